"""Studies: what a budget buys, and the command from end to end. Jobs are forked, as from the
command line."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from g2rpo.assembly.config import load_config
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.core.errors import UserError
from g2rpo.evaluation.untrained import Controls
from g2rpo.evaluation.work import iterations_within, work
from g2rpo.lab.compare.jobs import environment_of
from g2rpo.lab.compare.results import lines
from g2rpo.lab.compare.study import Study, parse_budget, parse_cells
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rollout.planning import count_trained
from g2rpo.run.rates import FACTORS, Pilot
from g2rpo.run.run import Run
from tests.support import processes  # noqa: F401  which a study's jobs are forked from
from tests.support.commands import done, g2rpo, refused
from tests.support.runs import fits, trainer


@pytest.mark.parametrize("name", ALGORITHMS)
def test_work_is_what_a_run_does(tmp_path, name):
    """The rollout's evaluations as logged, and the latents of the training pass as they are
    sampled, over three iterations."""

    class Counting(GaussianPolicy):
        trained = without_gradient = 0

        def velocity(self, x, sigma, cond):
            self.trained += len(x) * torch.is_grad_enabled()
            self.without_gradient += len(x) * (not torch.is_grad_enabled())
            return super().velocity(x, sigma, cond)

    policy = Counting()
    # a part of a group sees a shared latent again
    once = ["algorithm.update_every=rollout"] if name != "refl" else []
    words = [
        f"algorithm.name={name}",
        "algorithm.group_size=4",
        "sampling.num_steps=9",
        *fits(name),
        *once,
    ]
    t = trainer(tmp_path, *words, policy=policy)
    for iteration in range(3):
        policy.trained = policy.without_gradient = 0
        evaluations = t.iterate()["evaluations"]
        seen = policy.trained, policy.without_gradient - evaluations
        assert seen == tuple(2 * rows for rows in count_trained(t.algorithm, t.plans(iteration), 9))
        assert (
            work(t.config, iteration)
            == work(t.config, iteration, evaluations)
            == evaluations + 3 * seen[0] + seen[1]
        )


@pytest.mark.parametrize("name", ["g2rpo", "dancegrpo", "mixgrpo"])
def test_a_budget_buys_as_many_iterations_as_fit(name):
    config = load_config("scenes", [f"algorithm.name={name}"])
    costs = np.cumsum([work(config, iteration) for iteration in range(60)])
    for count in (1, 2, 30):
        assert iterations_within(config, costs[count - 1]) == count
        assert iterations_within(config, costs[count] - 1) == count
    with pytest.raises(UserError, match=f"below one iteration, which takes {costs[0]:,}"):
        iterations_within(config, costs[0] - 1)


def test_a_budget_of_more_iterations_than_anyone_runs_is_refused_at_once(monkeypatch):
    monkeypatch.setattr("g2rpo.evaluation.work.MOST_ITERATIONS", 1000)
    with pytest.raises(UserError, match="more than 1,000 iterations"):
        iterations_within(load_config("scenes", []), 1e9)


def test_lines_pair_seeds_and_prompts():
    """Two cells that differ by exactly 1 everywhere lead by exactly 1, however much seeds and
    prompts vary."""
    random = np.random.default_rng(0)
    base, one = random.normal(size=30), random.normal(size=(3, 30))
    table = lines({(10, "a"): base}, {"one": {(10, "a"): one}, "two": {(10, "a"): one + 1}})
    assert [(line.cell, line.steps, line.reward) for line in table] == [
        ("one", 10, "a"),
        ("two", 10, "a"),
    ]
    assert table[0].lead.low == table[0].lead.high == 0
    assert table[1].lead.low == pytest.approx(1) and table[1].lead.high == pytest.approx(1)
    assert table[1].change.mean == pytest.approx((one + 1 - base).mean())
    assert table[1].change.low < table[1].change.mean < table[1].change.high


def test_cells_and_budgets_are_read():
    cells = parse_cells(
        "g2rpo, mixgrpo",
        ["fine: algorithm.granularities=[1,2] budget=2e4 'rewards.x.options.note=two words'"],
    )
    assert cells == {
        "g2rpo": ["algorithm.name=g2rpo"],
        "mixgrpo": ["algorithm.name=mixgrpo"],
        "fine": ["algorithm.granularities=[1,2]", "budget=2e4", "rewards.x.options.note=two words"],
    }
    fixed = {"recipe": "scenes", "overrides": ["x=1"], "find_rate": False, "seeds": 1, "steps": []}
    study = Study(cells=cells, budget=1e5, unit="evaluations", **fixed)
    assert study.overrides_of("fine") == [
        "x=1",
        "algorithm.granularities=[1,2]",
        "rewards.x.options.note=two words",
    ]
    assert [study.budget_of(cell) for cell in cells] == [1e5, 1e5, 2e4]
    assert parse_budget("evaluations=1e5") == ("evaluations", 1e5)


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert environment_of(0, 3) == {"OMP_NUM_THREADS": "2"} and environment_of(0, 20) == {
        "OMP_NUM_THREADS": "1"
    }
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
        (
            ["--cell", "a: x.eta=1", "--cell", "b: y.eta=1"],
            "cell a: recipe scenes: unknown key 'x'",
        ),
        (
            ["--cell", "a: x.eta=1", "--cell", "b: y.eta=1"],
            "cell b: recipe scenes: unknown key 'y'",
        ),
        (["x.eta=1", "--cell", "a:", "--cell", "b:"], "cells a, b: recipe scenes: unknown key 'x'"),
        (["--cell", "algorithm.eta=1"], "should be a name"),
        (["--cell", "a: trainer.seed=1"], "trainer.seed of cell a belongs to the study"),
        (["--cell", "a:", "--cell", "a:"], "two cells are named 'a'"),
        (
            ["--cell", "a:", "--cell", "b: policy.guidance_scale=5"],
            "a and b would not be judged alike: policy.guidance_scale",
        ),
        (["--cell", "a: budget=1.5"], "--cell a: budget=1.5: should be a positive number"),
        (["--algorithms", "g2rpo", "--budget", "iterations=1.5"], "should be a positive number"),
        (
            ["--algorithms", "g2rpo", "--budget", "evaluations=9"],
            "cell g2rpo: a budget of 9 evaluations is below one iteration",
        ),
        (["--algorithms", "g2rpo", "--seeds", "1001"], "at most 1000"),
        (
            ["--algorithms", "g2rpo", "--steps", "0"],
            "steps.0: input should be greater than or equal to 1",
        ),
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
    err = refused(
        capsys,
        "compare",
        tiny_config,
        "--algorithms",
        f"g2rpo,{mine}:Mine",
        "--out",
        tmp_path / "study",
    )
    assert "cell Mine: algorithm Mine" in err and "advantages should return shape" in err
    assert not (tmp_path / "study").exists()


def test_a_study_runs_resumes_grows_and_refuses_another(capsys, tmp_path, tiny_config):
    out = tmp_path / "study"
    asked = [
        "compare",
        tiny_config,
        "--cell",
        "one: algorithm.granularities=[1]",
        "--steps",
        "2,4",
        "--jobs",
        "2",
    ]
    asked += ["--budget", "evaluations=110", "--seeds", "1", "--out", out]
    mix = ["--cell", "mix: budget=70 algorithm.name=mixgrpo algorithm.group_size=3"]
    shown = done(capsys, *asked)
    assert (out / "curves.png").is_file() and "4 steps: change against the base" in " ".join(
        shown.split()
    )

    judged = {path: path.stat().st_mtime_ns for path in out.rglob("pictures.jsonl")}
    before = (out / "results.json").read_bytes()
    done(capsys, *asked)  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in out.rglob("pictures.jsonl")} == judged
    assert (out / "results.json").read_bytes() == before

    # as if interrupted before the end: it goes on from its checkpoint to the same weights
    cut = out / "runs/one/seed_42"
    (weights,) = (cut / "adapter").glob("*.safetensors")
    content = load_file(weights)
    shutil.rmtree(cut / "adapter")
    shown = " ".join(done(capsys, *asked, *mix, "--controls").split())
    again = load_file(weights)
    assert again.keys() == content.keys() and all(
        torch.equal(again[name], content[name]) for name in again
    )
    assert "resuming after iteration" in (out / "runs/one/seed_42.log").read_text()

    results = json.loads((out / "results.json").read_text())
    assert list(results["spent"]) == ["one", "mix"]
    for cell, spent in results["spent"].items():  # the runs are what the budget asks for
        config = Run(out / "runs" / cell / "seed_42").read_config()
        budget = {"one": 110, "mix": 70}[cell]
        assert config.trainer.iterations == spent["iterations"] == iterations_within(config, budget)
        assert (
            spent["evaluations"]
            == sum(work(config, iteration) for iteration in range(config.trainer.iterations))
            <= budget
        )

    (base,) = (out / "bases").iterdir()  # one for both cells
    stored = [
        (run / "baseline.safetensors").read_bytes() for run in (base, cut, out / "runs/mix/seed_42")
    ]
    assert len(set(stored)) == 1

    base, tuned = (
        [json.loads(row) for row in (out / "judged" / side / "pictures.jsonl").open()]
        for side in ("base", "mix/seed_42")
    )
    assert {row["side"] for row in base} == {"base"} and {row["side"] for row in tuned} == {"tuned"}
    (line,) = [row for row in results["judged"] if (row["cell"], row["steps"]) == ("mix", 4)]
    means = [
        np.nanmean([row["scores"]["scene_accuracy"] for row in rows if row["steps"] == 4])
        for rows in (base, tuned)
    ]
    assert line["tuned"]["mean"] == pytest.approx(means[1]) and line["change"][
        "mean"
    ] == pytest.approx(means[1] - means[0])

    free = Controls.model_validate(results["controls"])
    knob, several = free.best["scene_accuracy"], free.best_of["scene_accuracy"]
    assert knob.means["scene_accuracy"] == max(
        way.means["scene_accuracy"] for way in free.of("knob")
    )
    assert (several.name, several.evaluations, several.readings) == ("best of 16", 32, 16)
    two = [row["scores"]["scene_accuracy"] for row in base if row["steps"] == 2]
    change = knob.changes["scene_accuracy"].mean
    assert change == pytest.approx(knob.means["scene_accuracy"] - np.nanmean(two))
    assert (
        "best free knob" in shown
        and f"{knob.name}: {knob.price}" in shown
        and several.price in shown
    )

    for other in ([], [*mix, "sampling.num_steps=5"]):
        assert "holds another study" in refused(capsys, *asked, *other)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").touch()
    assert "holds no study" in refused(capsys, *asked[:-1], tmp_path / "other", *mix)


@pytest.mark.slow  # a dozen studies that are begun again
def test_a_study_with_a_file_that_was_cut_in_half_goes_on_or_names_it(
    capsys, tmp_path, tiny_config
):
    """As by a disk that lost the end of a file: the study is finished, or the command ends with one
    message."""
    whole = tmp_path / "whole"
    asked = ["compare", tiny_config, "--cell", "one: algorithm.granularities=[1]", "--steps", "2"]
    asked += ["--budget", "evaluations=110", "--seeds", "1", "--jobs", "2", "--out"]
    done(capsys, *asked, whole)
    results = (whole / "results.json").read_bytes()
    files = {
        path.suffix + path.name[:4]: path
        for path in sorted(whole.rglob("*"))
        if path.is_file() and path.stat().st_size
    }
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


def test_the_first_run_of_a_cell_finds_its_rate_and_the_others_take_it(
    capsys, tmp_path, tiny_config
):
    """Its pilots' gains are replaced by such as let one rate learn. The runs' own evaluations are
    compared."""
    out = tmp_path / "study"
    asked = [
        "compare",
        tiny_config,
        "--cell",
        "a: optim.learning_rate=1e-2",
        "--find-rate",
        "--seeds",
        "2",
    ]
    asked += ["--budget", "iterations=1", "--out", out]
    code, _, said = g2rpo(capsys, *asked)
    assert (
        code == 2
        and "a, seed 42 failed" in said
        and "no rate learns" in said
        and "no cell is whole" in said
    )
    first, second = (Run(out / "runs" / "a" / f"seed_{seed}") for seed in (42, 43))
    sweep = first.read_rates()
    assert {pilot.rate for pilot in sweep.pilots} == {factor * 1e-2 for factor in FACTORS}
    gains = zip(sweep.rates, (0, 0.5, 0, 0), strict=True)
    sweep.pilots = [Pilot(rate, gain, gain - 0.1, gain + 0.1, {}, 3, 1.0) for rate, gain in gains]
    first.write_rates(sweep)
    done(capsys, *asked)
    results = json.loads((out / "results.json").read_text())
    assert (
        results["spent"]["a"]["learning_rate"] == sweep.rates[1]
        and not results["spent"]["a"]["at_edge"]
    )
    assert [pilot["gain"] for pilot in results["pilots"]["a"]] == [0, 0.5, 0, 0]
    assert [run.read_config().optim.learning_rate for run in (first, second)] == [
        sweep.rates[1]
    ] * 2
    assert second.read_config().trainer.seed == 43 and second.read_rates() is None
    scores = [
        [run.read_scores(at, ["scene_accuracy"])["scene_accuracy"].double() for at in (0, 1)]
        for run in (first, second)
    ]
    (line,) = results["judged"]
    assert line["change"]["mean"] == pytest.approx(
        float(np.mean([float((last - base).mean()) for base, last in scores]))
    )
    assert not (out / "judged").exists()


FAILING = """
import os
def it(images, prompts):
    if len(images) % 5 == 0:
        os.kill(os.getpid(), 9)
    if len(images) % 7 == 0:
        raise RuntimeError("no such judge")
    return images.mean((1, 2, 3))
