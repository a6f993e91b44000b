"""The cases of `benchmarks.first_gpu`, each in a process of its own: CASE.json and FOUND.json are
given.

What is found is written after every step; a step that fails leaves its error, and the next follows.
"""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.forked import Forked
from benchmarks.machine import describe, matmul_rate
from benchmarks.published_loop import PublishedLoop
from benchmarks.random_models import RandomText, random_pipeline, shape_of
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.config.recipes import recipe_settings
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config
from g2rpo.core.data import Cond
from g2rpo.core.devices import accelerator, empty_cache, pick_device
from g2rpo.core.errors import UserError, refuse
from g2rpo.core.noise import generator_for
from g2rpo.lab.check_gradient import perturb
from g2rpo.lab.plan.cards import CARDS, card_of
from g2rpo.lab.plan.counting import count, settled
from g2rpo.lab.plan.kernels import RATES
from g2rpo.lab.plan.memory import CONTEXT_BYTES, SLACK
from g2rpo.lab.plan.plan import make_plan
from g2rpo.models import catalogue, pipelines
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import Blueprint, size_of
from g2rpo.models.embeddings import CachedEncoder
from g2rpo.models.hub import located
from g2rpo.models.load import policy_class
from g2rpo.models.published import PublishedModel
from g2rpo.models.quantized import faults_of_quantization
from g2rpo.rewards.analytic import Brightness
from g2rpo.rollout.engine import Engine
from g2rpo.train.checks import faults_of_autocast
from g2rpo.train.run.checkpoint import checkpoints, load_checkpoint, newest_iteration
from g2rpo.train.run.folder import Run
from g2rpo.train.trainer import Trainer

Case = dict[str, Any]
Asked = tuple[Tensor, Tensor, Cond]
LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "triton",
    "bitsandbytes",
    "torchao",
    "flash_attn",
    "numpy",
)
LESS = [
    "trainer.prompts_per_iteration=1", "algorithm.group_size=6", "algorithm.kl_weight=0", "policy.compile=false",
]  # fmt: skip
TINY = [
    "policy.height=64", "policy.width=64", "policy.max_sequence_length=8", "policy.lora_rank=2", "algorithm.group_size=3",
    "algorithm.branch_steps=[0,1]", "sampling.num_steps=4", "sampling.batch_size=4", "sampling.decode_batch_size=2",
    "trainer.micro_batch_size=2",
]  # fmt: skip
COMMAND = "g2rpo.cli.main"
SHORT = [  # with a reward that has no threshold, so that rounding does not become a step
    "rewards.scene_accuracy=", "rewards.brightness.weight=1", "trainer.iterations=2", "trainer.prompts_per_iteration=2",
    "trainer.checkpoint_every=1", "evaluation.num_prompts=16",
]  # fmt: skip
COMPARED = ("reward/", "advantage_size", "loss", "log_prob_drift", "ratio_deviation", "grad_norm")
SHORTER = [
    "trainer.prompts_per_iteration=1", "algorithm.group_size=3", "algorithm.branch_steps=[1]", "sampling.num_steps=3",
    "evaluation.num_prompts=2",
]  # fmt: skip


