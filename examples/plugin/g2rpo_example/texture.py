"""A reward on final latents: nothing is decoded for it."""

from collections.abc import Sequence

from torch import Tensor


def texture(latents: Tensor, prompts: Sequence[str]) -> Tensor:
    """How much neighbours differ in the last dimension of latents [B, ...]; the less, the smoother
    the picture."""
    return latents.diff(dim=-1).square().flatten(1).mean(1)


texture.latent = True  # type: ignore[attr-defined]
