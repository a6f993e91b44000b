"""Studies: what a budget buys, how a rate is chosen, and the command from end to end."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from g2rpo.assembly.config import load_config
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.core.errors import UserError
from g2rpo.core.plain import as_json
from g2rpo.evaluation.work import iterations_within, work
from g2rpo.lab.compare.jobs import environment_of
from g2rpo.lab.compare.outcomes import History, gain_of, lines, read_run, seconds_per_evaluation
from g2rpo.lab.compare.results import FREE
from g2rpo.lab.compare.study import check_overrides, own_budgets, parse_budget, parse_cells, parse_rates
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rollout.planning import count_trained
from g2rpo.run.rates import RateGain, good_rates, smallest_good_rate
from g2rpo.run.run import Run
from tests.support.commands import done, g2rpo, refused
from tests.support.runs import fits, trainer


@pytest.mark.parametrize("name", ALGORITHMS)
def test_work_is_what_a_run_does(tmp_path, name):
    """The rollout's evaluations as logged, and the latents of the training pass as they are sampled, over three iterations."""

    class Counting(GaussianPolicy):
        trained = without_gradient = 0

        def velocity(self, x, sigma, cond):
            self.trained += len(x) * torch.is_grad_enabled()
            self.without_gradient += len(x) * (not torch.is_grad_enabled())
            return super().velocity(x, sigma, cond)

    policy = Counting()
    once = ["algorithm.update_every=rollout"] if name != "refl" else []  # a part of a group sees a shared latent again
    words = [f"algorithm.name={name}", "algorithm.group_size=4", "sampling.num_steps=9", *fits(name), *once]
    t = trainer(tmp_path, *words, policy=policy)
    for iteration in range(3):
        policy.trained = policy.without_gradient = 0
        evaluations = t.iterate()["evaluations"]
        seen = policy.trained, policy.without_gradient - evaluations
        assert seen == tuple(2 * rows for rows in count_trained(t.algorithm, t.plans(iteration), 9))
        assert work(t.config, iteration) == work(t.config, iteration, evaluations) == evaluations + 3 * seen[0] + seen[1]


@pytest.mark.parametrize("name", ["g2rpo", "dancegrpo", "mixgrpo"])
def test_a_budget_buys_as_many_iterations_as_fit(name):
    config = load_config("scenes", [f"algorithm.name={name}"])
    costs = np.cumsum([work(config, iteration) for iteration in range(60)])
    for count in (1, 2, 30):
        assert iterations_within(config, costs[count - 1]) == count
        assert iterations_within(config, costs[count] - 1) == count
    with pytest.raises(UserError, match=f"below one iteration, which takes {costs[0]:,}"):
        iterations_within(config, costs[0] - 1)


def run(*scores):
    """A run with these evaluations of one reward."""
    rows = [{"a": np.array(values, float)} for values in scores]
    places = range(len(rows))
    return History([10 * place for place in places], [100 * place for place in places], [2.0 * place for place in places], rows)


def test_a_gain_is_in_units_of_the_base():
    def gained(run, weight=1.0):
        return gain_of(1e-4, [run], {"a": weight}).gain

    assert gained(run([0, 2], [5, 5], [1, 3]), 2.0) == 2.0  # +1 in a spread of 1, twice
    assert gained(run([1, 1], [2, 4])) == 2.0  # nothing varies: as it is
    assert gained(run([0, 2, math.nan], [1, 3, 9])) == 1.0


def tried(rate, gain, error=0.1, *alarms):
    return RateGain(rate, gain, gain - error, gain + error, dict.fromkeys(alarms, "..."))


