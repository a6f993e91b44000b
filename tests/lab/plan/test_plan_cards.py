"""`g2rpo plan --cards`: every card that can compute the run, and how it fits."""

import io
import json

import pytest
from rich.console import Console

from g2rpo.cli.plan import show_cards
from g2rpo.lab.plan import cards, fit
from tests.support.commands import g2rpo


def test_cards_without_float8_are_left_out_and_too_small_ones_say_so(
    capsys, tiny_config, monkeypatch
):
    """1 GiB is what CUDA itself is taken to need."""
    small = cards.Card("a small card", 1.0, 10, 20, 5, 100, 100, 10, True, "none")
    monkeypatch.setitem(cards.CARDS, "small", small)
    code, out, _ = g2rpo(
        capsys,
        "plan",
        tiny_config,
        "policy.dtype=bfloat16",
        "policy.quantize=fp8",
        "--cards",
        "--json",
    )
    rows = json.loads(out)
    assert (
        code == 0
        and "a100" not in rows
        and rows["h100"]["fits"]
        and rows["h100"]["overrides"] == []
    )
    assert not rows["small"]["fits"] and rows["small"]["overrides"] is None


def test_a_table_of_80_columns_breaks_no_override():
    longest = [
        "evaluation.rewards.image_reward.options.device=cpu",
        "rewards.hpsv2.options.device=cpu",
    ]
    console = Console(file=io.StringIO(), width=80)
    show_cards("flux1-dev-lora", {"rtx6000ada": fit.OnCard(longest, 2**34, 2**35, 1e5)}, console)
    lines = console.file.getvalue().splitlines()
    assert f"changes 1: {' '.join(longest)}" in lines and any(
        "rtx6000ada" in line for line in lines
    )
    assert all(len(line) <= 80 for line in lines[:-1])


@pytest.mark.slow  # a plan that tries all that would make the run fit
def test_ram_is_not_taken_for_a_cards_memory(capsys, tiny_config, monkeypatch):
    monkeypatch.setattr("g2rpo.lab.plan.plan.os.sysconf", lambda name: 1)
    out = " ".join(
        g2rpo(
            capsys,
            "plan",
            tiny_config,
            "policy.device=cpu",
            "policy.dtype=bfloat16",
            "policy.quantize=int8",
        )[1].split()
    )
    assert "does not fit" in out and "this machine's RAM" in out and "--device" in out
