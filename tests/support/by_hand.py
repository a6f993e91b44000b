"""What each class of pipelines computes for a velocity, written out: one call of the transformer, and guidance."""

import inspect
import sys

import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image


def by_hand(pipeline, x, sigma, prompts, scale, size):
    """The velocity of rows x at `sigma`, each for its prompt, from nothing but the transformer and `encode_prompt`."""
    return globals()[type(pipeline).__name__](pipeline, x, sigma, prompts, scale, size)


def grid(pipeline, size):
    return size["height"] // pipeline.image_processor.config.vae_scale_factor, size["width"] // (
        pipeline.image_processor.config.vae_scale_factor
    )


def FluxPipeline(p, x, s, prompts, scale, size):
    e, pooled, ids = p.encode_prompt(prompts, None, max_sequence_length=size["max_sequence_length"])
    image_ids = p._prepare_latent_image_ids(len(x), *grid(p, size), "cpu", torch.float32)
    return p.transformer(
        hidden_states=x,
        timestep=s,
        guidance=torch.full((len(x),), scale),
        pooled_projections=pooled,
        encoder_hidden_states=e,
        txt_ids=ids,
        img_ids=image_ids,
        return_dict=False,
    )[0]


def StableDiffusion3Pipeline(p, x, s, prompts, scale, size):
    def network(prompts):
        e, _, pooled, _ = p.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=size["max_sequence_length"]
        )
        return p.transformer(x, encoder_hidden_states=e, pooled_projections=pooled, timestep=1000 * s, return_dict=False)[0]

    return guided(network, prompts, scale)


def guided(network, prompts, scale, normed=False):
    """v_negative + scale (v - v_negative) above a scale of 1; if `normed`, with the norm of v along the last axis."""
    v = network(prompts)
    if scale <= 1:
        return v
    negative = network([""] * len(prompts))
    combined = negative + scale * (v - negative)
    return combined * (v.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)) if normed else combined


def guided_beyond(network, prompts, scale):
    """v + scale (v - v_negative) above a scale of 0."""
    v = network(prompts)
    return v + scale * (v - network([""] * len(prompts))) if scale > 0 else v


def Flux2KleinPipeline(p, x, s, prompts, scale, size):
    h, w = grid(p, size)
    image_ids = torch.cartesian_prod(torch.arange(1), torch.arange(h), torch.arange(w), torch.arange(1))

    def network(prompts):
        e, ids = p.encode_prompt(prompts, max_sequence_length=size["max_sequence_length"])
        return p.transformer(
            hidden_states=x,
            timestep=s,
            guidance=None,
            encoder_hidden_states=e,
            txt_ids=ids,
            img_ids=image_ids.expand(len(x), -1, -1),
            return_dict=False,
        )[0]

    return guided(network, prompts, scale)


def QwenImagePipeline(p, x, s, prompts, scale, size):
    h, w = grid(p, size)

    def network(prompts):
        e, mask = p.encode_prompt(prompts, max_sequence_length=size["max_sequence_length"])
        return p.transformer(
            hidden_states=x,
            timestep=s,
            encoder_hidden_states=e,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, h, w)]] * len(x),
            return_dict=False,
        )[0]

    return guided(network, prompts, scale, normed=True)


def ZImagePipeline(p, x, s, prompts, scale, size):
    def network(prompts):
        e, _ = p.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=size["max_sequence_length"]
        )
        return -torch.stack(p.transformer(list(x[:, :, None]), 1 - s, e, return_dict=False)[0])[:, :, 0]

    return guided_beyond(network, prompts, scale)


