"""Benchmarks measure what they say: the published loop, agreement of rewards, rates, and what is left of cases that fail."""

import json
import subprocess
import sys
import time

import pytest
import torch
from PIL import Image

from benchmarks import first_gpu
from benchmarks.fast_tails import agreement
from benchmarks.machine import matmul_rate
from benchmarks.published_loop import PublishedLoop
from benchmarks.rollout import published_evaluations
from benchmarks.second_reader import available, read_words
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.rollout.engine import Engine
from g2rpo.testbed.words.drawing import draw
from g2rpo.testbed.words.language import parse, prompts
from tests.rollout.test_engine import SIGMAS, Network, noise
from tests.support.runs import brightness


@pytest.mark.parametrize(("granularities", "published"), [((1,), 1216), ((1, 2), 1792), ((1, 2, 3), 2188)])
def test_the_published_loop_needs_what_is_published_and_the_engine_gives_its_latents(granularities, published):
    """Elementwise float32 arithmetic in another batch: the last bits of |x| ~ 3 over 16 steps."""
    algorithm, policy = GranularGRPO(granularities=granularities), Network(size=1)
    loop = PublishedLoop(policy, SIGMAS, algorithm, {"bright": brightness})
    (finals,) = loop.rollout(["0.1"], noise)
    assert loop.evaluations == published == published_evaluations(algorithm)
    engine = Engine(policy=policy, cond=policy.encode(["0.1"]), sigmas=SIGMAS)
    rollouts = engine.rollout(algorithm.plans(16), algorithm.group_size, algorithm.kernel(SIGMAS), noise)
    torch.testing.assert_close(torch.stack([rollout.finals for rollout in rollouts]), finals, atol=1e-5, rtol=0)


def test_agreement_of_rewards():
    """By hand: one group keeps its ranks, one turns them round, one is silent; errors are 0, (2 + 0 + 2) / 3 and 1."""
    exact = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    fast = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 2.0, 2.0]])
    found = agreement(exact, fast)
    assert found["absolute_error"] == pytest.approx((0 + 4 / 3 + 1) / 3)
    assert (found["spearman"], found["groups"]) == (pytest.approx(0), 2)
    assert found["spearman_std"] == pytest.approx(2**0.5)  # of +1 and -1
    assert found["spread_in_groups"] == pytest.approx(2 / 3)


def test_the_rate_of_a_matrix_product_is_counted_right():
    """A clock that says one second for every product: 2 * 1024^3 operations a second."""
    ticks = iter(range(10**6))
    assert matmul_rate(torch.float32, torch.device("cpu"), lambda: next(ticks), seconds=0.05) == 2 * 1024**3


@pytest.mark.skipif(not available(), reason="tesseract is not installed")
def test_the_second_reader_reads_clean_words_in_their_order(tmp_path):
    words = [parse(prompt) for prompt in prompts("heldout")[:6]]
    files = [tmp_path / f"{i}.png" for i in range(6)]
    for word, file in zip(words, files, strict=True):
        Image.fromarray(draw(word)).save(file)
    assert read_words(files) == [word.letters for word in words]


CASES = """
import json, os, subprocess, sys, time
given = json.load(open(sys.argv[1]))
if isinstance(given, list):  # the process that plans
    planned = {case["name"]: {"velocity, s": 2.0} for case in given}
    json.dump({"notes": planned, "errors": {"fine": "no plan of it"} if "fine" in planned else {}}, open(sys.argv[2], "w"))
    sys.exit()
what = given.get("recipe", "machine")
found = {"measured": {"velocity, s": 2.6}, "checks": {}, "notes": {"device": "a card"}, "errors": {}}
if what == "refuses":
    found["notes"]["refused"] = "no float8"
if what == "errs":
    found["errors"]["decode"] = "OutOfMemoryError: 80 GB"
if what == "differs":
    found["checks"]["ratio"] = ["NaN", 0.1]
json.dump(found, open(sys.argv[2], "w"))
if what in ("hangs", "sleeps"):
    subprocess.run([sys.executable, "-c", "import time; open('child', 'w'); time.sleep(3); open('alive', 'w')"])
if what == "crashes":
    print("the last words", flush=True)
    os.abort()
"""


@pytest.fixture
def first_hour(monkeypatch, tmp_path):
    """A function that runs a part of these cases below a folder and returns its JSON, the summary and the exit code."""

    def start(given, log, **environment):
        with log.open("w") as file:
            command = [sys.executable, "-c", CASES, *given]
            return subprocess.Popen(command, stdout=file, stderr=file, process_group=0, cwd=tmp_path)

    def run(*names, **options):
        cases = [first_gpu.of(name, limit=1 if name == "hangs" else 30) for name in names]
        monkeypatch.setitem(first_gpu.PARTS, "shapes", cases)
        code = 0
        try:
            first_gpu.main(["shapes", "--out", str(tmp_path), *(f"--{key}={value}" for key, value in options.items())])
        except SystemExit as ended:
            code = ended.code
        return json.loads((tmp_path / "shapes.json").read_text()), (tmp_path / "summary.md").read_text(), code

    monkeypatch.setattr(first_gpu, "start", start)
    return run


def test_a_case_of_the_first_hour_that_fails_is_reported_and_the_next_follows(first_hour, tmp_path):
    result, summary, code = first_hour("crashes", "hangs", "errs", "differs", "refuses", "fine")
    states = {name: case["state"] for name, case in result["cases"].items()}
    assert code == 1 and states == {
        "crashes": "failed: ended with -6", "hangs": "failed: not done after 1 s", "errs": "failed",
        "differs": "done", "refuses": "refused", "fine": "done",
    }  # fmt: skip
    assert "the last words" in result["cases"]["crashes"]["log"] and result["cases"]["hangs"]["measured"]
    assert "| differs | ratio | nan | at most 0.1 | |" in summary
    for line in ("errs: decode: OutOfMemoryError: 80 GB", "differs: ratio: nan, at most 0.1", "fine: plan: no plan of it"):
        assert f"- shapes, {line}\n" in summary
    assert "- shapes, fine: velocity, s: 1.30 times the plan's" in summary
    assert (tmp_path / "child").exists()
    time.sleep(3)
    assert not (tmp_path / "alive").exists()  # what a case has started ends with it


def test_the_first_hour_goes_on_where_its_time_was_over(first_hour, monkeypatch):
    result, summary, code = first_hour("refuses", "last", minutes=0)
    assert code == 0 and {case["state"] for case in result["cases"].values()} == {"not reached"}
    assert "- shapes, last: not reached\n" in summary
    once = first_hour("refuses")[0]["cases"]["refuses"]
    result, _, code = first_hour("refuses", "last")
    assert code == 0 and result["cases"]["last"]["state"] == "done" and result["cases"]["refuses"] == once
    monkeypatch.setattr(first_gpu, "LEAST", 0)
    result, _, code = first_hour("sleeps", minutes=0.02)
    assert code == 0 and result["cases"]["sleeps"]["state"] == "not finished"
    assert "take another folder" in first_hour("last", device="cpu")[2]
