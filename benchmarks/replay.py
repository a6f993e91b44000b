"""What a velocity by a pipeline's own call costs beside one written by hand: `python -m benchmarks.replay`.

The same weights, inputs and process; calls of both alternate, and the median of their ratios counts. The tiny FLUX of the
testbed, and blocks as wide as FLUX.1-dev's (3072), few of them and with few tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel

from g2rpo.policies.catalogue import Flux
from g2rpo.policies.flux import FluxPolicy
from g2rpo.policies.pipelines import load_pipeline
from g2rpo.seeding import generator_for
from g2rpo.testbed import pipeline_dir

RESULTS = Path(__file__).parent / "results" / "replay.json"
SIZE = {"height": 64, "width": 64, "max_sequence_length": 16, "tuning": "frozen"}
WIDE = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "axes_dims_rope": (16, 56, 56),
}


def pipeline(wide: bool):
    from diffusers import FluxPipeline

    made = load_pipeline(FluxPipeline, pipeline_dir(), torch.float32, "frozen")
    if wide:
        made.transformer = FluxTransformer2DModel.from_config({**made.transformer.config, **WIDE})
    return made


@torch.no_grad()
def compared(wide: bool, rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a call by hand, and by the pipeline's own call; the median of their ratios."""
    shared = pipeline(wide)
    policies = [FluxPolicy(shared, **SIZE), Flux(shared, **SIZE)]
    cond = policies[0].encode(["a red circle"] * rows), policies[1].encode(["a red circle"] * rows)
    x, sigma = policies[0].noise([generator_for(i) for i in range(rows)]), torch.linspace(0.2, 0.9, rows)
    assert torch.allclose(policies[0].velocity(x, sigma, cond[0]), policies[1].velocity(x, sigma, cond[1]), atol=1e-5)
    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        pair = []
        for policy, own in zip(policies, cond, strict=True):
            began = time.process_time()
            policy.velocity(x, sigma, own)
            pair.append(1e3 * (time.process_time() - began))
        times.append((pair[0], pair[1]))
    by_hand, replayed = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = statistics.median(after / before for before, after in times)
    return {"rows": rows, "by_hand_ms": by_hand, "replayed_ms": replayed, "ratio": ratio}


def main() -> None:
    out = arguments().out
    torch.set_num_threads(1)
    results = {
        "tiny FLUX, 1 row": compared(wide=False, rows=1, repeats=200),
        "tiny FLUX, 64 rows": compared(wide=False, rows=64, repeats=30),
        "3072 wide, 1 double and 1 single block, 1 row": compared(wide=True, rows=1, repeats=40),
    }
    for name, result in results.items():
        print(name, {key: round(value, 3) for key, value in result.items()})
    out.write_text(json.dumps(results, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
