"""Host memory of several processes that load the same pipeline, as the ranks of a node do.

    python -m benchmarks.loading --processes 4 --out benchmarks/results/loading.json

A random FLUX of a few hundred MB in bfloat16. Every process, forked with its libraries loaded,
loads it and reads each weight once, as moving it to a GPU does; what the processes then hold
together is measured by Linux as PSS, where a page that n processes share counts 1/n to each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any, Literal

TUNINGS = ("lora", "full")


def make(folder: Path) -> int:
    """Saves the pipeline; returns the bytes of its transformer."""
    import torch
    from diffusers import FluxPipeline, FluxTransformer2DModel

    from g2rpo.data.testbed import pipeline_dir

    pipeline = FluxPipeline.from_pretrained(pipeline_dir(), dtype=torch.bfloat16)
    sizes = {
        "num_layers": 3,
        "num_single_layers": 5,
        "attention_head_dim": 128,
        "num_attention_heads": 8,
    }
    config = {**pipeline.transformer.config, **sizes, "axes_dims_rope": (16, 56, 56)}
    pipeline.transformer = FluxTransformer2DModel.from_config(config).to(torch.bfloat16)
    pipeline.save_pretrained(folder, safe_serialization=True)
    return sum(p.nbytes for p in pipeline.transformer.parameters())


def load(folder: str, tuning: Literal["lora", "full"], barrier: Any, results: Any) -> None:
    """Loads the pipeline and reports bytes of PSS, and of private pages, that were added."""
    import torch
    from diffusers import FluxPipeline

    from g2rpo.models.pipelines import read_pipeline

    torch.set_num_threads(1)
    barrier.wait()
    before = held()
    pipeline = read_pipeline(FluxPipeline, folder, torch.bfloat16, tuning)
    for weight in pipeline.transformer.parameters():
        float(weight.sum(dtype=torch.float32))
    barrier.wait()
    results.put([now - then for now, then in zip(held(), before, strict=True)])
    barrier.wait()


def held() -> tuple[int, int]:
    """This process's PSS and private dirty pages, in bytes."""
    rows = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {row[0]: int(row[1]) * 1024 for row in rows}
    return sizes["Pss:"], sizes["Private_Dirty:"]


def main() -> None:
    args = arguments()
    context, found = multiprocessing.get_context("fork"), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        stored = make(Path(folder))
        for tuning in TUNINGS:
            barrier, results = context.Barrier(args.processes), context.Queue()
            started = [
                context.Process(target=load, args=(folder, tuning, barrier, results))
                for _ in range(args.processes)
            ]
            for each in started:
                each.start()
            rows = [results.get() for _ in started]
            for each in started:
                each.join()
            pss, private = (sum(column) / 2**20 for column in zip(*rows, strict=True))
            found[tuning] = {
                "stored_mib": stored / 2**20,
                "together_mib": pss,
                "private_mib": private,
            }
            print(
                f"{tuning}: {stored / 2**20:.0f} MiB stored; {args.processes} processes hold {pss:.0f}, {private:.0f} private"
            )
    if args.out:
        args.out.write_text(json.dumps({"processes": args.processes, **found}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