"""


def test_a_run_that_fails_or_dies_ends_no_other_and_is_named_with_what_it_said(
    capsys, tmp_path, tiny_config
):
    """An exception, and a process that is killed, as the kernel does for want of memory: with
    groups of 7 and of 5."""
    (tmp_path / "mine.py").write_text(FAILING)
    own = [
        f"rewards.mine={{kind: function, options: {{target: {tmp_path / 'mine.py'}:it}}}}",
        "algorithm.granularities=[1]",
    ]
    cells = [
        word for size in (7, 5, 3) for word in ("--cell", f"of-{size}: algorithm.group_size={size}")
    ]
    out = tmp_path / "study"
    own += [
        "--plugin",
        tmp_path / "mine.py",
        "--seeds",
        "1",
        "--budget",
        "iterations=1",
        "--out",
        out,
    ]
    code, _, said = g2rpo(capsys, "compare", tiny_config, *own, *cells)
    assert code == 1, said
    assert re.search(r"(?s)of-7, seed 42 failed \(exit code 1\).*no such judge", said)
    assert (
        "of-5, seed 42 failed (exit code -9)" in said
        and "results are of the cells that are whole" in said
    )
    results = json.loads((out / "results.json").read_text())
    assert list(results["spent"]) == ["of-3"]


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.cuda.device_count = lambda: GPUS
from g2rpo.lab.compare.jobs import Job, Workers
with open("runs", "a") as runs:
    runs.write("once")
print(Workers(1).run([Job("version", ("--version",), Path("log"))]))
"""


@pytest.mark.slow  # imports torch twice
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_script_that_runs_a_study_is_not_run_again_by_its_jobs(tmp_path, gpus):
    """Forked, or with a GPU spawned."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("GPUS", str(gpus)))
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True)
    assert (tmp_path / "runs").read_text() == "once" and (tmp_path / "log").read_text().startswith(
        "g2rpo "
    )
