"""Benchmarks measure what they say: the published loop, agreement of rewards, rates, and what is
left of cases that fail."""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import first_gpu
from benchmarks.fast_tails import agreement
from benchmarks.machine import matmul_rate
from benchmarks.published_loop import PublishedLoop
from benchmarks.quickstart import letters_right
from benchmarks.rollout import published_evaluations
from benchmarks.second_reader import available, read_words
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.data.testbed.words import Word, draw_word, parse_word, word_prompts
from g2rpo.rollout.engine import Engine
from tests.rollout.test_engine import SIGMAS, Network, noise
from tests.support.runs import brightness
from tests.support.tolerances import rounding
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("granularities", "published"), [((1,), 1216), ((1, 2), 1792), ((1, 2, 3), 2188)]
)
def test_the_published_loop_needs_what_is_published_and_the_engine_gives_its_latents(
    granularities, published
):
    """But for the rounding of some eight operations in each of 16 steps."""
    algorithm, policy = GranularGRPO(granularities=granularities), Network(size=1)
    loop = PublishedLoop(policy, SIGMAS, algorithm, {"bright": brightness})
    (finals,) = loop.rollout(["0.1"], noise)
    assert loop.evaluations == published == published_evaluations(algorithm)
    engine = Engine(policy=policy, cond=policy.encode(["0.1"]), sigmas=SIGMAS)
    rollouts = engine.rollout(algorithm.plans(16), 12, algorithm.kernel(SIGMAS), noise)
    ours = torch.stack([rollout.finals for rollout in rollouts])
    torch.testing.assert_close(ours, finals, **rounding(16 * 8, size=finals.abs().max()))


def test_agreement_of_rewards():
    """By hand: one group keeps its ranks, one turns them round, one is silent; errors are 0, (2 + 0
    + 2) / 3 and 1."""
    exact = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    fast = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 2.0, 2.0]])
    found = agreement(exact, fast)
    assert found["absolute_error"] == pytest.approx((0 + 4 / 3 + 1) / 3)
    assert (found["spearman"], found["groups"]) == (pytest.approx(0), 2)
    assert found["spearman_std"] == pytest.approx(2**0.5)  # of +1 and -1
    assert found["spread_in_groups"] == pytest.approx(2 / 3)


def test_letters_of_words_are_counted_by_kind_and_side(tmp_path):
    """Asked 'banjo': the base drew rrnjo, in which the a is wrong and so is the b; tuned is right."""
    judged = [{"side": "control", "prompt": "a red circle", "picture": "none"}]
    for side, shown in (("base", "rrnjo"), ("tuned", "banjo")):
        Image.fromarray(draw_word(Word(shown, "red"))).save(tmp_path / f"{side}.png")
        judged.append({"side": side, "prompt": "'banjo' in red", "picture": f"{side}.png"})
    assert letters_right(judged, tmp_path) == {
        "a e": {"base": 0, "tuned": 1},
        "others": {"base": 3 / 4, "tuned": 1},
    }


def test_the_rate_of_a_matrix_product_is_counted_right():
    """A clock that says one second for every product: 2 * 1024^3 operations a second."""
    ticks = iter(range(10**6))
    rate = matmul_rate(torch.float32, torch.device("cpu"), lambda: next(ticks), seconds=0.05)
    assert rate == 2 * 1024**3


@pytest.mark.skipif(not available(), reason="tesseract is not installed")
def test_the_second_reader_reads_clean_words_in_their_order(tmp_path):
    words = [parse_word(prompt) for prompt in word_prompts("heldout")[:6]]
    files = [tmp_path / f"{i}.png" for i in range(6)]
    for word, file in zip(words, files, strict=True):
        Image.fromarray(draw_word(word)).save(file)
    assert read_words(files) == [word.letters for word in words]


CHILD = """
import fcntl, os, time
with open("child", "w") as file:
    file.write(str(os.getpgrp()))
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    time.sleep(1000)
"""


def group_of(child):
    """The process group of CHILD while it lives, by its lock, which ends with it; else None."""
    if not child.exists():
        return None
    with child.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read())
    return None


def stand_in(given):
    """In the place of `benchmarks.gpu_cases.main`: cases that end as their recipes say."""
    asked, left = json.loads(Path(given[0]).read_text()), Path(given[1])
    if isinstance(asked, list):  # the process that plans
        planned = {case["name"]: {"velocity, s": 2.0} for case in asked}
        errors = {"model fine": "no plan of it"} if "model fine" in planned else {}
        left.write_text(json.dumps({"notes": planned, "errors": errors}))
        return
    what, notes, errors, checks = asked.get("recipe"), {"device": "A Card"}, {}, {}
    if what == "refuses":
        notes["refused"] = "no float8"
    if what == "errs":
        errors["decode"] = "OutOfMemoryError: 80 GB"
    if what == "differs":
        checks["ratio"] = ["NaN", 0.1]
    found = {"measured": {"velocity, s": 2.6}, "checks": checks, "notes": notes, "errors": errors}
    left.write_text(json.dumps(found))
    if what == "hangs":
        subprocess.run([sys.executable, "-c", CHILD])
    if what == "crashes":
        print("the last words", flush=True)
        os._exit(3)