@pytest.mark.parametrize(
    ("gains", "good"),
    [
        ([tried(1, 0.2), tried(2, 0.5), tried(4, 0.2)], [2]),
        ([tried(1, 0.41), tried(2, 0.45), tried(4, 0.5)], [1, 2, 4]),
        ([tried(1, 0.39), tried(2, 0.45), tried(4, 0.5)], [2, 4]),
        ([tried(1, 0.39), tried(2, 0.45), tried(4, 0.9, 0.1, "hacking")], [1, 2]),  # an alarm is not the best
        ([tried(1, 0.39), tried(2, 0.45), tried(4, 0.9, 0.1, "decline"), tried(8, 0.9, 0.1, "stopped")], [1, 2]),
        ([tried(1, 0.39), tried(2, 0.45, 0.1, "silent")], [1, 2]),  # says nothing of the model
        ([tried(1, 0.2), tried(2, 0.9, 1.0)], [1, 2]),  # the best is one that learns
        ([tried(1, -0.5), tried(2, -0.2), tried(4, -0.15)], [2, 4]),  # none learns
        ([tried(1, math.nan, 0.1), tried(2, 0.3, math.nan), tried(4, 0.2, math.nan)], [2]),  # no score; no error
        ([tried(1, 0.5, 0.1, "pictures")], []),
        ([], []),
    ],
)
def test_good_rates_are_those_within_an_error_of_the_best_without_an_alarm(gains, good):
    assert good_rates(gains) == good == good_rates(gains[::-1])


def test_a_study_takes_the_smallest_good_rate():
    def pilots(rate, *means):
        """Seeds of 20 prompts whose gains are spread by .1 around a mean."""
        spread = np.linspace(-0.1, 0.1, 20)
        return gain_of(
            rate, [run([*np.tile([0, 2], 10)], [*(np.tile([0, 2], 10) + mean + spread)]) for mean in means], {"a": 1}
        )

    tried = [pilots(1e-4, 0.1, 0.1, 0.1), pilots(2e-4, 0.3, 0.5, 0.4), pilots(4e-4, 0.1, 0.9, 0.3)]
    assert [one.gain for one in tried] == pytest.approx([0.1, 0.4, 1.3 / 3])
    assert smallest_good_rate(tried) == 2e-4  # 4e-4 gains most with one of three seeds: its error holds 2e-4 and not 1e-4
    assert smallest_good_rate([replace(one, alarms={"hacking": "..."}) for one in tried]) == 2e-4  # all have one: marked
    assert smallest_good_rate([pilots(1e-4, math.nan), tried[1]]) == 2e-4
    with pytest.raises(UserError, match="no pilot has scores"):
        smallest_good_rate([pilots(1e-4, math.nan)])


def test_what_a_study_chooses_is_not_set_beside_it():
    for cells in ({"a": ["optim.learning_rate=1e-3"]}, {"a b": []}):
        with pytest.raises(UserError, match=r"belongs to the study|its name may have"):
            check_overrides([], cells, None)
    with pytest.raises(UserError, match="--rates has the learning rates"):
        check_overrides(["optim.learning_rate=1e-3"], {"a": []}, [1e-4])
    check_overrides(["optim.learning_rate=1e-3"], {"a": []}, None)


def test_a_budget_of_more_iterations_than_anyone_runs_is_refused_at_once(monkeypatch):
    monkeypatch.setattr("g2rpo.evaluation.work.MOST_ITERATIONS", 1000)
    with pytest.raises(UserError, match="more than 1,000 iterations"):
        iterations_within(load_config("scenes", []), 1e9)


def test_lines_pair_seeds_and_prompts():
    """Two cells that differ by exactly 1 everywhere lead by exactly 1, however much seeds and prompts vary."""
    random = np.random.default_rng(0)
    base, one = random.normal(size=30), random.normal(size=(3, 30))
    table = lines({(10, "a"): base}, {"one": {(10, "a"): one}, "two": {(10, "a"): one + 1}})
    assert [(line.cell, line.steps, line.reward) for line in table] == [("one", 10, "a"), ("two", 10, "a")]
    assert table[0].lead.low == table[0].lead.high == 0
    assert table[1].lead.low == pytest.approx(1) and table[1].lead.high == pytest.approx(1)
    assert table[1].change.mean == pytest.approx((one + 1 - base).mean())
    assert table[1].change.low < table[1].change.mean < table[1].change.high


