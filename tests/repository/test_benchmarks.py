"""Benchmarks: the published loop, and what is left of cases on a GPU that fail."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks import first_gpu, published_times
from benchmarks.published_loop import PublishedLoop
from benchmarks.rollout import published_evaluations
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.rollout.engine import Engine
from tests.rollout.test_engine import SIGMAS, Network, noise
from tests.support.runs import brightness
from tests.support.tolerances import rounding


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


def stand_in(given):
    """In the place of `benchmarks.gpu_cases.main`: cases that end as their recipes say."""
    asked, left = json.loads(Path(given[0]).read_text()), Path(given[1])
    if isinstance(asked, list):  # the process that plans
        # replaced whole, as `Found.write` does: the parent reads it at any moment
        left.with_suffix(".new").write_text(
            json.dumps({"notes": {}, "errors": {"model fine": "no plan of it"}})
        )
        os.replace(left.with_suffix(".new"), left)
        return
    what, found = asked.get("recipe"), {"measured": {"velocity, s": 2.6}, "checks": {}}
    found |= {"notes": {"device": "A Card"}, "errors": {}}
    match what:
        case "refuses":
            found["notes"]["refused"] = "no float8"
        case "errs":
            found["errors"]["decode"] = "OutOfMemoryError: 80 GB"
        case "differs":
            found["checks"]["ratio"] = ["NaN", 0.1]
        case "hangs":
            time.sleep(1000)
        case "crashes":
            print("the last words", flush=True)
            os._exit(3)
    left.write_text(json.dumps(found))


@pytest.fixture
def first_minutes(monkeypatch, tmp_path):
    """A function that runs cases and returns the result file's content and the exit code."""
    monkeypatch.setattr(first_gpu.gpu_cases, "main", stand_in)
    # another test may have asked CUDA, and a new process would not have the stand-in
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.chdir(tmp_path)

    def run(minutes=100.0, **seconds):
        cases = [first_gpu.case(name, seconds=each) for name, each in seconds.items()]
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


def test_cases_on_a_gpu_have_names_of_their_own_and_the_first_ten_fit():
    names = [case["name"] for case in first_gpu.CASES]
    assert len(set(names)) == len(names)
    # the rest of 25 minutes: imports, and one that is late
    assert sum(case["seconds"] for case in first_gpu.CASES[:10]) < 60 * 23


def test_a_case_on_a_gpu_that_fails_is_reported_and_the_next_follows(first_minutes, capsys):
    result, code = first_minutes(
        crashes=100, hangs=0.1, errs=100, differs=100, refuses=100, fine=100
    )
    states = {name.removeprefix("model "): case["state"] for name, case in result["cases"].items()}
    assert code == 1 and states == {
        "crashes": "failed: ended with 3", "hangs": "failed: not done after 0 s", "errs": "failed",
        "differs": "done", "refuses": "refused", "fine": "done",
    }  # fmt: skip
    assert "the last words" in result["cases"]["model crashes"]["log"]
    assert result["card"] == "A Card" and result["commit"] and result["date"]
    said = capsys.readouterr().out
    for line in (
        "errs: decode: OutOfMemoryError: 80 GB",
        "differs: ratio: nan, at most 0.1",
        "fine: plan: no plan of it",
    ):
        assert f"\nmodel {line}\n" in said


def test_cases_that_do_not_fit_are_skipped_and_made_by_the_next_command(first_minutes):
    result, code = first_minutes(refuses=90, last=90, minutes=1)
    assert code == 0 and {case["state"] for case in result["cases"].values()} == {"skipped"}
    once = first_minutes(refuses=90)[0]["cases"]["model refuses"]
    result, code = first_minutes(refuses=90, last=90)
    assert code == 0 and result["cases"]["model last"]["state"] == "done"
    assert result["cases"]["model refuses"] == once


def test_figures_that_were_collected_are_split_by_the_rule():
    """A figure that changes halves after a fit would be a test of nothing."""
    rows = [row for row in published_times.published() if row.collected]
    assert published_times.halved(rows) == [row.held_out for row in rows]
