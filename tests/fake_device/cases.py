"""What runs on the fake device, each in a process that has registered it: functions of (world,
folder, ...)."""

import json
import math
from pathlib import Path

import torch

from benchmarks import first_gpu
from g2rpo import api
from g2rpo.config import recipes
from g2rpo.config.resolve import resolve
from g2rpo.core import noise
from g2rpo.lab.demo.drawing import draw, trace_group
from g2rpo.lab.demo.model import open_model
from g2rpo.lab.evaluate import evaluate, run_settings
from g2rpo.lab.plan import trace
from g2rpo.lab.sample import sample, sample_config
from g2rpo.models import load
from g2rpo.models.blueprint import read_blueprint, shapes_of, size_of
from g2rpo.models.offload import offloaded_bytes
from g2rpo.train.build import Request
from g2rpo.train.build import build as built
from g2rpo.train.evaluation.controls import Control
from g2rpo.train.run.folder import Run
from tests.fake_device import device
from tests.support.policies import velocity
from tests.support.runs import finished, smooth
from tests.support.watched import flat

PROMPTS = ["a red circle", "two blue circle", "a blue square left of a red circle", "red square"]
DATA = {
    "policy": {
        "height": 32,
        "width": 32,
        "max_sequence_length": 12,
        "lora_rank": 2,
        "device": "fakegpu",
    },
    "algorithm": {
        "group_size": 3,
        "branch_steps": [0, 1],
        "granularities": [1, 2],
        "kl_weight": 0.01,
    },
    "rewards": {"brightness": 1.0, "jpeg_size": 0.1},
    "prompts": {"train": "none"},
    "sampling": {"num_steps": 4, "batch_size": 5, "decode_batch_size": 4},
    "optim": {"learning_rate": 1e-3, "ema_decay": 0.9},
    "trainer": {
        "iterations": 2,
        "prompts_per_iteration": 2,
        "checkpoint_every": 1,
        "micro_batch_size": 2,
    },
    "evaluation": {"prompts": "none", "num_prompts": 3, "every": 2},
    "trackers": [],
}


def config(folder: Path, model: Path, *overrides):
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    sources = [f"{key}={folder / 'prompts.txt'}" for key in ("prompts.train", "evaluation.prompts")]
    return resolve(
        DATA,
        [f"policy.path={model}", f"prompts.cache={folder / 'embeddings'}", *sources, *overrides],
    )


def build(world, folder, model, *overrides, **options):
    (folder / "run").mkdir(exist_ok=True)
    return built(
        Request(
            config=config(folder, model, *overrides), run_dir=folder / "run", world=world, **options
        )
    )


def at_peak(call, *arguments):
    """The result of a call, and the bytes at its peak beyond those that were there before."""
    standing = torch.fakegpu.memory_allocated()
    torch.fakegpu.reset_peak_memory_stats()
    answer = call(*arguments)
    return answer, torch.fakegpu.max_memory_allocated() - standing


def assert_placed(trainer):
    """The transformer and the VAE are on the device; the text encoders, whose prompts are all
    encoded, are not, nor are blocks that live in host memory."""
    offload = trainer.policy.options.offload
    for name, part in trainer.policy.pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            places = {tensor.device.type for tensor in (*part.parameters(), *part.buffers())}
            on_host = {"cpu"} if name.startswith("text_encoder") else set()
            both = {"cpu", "fakegpu"} if offload and name == "transformer" else on_host
            assert places == (both or {"fakegpu"}), (name, places)


def train(world, folder, model, *overrides):
    """A run from its base model's evaluation to its weights, and one more iteration of it,
    resumed."""
    trainer = build(world, folder, model, *overrides)
    assert_placed(trainer)
    rows = [row for row in trainer.train() if row["kind"] == "train"]
    trainer.finish()
    trainer.export()
    again = build(world, folder, model, *overrides, "trainer.iterations=3")
    assert again.resume() == [] and again.iteration == 2
    rows.append(again.iterate())
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows), rows
    other = 1 - torch.fakegpu.current_device()
    return {
        "ratio": max(row["ratio_deviation"] for row in rows),
        "drift": max(row["log_prob_drift"] for row in rows),
        "reward": rows[-1]["reward/brightness"],
        "elsewhere": torch.fakegpu.memory_allocated(other),
        "weights": weight_of(again),
    }


def weight_of(trainer):
    """The sum of sizes of what is trained."""
    return float(sum(p.detach().cpu().double().abs().sum() for p in trainer.learner.parameters))


