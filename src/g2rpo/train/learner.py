"""The training state: weights, the optimizer's moments, the moving average."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map_only

from g2rpo.config.schema import OptimConfig
from g2rpo.core.devices import accelerator
from g2rpo.core.errors import UserError, counted, out_of_device_memory
from g2rpo.models.sharding import Pieces, Replicated

Snapshot = tuple[dict[str, list[Tensor]], dict[str, Any]]
BETAS, EPSILON = (0.9, 0.999), 1e-8
"""AdamW's, of all published codes."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of one parameter."""


class Learner:
    """The trained `parameters` with AdamW (arXiv 1711.05101) and, with `ema_decay`, their
    exponential moving average.

    With sharded weights (`shards`), `stored` and `weights` return this rank's pieces; `take`
    expects those of all ranks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimConfig,
        shards: Replicated,
        keep_old: bool = False,
    ) -> None:
        self.parameters = nn.ParameterList(parameters)
        self.config = config
        self.learning_rate = config.learning_rate
        self.shards = shards
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=config.weight_decay,
            # one operation, without a temporary copy of the moments; of shards DTensor plans one
            # and not a dozen
            fused=shards.divided or any(accelerator(p.device) is not None for p in self.parameters),
        )
        self.average = (
            AveragedModel(self.parameters, multi_avg_fn=self._blend) if config.ema_decay else None
        )
        if self.average is not None and config.ema_warmup:
            # starts at the untrained weights; otherwise the first update copies the weights
            self.average.n_averaged.fill_(1)
        self.old = [parameter.detach().clone() for parameter in self.parameters] if keep_old else []
        self.optimizer.register_step_post_hook(lambda *_: self._after_step())

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far."""
        counts = [state["step"] for state in self.optimizer.state.values()]
        # read once: a fused AdamW keeps the count on the device
        return int(torch.stack(counts).max()) if counts else 0

    @property
    def ema_decay(self) -> float:
        """The decay of the average: `ema_decay`, after a warm-up of (1 + t) / (10 + t) at optimizer
        step t."""
        warm = (1 + self.steps) / (10 + self.steps) if self.config.ema_warmup else 1.0
        return min(warm, self.config.ema_decay)

    @property
    def rate(self) -> float:
        """The optimizer's learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_scheduled_rate(self, iteration: int, iterations: int) -> float:
        """Sets and returns the rate of an iteration, counted from 0: `learning_rate` times a linear
        warm-up and, with "cosine", a cosine over all iterations."""
        rate = self.learning_rate * min(1.0, (iteration + 1) / (self.config.warmup_iterations + 1))
        if self.config.decay == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * iteration / iterations))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def update_average(self) -> None:
        """Updates the average after an iteration; a no-op if `ema_every` counts optimizer steps."""
        if self.average is not None and self.config.ema_every is None:
            self.average.update_parameters(self.parameters)

    def _after_step(self) -> None:
        every = self.config.ema_every
        # 7, 15, ... of 8, as Flow-GRPO
        if self.average is not None and every is not None and (self.steps + 1) % every == 0:
            self.average.update_parameters(self.parameters)

    def _blend(self, averages: Sequence[Tensor], weights: Sequence[Tensor], updates: Any) -> None:
        get_ema_multi_avg_fn(self.ema_decay)(averages, weights, updates)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While entered, the weights are replaced by their average, if there is one."""
        if self.average is None:
            yield
            return
        own = [parameter.detach().clone() for parameter in self.parameters]
        _copy(self.average.module.parameters(), self.parameters)
        try:
            yield
        finally:
            _copy(own, self.parameters)

    @contextmanager
    def as_old(self) -> Iterator[None]:
        """While entered, old and trained weights are swapped."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # one by one: no third copy of all weights
        for old, parameter in zip(self.old, self.parameters, strict=True):
            try:
                trained = parameter.clone()
            except RuntimeError as error:
                # some are swapped, so a smaller batch cannot go on from here
                if out_of_device_memory(error):
                    raise UserError(
                        "memory ran out while old and trained weights were swapped; lower batch sizes"
                    ) from error
                raise
            parameter.copy_(old)
            old.copy_(trained)

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """old <- decay old + (1 - decay) trained; a no-op without old weights."""
        for old, parameter in zip(self.old, self.parameters if self.old else (), strict=True):
            old.copy_(decay * old + (1 - decay) * parameter)

    def weights(self) -> dict[str, list[Tensor]]:
        """This rank's pieces of the current weights, for a checkpoint of the weights alone."""
        return {"weights": [self.shards.own(p) for p in self.parameters]}

    def stored(self) -> Snapshot:
        """(tensors, state) for `take`, with all that another process needs to continue: with this rank's
        pieces of each tensor."""
        moments = self.optimizer.state_dict()["state"]
        tensors = {
            name: [values[name] for values in moments.values()] for name in MOMENTS[1:] if moments
        }
        if self.average is not None:
            tensors["average"] = list(self.average.module.parameters())
        if self.old:
            tensors["old"] = self.old
        averaged = int(self.average.n_averaged) if self.average is not None else 0
        steps = {place: {"step": values["step"]} for place, values in moments.items()}
        own = {
            name: [self.shards.own(value) for value in values] for name, values in tensors.items()
        }
        return self.weights() | own, {"optimizer": {"state": steps}, "averaged": averaged}

    def take(
        self, tensors: Mapping[str, Sequence[Tensor | Pieces]], state: Mapping[str, Any]
    ) -> None:
        """Restores the result of `stored`; for another model's it raises an exception and changes
        nothing."""
        own = list(self.parameters)
        averages = list(self.average.module.parameters()) if self.average is not None else []
        _check_shapes(tensors["weights"], own)
        _check_shapes(tensors["average"] if averages else [], averages)
        _check_shapes(tensors["old"] if self.old else [], self.old)
        moments, averaged = {}, int(state["averaged"])
        for index, (place, values) in enumerate(state["optimizer"]["state"].items()):
            values = values | {name: tensors[name][index] for name in MOMENTS[1:]}
            _check_shapes(
                [values[name] for name in MOMENTS], [torch.zeros(()), own[place], own[place]]
            )
            moments[place] = {name: self.shards.piece(values[name], own[place]) for name in MOMENTS}
        # hyper-parameters are the config's, not the checkpoint's
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._restore(tensors["weights"], own)
        if self.average is not None:
            self._restore(tensors["average"], averages)
            self.average.n_averaged.fill_(averaged)
        if self.old:
            self._restore(tensors["old"], self.old)

    def snapshot(self) -> Snapshot:
        """A copy of `stored` in host memory."""
        return tree_map_only(
            Tensor, lambda value: value.detach().to("cpu", copy=True), self.stored()
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Takes a copy of a snapshot, which may be restored again: the optimizer keeps and changes
        what it is given."""
        self.take(*copy.deepcopy(snapshot))

    def _restore(self, values: Sequence[Tensor | Pieces], into: Iterable[Tensor]) -> None:
        into = list(into)
        _copy(
            (self.shards.piece(value, tensor) for value, tensor in zip(values, into, strict=True)),
            into,
        )


@torch.no_grad()
def _copy(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    for value, parameter in zip(values, into, strict=True):
        parameter.copy_(value)


def _check_shapes(values: Sequence[Tensor | Pieces], like: Sequence[Tensor]) -> None:
    """ValueError unless both have the same shapes; copying would broadcast."""
    given, wanted = ([list(tensor.shape) for tensor in tensors] for tensors in (values, like))
    if len(given) != len(wanted):
        raise ValueError(f"it has {counted(len(given), 'tensor')} instead of {len(wanted)}")
    for one, other in zip(given, wanted, strict=True):
        if one != other:
            raise ValueError(f"it has a tensor of shape {one} instead of {other}")