class Found:
    """What a case has measured; its checks, each with the largest value allowed; notes; errors by
    step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.measured: dict[str, float] = {}
        self.checks: dict[str, tuple[float, float]] = {}
        self.notes: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.errors[name] = f"{type(error).__name__}: {str(error)[:500]}"
        gc.collect()
        empty_cache()
        self.write()

    @contextmanager
    def named(self, way: str) -> Iterator[None]:
        """What is measured inside is of this `way`."""
        before, self.measured = self.measured, {}
        yield
        self.measured = before | {f"{name}, {way}": value for name, value in self.measured.items()}

    def write(self) -> None:
        left = json.dumps({name: value for name, value in vars(self).items() if name != "path"})
        # JSON has no NaN
        self.path.with_suffix(".new").write_text(json.dumps(json.loads(left, parse_constant=str)))
        os.replace(self.path.with_suffix(".new"), self.path)


# --- what cases are made of -----------------------------------------------------------------------


def configured(case: Case, *overrides: str) -> tuple[Config, Blueprint]:
    """A recipe with one prompt an iteration, a reward without weights, and the case's overrides."""
    given = recipe_settings(case["recipe"])
    shape = shape_of(
        given["policy"]["path"], case["tiny"], case["blocks"] or (2 if case["tiny"] else None)
    )
    given["policy"]["path"] = "random"
    given |= {
        "rewards": {"brightness": 1.0},
        "prompts": {"train": "none"},
        "evaluation": {"prompts": "none"},
    }
    frames = ["policy.num_frames=5"] if "num_frames" in given["policy"] else []
    small = [*TINY, *frames] if case["tiny"] else []
    if any(
        each.startswith("algorithm.name=") for each in case["overrides"]
    ):  # without branch steps
        small = [each for each in small if "branch" not in each]
    return resolve(
        given, [f"policy.device={case['device']}", *LESS, *overrides, *case["overrides"], *small]
    ), shape


def policy_of(config: Config, shape: Blueprint, pipeline: Any = None) -> DiffusersPolicy:
    """A policy with random weights, or those of a `pipeline`, whose adapters act."""
    device = torch.device(pick_device(config.policy.device))
    drawn_on = torch.device("cpu") if config.policy.offload else device
    drawn = (
        random_pipeline(shape, drawn_on, getattr(torch, config.policy.dtype))
        if pipeline is None
        else copy.deepcopy(pipeline)
    )
    policy = policy_class(config.policy, shape.kind)(drawn, located(config.policy), device=device)
    perturb(policy)
    return policy


def trainer_of(config: Config, policy: DiffusersPolicy) -> Trainer:
    text: Any = RandomText(policy)
    policy.stored = CachedEncoder(text, None, notify=print)
    return Trainer(
        config=config,
        policy=policy,
        rewards={"brightness": Brightness()},
        prompts=["a"],
        heldout=["a"],
        trackers=[],
    )


def question(policy: DiffusersPolicy, rows: int) -> Asked:
    cond = RandomText(policy).encode([f"prompt {row}" for row in range(rows)])
    x = policy.noise([generator_for("noise", row) for row in range(rows)]).to(policy.device)
    return x, torch.linspace(0.9, 0.2, rows).to(policy.device), cond


def learn(policy: DiffusersPolicy, *asked: Any) -> None:
    """A training pass, whose gradients are added to those that are there."""
    policy.velocity(*asked).float().square().mean().backward()


def gradient(policy: DiffusersPolicy, asked: Asked) -> Tensor:
    for parameter in policy.trainable_parameters():
        parameter.grad = None
    learn(policy, *asked)
    return torch.cat(
        [p.grad.flatten().cpu() for p in policy.trainable_parameters() if p.grad is not None]
    )


def relative(got: Tensor, exact: Tensor) -> float:
    got, exact = (each.detach().cpu().double() for each in (got, exact))
    return float((got - exact).norm() / exact.norm())


def waited(device: torch.device) -> Any:
    """torch's module for the device, once all its work is done; None for a CPU."""
    if (module := accelerator(device)) is not None:
        module.synchronize(device)
    return module


def timed(
    found: Found,
    name: str,
    rows: str,
    device: torch.device,
    call: Callable[..., object],
    *given: Any,
    most: int = 5,
) -> None:
    """The median of a call's seconds, after two that warm up, of which the first is noted; and its
    peak of bytes, with what is given to it, as the plan counts."""
    taken: list[float] = []
    ends = time.monotonic() + 4
    while len(taken) < 3 or (len(taken) < most + 2 and time.monotonic() < ends):
        waited(device)
        began = time.perf_counter()
        call(*given)
        waited(device)
        taken.append(time.perf_counter() - began)
    found.measured[f"{name}, {rows}, s"] = statistics.median(taken[2:])
    found.notes[f"{name}, {rows}, first call, s"] = taken[0]
    if (module := waited(device)) is not None:
        module.reset_peak_memory_stats(device)
        standing = module.memory_allocated(device) - sum(map(bytes_of, given))
        call(*given)
        # of the largest call
        found.measured.setdefault(f"{name}, bytes", module.max_memory_allocated(device) - standing)
        found.notes.setdefault(f"{name}, reserved bytes", module.memory_reserved(device))
    found.write()


