"""A policy of a few numbers that counts what is asked of it."""

import torch

from g2rpo.models.gaussian import GaussianPolicy


class Counting(GaussianPolicy):
    trained = passes = without_gradient = 0
    """Rows with gradients, calls with gradients, and rows without."""

    def velocity(self, x, sigma, cond):
        if torch.is_grad_enabled():
            self.trained += len(x)
            self.passes += 1
        else:
            self.without_gradient += len(x)
        return super().velocity(x, sigma, cond)
