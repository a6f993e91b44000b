"""Floating-point operations of a transformer, from its modules: 2 per weight and token, and attention's two products."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from g2rpo.policies.pipelines import Shapes

_ONCE = re.compile(r"(^|\.)(norm\w*\.linear|time_text_embed)")  # modulation and time embeddings: one token for any picture size


def linear_flops(transformer: nn.Module, shapes: Shapes, trained: bool = False) -> float:
    """2 * weights * tokens, summed over linear layers (and SD3's patches), for one row of the network; biases are free.

    Image layers see the picture's tokens, context layers the prompt's, FLUX's single blocks both. `trained` counts only
    layers whose weights are trained: what their gradients cost on top.
    """
    total = 0.0
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and (module.weight.requires_grad or not trained):
            total += 2.0 * module.weight.numel() * _tokens(name, shapes)
    return total


def _tokens(layer: str, shapes: Shapes) -> int:
    if _ONCE.search(layer):
        return 1
    if layer.startswith("single_transformer_blocks"):
        return shapes.image_tokens + shapes.text_tokens
    return shapes.text_tokens if "context" in layer or "add_" in layer else shapes.image_tokens


def attention_flops(transformer: Any, shapes: Shapes) -> float:
    """4 * tokens^2 * width for every attention of one row: queries with keys, weights with values.

    All tokens attend to all; SD3.5's second attention (attn2) is the picture's own.
    """
    width = transformer.config.attention_head_dim * transformer.config.num_attention_heads
    total = 0.0
    for name, _ in transformer.named_modules():
        if name.endswith((".attn", ".attn2")):
            tokens = shapes.image_tokens + (shapes.text_tokens if name.endswith(".attn") else 0)
            total += 4.0 * tokens**2 * width
    return total


def forward_flops(transformer: Any, shapes: Shapes) -> float:
    """Operations of one evaluation, with all its network rows."""
    return shapes.rows * (linear_flops(transformer, shapes) + attention_flops(transformer, shapes))


def training_flops(transformer: Any, shapes: Shapes, checkpointed: bool, attention_backward: float = 2.5) -> float:
    """Operations of one row of the training pass.

    Forward, once more if blocks are checkpointed; backward through every layer (as much as forward), and again for the weights
    that are trained. Flash attention's backward recomputes the scores: five products where forward has two.
    """
    linear, attention = linear_flops(transformer, shapes), attention_flops(transformer, shapes)
    forward = (2 if checkpointed else 1) * (linear + attention)
    backward = linear + linear_flops(transformer, shapes, trained=True) + attention_backward * attention
    return shapes.rows * (forward + backward)