def test_cells_budgets_and_rates_are_read():
    cells = parse_cells("g2rpo, mixgrpo", ["fine: algorithm.granularities=[1,2] 'rewards.x.options.note=two words'"])
    assert cells == {
        "g2rpo": ["algorithm.name=g2rpo"],
        "mixgrpo": ["algorithm.name=mixgrpo"],
        "fine": ["algorithm.granularities=[1,2]", "rewards.x.options.note=two words"],
    }
    own = {"a": [], "b": ["x=1", "budget=2e4", "y=2"]}
    assert own_budgets(own, "evaluations") == ({"a": [], "b": ["x=1", "y=2"]}, {"b": 2e4})
    assert own == {"a": [], "b": ["x=1", "budget=2e4", "y=2"]}
    assert parse_budget("evaluations=1e5") == ("evaluations", 1e5) and parse_budget("seconds=0.5") == ("seconds", 0.5)
    assert parse_rates("4e-4,1e-4,4e-4") == [1e-4, 4e-4]


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert environment_of(0, 3) == {"OMP_NUM_THREADS": "2"} and environment_of(0, 20) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [environment_of(slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
    assert environment_of(1, 2) == {"OMP_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to compare"),
        (["--algorithms", "g2rpo,mixgrop"], "mixgrop"),
        (["--cell", "a: x.eta=1", "--cell", "b: y.eta=1"], "cell a: recipe scenes: unknown key 'x'"),
        (["--cell", "a: x.eta=1", "--cell", "b: y.eta=1"], "cell b: recipe scenes: unknown key 'y'"),
        (["x.eta=1", "--cell", "a:", "--cell", "b:"], "cells a, b: recipe scenes: unknown key 'x'"),
        (["--cell", "algorithm.eta=1"], "should be a name"),
        (["--cell", "a: optim.learning_rate=1"], "optim.learning_rate belongs to the study"),
        (["--cell", "a:", "--cell", "a:"], "two cells are named 'a'"),
        (["--cell", "a:", "--cell", "b: policy.guidance_scale=5"], "a and b would not be judged alike: policy.guidance_scale"),
        (["--cell", "a: budget=1.5"], "--cell a: budget=1.5: should be a positive number"),
        (["--cell", "a: budget=1 budget=2"], "--cell a: has more than one budget"),
        (["--algorithms", "g2rpo", "--budget", "iterations=1.5"], "should be a positive number"),
        (
            ["--algorithms", "g2rpo", "--budget", "evaluations=9"],
            "cell g2rpo: a budget of 9 evaluations is below one iteration",
        ),
        (["--algorithms", "g2rpo", "--rates", "1e-4;2"], "--rates 1e-4;2: should be numbers"),
        (["--algorithms", "g2rpo", "--seeds", "1001"], "at most 1000"),
        (["--algorithms", "g2rpo", "--steps", "0"], "steps.0: input should be greater than or equal to 1"),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(capsys, tmp_path, arguments, message):
    err = refused(capsys, "compare", "scenes", *arguments, "--out", tmp_path / "study")
    assert message in " ".join(err.split()) and "Traceback" not in err
    assert not (tmp_path / "study").exists()


def test_own_code_of_every_cell_is_tried_before_the_first_run(capsys, tmp_path, tiny_config):
    mine = tmp_path / "mine.py"
    mine.write_text("""
from dataclasses import dataclass
from g2rpo.algorithms.g2rpo import GranularGRPO

@dataclass(frozen=True)
class Mine(GranularGRPO):
    branch_steps: tuple[int, ...] = (0, 1)

    def advantages(self, rewards, weights):
        return rewards
""")
    err = refused(capsys, "compare", tiny_config, "--algorithms", f"g2rpo,{mine}:Mine", "--out", tmp_path / "study")
    assert "cell Mine: algorithm Mine" in err and "advantages should return shape" in err
    assert not (tmp_path / "study").exists()


def test_a_study_runs_resumes_grows_and_refuses_another(capsys, tmp_path, tiny_config, forked_jobs):
    out = tmp_path / "study"
    asked = ["compare", tiny_config, "--cell", "one: algorithm.granularities=[1]", "--rates", "1e-3,1e-2", "--steps", "2,4"]
    asked += ["--budget", "evaluations=110", "--seeds", "1", "--pilots", "1", "--jobs", "2", "--out", out]
    mix = ["--cell", "mix: budget=70 algorithm.name=mixgrpo algorithm.group_size=3"]
    shown = done(capsys, *asked)
    assert (out / "curves.png").is_file() and "edge of the sweep" in (out / "results.md").read_text()
    assert "4 steps: change against the base" in " ".join(shown.split())

    judged = {path: path.stat().st_mtime_ns for path in out.rglob("pictures.jsonl")}
    before = (out / "results.json").read_bytes()
    done(capsys, *asked)  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in out.rglob("pictures.jsonl")} == judged
    assert (out / "results.json").read_bytes() == before

    cut = out / "runs/one/seed_42"  # as if interrupted before the end: it goes on from its checkpoint to the same weights
    (weights,) = (cut / "adapter").glob("*.safetensors")
    content = load_file(weights)
    for path in (cut / "adapter").iterdir():
        path.unlink()
    (cut / "adapter").rmdir()
    shown = done(capsys, *asked, *mix, "--controls")
    again = load_file(weights)
    assert again.keys() == content.keys() and all(torch.equal(again[name], content[name]) for name in again)
    assert "resuming after iteration" in (out / "runs/one/seed_42.log").read_text()

    results = json.loads((out / "results.json").read_text())
    assert list(results["spent"]) == ["one", "mix"]
    for cell, spent in results["spent"].items():  # the runs are what the budget and the pilots ask for
        config = Run(out / "runs" / cell / "seed_42").read_config()
        budget = {"one": 110, "mix": 70}[cell]
        assert config.trainer.iterations == spent["iterations"] == iterations_within(config, budget)
        assert spent["evaluations"] == sum(work(config, iteration) for iteration in range(config.trainer.iterations)) <= budget
        pilots = []
        for rate in (1e-3, 1e-2):
            folder = out / "pilots" / cell / f"rate_{rate:g}" / "seed_1042"
            pilot = Run(folder).read_config()
            assert pilot.evaluation.prompts == config.prompts.train and pilot.optim.learning_rate == rate
            pilots.append(gain_of(rate, [read_run(pilot, folder)], {"scene_accuracy": 1.0}))
        assert config.optim.learning_rate == spent["learning_rate"] == smallest_good_rate(pilots)
        assert results["pilots"][cell] == json.loads(as_json(pilots))

    base = [json.loads(row) for row in (out / "judged/base/pictures.jsonl").open()]
    tuned = [json.loads(row) for row in (out / "judged/mix/seed_42/pictures.jsonl").open()]
    assert {row["side"] for row in base} == {"base"} and {row["side"] for row in tuned} == {"tuned"}
    (line,) = [row for row in results["judged"] if (row["cell"], row["steps"]) == ("mix", 4)]
    means = [np.nanmean([row["scores"]["scene_accuracy"] for row in rows if row["steps"] == 4]) for rows in (base, tuned)]
    assert line["tuned"]["mean"] == pytest.approx(means[1]) and line["change"]["mean"] == pytest.approx(means[1] - means[0])

    knob, several = [knob for knob in results["controls"] if knob["reward"] == "scene_accuracy"]
    ways = json.loads((out / "judged/controls/results.json").read_text())["controls"]["ways"]
    means = {way["name"]: way["means"]["scene_accuracy"] for way in ways}
    best = max(mean for name, mean in means.items() if not name.startswith(("base", "best of")))
    assert knob["mean"] == pytest.approx(best) == pytest.approx(means[knob["control"]])
    assert (several["kind"], several["control"], several["evaluations"], several["readings"]) == (
        "best_of",
        "best of 16",
        32,
        16,
    )
    two = [row["scores"]["scene_accuracy"] for row in base if row["steps"] == 2]
    assert knob["change"]["mean"] == pytest.approx(knob["mean"] - np.nanmean(two))
    assert all(f"| {label} | " in (out / "results.md").read_text() for label in FREE.values()) and "best free knob" in " ".join(
        shown.split()
    )

    for other, message in (([], "holds a study with the cells mix too"), ([*mix, "sampling.num_steps=5"], "another study")):
        assert message in refused(capsys, *asked, *other)
    study = out / "study.yaml"
    study.write_text(study.read_text().replace("seeds: 1", "seeds: 2"))
    assert "holds a study with 2 seeds" in refused(capsys, *asked, *mix)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").touch()
    assert "holds no study" in refused(capsys, *asked[:-1], tmp_path / "other", *mix)


@pytest.mark.slow  # a dozen studies that are begun again
def test_a_study_with_a_file_that_was_cut_in_half_goes_on_or_names_it(capsys, tmp_path, tiny_config, forked_jobs):
    """As by a disk that lost the end of a file: the study is finished, or the command ends with one message."""
    whole = tmp_path / "whole"
    asked = ["compare", tiny_config, "--cell", "one: algorithm.granularities=[1]", "--rates", "1e-3,1e-2", "--steps", "2"]
    asked += ["--budget", "evaluations=110", "--seeds", "1", "--pilots", "1", "--jobs", "2", "--out"]
    done(capsys, *asked, whole)
    results = (whole / "results.json").read_bytes()
    files = {path.suffix + path.name[:4]: path for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size}
    found = {}
    for number, path in enumerate(files.values()):
        out = tmp_path / f"study_{number}"
        shutil.copytree(whole, out)
        cut = out / path.relative_to(whole)
        cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
        code, _, err = g2rpo(capsys, *asked, out)
        assert code in (0, 1, 2) and "Traceback" not in err, (path, err)
        found[str(path.relative_to(whole))] = code
        if code == 0:
            assert (out / "results.json").read_bytes() == results, path
        else:
            assert path.name in err or str(cut.parent) in err, (path, err)
    assert 0 in found.values() and 2 in found.values(), found


@pytest.mark.slow  # a whole study more
def test_a_budget_in_seconds_is_measured_first(capsys, tmp_path, tiny_config, monkeypatch, forked_jobs):
    """How fast this machine is at the moment is measured, and then replaced by a price that buys two iterations."""
    out, measured = tmp_path / "study", []

    def price(config, probe):
        measured.append(seconds_per_evaluation(config, probe))
        return 1 / (work(config, 0) + work(config, 1))

    monkeypatch.setattr("g2rpo.lab.compare.workflow.seconds_per_evaluation", price)
    done(capsys, "compare", tiny_config, "--cell", "a:", "--seeds", "1", "--budget", "seconds=1", "--out", out)
    assert len(measured) == 1 and measured[0] > 0
    assert Run(out / "runs/a/seed_42").read_config().trainer.iterations == 2 and not (out / "pilots").exists()
    assert Run(out / "probes/a").read_config().trainer.iterations == 3


def test_a_failing_run_is_named_with_what_it_said(capsys, tmp_path, tiny_config, forked_jobs):
    reward = tmp_path / "mine.py"
    fails = "if len(images) > 2:  # not in the trial\n        raise RuntimeError('no such judge')"
    reward.write_text(f"def broken(images, prompts):\n    {fails}\n    return images.mean((1, 2, 3))\n")
    out = tmp_path / "study"
    overrides = ["rewards.mine.kind=function", f"rewards.mine.options.target={reward}:broken"]
    code, _, said = g2rpo(capsys, "compare", tiny_config, "--cell", "a:", "--out", out, *overrides)
    assert code == 1 and re.search(r"(?s)a, rate 0\.001, seed 42 failed \(exit code 1\).*no such judge", said)
    assert Path(out / "runs/a/seed_42.log").is_file()
