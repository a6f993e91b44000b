"""What passes through a trainer while it iterates."""

import torch


class Watched:
    """The trainer `t` from now on: what its collector made of prompts (`collected`) and its
    updater was given (`updated`), each as (arguments, value) of a call; the
    `batches` of updates; and the `gradients` of optimizer steps, by tensor, clipped."""

    def __init__(self, t):
        self.t = t
        self.collected = _kept(t.collector, "collect")
        self.updated = _kept(t.updater, "update")
        self.gradients, self._accumulated = [], _kept(t.updater, "_accumulate")
        t.learner.optimizer.register_step_pre_hook(self._keep_gradient)

    @property
    def examples(self):
        """Of every update."""
        return [given[0] for given, _ in self.updated]

    @property
    def batches(self):
        return [given[0] for given, _ in self._accumulated]

    def _keep_gradient(self, *_):
        self.gradients.append([p.grad.clone() for p in self.t.learner.parameters])


def _kept(thing, name):
    """(arguments, value) of every coming call of a method."""
    calls, call = [], getattr(thing, name)

    def calling(*arguments, **named):
        value = call(*arguments, **named)
        calls.append((arguments, value))
        return value

    setattr(thing, name, calling)
    return calls


def flat(tensors):
    """One vector of all, of its own memory."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