@pytest.fixture
def first_minutes(monkeypatch, tmp_path):
    """A function that runs these cases and returns the result file's content and the exit code."""
    monkeypatch.setattr(first_gpu.gpu_cases, "main", stand_in)
    monkeypatch.chdir(tmp_path)

    def run(*names, minutes=100.0, seconds=100):
        cases = [first_gpu.case(name, seconds=seconds) for name in names]
        monkeypatch.setattr(first_gpu, "CASES", cases)
        monkeypatch.setattr(first_gpu, "BEGAN", time.monotonic())
        code = 0
        try:
            first_gpu.main(["first", "--out", str(tmp_path), f"--minutes={minutes}"])
        except SystemExit as ended:
            code = ended.code
        (file,) = tmp_path.glob("gpu_a-card_*.json")
        return json.loads(file.read_text()), code

    return run


def test_cases_on_a_gpu_have_names_of_their_own_and_the_first_five_fit():
    names = [case["name"] for case in first_gpu.CASES]
    assert len(set(names)) == len(names)
    # the rest of 8 minutes: imports, and one that is late
    assert sum(case["seconds"] for case in first_gpu.CASES[:5]) < 60 * 6


def test_a_case_on_a_gpu_that_fails_is_reported_and_the_next_follows(
    first_minutes, monkeypatch, tmp_path, capsys
):
    child, wait = tmp_path / "child", first_gpu.Forked.wait

    def patient(process, seconds=math.inf):
        """Of the case that hangs for as long as it takes to begin."""
        if seconds < math.inf:
            until(lambda: process.poll() is not None or group_of(child) == process.pid)
            seconds = 0.0
        return wait(process, seconds)

    monkeypatch.setattr(first_gpu.Forked, "wait", patient)
    result, code = first_minutes("crashes", "hangs", "errs", "differs", "refuses", "fine")
    states = {name.removeprefix("model "): case["state"] for name, case in result["cases"].items()}
    assert code == 1 and states == {
        "crashes": "failed: ended with 3", "hangs": "failed: not done after 300 s", "errs": "failed",
        "differs": "done", "refuses": "refused", "fine": "done",
    }  # fmt: skip
    assert "the last words" in result["cases"]["model crashes"]["log"]
    assert result["cases"]["model hangs"]["measured"]
    assert result["card"] == "A Card" and result["commit"] and result["date"]
    said = capsys.readouterr().out
    for line in (
        "errs: decode: OutOfMemoryError: 80 GB",
        "differs: ratio: nan, at most 0.1",
        "fine: plan: no plan of it",
    ):
        assert f"\nmodel {line}\n" in said
    assert "velocity, s: 2.6, planned 2, ratio 1.30 <- beside the plan" in said
    lines = (tmp_path / "measured.jsonl").read_text().splitlines()
    assert len(lines) == 6 and json.loads(lines[-1]).items() >= {
        "card": "A Card", "case": "model fine", "measured": {"velocity, s": 2.6},
    }.items()  # fmt: skip
    until(lambda: group_of(child) is None)  # what a case has started ends with it


def test_cases_that_do_not_fit_are_skipped_and_made_by_the_next_command(first_minutes, capsys):
    result, code = first_minutes("refuses", "last", seconds=90, minutes=1)
    assert code == 0 and {case["state"] for case in result["cases"].values()} == {"skipped"}
    assert "model last: skipped, is expected to take 90 s of " in capsys.readouterr().out
    once = first_minutes("refuses")[0]["cases"]["model refuses"]
    result, code = first_minutes("refuses", "last")
    assert code == 0 and result["cases"]["model last"]["state"] == "done"
    assert result["cases"]["model refuses"] == once


def test_what_was_measured_is_kept_when_the_command_is_killed(first_minutes, tmp_path):
    """By SIGKILL in the second case; the file is whole and has the first."""
    command, child = os.fork(), tmp_path / "child"
    if command == 0:
        first_minutes("fine", "hangs")
        os._exit(0)
    until(lambda: group_of(child))
    os.kill(command, signal.SIGKILL)
    os.waitpid(command, 0)
    os.killpg(group_of(child), signal.SIGKILL)
    (file,) = tmp_path.glob("gpu_a-card_*.json")
    assert json.loads(file.read_text())["cases"]["model fine"]["state"] == "done"
    until(lambda: group_of(child) is None)
