"""The task scenes: 64x64 drawings of a few shapes, by a base that has read captions which are not
always right.

T5 must tell of every word all that is said about its group, and on which side of the other group
that one stands; CLIP's pooled output must tell all about both groups. From words alone neither is
known: it takes their order.

As with a model trained on the web, some captions are wrong, less often at higher guidance: half of
them at guidance 1, hardly any at guidance 5. What the base then gets wrong is content rather than
drawing, and reinforcement learning has something natural to sharpen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import CLIPModel, PreTrainedTokenizerFast

from g2rpo.data.testbed.rewards import SceneAccuracy
from g2rpo.data.testbed.scenes import (
    COLOURS,
    COUNTS,
    MAX_COUNT,
    NOUNS,
    RELATIONS,
    SHAPES,
    SIDE,
    SIZES,
    Group,
    Relation,
    Scene,
    render_prompt,
    scene_prompts,
)
from tools.testbed import judges
from tools.testbed.augment import mild
from tools.testbed.drawings import (
    FAMILY,
    OPPOSITE,
    corrupt,
    draw_dataset,
    sample_train_scene,
    training_pictures,
)
from tools.testbed.pipeline import (
    IGNORED,
    READING_BATCH,
    Autoencoder,
    Batch,
    Phase,
    Task,
    decode,
    encode,
    pack,
    psnr,
)
from tools.testbed.training import Context, bf16

# CLIPTextModel pools at the first end token, except that it treats the id 2 as a mark of old,
# broken configs.
PAD, END, UNKNOWN = 0, 1, 3
WORDS = (
    *COUNTS,
    *SIZES,
    *COLOURS,
    *NOUNS,
    *dict.fromkeys(word for relation in RELATIONS for word in relation.split()),
)
SPECIAL = ("<pad>", "</s>", "<reserved>", "<unk>")
MAX_TOKENS = 16
GUIDANCE = (1.0, 5.0)
BATCH = 128
WRONG_CAPTIONS = 2  # per picture; a single one would be memorised


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Words to ids, an end token after the last word, padding on the right."""
    core = Tokenizer(
        WordLevel(
            {word: i for i, word in enumerate((*SPECIAL, *WORDS))}, unk_token=SPECIAL[UNKNOWN]
        )
    )
    core.normalizer = Lowercase()
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[(SPECIAL[END], END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        unk_token=SPECIAL[UNKNOWN],
        model_max_length=MAX_TOKENS,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


class Scenes(Task):
    stage = ""
    height = width = SIDE
    autoencoder = Autoencoder((8, 16, 32, 64), 32, 4000, 2e-3, 0.998)
    distances = (32, MAX_TOKENS)
    reading_steps = 1200
    # about a group
    of_token = of_prompt = (
        MAX_COUNT,
        len(SIZES) + 1,
        len(COLOURS),
        len(SHAPES),
        len(RELATIONS) + 1,
    )
    parts = 2  # groups
    layers = (2, 4)
    guided = True
    first_stage = "flux"
    flux_ema = 0.998
    fast = True
    card = """# The testbed's weights

Weights of g2rpo's embedded world: a tiny FLUX pipeline, a tiny CLIP and a tiny preference model for 64x64 drawings of
simple scenes. All were trained from nothing, on pictures and prompts drawn by the package itself, with

    python -m tools.testbed scenes --out DIR

The base model learned from captions of which a share is wrong, less so the higher the guidance: it draws cleanly, but
often not quite what was asked. That is what reinforcement learning is to mend.

The weights that ship were made by these stages one at a time, while the builder was being written, with slightly other
settings (studies/LOG.md says which); the command repeats the recipe, not these bits.
"""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tokenizer()

    def pictures(
        self, ctx: Context, rng: np.random.Generator, count: int | None = None
    ) -> NDArray[np.uint8]:
        drawn = training_pictures(ctx).pictures
        return drawn[:4096] if count is None else drawn[rng.integers(len(drawn), size=count)]

    def questions(self, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        scenes = [sample_train_scene(rng) for _ in range(READING_BATCH)]
        of_words, of_groups = (
            torch.tensor(rows) for rows in zip(*map(answers, scenes), strict=True)
        )
        return self.tokenize([render_prompt(scene) for scene in scenes]), of_words, of_groups

    def stages(self, ctx: Context, vae: AutoencoderKL) -> dict[str, Callable[[], list[Phase]]]:
        def phases() -> list[Phase]:
            latents, right, wrong = captioned(ctx, self, vae)

            def batch(wrong_captions: tuple[float, float]) -> Batch:
                """`wrong_captions` is their share at either end of the guidance's range, and linear
                between."""
                rows = torch.randint(len(latents), (BATCH,))
                guidance = torch.empty(BATCH).uniform_(*GUIDANCE)
                (low, high), (at_low, at_high) = GUIDANCE, wrong_captions
                is_wrong = torch.rand(BATCH) < at_low + (guidance - low) / (high - low) * (
                    at_high - at_low
                )
                tokens = torch.where(
                    is_wrong[:, None],
                    wrong[rows, torch.randint(WRONG_CAPTIONS, (BATCH,))],
                    right[rows],
                )
                return latents[rows].float(), tokens, guidance

            return [
                Phase(3000, 2e-3, 8e-3, partial(batch, (0.5, 0.05))),
                Phase(2000, 1.5e-3, 6e-3, partial(batch, (0.5, 0.02))),
                Phase(4500, 1.5e-3, 6e-3, partial(batch, (0.5, 0.0))),
            ]

        return {"flux": phases}

    def accuracy(self, pipe: FluxPipeline, texts: Sequence[str]) -> float:
        """The share of pictures that show all that their prompt asks for, and nothing else."""
        return SceneAccuracy()(self.sample(pipe, texts), texts).mean().item()

    def progress(self, ctx: Context, pipe: FluxPipeline) -> str:
        train, heldout = (
            self.accuracy(pipe, scene_prompts(split)[: ctx.scaled(100, 4)])
            for split in ("train", "heldout")
        )
        return f"accuracy: train {train:.2f}, held-out {heldout:.2f}"

    def rewards(self, ctx: Context, vae: AutoencoderKL) -> tuple[CLIPModel, ...]:
        dataset = training_pictures(ctx)
        clip = judges.build_clip(ctx, dataset, tokenizer())
        return clip, judges.build_preference(ctx, dataset, tokenizer(), vae, clip)

    def measure(
        self, ctx: Context, vae: AutoencoderKL, pipe: FluxPipeline, *rewards: CLIPModel
    ) -> dict[str, float]:
        clip, preference = rewards
        rng = ctx.rng("figures")
        fresh = draw_dataset(rng, ctx.scaled(4000, 64))
        rows = ctx.scaled(1000, 64)
        texts, drawn = fresh.prompts, fresh.images(slice(None))
        decoded = decode(vae, encode(vae, fresh.pictures[:rows]))
        single = slice(0, FAMILY * 256, FAMILY)  # one picture of each family
        retrieval = partial(judges.retrieval, clip, tokenizer())
        families = [slice(i, i + FAMILY) for i in range(0, rows, FAMILY)]
        figures = {
            "detector accuracy on drawings": SceneAccuracy()(drawn, texts).mean().item(),
            "detector accuracy on VAE reconstructions": SceneAccuracy()(decoded, texts[:rows])
            .mean()
            .item(),
            "VAE reconstruction PSNR (dB)": psnr(decoded, drawn[:rows]),
            "CLIP retrieval of the prompt among 256": retrieval(mild(drawn[single]), texts[single]),
            "CLIP retrieval of the prompt among 4 that differ in a word or two": sum(
                retrieval(drawn[family], texts[family]) for family in families
            )
            / len(families),
        }
        generated = judges.generated_like(ctx, fresh, vae)
        wins = judges.pair_accuracy(
            preference, tokenizer(), fresh, rng, generated, ctx.scaled(16, 1)
        )
        figures |= {f"preference pairs, {name}": share for name, share in wins.items()}
        return figures | {
            f"base accuracy, {split} prompts": self.accuracy(
                pipe, scene_prompts(split)[: ctx.scaled(400, 8)]
            )
            for split in ("train", "heldout")
        }


def answers(scene: Scene) -> tuple[list[list[int]], list[list[int]]]:
    """The targets of T5 for each of the 16 tokens, and of CLIP for each of two groups: five
    classes, or `IGNORED`."""
    relations: list[Relation | None] = [scene.relation, scene.relation and OPPOSITE[scene.relation]]
    groups = [
        _classes(group, relation) for group, relation in zip(scene.groups, relations, strict=False)
    ]
    nothing = [IGNORED] * len(Scenes.of_token)
    words: list[list[int]] = []
    for group, classes in zip(scene.groups, groups, strict=True):
        between = len(scene.relation.split()) if words and scene.relation else 0
        words += [nothing] * between + [classes] * (3 + (group.size is not None))
    return words + [nothing] * (MAX_TOKENS - len(words)), groups + [nothing] * (2 - len(groups))


def _classes(group: Group, relation: Relation | None) -> list[int]:
    """A group as five class indices; 0 stands for a size or a relation that is not named."""
    return [
        group.count - 1,
        0 if group.size is None else 1 + SIZES.index(group.size),
        COLOURS.index(group.colour),
        SHAPES.index(group.shape),
        0 if relation is None else 1 + RELATIONS.index(relation),
    ]


def captioned(ctx: Context, task: Task, vae: AutoencoderKL) -> tuple[Tensor, Tensor, Tensor]:
    """Neatly laid out pictures as packed latents [N, 16, 64] float16, their captions [N, 16], and
    wrong ones.

    The wrong captions [N, WRONG_CAPTIONS, 16] are wrong in one attribute.
    """
    file = ctx.work / "flux.safetensors"
    if not file.exists():
        with torch.random.fork_rng(devices=[]), bf16():
            rng = ctx.rng("flux data")
            dataset = draw_dataset(rng, ctx.scaled(128_000, 256), neat=True)
            latents = pack(encode(vae, dataset.pictures).half())
        right = task.tokenize(dataset.prompts)
        foils = [
            render_prompt(corrupt(scene, rng))
            for scene in dataset.scenes
            for _ in range(WRONG_CAPTIONS)
        ]
        wrong = task.tokenize(foils).reshape(len(right), WRONG_CAPTIONS, -1)
        save_file({"latents": latents.contiguous(), "right": right, "wrong": wrong}, file)
    data = load_file(file)
    return data["latents"], data["right"], data["wrong"]