def bytes_of(given: Tensor | Cond) -> int:
    if isinstance(given, Tensor):
        return given.nbytes
    return sum(
        each.nbytes for each in (*given.tensors.values(), *itertools.chain(*given.ragged.values()))
    )


def planned(case: Case, card_name: str) -> dict[str, float]:
    """What `g2rpo plan` says of the figures that `model` measures; seconds for a known card
    only."""
    config, shape = configured(case)
    drawn = replace(
        catalogue.SPECS[shape.kind],
        models={"random": PublishedModel("", parts=shape.parts, options=shape.options)},
    )
    with patch.dict(catalogue.SPECS, {shape.kind: drawn}):
        plan = make_plan(config, cuda=True, heldout=1, distinct_prompts=1)
    memory, peak = (
        plan.memory,
        max(plan.memory.moments[name] for name in ("rollout", "decoding", "update")),
    )
    found = {
        "weights, bytes": sum(
            memory.parts[name] for name in ("frozen weights", "trained weights", "VAE")
        ),
        "velocity, bytes": memory.working["network call"],
        "training pass, bytes": memory.working["training pass"],
        "decode, bytes": memory.working["decoding"],
        "iteration, bytes": peak,
        "iteration with all of CUDA's, bytes": math.ceil(peak * (1 + SLACK)) + CONTEXT_BYTES,
        "evaluations": plan.counts.mean(lambda it: it.evaluations),
    }
    if (card := card_of(card_name) or (CARDS["h100"] if case["tiny"] else None)) is None:
        return found
    calls = plan.traced
    most, passed, pictures = calls.velocity.rows, calls.training.rows, calls.decode.rows
    training, decode = calls.training.roofline.call(card), calls.decode.roofline.call(card)
    for rows in sizes(most):
        found[f"velocity, rows={rows}, s"] = calls.velocity.roofline.call(card, rows=rows / most)
    found |= {
        f"training pass, rows={passed}, s": training,
        f"decode, pictures={pictures}, s": decode,
    }
    phases = plan.seconds(card).iteration
    return (
        found
        | {"iteration, s": sum(phases.values())}
        | {f"iteration: {name}, s": phases[name] for name in PHASES}
    )


PHASES = ("rollout", "update")


def sizes(most: int) -> list[int]:
    """Rows of the calls that are timed, the recipe's first."""
    return sorted({most, 1}, reverse=True)


# --- the cases ------------------------------------------------------------------------------------


def machine(found: Found, case: Case) -> None:
    """The card, the versions, and rates of a product and of a copy beside what the roofline takes
    them to be."""
    device, notes = torch.device(pick_device(case["device"])), found.notes
    with found.step("versions"):
        notes |= {
            **describe(device),
            "python": sys.version.split()[0],
            "cuda": torch.version.cuda,
            "cores": os.cpu_count(),
        }
        for name in LIBRARIES:
            with suppress(importlib.metadata.PackageNotFoundError):
                notes[name] = importlib.metadata.version(name)
        notes["compiler"] = shutil.which("cc") or shutil.which("gcc")
    with found.step("driver"):
        if shutil.which("nvidia-smi"):
            fields = "--query-gpu=driver_version,memory.total,memory.used,power.limit,clocks.max.sm"
            notes["nvidia-smi"] = subprocess.run(
                ["nvidia-smi", fields, "--format=csv"], capture_output=True, text=True, timeout=30
            ).stdout
    with found.step("rates"):
        found.measured["product in bfloat16, FLOP/s"] = matmul_rate(
            torch.bfloat16, device, seconds=0.05 if case["tiny"] else 2
        )
        some = torch.randn(2**20 if case["tiny"] else 2**29, device=device)
        timed(found, "copy", "4 bytes a number", device, some.clone)
        found.measured["copy, B/s"] = (
            2 * some.nbytes / found.measured.pop("copy, 4 bytes a number, s")
        )
        if (card := card_of(notes["device"])) is not None:
            product, copied = RATES.products(card, "bfloat16"), RATES.moved(card)
            notes["planned"] = {"product in bfloat16, FLOP/s": product, "copy, B/s": copied}


