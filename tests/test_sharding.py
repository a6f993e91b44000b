"""Weights in pieces: what is learnt is what whole weights learn, no rank waits for a call that never comes, any number resumes."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from g2rpo.policies.flux import FluxPolicy
from g2rpo.policies.sd3 import SD3Policy
from g2rpo.sharding import Sharded
from tests import ranks
from tests.runs import trainer

PROMPTS = ["a red circle", "two blue squares", "a blue circle", "a green star"]
SMALL = (
    "algorithm.group_size=3",
    "algorithm.branch_steps=[0,1]",
    "sampling.num_steps=4",
    "sampling.batch_size=1",
    "sampling.decode_batch_size=1",
    "trainer.micro_batch_size=1",
    "trainer.prompts_per_iteration=4",
    "trainer.iterations=3",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=5",
    "optim.eps=1",
    "optim.learning_rate=0.5",
    "policy.tuning=full",
)


def small(world, folder, model, mode, *overrides, kind=FluxPolicy, rewards=None, **options):
    """A trainer of a tiny model, all weights; `mode` as trainer.sharding."""
    sharding = Sharded(world, "cpu", whole_samples=mode == "training") if mode != "none" else None
    options = {"height": 32, "width": 32, "max_sequence_length": 12, "tuning": "full", "keep_base": False} | options
    policy = kind.from_pretrained(model, sharding=sharding, **options)
    return trainer(folder, *SMALL, *overrides, policy=policy, prompts=PROMPTS, rewards=rewards, world=world, sharding=sharding)


def learn(world, folder, model, mode, overrides=(), kind=FluxPolicy, options=None):
    """Three iterations and their log; leaves weights and averages as `export` writes them."""
    t = small(world, folder, model, mode, *overrides, kind=kind, **(options or {}))
    rows = [t.evaluate(), *(t.iterate() for _ in range(3)), t.evaluate()]
    t.export()
    return rows


def exported(folder):
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def same_within_rounding(weights, others, iterations=3):
    """Calls have one row each, so only the order of sums differs, of 8 branch points: by at most 8 x 2^-24 of gradients that are
    clipped at 1. With eps = 1 Adam's step is lr m / (sqrt(v) + 1): it changes by at most lr = 0.5 times as much, 2.4e-7, and
    adding it to a weight of up to 2 rounds by up to 1.2e-7 on either side."""
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], atol=iterations * 5e-7, rtol=0)


def agree(row, other):
    names = {name for name in row if not name.startswith("seconds") and name not in ("kind", "ranks", "out_of_memory")}
    assert {name: row[name] for name in names} == pytest.approx(
        {name: other[name] for name in names}, rel=1e-3, abs=1e-5, nan_ok=True
    )


VARIANTS = {
    "flux": ("flux_directory", (), FluxPolicy, {}),
    "sd3": (
        "sd3_directory",
        ("algorithm.update_every=branch", "optim.ema_decay=0.5", "algorithm.kl_weight=0.5"),
        SD3Policy,
        {"gradient_checkpointing": True, "keep_base": True},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_learn_what_whole_weights_learn(tmp_path, request, variant):
    """1 x 4 prompts with whole weights = 2 x 2 = 4 x 1 with pieces. One rank of two has two of the three held-out prompts."""
    model, *rest = VARIANTS[variant]
    logs = {}
    for size, mode in ((1, "none"), (2, "full"), (2, "training"), (4, "full")):
        folder = tmp_path / f"{size}{mode}"
        logs[folder.name], *_ = ranks.run(size, learn, folder, str(request.getfixturevalue(model)), mode, *rest)
    alone = exported(tmp_path / "1none")
    config = (tmp_path / "1none" / "transformer" / "config.json").read_text()
    for name in ("2full", "2training", "4full"):
        same_within_rounding(exported(tmp_path / name), alone)
        assert (tmp_path / name / "transformer" / "config.json").read_text() == config
        for ours, theirs in zip(logs[name], logs["1none"], strict=True):
            agree(ours, theirs)
    before = load_file(request.getfixturevalue(model) / "transformer" / "diffusion_pytorch_model.safetensors")
    assert max(float((alone[name] - before[name]).abs().max()) for name in before) > 1e-3
