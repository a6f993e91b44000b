"""What each class of pipelines computes for a velocity, written out: one call of the transformer, and guidance."""

import torch


def by_hand(pipeline, x, sigma, prompts, scale, size):
    """The velocity of rows x at `sigma`, each for its prompt, from nothing but the transformer and `encode_prompt`."""
    return globals()[type(pipeline).__name__](pipeline, x, sigma, prompts, scale, size)


def tokens(n):
    return {"max_sequence_length": n}


def grid(pipeline, size, side=16):
    return size["height"] // pipeline.image_processor.config.vae_scale_factor, size["width"] // (
        pipeline.image_processor.config.vae_scale_factor
    )


def FluxPipeline(p, x, s, prompts, scale, size):
    e, pooled, ids = p.encode_prompt(prompts, None, **tokens(size["max_sequence_length"]))
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
    n = tokens(size["max_sequence_length"])
    e, _, pooled, _ = p.encode_prompt(prompts, None, None, do_classifier_free_guidance=False, **n)
    ne, _, npooled, _ = p.encode_prompt([""] * len(x), None, None, do_classifier_free_guidance=False, **n)

    def network(e, pooled):
        return p.transformer(x, encoder_hidden_states=e, pooled_projections=pooled, timestep=1000 * s, return_dict=False)[0]

    return guided(network(e, pooled), lambda: network(ne, npooled), scale)


def guided(v, negative, scale, off=1.0):
    """v_negative + scale (v - v_negative)."""
    if scale <= off:
        return v
    without = negative()
    return without + scale * (v - without)


def Flux2KleinPipeline(p, x, s, prompts, scale, size):
    h, w = grid(p, size)
    image_ids = torch.cartesian_prod(torch.arange(1), torch.arange(h), torch.arange(w), torch.arange(1))

    def network(prompts):
        e, ids = p.encode_prompt(prompts, **tokens(size["max_sequence_length"]))
        return p.transformer(
            hidden_states=x,
            timestep=s,
            guidance=None,
            encoder_hidden_states=e,
            txt_ids=ids,
            img_ids=image_ids.expand(len(x), -1, -1),
            return_dict=False,
        )[0]

    return guided(network(prompts), lambda: network([""] * len(x)), scale)


def QwenImagePipeline(p, x, s, prompts, scale, size):
    h, w = grid(p, size)

    def network(prompts):
        e, mask = p.encode_prompt(prompts, **tokens(size["max_sequence_length"]))
        return p.transformer(
            hidden_states=x,
            timestep=s,
            encoder_hidden_states=e,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, h, w)]] * len(x),
            return_dict=False,
        )[0]

    v = network(prompts)
    if scale <= 1:
        return v
    combined = guided(v, lambda: network([""] * len(x)), scale)
    return combined * (v.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


def ZImagePipeline(p, x, s, prompts, scale, size):
    def network(prompts):
        e, _ = p.encode_prompt(list(prompts), do_classifier_free_guidance=False, **tokens(size["max_sequence_length"]))
        return -torch.stack(p.transformer(list(x[:, :, None]), 1 - s, e, return_dict=False)[0])[:, :, 0]

    v = network(prompts)
    return v + scale * (v - network([""] * len(x))) if scale > 0 else v
