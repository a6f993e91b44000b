"""`policy.compile`: the blocks of a network run through torch.compile, each kind of block by graphs
that all of its blocks share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._functorch import config as lowering

from g2rpo.core.errors import cut

SHOWN = 200
"""How many letters are shown of what the compiler says."""


class Compiled:
    """The blocks of a network, compiled in place. `notify` gets a line for every graph, with the
    seconds that it takes, for every break of one, and where the compiler fails: blocks of that kind
    are then called as they are."""

    def __init__(self, blocks: Sequence[nn.Module], backend: str | Callable[..., Any]) -> None:
        self.notify: Callable[[str], None] = partial(print, file=sys.stderr)
        self._blocks = list(blocks)
        # else a backward graph that cannot be compiled fails in the backward pass
        if hasattr(lowering, "force_non_lazy_backward_lowering"):
            lowering.force_non_lazy_backward_lowering = True
        for block in blocks:
            block.compile(backend=backend, dynamic=True)
            compiled: Any = block._compiled_call_impl
            block._compiled_call_impl = partial(self._call, block, compiled)

    def _call(
        self, block: nn.Module, compiled: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        kind, began = f"policy.compile: {type(block).__name__}", time.perf_counter()
        graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
        try:
            return compiled(*args, **named)
        except TorchDynamoException as error:
            why = getattr(error, "inner_exception", error)
            self.notify(f"{kind} cannot be compiled and runs as it is: {_first_line(why)}")
            for other in self._blocks:
                if type(other) is type(block):
                    other._compiled_call_impl = None
            return block(*args, **named)
        finally:
            for why in counters["graph_break"].keys() - breaks.keys():
                self.notify(f"{kind} has a break in its graph: {_first_line(why)}")
            if counters["stats"]["unique_graphs"] > graphs:
                took = time.perf_counter() - began
                # why it could not be an earlier graph
                why = get_compilation_metrics()[-1].recompile_reason
                again = f", again: {_first_line(why).partition('  #')[0]}" if why else ""
                self.notify(f"{kind} is compiled in {took:.0f} s{again}")


def _first_line(said: object) -> str:
    return cut(f"{said}".strip().partition("\n")[0] or type(said).__name__, SHOWN)