def model(found: Found, case: Case) -> None:
    """Memory, seconds and repeatability of a recipe's calls and of its iterations."""
    config, shape = configured(case)
    config = settled(config, cuda=True)
    refuse(faults_of_quantization(config.policy.quantize, config.policy.tuning))
    refuse(faults_of_autocast(config))
    refuse(
        pipelines.faults_of_attention(config.policy.attention, pick_device(config.policy.device))
    )
    device, counts = torch.device(pick_device(config.policy.device)), count(config, 1)
    rows, passed = counts.largest(lambda it: it.calls), counts.largest(lambda it: it.passes)
    pictures = min(int(config.sampling.decode_batch_size), counts.largest(lambda it: [it.images]))
    with found.step("build"):
        policy = policy_of(config, shape)
        found.notes["blocks"] = len(policy.blocks)
        found.notes["weights, bytes"] = sum(
            size_of(getattr(policy.pipeline, part)) for part in ("transformer", "vae")
        )
    if found.errors:
        return
    if (module := waited(device)) is not None:
        found.measured["weights, bytes"] = module.memory_allocated(device)
    with found.step("velocity"), torch.no_grad():
        for size in sizes(rows):
            asked = question(policy, size)
            timed(found, "velocity", f"rows={size}", device, policy.velocity, *asked)
        velocities = [policy.velocity(*asked) for _ in range(2)]
        found.checks["velocity, not finite"] = (float((~velocities[0].isfinite()).sum()), 0)
        found.checks["velocity, from call to call"] = (relative(*velocities), 0)
    with found.step("training pass"):
        if case["passes"]:
            pass_of(found, policy, passed, device)
    with found.step("decode"), torch.no_grad():
        latents = question(policy, pictures)[0]
        timed(found, "decode", f"pictures={pictures}", device, policy.decode, latents, most=3)
    with found.step("iterations"):
        trainer = trainer_of(config, policy)
        for number in range(case["iterations"]):
            iteration(found, trainer, device, first=number == 0)
    if case["again"]:
        with found.step("again"):
            weights = []
            for _ in range(2):
                torch.manual_seed(0)  # of the random weights
                policy = policy_of(config, shape)
                trainer_of(config, policy).iterate()
                weights.append(
                    torch.cat([p.detach().flatten().cpu() for p in policy.trainable_parameters()])
                )
            found.checks["trained weights, from run to run"] = (relative(*weights), 0)


def pass_of(found: Found, policy: DiffusersPolicy, rows: int, device: torch.device) -> None:
    """Seconds, memory and gradients of a training pass."""
    asked = question(policy, rows)
    timed(found, "training pass", f"rows={rows}", device, partial(learn, policy), *asked)
    gradients = [gradient(policy, asked) for _ in range(2)]
    found.checks["gradient, not finite"] = (float((~gradients[0].isfinite()).sum()), 0)
    found.checks["gradient, share of zeros"] = (float((gradients[0] == 0).float().mean()), 0.5)
    # attention's backward pass adds in an order that varies
    limit = 0 if device.type == "cpu" else 0.05
    found.checks["gradient, from call to call"] = (relative(*gradients), limit)