def offload(world, folder, model, *overrides):
    """Of two iterations with blocks on the device, and in host memory: whether rows, weights and
    velocities differ; and by how much less memory is used, beside the bytes of each block."""
    found, peaks = [], []
    for more in ([], ["policy.offload=true"]):
        standing = torch.fakegpu.memory_allocated()
        trainer = build(world, folder, model, *overrides, *more)
        assert_placed(trainer)
        rows = [trainer.iterate()]
        torch.fakegpu.reset_peak_memory_stats()
        rows.append(trainer.iterate())
        peaks.append(torch.fakegpu.max_memory_allocated() - standing)
        told = [row[key] for row in rows for key in ("loss", "grad_norm", "reward/brightness")]
        answer = velocity(trainer.policy, 0.5)
        found.append((told, [answer, *trainer.learner.parameters]))
    (rows, tensors), (own_rows, own) = found
    equal = rows == own_rows and all(map(torch.equal, tensors, own))
    blocks = [offloaded_bytes(block) for block in trainer.policy.blocks]
    return equal, peaks[0] - peaks[1], blocks


def iterate(world, folder, model, *many):
    """One iteration with each of several lists of overrides."""
    for overrides in many:
        row = build(world, folder, model, *overrides).iterate()
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0, (overrides, row)
    return len(many)


def apple(world, folder, recipe, *overrides):
    """What differs from the same run on the CPU after two iterations, relative to the moves of the
    weights, on a device with the limits of Apple's; of the embedded model."""
    noise.NO_FLOAT64.add("fakegpu")
    torch.fakegpu.__class__ = device.Apple
    small = ["trainer.prompts_per_iteration=2", "algorithm.group_size=4", "sampling.num_steps=5"]
    small += [f"prompts.cache={folder}", "trackers=[]"]
    moves = []
    for place in ("cpu", "fakegpu"):
        settings = resolve(
            recipes.recipe_settings(recipe), [f"policy.device={place}", *small, *overrides]
        )
        (folder / place).mkdir()
        trainer = smooth(built(Request(config=settings, run_dir=folder / place, world=world)))
        begin = flat(trainer.learner.parameters).cpu()
        with device.OwnFloat64():
            rows = [trainer.iterate() for _ in range(2)]
        assert all(math.isfinite(row["loss"]) for row in rows), rows
        assert "memory_peak" not in rows[0]
        moves.append(flat(trainer.learner.parameters).cpu() - begin)
    return float((moves[1] - moves[0]).norm() / moves[0].norm())


FAULTS = ("a number", "a mask", "conditioning on the host", "small tensors", "kept", "float64")


def count_costs(world, folder, model):
    """Of three iterations without a fault and one with each of `FAULTS`: the calls of the network,
    the waits and copies to the device in them and in all, and the bytes that stay on the device; or
    what the device raises."""
    trainer, kept, found, fault = build(world, folder, model), [], {}, None
    inner, inside = trainer.policy.velocity, []

    def velocity(x, sigma, cond):
        before = torch.fakegpu.costs()
        if fault == "a number":
            x.sum().item()
        if fault == "a mask":
            x = x[x[:, 0, 0].isfinite()]
        if fault == "conditioning on the host":
            cond = cond.to("cpu").to("fakegpu")
        if fault == "float64":
            x = x.double().float()
        answer = inner(x, sigma, cond)
        inside.append(torch.fakegpu.costs() - before)
        return answer

    trainer.policy.velocity = velocity
    for fault in ("first", "second", "third", *FAULTS):
        inside.clear()
        before, standing = torch.fakegpu.costs(), torch.fakegpu.memory_allocated()
        try:
            trainer.iterate()
        except RuntimeError as error:
            found[fault] = {"error": str(error)}
            continue
        if fault == "small tensors":
            for _ in range(100):
                torch.ones(1).to("fakegpu").item()
        if fault == "kept":
            kept.append(torch.zeros(1, device="fakegpu"))
        found[fault] = {
            "calls": len(inside),
            "inside": sum(inside).tolist(),
            "in all": (torch.fakegpu.costs() - before).tolist(),
            "kept": torch.fakegpu.memory_allocated() - standing,
        }
    return found


