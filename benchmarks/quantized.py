"""Frozen weights in fewer bits, ours beside torchao's and bitsandbytes': `OMP_NUM_THREADS=1 python
-m benchmarks.quantized`.

A linear layer as wide as FLUX.1-dev's (3072 x 3072, bfloat16, 256 rows), and the tiny FLUX of the
recipe scenes with a LoRA. Errors are relative in norm: of the layer to the same weights in float32,
of the tiny model's velocity and of its adapters' gradient to bfloat16. `stored` are the bytes of
the weight, `kept` those that a call keeps until its backward pass.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torchao.quantization as torchao
from torch import Tensor, nn
from torch.nn import functional as F

from g2rpo.core.noise import generator_for
from g2rpo.data.testbed import pipeline_dir
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.catalogue import flux
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import read_pipeline
from g2rpo.models.quantized import QUANTIZED_LINEARS, linears_of_blocks

RESULTS = Path(__file__).parent / "results" / "quantized.json"
CPU = torch.device("cpu")
WIDTH, ROWS = 3072, 256
Make = Callable[[nn.Linear], nn.Module]


def ours(kind: str) -> Make:
    return lambda linear: QUANTIZED_LINEARS[kind](linear, CPU)


def by_torchao(config: Callable[[], Any]) -> Make:
    def make(linear: nn.Linear) -> nn.Module:
        torchao.quantize_(linear, config(), filter_fn=lambda module, name: True)
        return linear

    return make


def by_bitsandbytes(linear: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    kind: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    layer = Linear4bit(
        linear.in_features, linear.out_features, compute_dtype=linear.weight.dtype, **kind
    )
    layer.weight = Params4bit(linear.weight.data, requires_grad=False, module=layer, **kind)
    layer.bias = linear.bias
    return layer.to(CPU)


WAYS: dict[str, Make] = {
    "bfloat16": lambda linear: linear,
    "int8": ours("int8"),
    "int8, torchao": by_torchao(lambda: torchao.Int8WeightOnlyConfig(version=2)),
    "nf4": ours("nf4"),
    "nf4, bitsandbytes": by_bitsandbytes,
}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def of_a_layer(make: Make) -> dict[str, float]:
    """Errors of the output and of the inputs' gradient, and bytes."""
    draw = generator_for("quantized")
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(0.02 * torch.randn(WIDTH, WIDTH, generator=draw))
    x, toward = (torch.randn(ROWS, WIDTH, generator=draw).bfloat16() for _ in range(2))
    exact = (F.linear(x.float(), linear.weight.float()), toward.float() @ linear.weight.float())
    layer, kept = make(copy.deepcopy(linear)), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    (gradient,) = torch.autograd.grad(y, x, toward)
    return {
        "output": error(y.detach(), exact[0]),
        "gradient": error(gradient, exact[1]),
        "stored": sum(bytes_of(value) for value in (*layer.parameters(), *layer.buffers())),
        "kept": sum(kept),
    }


def bytes_of(value: Tensor) -> int:
    """Of a tensor, or of the tensors in one of a library's own kinds."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(bytes_of(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    state = getattr(value, "quant_state", None)
    parts = (
        []
        if state is None
        else [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    )
    return value.nbytes + sum(bytes_of(part) for part in parts)


def of_the_tiny_model(make: Make) -> tuple[Tensor, Tensor]:
    """A velocity, and the gradient of its squares by the adapters."""
    from diffusers import FluxPipeline

    size: dict[str, Any] = {
        "height": 64,
        "width": 64,
        "max_sequence_length": 16,
        "dtype": "bfloat16",
    }
    made = read_pipeline(FluxPipeline, pipeline_dir(), torch.bfloat16)
    policy = DiffusersPolicy.of(flux)(made, PolicyConfig(path="", **size))
    for number, value in enumerate(policy.trainable_parameters()):
        value.data = 0.1 * torch.randn(value.shape, generator=generator_for(number))
    for name, linear in list(linears_of_blocks(policy.transformer)):
        policy.transformer.set_submodule(name, make(linear))
    x, cond = (
        policy.noise([generator_for(number) for number in range(4)]),
        policy.encode(["a red circle"] * 4),
    )
    velocity = policy.velocity(x, torch.tensor([0.9, 0.6, 0.4, 0.1]), cond)
    gradients = torch.autograd.grad(velocity.float().square().sum(), policy.trainable_parameters())
    return velocity.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def measure() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    velocity, gradient = of_the_tiny_model(WAYS["bfloat16"])
    for name, make in WAYS.items():
        try:
            other, slope = of_the_tiny_model(make)
            tiny = {
                "tiny velocity": error(other, velocity),
                "tiny gradient": error(slope, gradient),
            }
            found[name] = {**of_a_layer(make), **tiny}
        except (AssertionError, RuntimeError, NotImplementedError) as reason:
            found[name] = {"refused": str(reason).splitlines()[0]}
    return found


def main() -> None:
    args, found = arguments(), measure()
    versions = {library: version(library) for library in ("torch", "torchao", "bitsandbytes")}
    args.out.write_text(json.dumps({"versions": versions, **found}, indent=1) + "\n")
    for name, row in found.items():
        print(
            name,
            *(f"{key} {value:.4g}" if key != "refused" else value for key, value in row.items()),
            sep=" | ",
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