def ways(found: Found, case: Case) -> None:
    """One policy as it is and compiled: a call, a training pass and an iteration, and how far they
    are apart; with `loop` the published order of calls beside them."""
    config, shape = configured(case)
    device, counts = torch.device(pick_device(config.policy.device)), count(config, 1)
    policy = policy_of(config, shape)
    trainer, weights = trainer_of(config, policy), policy.trainable_parameters()
    old = [weight.detach().clone() for weight in weights]
    call, asked = (
        question(policy, counts.largest(of)) for of in (lambda it: it.calls, lambda it: it.passes)
    )
    lines, answers = list[str](), list[list[Tensor]]()
    for way in ("as it is", "compiled"):
        with found.step(way), found.named(way):
            if answers:
                policy.compile("aot_eager" if case["tiny"] else "inductor")
                policy.compiled.notify = lines.append  # type: ignore[union-attr]
            for weight, value in zip(weights, old, strict=True):
                weight.data.copy_(value)
            with torch.no_grad():
                timed(found, "velocity", f"rows={len(call[1])}", device, policy.velocity, *call)
                velocity = policy.velocity(*call)
            pass_of(found, policy, len(asked[1]), device)
            answers.append([velocity, gradient(policy, asked)])
            trainer.iterate()  # compiles what only an iteration has
            iteration(found, trainer, device, first=True)
    found.notes["compiler"] = lines
    for name, mine, theirs in zip(("velocity", "gradient"), *answers, strict=True):
        found.checks[f"{name}, compiled and as it is"] = (relative(theirs, mine), 0.05)
    if case["loop"]:
        with found.step("published order"):
            began = time.perf_counter()
            found.measured["published order, evaluations"] = published_order(trainer)
            waited(device)
            found.measured["published order, s"] = time.perf_counter() - began


def published_order(trainer: Trainer) -> int:
    """A rollout of one prompt with every velocity computed anew, a row at a time; returns how many
    there are."""
    algorithm = trainer.algorithm
    if isinstance(algorithm, GranularGRPO):
        loop = PublishedLoop(trainer.policy, trainer.sigmas, algorithm, trainer.rewards)
        loop.rollout(["a"], generator_for)
        return loop.evaluations
    cond = trainer.policy.encode(["a"])
    engine = Engine(policy=trainer.policy, cond=cond, sigmas=trainer.sigmas, batch_size=1)
    apart = [replace(plan, shared_noise=False) for plan in trainer.plans()]
    engine.rollout(apart, algorithm.group_size, algorithm.kernel(trainer.sigmas), generator_for)
    return engine.evaluations


def limited(found: Found, case: Case) -> None:
    """An iteration with so much of the GPU's memory."""
    config, shape = configured(case)
    device = torch.device(pick_device(config.policy.device))
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    trainer = trainer_of(config, policy_of(config, shape))
    for limit in (24, 16, 12):
        with found.step(f"{limit} GB"):
            empty_cache()
            if total:
                torch.cuda.set_per_process_memory_fraction(min(1, limit * 1e9 / total), device)
            with found.named(f"{limit} GB"):
                iteration(found, trainer, device, first=True)


def drift(found: Found, case: Case) -> None:
    """Log-probs of the training pass against the rollout's, where batches of the one and of the
    other have other sizes."""
    small = () if case["tiny"] else ("policy.height=512", "policy.width=512")
    sizes = (1, 2, 4) if case["tiny"] else (1, 4, 8)
    for rollout, passed in itertools.product(sizes, sizes[:2]):
        with found.step(f"rollout {rollout}, training pass {passed}"):
            batches = [f"sampling.batch_size={rollout}", f"trainer.micro_batch_size={passed}"]
            varied = case | {
                "overrides": (
                    *small,
                    "algorithm.branch_steps=[0,2]",
                    "algorithm.granularities=[1]",
                    *batches,
                )
            }
            config, shape = configured(varied)
            torch.manual_seed(0)  # of the random weights
            trainer = trainer_of(config, policy_of(config, shape))
            row, sizes_text = trainer.iterate(), f"rollout in {rollout}, training in {passed}"
            found.checks[f"log-prob drift, {sizes_text}"] = (
                row["log_prob_drift"],
                trainer.alarms.drift_limit,
            )
            found.checks[f"ratio off 1, {sizes_text}"] = (row["ratio_deviation"], 0)