def run_out(world, folder, model):
    """An iteration for which a third of the memory that it would take is there; returns its row's
    sizes and its prompts'."""
    sizes = ("sampling.batch_size", "sampling.decode_batch_size", "trainer.micro_batch_size")
    trainer = build(world, folder, model, *(f"{size}=64" for size in sizes))
    trainer.iterate()
    standing = torch.fakegpu.memory_allocated()
    _, peak = at_peak(trainer.iterate)
    torch.fakegpu.limit(standing + peak // 3)
    row = trainer.iterate()
    return {
        name: row[name] for name in (*(each.partition(".")[2] for each in sizes), "out_of_memory")
    }


def encode(world, folder, model, *overrides):
    """Bytes on the device at the peak of building a trainer, and after it; those of its transformer
    and VAE, and of its text encoders; and how many prompts were encoded."""
    torch.fakegpu.reset_peak_memory_stats()
    trainer = build(world, folder, model, *overrides)
    pipeline = trainer.policy.pipeline
    return {
        "peak": torch.fakegpu.max_memory_allocated(),
        "painting": size_of(pipeline.transformer) + size_of(pipeline.vae),
        "encoding": size_of(pipeline.text_encoder) + size_of(pipeline.text_encoder_2),
        "now": torch.fakegpu.memory_allocated(),
        "encoded": trainer.policy.stored.encoded,
    }


def peaks(world, folder, model, *overrides):
    """Bytes at the peak of a trainer's second evaluation and iteration; and, beyond what stays, of
    a training pass of 4 rows, of a network call of 8, and of decoding 4."""
    settings = config(folder, model, *overrides)
    trainer = build(world, folder, model, *overrides)
    found, policy = {}, trainer.policy

    def peak(name, call, *arguments):
        _, found[name] = at_peak(call, *arguments)

    trainer.evaluate()
    trainer.iterate()  # now moments are there
    torch.fakegpu.reset_peak_memory_stats()
    trainer.evaluate()
    trainer.iterate()
    found["in all"] = torch.fakegpu.max_memory_allocated()
    shapes = shapes_of(policy, read_blueprint(settings.policy))
    # transformers has another torch.linspace while it loads a model, and torch remembers that one
    torch.utils._device._device_constructors.cache_clear()
    with torch.device("fakegpu"):
        for _ in range(2):  # the second time gradients are there
            peak("training", trace.training_pass, policy, settings, shapes, set(trainer.plans()), 4)
        with torch.no_grad():
            peak("velocity", lambda: policy.velocity(*trace.inputs(policy, shapes, 8)))
            peak("decode", lambda: policy.decode(torch.zeros(4, *shapes.latent)))
    return found


def use(world, folder, model):
    """What a finished run is used for: pictures, evaluations, the demo. Returns a held-out
    picture's mean from each, and how many models' memory `api.evaluate` takes."""
    run, prompt = folder / "run", PROMPTS[0]
    trainer = build(world, folder, model)
    Run(run).claim(trainer.config)
    finished(trainer).export()
    own = trainer.sample([prompt])

    places, inner = [], load.Loaded.policy
    load.Loaded.policy = lambda loaded, *given, **more: (
        places.append(str(loaded.text.modules[0].device)) or inner(loaded, *given, **more)
    )
    sample([prompt], sample_config(run_settings(run), seed=0, batch_size=2), folder / "sampled")
    load.Loaded.policy = inner
    evaluate(run_settings(run), [], folder / "evaluated")
    table, peak = at_peak(api.evaluate, run, trainer.rewards, [prompt])
    pipeline = trainer.policy.pipeline

    session = open_model(Run(run).read_config(mention=False), Run(run).weights, print)
    control = Control(steps=trainer.config.sampling.num_steps, guidance=3.5)
    drawing = draw(session, prompt, seed=0, control=control)
    group = trace_group(session, prompt, seed=0, plan=0, tuned=True)
    assert group.finals.shape[:2] == (2, 3)
    return {
        "trainer": float(own.mean()),
        "api": table["brightness"].tuned,
        "models": peak / (size_of(pipeline.transformer) + size_of(pipeline.vae)),
        "encoders": [*places, str(session.policy.text.modules[0].device)],
        "demo": drawing.tuned.scores["brightness"],
        "sample": float(api.sample(run, [prompt]).mean()),
    }


def measure(world, folder, *arguments):
    """What `benchmarks.first_gpu` leaves on this device: its JSON and the exit code. Its forks have
    the device, too."""
    code = 0
    try:
        fixed = f"--minutes 60 --tiny --device fakegpu --out {folder}"
        first_gpu.main(["first", *arguments, *fixed.split()])
    except SystemExit as ended:
        code = ended.code
    (result,) = folder.glob("gpu_*.json")
    return json.loads(result.read_text()), code
