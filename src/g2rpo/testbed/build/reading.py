"""Stage 4: the pipeline's text encoders, pretrained on text alone, as those of real pipelines are.

T5 must tell of every word all that is said about its group, and on which side of the other group that one stands; CLIP's
pooled output must tell all about both groups. From words alone neither is known: it takes their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from g2rpo.testbed.build.common import Context, fit
from g2rpo.testbed.build.text import END, MAX_TOKENS, PAD, VOCABULARY, tokenize
from g2rpo.testbed.grammar import OPPOSITE, render_prompt, sample_train_scene
from g2rpo.testbed.scenes import COLOURS, MAX_COUNT, RELATIONS, SHAPES, SIZES, Group, Relation, Scene

WIDTH, POOLED_WIDTH = 128, 64
BATCH = 128
CLASSES = (MAX_COUNT, len(SIZES) + 1, len(COLOURS), len(SHAPES), len(RELATIONS) + 1)  # of what is said about a group
IGNORED = -100


class Readers(nn.Module):
    """The two text encoders with their classification heads, which are discarded after training."""

    def __init__(self) -> None:
        super().__init__()
        self.t5, self.clip = new_t5(), new_text_tower()
        self.word_head = nn.Linear(WIDTH, sum(CLASSES))
        self.prompt_head = nn.Linear(POOLED_WIDTH, 2 * sum(CLASSES))


def new_t5() -> T5EncoderModel:
    """An untrained two-layer text encoder."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(VOCABULARY),
            d_model=WIDTH,
            d_kv=32,
            num_heads=4,
            d_ff=2 * WIDTH,
            num_layers=2,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=MAX_TOKENS,
            feed_forward_proj="relu",
            dropout_rate=0.0,
            pad_token_id=PAD,
            eos_token_id=END,
            is_encoder_decoder=False,
        )
    )


def new_text_tower() -> CLIPTextModel:
    """An untrained CLIP text encoder, whose pooled output is the transformer's global text embedding."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=POOLED_WIDTH,
            intermediate_size=2 * POOLED_WIDTH,
            num_attention_heads=4,
            num_hidden_layers=2,
            max_position_embeddings=MAX_TOKENS,
            pad_token_id=PAD,
            bos_token_id=PAD,
            eos_token_id=END,
        )
    )


def build_readers(ctx: Context) -> Readers:
    """Trains both text encoders."""
    file = ctx.work / "readers.safetensors"
    rng = ctx.rng("reading")
    readers = Readers()
    if file.exists():
        load_model(readers, file)
        return readers.eval()

    def loss() -> Tensor:
        scenes = [sample_train_scene(rng) for _ in range(BATCH)]
        tokens = tokenize([render_prompt(scene) for scene in scenes])
        of_words, of_prompts = (torch.tensor(rows) for rows in zip(*(answers(scene) for scene in scenes), strict=True))
        told = readers.word_head(readers.t5(tokens)[0])
        gist = readers.prompt_head(readers.clip(tokens).pooler_output).unflatten(-1, (2, -1))
        return questions(told, of_words, CLASSES) + questions(gist, of_prompts, CLASSES)

    fit(ctx, "reading", readers, loss, steps=ctx.scaled(1200, 4), lr=2e-3, matrix_lr=8e-3, ema=0.99)
    save_model(readers, str(file))
    return readers


def questions(told: Tensor, answers: Tensor, classes: Sequence[int]) -> Tensor:
    """Mean cross-entropy of logits [..., sum(classes)] for answers [..., len(classes)], without those that are `IGNORED`."""
    parts = told.float().split(list(classes), dim=-1)
    losses = [F.cross_entropy(p.flatten(0, -2), answers[..., i].flatten(), ignore_index=IGNORED) for i, p in enumerate(parts)]
    return torch.stack(losses).mean()


def answers(scene: Scene) -> tuple[list[list[int]], list[list[int]]]:
    """The targets of T5 for each of the 16 tokens, and of CLIP for each of two groups: five classes, or `IGNORED`."""
    relations: list[Relation | None] = [scene.relation, scene.relation and OPPOSITE[scene.relation]]
    groups = [_classes(group, relation) for group, relation in zip(scene.groups, relations, strict=False)]
    nothing = [IGNORED] * len(CLASSES)
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