def FluxKontextPipeline(p, x, s, prompts, scale, size):
    def one(x, s, prompt):
        e, pooled, ids = p.encode_prompt([prompt], None, max_sequence_length=size["max_sequence_length"])
        picture = Image.open(prompt.images[0])
        _, w, h = min(
            (abs(picture.width / picture.height - w / h), w, h) for w, h in pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
        )
        z = p.vae.encode(p.image_processor.preprocess(p.image_processor.resize(picture, h, w), h, w)).latent_dist.mode()
        z = (z - p.vae.config.shift_factor) * p.vae.config.scaling_factor
        packed = p._pack_latents(z, 1, *z.shape[1:])
        own = p._prepare_latent_image_ids(1, *grid(p, size), "cpu", torch.float32)
        theirs = p._prepare_latent_image_ids(1, z.shape[2] // 2, z.shape[3] // 2, "cpu", torch.float32)
        theirs[:, 0] = 1
        return p.transformer(
            hidden_states=torch.cat([x, packed], 1),
            timestep=s,
            guidance=torch.full((1,), scale),
            pooled_projections=pooled,
            encoder_hidden_states=e,
            txt_ids=ids,
            img_ids=torch.cat([own, theirs]),
            return_dict=False,
        )[0][:, : x.shape[1]]

    return torch.cat([one(x[i : i + 1], s[i : i + 1], prompt) for i, prompt in enumerate(prompts)])


def QwenImageEditPipeline(p, x, s, prompts, scale, size, sees=None):
    module = sys.modules[type(p).__module__]

    def one(x, s, prompt):
        opened = [Image.open(path) for path in prompt.images]
        sizes = [module.calculate_dimensions(1024 * 1024, o.width / o.height)[:2] for o in opened]
        seen = [p.image_processor.resize(o, h, w) for o, (w, h) in zip(opened, sizes, strict=True)]
        asked = seen[0] if sees is None else [sees(p, module, o) for o in opened]
        packed = []
        for o, (w, h) in zip(seen if sees is None else opened, sizes, strict=True):
            z = p.vae.encode(p.image_processor.preprocess(o, h, w)[:, :, None]).latent_dist.mode()
            z = (z - p.vae.config.latents_mean[0]) / p.vae.config.latents_std[0]
            packed.append(p._pack_latents(z, 1, z.shape[1], *z.shape[3:]))
        side = p.image_processor.config.vae_scale_factor
        shapes = [(1, *grid(p, size)), *((1, h // side, w // side) for w, h in sizes)]

        def network(texts):
            e, mask = p.encode_prompt(texts, asked, max_sequence_length=size["max_sequence_length"])
            return p.transformer(
                hidden_states=torch.cat([x, *packed], 1),
                timestep=s,
                encoder_hidden_states=e,
                encoder_hidden_states_mask=mask,
                img_shapes=[shapes],
                return_dict=False,
            )[0][:, : x.shape[1]]

        return guided(network, [str(prompt)], scale, normed=True)

    return torch.cat([one(x[i : i + 1], s[i : i + 1], prompt) for i, prompt in enumerate(prompts)])


def QwenImageEditPlusPipeline(p, x, s, prompts, scale, size):
    def sees(p, module, picture):
        w, h = module.calculate_dimensions(module.CONDITION_IMAGE_SIZE, picture.width / picture.height)
        return p.image_processor.resize(picture, h, w)

    return QwenImageEditPipeline(p, x, s, prompts, scale, size, sees)


def WanPipeline(p, x, s, prompts, scale, size):
    def network(prompts):
        e, _ = p.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=size["max_sequence_length"])
        return p.transformer(hidden_states=x, timestep=1000 * s, encoder_hidden_states=e, return_dict=False)[0]

    return guided(network, prompts, scale)


def LTXPipeline(p, x, s, prompts, scale, size):
    h, w = size["height"] // p.vae_spatial_compression_ratio, size["width"] // p.vae_spatial_compression_ratio
    frames = (size["num_frames"] - 1) // p.vae_temporal_compression_ratio + 1

    def network(prompts):
        e, mask, _, _ = p.encode_prompt(
            prompts, do_classifier_free_guidance=False, max_sequence_length=size["max_sequence_length"]
        )
        return p.transformer(
            hidden_states=x,
            timestep=1000 * s,
            encoder_hidden_states=e,
            encoder_attention_mask=mask,
            num_frames=frames,
            height=h,
            width=w,
            rope_interpolation_scale=(p.vae_temporal_compression_ratio / 25, *[p.vae_spatial_compression_ratio] * 2),
            return_dict=False,
        )[0]

    return guided(network, prompts, scale)


def Lumina2Pipeline(p, x, s, prompts, scale, size):
    def network(prompts):  # what is avoided is not introduced by the system prompt
        texts = [f"{p.system_prompt} <Prompt Start> {prompt}" if prompt else "" for prompt in prompts]
        e, mask = p._get_gemma_prompt_embeds(texts, max_sequence_length=size["max_sequence_length"])
        return -p.transformer(
            hidden_states=x, timestep=1 - s, encoder_hidden_states=e, encoder_attention_mask=mask, return_dict=False
        )[0]

    return guided(network, prompts, scale, normed=True)


def ChromaPipeline(p, x, s, prompts, scale, size):
    h, w = grid(p, size)
    image_ids = p._prepare_latent_image_ids(len(x), h, w, "cpu", torch.float32)

    def network(prompts):
        e, ids, mask, *_ = p.encode_prompt(
            prompts, do_classifier_free_guidance=False, max_sequence_length=size["max_sequence_length"]
        )
        return p.transformer(
            hidden_states=x,
            timestep=s,
            encoder_hidden_states=e,
            txt_ids=ids,
            img_ids=image_ids,
            attention_mask=torch.cat([mask, torch.ones(len(x), h * w)], 1),
            return_dict=False,
        )[0]

    return guided(network, prompts, scale)


def CogView4Pipeline(p, x, s, prompts, scale, size):
    """Times before the shift: sigma = mu / (mu + 1 / u - 1)."""
    length = x.shape[2] * x.shape[3] / 4
    mu = (length / 16) ** 0.5 * 0.75 + 0.25
    u = 1 / (1 + mu * (1 / s - 1))
    sizes = torch.tensor([[size["height"], size["width"]]] * len(x)).float()

    def network(prompts):
        def one(i):
            e, _ = p.encode_prompt(
                [str(prompts[i])], do_classifier_free_guidance=False, max_sequence_length=size["max_sequence_length"]
            )
            return p.transformer(
                hidden_states=x[i : i + 1],
                encoder_hidden_states=e,
                timestep=1000 * u[i : i + 1],
                original_size=sizes[:1],
                target_size=sizes[:1],
                crop_coords=torch.zeros(1, 2),
                return_dict=False,
            )[0]

        return torch.cat([one(i) for i in range(len(x))])

    return guided(network, prompts, scale)


def SanaPipeline(p, x, s, prompts, scale, size):
    instruction = inspect.signature(type(p).__call__).parameters["complex_human_instruction"].default

    def network(prompts):
        n, instructed = size["max_sequence_length"], instruction if any(prompts) else None
        e, mask = p._get_gemma_prompt_embeds(
            [str(prompt) for prompt in prompts],
            "cpu",
            torch.float32,
            max_sequence_length=n,
            complex_human_instruction=instructed,
        )
        kept = [0, *range(-n + 1, 0)]
        e, mask = (e[:, kept], mask[:, kept]) if instructed else (e, mask)
        return p.transformer(x, encoder_hidden_states=e, encoder_attention_mask=mask, timestep=1000 * s, return_dict=False)[0]

    return guided(network, prompts, scale)


def Krea2Pipeline(p, x, s, prompts, scale, size):
    ids = p.prepare_position_ids(size["max_sequence_length"], *grid(p, size), "cpu")

    def network(prompts):
        e, mask = p.get_text_hidden_states([str(prompt) for prompt in prompts], size["max_sequence_length"])
        return p.transformer(
            hidden_states=x,
            encoder_hidden_states=e,
            timestep=s,
            position_ids=ids,
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]

    return guided_beyond(network, prompts, scale)
