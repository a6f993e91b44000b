"""How a tail walks: Euler, or DPM-Solver++(2M), which remembers what the step before predicted.

In flow matching, DPM-Solver++ of first order is the Euler step, and the second-order multistep update is an Euler step with a
bent velocity. So bending is all there is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo.flow import per_row


@dataclass(frozen=True)
class Memory:
    """What one row saw at a step: the image [...] that it predicted, x - sigma v, and the step's sigma."""

    image: Tensor
    sigma: Tensor


def log_snr(sigma: Tensor) -> Tensor:
    """lambda = log(alpha / sigma), alpha = 1 - sigma; from -inf at the noise to inf at the image."""
    return ((1 - sigma) / sigma).log()


def bend(
    velocity: Tensor, sigma: Tensor, sigma_next: Tensor, memories: Sequence[tuple[Memory | None, Memory | None]]
) -> Tensor:
    """Velocities [B, ...] whose Euler steps are DPM-Solver++(2M)'s midpoint updates (arXiv 2211.01095, Algorithm 2).

    The update steps towards an image extrapolated along lambda: D = image + (image - before) h / (2 h0), where h is the change
    of lambda in this step and h0 in the one before. `memories` holds (this step's, the step before's) for every row. A row's
    velocity stays as it is on its first step (there is nothing to extrapolate from, so None), on a step to sigma_next = 0 (h is
    infinite), and for Euler's rows (both None). Sigmas [B], falling.
    """
    pairs = [(i, now, before) for i, (now, before) in enumerate(memories) if now and before and sigma_next[i] > 0]
    if not pairs:
        return velocity
    rows = [i for i, *_ in pairs]
    image, before = torch.stack([now.image for _, now, _ in pairs]), torch.stack([past.image for *_, past in pairs])
    here = log_snr(sigma[rows])
    h, h0 = log_snr(sigma_next[rows]) - here, here - log_snr(torch.stack([past.sigma for *_, past in pairs]))
    bent = velocity.clone()
    bent[rows] += per_row(h / (2 * h0 * sigma[rows]), image) * (before - image)
    return bent