def iteration(found: Found, trainer: Trainer, device: torch.device, first: bool) -> None:
    """Runs one; the weights of the first do not move between its rollout and its training
    passes."""
    if (module := waited(device)) is not None:
        module.reset_peak_memory_stats(device)
    row = trainer.iterate()
    if first:
        found.checks["ratio before the first update, off 1"] = (row["ratio_deviation"], 0)
        found.checks["log-prob, training pass against rollout"] = (
            row["log_prob_drift"],
            trainer.alarms.drift_limit,
        )
        found.checks["batches halved"] = (row["out_of_memory"], 0)
    found.measured |= {"iteration, s": row["seconds"], "evaluations": row["evaluations"]}
    found.measured |= {f"iteration: {name}, s": row[f"seconds/{name}"] for name in PHASES}
    found.notes |= {
        "evaluations/s": row["evaluations"] / row["seconds/rollout"],
        "grad_norm": row["grad_norm"],
    }
    if module is not None:
        found.measured["iteration, bytes"] = module.max_memory_allocated(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found.measured["iteration with all of CUDA's, bytes"] = total - free
    found.write()


def exact(found: Found, case: Case) -> None:
    """A model on the CPU and on the device; on the device in batches of other sizes; and the waits
    in its rollout."""
    config, shape = configured(
        case,
        "policy.height=256",
        "policy.width=256",
        "algorithm.group_size=3",
        "algorithm.branch_steps=[1]",
    )
    device, pipeline = (
        torch.device(pick_device(case["device"])),
        random_pipeline(shape, torch.device("cpu"), torch.float32),
    )

    def built(**changes: str) -> DiffusersPolicy:
        return policy_of(
            config.model_copy(update={"policy": config.policy.model_copy(update=changes)}),
            shape,
            pipeline,
        )

    torch.backends.cudnn.allow_tf32 = False
    with found.step("CPU"):
        host, policy = built(device="cpu", dtype="float32"), built(dtype="float32")
        asked, same = question(host, 2), question(policy, 2)
        with torch.no_grad():
            velocity, pictures = host.velocity(*asked), host.decode(asked[0][:1])
            found.checks["velocity, device and CPU"] = (
                relative(policy.velocity(*same), velocity),
                1e-4,
            )
            found.checks["pictures, device and CPU"] = (
                relative(policy.decode(same[0][:1]), pictures),
                1e-4,
            )
        found.checks["gradient, device and CPU"] = (
            relative(gradient(policy, same), gradient(host, asked)),
            1e-3,
        )
    if found.errors:
        return
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    for dtype, limit in (("float32", 5e-3), ("bfloat16", 0.3)):
        with found.step(dtype), torch.no_grad():
            policy = built(dtype=dtype)
            found.measured[f"velocity in {dtype}, off float32 on the CPU"] = relative(
                policy.velocity(*same), velocity
            )
            found.checks[f"velocity in {dtype}, in a batch and alone"] = (
                relative(
                    policy.velocity(*question(policy, 3))[:1], policy.velocity(*question(policy, 1))
                ),
                limit,
            )
            trainer = trainer_of(config, policy)
            finals = [rolled(trainer, size) for size in (2, 7, 7)]
            found.checks[f"final latents in {dtype}, batches of 2 and of 7"] = (
                relative(finals[0], finals[1]),
                limit,
            )
            found.checks[f"final latents in {dtype}, from run to run"] = (
                relative(finals[2], finals[1]),
                0,
            )
    with found.step("waits"), torch.no_grad():
        inside = waits(device, partial(policy.velocity, *same))
        found.checks["waits in a velocity"] = (sum(inside.values()), 0)
        found.notes |= {
            "waits in a velocity": inside,
            "waits in a rollout": waits(device, partial(rolled, trainer, 7)),
        }


def rolled(trainer: Trainer, batch_size: int) -> Tensor:
    """The final latents of one prompt's rollout."""
    engine = Engine(
        policy=trainer.policy,
        cond=trainer.policy.encode(["a"]),
        sigmas=trainer.sigmas,
        batch_size=batch_size,
    )
    algorithm = trainer.algorithm
    done = engine.rollout(
        trainer.plans(), algorithm.group_size, algorithm.kernel(trainer.sigmas), generator_for
    )
    return torch.cat([each.finals.flatten(0, 1) for each in done])


def waits(device: torch.device, call: Callable[[], object]) -> dict[str, int]:
    """How often a call has the host wait for the device, also to copy something to it, by the place
    in the code."""
    call()
    if (module := waited(device)) is not None and hasattr(module, "costs"):  # the tests' device
        before = module.costs()
        call()
        return dict(zip(("waits", "copies"), (module.costs() - before).int().tolist(), strict=True))
    if device.type != "cuda":
        call()
        return {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(
        Counter(
            f"{Path(each.filename).name}:{each.lineno}"
            for each in said
            if "called a synchronizing" in str(each.message)
        )
    )


# --- `g2rpo train scenes` -------------------------------------------------------------------------


def training(case: Case, name: str, *overrides: str, device: str = "") -> tuple[Run, Forked]:
    """A run below the working folder, and the process that makes it."""
    run = Run(Path(case["folder"]) / name)
    given = [
        *SHORT,
        *(SHORTER if case["tiny"] else []),
        f"policy.device={device or case['device']}",
        *overrides,
    ]
    return run, Forked(
        COMMAND,
        ["train", "scenes", "--run-dir", str(run.path), *given],
        run.path.with_suffix(".log"),
    )


def ended(run: Run, process: Forked) -> Run:
    """The run, once its process has ended well."""
    if code := process.wait():
        raise RuntimeError(
            f"g2rpo ended with {code}: {run.path.with_suffix('.log').read_text()[-400:]}"
        )
    return run


def whole(case: Case) -> Run:
    """The run that is not interrupted, which is made if no case has made it."""
    run = Run(Path(case["folder"]) / "whole")
    return run if run.results.is_file() else ended(*training(case, "whole"))


def numbers(run: Run) -> dict[str, float]:
    """What a run logs, by iteration and name; times and memory left out."""
    left_out = ("seconds", "memory")
    return {
        f"{row['kind']} {row['iteration']}: {key}": float(value)
        for row in run.read_log()
        for key, value in row.items()
        if isinstance(value, int | float) and not any(word in key for word in left_out)
    }


def beside_cpu(found: Found, case: Case) -> None:
    """Two iterations on the device and, at the same time, on the CPU: every figure beside the
    other's."""
    with found.step("runs"):
        runs = [training(case, "whole"), training(case, "cpu", device="cpu")]
        here, there = (numbers(ended(*each)) for each in runs)
        together = {
            name: [here[name], there[name], here[name] - there[name]]
            for name in here
            if name in there
        }
        found.notes["device, CPU, difference"] = together
        found.notes["side by side"] = {
            name: " beside the CPU's ".join(f"{value:.6g}" for value in values[:2])
            + f", difference {values[2]:.2g}"
            for name, values in together.items()
            if name.split(": ")[1].startswith(COMPARED)
        }
        for name, (mine, theirs, difference) in together.items():
            if name.startswith(("eval 0: reward/brightness", "train 1: reward/")):
                found.checks[f"{name}, device and CPU"] = (
                    abs(difference) / max(abs(mine), abs(theirs)),
                    1e-3,
                )


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What nested lists and dicts hold, by the path to it."""
    if isinstance(value, dict | list | tuple):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{name}/{key}")
    else:
        yield name, value


def compare(found: Found, one: Run, other: Run) -> None:
    """Every value of the last checkpoints of two runs, and every row that they logged."""
    mine, theirs = (
        dict(leaves(list(load_checkpoint(checkpoints(run.checkpoints)[-1]))))
        for run in (one, other)
    )
    apart = dict.fromkeys(mine.keys() ^ theirs.keys(), math.inf)
    for name in mine.keys() & theirs.keys():
        a, b = mine[name], theirs[name]
        if not isinstance(a, Tensor):
            if a != b and "seconds" not in name:
                apart[name] = math.inf
        elif not torch.equal(a, b):
            apart[name] = float((a.double() - b.double()).abs().max())
    logged, also = numbers(one), numbers(other)
    rows = [name for name in logged.keys() | also.keys() if logged.get(name) != also.get(name)]
    found.notes |= {
        "tensors": len(mine),
        "largest difference by tensor": apart,
        "rows that differ": sorted(rows),
    }
    found.checks |= {"tensors that differ": (len(apart), 0), "rows that differ": (len(rows), 0)}
    found.measured["largest difference of a tensor"] = max(apart.values(), default=0.0)


def twice(found: Found, case: Case) -> None:
    """Two runs of one config end alike."""
    with found.step("twice"):
        overrides, own = case["overrides"], len(case["overrides"])
        first = ended(*training(case, f"first_{own}", *overrides)) if overrides else whole(case)
        compare(found, first, ended(*training(case, f"second_{own}", *overrides)))


def resumed(found: Found, case: Case) -> None:
    """A run that is killed after its first checkpoint, and resumed, ends as one that was not."""
    with found.step("resumed"):
        overrides, own = case["overrides"], len(case["overrides"])
        run, process = training(case, f"killed_{own}", *overrides)
        while process.poll() is None and not checkpoints(run.checkpoints):
            time.sleep(0.005)
        process.kill()
        found.notes |= {"ended with": process.code, "checkpoint": newest_iteration(run.checkpoints)}
        found.checks["killed after its last checkpoint"] = (float(run.results.is_file()), 0)
        again = Forked(COMMAND, ["resume", str(run.path)], run.path.with_suffix(".log"))
        first = ended(*training(case, f"whole_{own}", *overrides)) if own else whole(case)
        compare(found, first, ended(run, again))


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def layouts(found: Found, case: Case) -> None:
    """Attention's gradients by kernel, off float32's, where the output's gradient is contiguous and
    where it is a slice.

    The contiguous one comes first: see `g2rpo.models.pipelines.mixes_layouts`.
    """
    device = torch.device(pick_device(case["device"]))
    # FLUX at 512x512
    batch, tokens, heads, width = (1, 64, 2, 32) if case["tiny"] else (4, 1536, 24, 128)
    given = [
        torch.randn(batch, tokens, heads, width, device=device, dtype=torch.bfloat16)
        for _ in range(3)
    ]
    narrow = torch.randn(batch, tokens, heads * width, device=device, dtype=torch.bfloat16)
    wide = torch.cat([narrow, narrow.new_zeros(batch, tokens, 4 * heads * width)], dim=-1)
    out = {"contiguous": narrow, "slice": wide[..., : heads * width]}

    def gradients(kernel: SDPBackend, dtype: torch.dtype, gradient: Tensor) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in given]
        with sdpa_kernel(kernel):
            query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
            attended = functional.scaled_dot_product_attention(query, key, value)
        return list(
            torch.autograd.grad(attended.transpose(1, 2).flatten(2), leaves, gradient.to(dtype))
        )

    exact = gradients(SDPBackend.MATH, torch.float32, narrow)
    for kind in set(KERNELS) & set(pipelines.attention_kinds(str(device))):
        for layout, gradient in out.items():
            with found.step(f"{kind}, {layout}"):
                off = map(relative, gradients(KERNELS[kind], torch.bfloat16, gradient), exact)
                found.measured[f"{kind}, {layout}, off float32"] = max(off)


KINDS = {
    each.__name__: each
    for each in (machine, model, ways, limited, drift, exact, twice, resumed, beside_cpu, layouts)
}


def main(given: list[str]) -> None:
    """CASE.json FOUND.json; or CASES.json FOUND.json CARD, to plan them all."""
    case, found = json.loads(Path(given[0]).read_text()), Found(Path(given[1]))
    warnings.filterwarnings("ignore", category=UserWarning)
    for each in case if isinstance(case, list) else []:
        with found.step(each["name"]):
            found.notes[each["name"]] = planned(each, given[2])
    if isinstance(case, dict):
        try:
            KINDS[case["kind"]](found, case)
        except UserError as error:  # what this machine or installation lacks
            found.notes["refused"] = str(error)
        found.write()


if __name__ == "__main__":
    main(sys.argv[1:])
