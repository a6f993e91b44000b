"""Studies: what a budget buys, and the command from end to end. Jobs are forked, as from the
command line."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.read import load_config
from g2rpo.config.work import iterations_within, work, work_of_run
from g2rpo.core.errors import UserError
from g2rpo.lab.compare.jobs import Job, environment_of
from g2rpo.lab.compare.results import lines, page
from g2rpo.lab.compare.study import Study, parse_budget, parse_cells
from g2rpo.lab.compare.workflow import _check_judged_alike, compare, unequal_work
from g2rpo.lab.plan.counting import count
from g2rpo.lab.untrained import Controls
from g2rpo.rollout.planning import count_trained
from g2rpo.train.run.folder import Run
from tests.lab.counting import Counting
from tests.support import processes  # noqa: F401  which a study's jobs are forked from
from tests.support.commands import adapter_of, done, g2rpo, own_reward, refused
from tests.support.runs import fits, trainer
from tests.support.tables import rows
from tests.support.variants import few

ONE = "one: algorithm.granularities=[1]"
OF_EACH_KIND = (
    *("g2rpo", "mixgrpo", "mixgrpo_flash", "tempflow_grpo"),
    *("diffusion_nft", "epg", "opsd", "refl"),
)


def test_cells_that_spend_other_evaluations_are_named_with_the_budget_that_makes_them_alike():
    """Twice as many members take twice the evaluations; half of the iterations make up for it."""
    few, many = (load_config("scenes", [f"algorithm.group_size={size}"]) for size in (6, 12))
    told = unequal_work({"few": few, "many": many}, {"few": 4, "many": 4})
    least = work_of_run(load_config("scenes", ["algorithm.group_size=6", "trainer.iterations=4"]))
    assert f"few {least:,} (1.0), many " in told and f"--budget evaluations={least} " in told
    assert unequal_work({"few": few, "other": few}, {"few": 4, "other": 4}) is None


@pytest.mark.parametrize("name", few(ALGORITHMS, OF_EACH_KIND.__contains__))
def test_work_is_what_a_run_does(tmp_path, name):
    """The rollout's evaluations as logged, and the latents of the training pass as the network sees
    them, over three iterations with the algorithm's own updates; a plan counts the same."""
    policy = Counting()
    words = [f"algorithm.name={name}", "algorithm.group_size=6", "sampling.num_steps=9"]
    t = trainer(tmp_path, *words, "trainer.iterations=3", *fits(name), policy=policy)
    worked = 0
    for iteration in range(3):
        policy.trained = policy.without_gradient = 0
        evaluations = t.iterate()["evaluations"]
        trained, base = policy.trained, policy.without_gradient - evaluations
        counted = count_trained(t.algorithm, t.plans(iteration), 9)
        assert (trained, base) == tuple(2 * rows for rows in counted)
        spent = evaluations + 3 * trained + base
        assert work(t.config, iteration) == work(t.config, iteration, evaluations) == spent
        worked += spent
    planned = count(t.config, 3).total(
        lambda it: it.evaluations + 3 * it.training_rows + it.reference_rows
    )
    assert work_of_run(t.config) == worked == planned


@pytest.mark.parametrize("name", ["g2rpo", "dancegrpo", "mixgrpo"])
def test_a_budget_buys_as_many_iterations_as_fit(name):
    config = load_config("scenes", [f"algorithm.name={name}"])
    costs = np.cumsum([work(config, iteration) for iteration in range(31)])
    for many in (1, 2, 30):
        assert iterations_within(config, costs[many - 1]) == many
        assert iterations_within(config, costs[many] - 1) == many
    with pytest.raises(UserError, match=f"below one iteration, which takes {costs[0]:,}"):
        iterations_within(config, costs[0] - 1)


def test_a_budget_of_more_iterations_than_anyone_runs_is_refused_at_once(monkeypatch):
    monkeypatch.setattr("g2rpo.config.work.MOST_ITERATIONS", 1000)
    with pytest.raises(UserError, match="more than 1,000 iterations"):
        iterations_within(load_config("scenes", []), 1e9)


def test_lines_pair_seeds_and_prompts():
    """Two cells that differ by exactly 1 everywhere lead by exactly 1, however much seeds and
    prompts vary."""
    random = np.random.default_rng(0)
    base, one = random.normal(size=30), random.normal(size=(3, 30))
    cells = {"one": {(10, "a"): one}, "two": {(10, "a"): one + 1}}
    first, second = lines({"one": {(10, "a"): base + 2}, "two": {(10, "a"): base}}, cells)
    assert (second["cell"], second["steps"], second["reward"]) == ("two", 10, "a")
    assert first["lead"].low == first["lead"].high == 0
    assert second["lead"].low == pytest.approx(1) and second["lead"].high == pytest.approx(1)
    assert second["change"].mean == pytest.approx((one + 1 - base).mean())
    assert second["change"].low < second["change"].mean < second["change"].high


def test_cells_and_budgets_are_read():
    cells = parse_cells("g2rpo, mixgrpo", ["fine: x.eta=[1,2] budget=2e4 'x.note=two words'"])
    unit, budget = parse_budget("evaluations=1e5")
    fixed = {"recipe": "scenes", "seeds": 1, "steps": []}
    study = Study(overrides=["x=1"], cells=cells, budget=budget, unit=unit, **fixed)
    assert {cell: (study.overrides_of(cell), study.budget_of(cell)) for cell in cells} == {
        "g2rpo": (["x=1", "algorithm.name=g2rpo"], 1e5),
        "mixgrpo": (["x=1", "algorithm.name=mixgrpo"], 1e5),
        "fine": (["x=1", "x.eta=[1,2]", "x.note=two words"], 2e4),
    }


def test_a_budget_is_told_to_the_last_digit():
    settings = {"recipe": "scenes", "overrides": [], "seeds": 1, "steps": []}
    study = Study(cells={"one": []}, budget=1234567, unit="evaluations", **settings)
    found = {"spent": {}, "judged": [], "trained": [], "prompts": 3}
    assert "Budget of a run: 1,234,567 evaluations." in page(study, found, None)


def test_workers_share_the_cores_and_take_the_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert environment_of(0, 3) == {"OMP_NUM_THREADS": "2"}
    assert environment_of(0, 20) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [environment_of(slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
    assert environment_of(1, 2) == {"OMP_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "3"}


REFUSED = r"""
--jobs 1 -> nothing to compare
--algorithms g2rpo,mixgrop -> mixgrop
--cell 'a: x.eta=1' --cell 'b: y.eta=1' -> cell a: recipe scenes: unknown key 'x'
--cell 'a: x.eta=1' --cell 'b: y.eta=1' -> cell b: recipe scenes: unknown key 'y'
--cell algorithm.eta=1 -> should be a name
--cell 'base: ' -> cell base: a study has a folder of this name
--cell 'a: trainer.seed=1' -> trainer.seed of cell a belongs to the study
--cell a: --cell a: -> two cells are named 'a'
--cell a: --cell 'b: policy.guidance_scale=5' -> a and b would not be judged alike: policy.guidance_scale
--cell "a: prompts.train='x" -> --cell 'a: prompts.train='x': No closing quotation
--cell 'a: budget=1.5' -> --cell a: budget=1.5: should be a positive number
--algorithms g2rpo --budget 500 -> --budget 500: should be iterations=NUMBER or evaluations=NUMBER
--algorithms g2rpo --budget evaluations=9 -> cell g2rpo: a budget of 9 evaluations is below one
--cell 'a: budget=9' --budget evaluations=1e6 -> g2rpo: cell a: a budget of 9 evaluations is below one
--algorithms g2rpo --steps 0 -> steps.0: input should be greater than or equal to 1
--algorithms g2rpo,mine.py:Mine -> cell Mine: algorithm Mine
--algorithms g2rpo,mine.py:Mine -> advantages should return shape
"""
OWN_ALGORITHM = """
from dataclasses import dataclass
from g2rpo.algorithms.g2rpo import GranularGRPO

@dataclass(frozen=True)
class Mine(GranularGRPO):
    def advantages(self, rewards, weights):
        return rewards
"""


@pytest.mark.parametrize(("words", "message"), rows(REFUSED))
def test_wrong_input_is_one_message_before_the_first_run(
    capsys, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN_ALGORITHM)
    assert message in refused(capsys, "compare", "scenes", *shlex.split(words), "--out", "study")
    assert not (tmp_path / "study").exists()


def test_a_length_among_the_settings_is_said_to_be_none():
    told = []
    study = ["trainer.iterations=5"], {"a": ["lr=1"]}, ("iterations", 60)
    with pytest.raises(UserError, match="cell a: .*unknown key 'lr'"):
        compare("scenes", *study, emit=told.append)
    assert [line.text for line in told] == [
        "trainer.iterations: runs are as long as --budget iterations=60 says"
    ]


def test_cells_may_have_other_bases_unless_one_is_evaluated_for_all():
    changes = {"a": [], "b": ["policy.quantize=int8"]}
    cells = {name: load_config("scenes", own) for name, own in changes.items()}
    _check_judged_alike(cells, one_base=False)
    with pytest.raises(UserError, match="policy.quantize is 'none' and 'int8'"):
        _check_judged_alike(cells, one_base=True)


def accuracy(out, side, steps):
    """The mean over the pictures of a side with so many steps."""
    rows = map(json.loads, (out / "judged" / side / "pictures.jsonl").open())
    return np.nanmean([row["scores"]["scene_accuracy"] for row in rows if row["steps"] == steps])


def test_a_study_runs_resumes_grows_and_refuses_another(capsys, tmp_path, tiny_config):
    out = tmp_path / "study"
    asked = ["compare", tiny_config, "--cell", ONE, "--steps", "2,4", "--jobs", "2"]
    asked += ["--budget", "evaluations=110", "--seeds", "1", "--out", out]
    mix = ["--cell", "mix: budget=70 algorithm.name=mixgrpo algorithm.group_size=3"]
    shown = " ".join(done(capsys, *asked).split())
    assert "4 steps: change against the base" in shown
    assert "95 % intervals over prompts; other seeds may differ." in shown
    assert (out / "curves.png").is_file()

    def written():
        kept = {path: path.stat().st_mtime_ns for path in out.rglob("pictures.jsonl")}
        return kept, (out / "results.json").read_bytes()

    before = written()
    done(capsys, *asked)  # nothing is left to do
    assert written() == before

    # as if interrupted before its weights were written: they are the last checkpoint's
    cut = Run(out / "runs/one/seed_42")
    content = adapter_of(cut.path)
    shutil.rmtree(cut.path / "adapter")
    shown = " ".join(done(capsys, *asked, *mix, "--controls").split())
    again = adapter_of(cut.path)
    assert all(torch.equal(again[name], value) for name, value in content.items())
    said = "iterations are done; base and tuned are compared again"
    assert said in (out / "runs/one/seed_42.log").read_text()

    results = json.loads((out / "results.json").read_text())
    assert list(results["spent"]) == ["one", "mix"]
    for cell, budget in (("one", 110), ("mix", 70)):  # the runs are what the budget asks for
        config = Run(out / "runs" / cell / "seed_42").read_config()
        spent, iterations = results["spent"][cell], config.trainer.iterations
        assert iterations == spent["iterations"] == iterations_within(config, budget)
        assert spent["evaluations"] == work_of_run(config) <= budget

    (line,) = [row for row in results["judged"] if (row["cell"], row["steps"]) == ("mix", 4)]
    before, after = (accuracy(out, side, 4) for side in ("base", "mix/seed_42"))
    assert line["tuned"]["mean"] == pytest.approx(after)
    assert line["change"]["mean"] == pytest.approx(after - before)

    free = Controls.model_validate(results["controls"])
    knob, several = free.best["scene_accuracy"], free.best_of["scene_accuracy"]
    assert (several.name, several.evaluations, several.readings) == ("best of 16", 32, 16)
    mean, change = knob.means["scene_accuracy"], knob.changes["scene_accuracy"].mean
    assert change == pytest.approx(mean - accuracy(out, "base", 2))
    assert f"{knob.name}: {knob.price}" in shown and several.price in shown

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
    asked = ["compare", tiny_config, "--cell", ONE, "--steps", "2", "--budget", "evaluations=110"]
    asked += ["--seeds", "1", "--jobs", "2", "--out"]
    done(capsys, *asked, whole)
    results = (whole / "results.json").read_bytes()
    paths = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
    one_of_each_kind = {path.suffix + path.name[:4]: path for path in paths}
    codes = set()
    for path in one_of_each_kind.values():
        out = shutil.copytree(whole, tmp_path / str(len(codes)), dirs_exist_ok=True)
        cut = out / path.relative_to(whole)
        cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
        code, _, err = g2rpo(capsys, *asked, out)
        assert code in (0, 1, 2) and "Traceback" not in err, (path, err)
        codes.add(code)
        if code == 0:
            assert (out / "results.json").read_bytes() == results, path
        else:
            assert path.name in err or str(cut.parent) in err, (path, err)
        shutil.rmtree(out)
    assert {0, 2} <= codes


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
    out, words = tmp_path / "study", own_reward(tmp_path / "mine.py", FAILING)[1:]
    words += ["algorithm.granularities=[1]", "--seeds", "1", "--budget", "iterations=1"]
    for size in (7, 5, 3):
        words += ["--cell", f"of-{size}: algorithm.group_size={size}"]
    code, _, said = g2rpo(capsys, "compare", tiny_config, *words, "--out", out)
    assert code == 1, said
    assert re.search(r"(?s)of-7, seed 42 failed \(exit code 1\).*no such judge", said)
    assert "of-5, seed 42 failed (exit code -9)" in said
    assert "results are of the cells that are whole" in said
    assert list(json.loads((out / "results.json").read_text())["spent"]) == ["of-3"]


def test_a_job_that_dies_before_its_log_is_open_is_named(tmp_path):
    log = tmp_path / "one.log"
    said = Job("one, seed 1", (), log).failed(-9)
    assert said == f"one, seed 1 failed (exit code -9); its output is in {log}:"


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
    assert (tmp_path / "runs").read_text() == "once"
    assert (tmp_path / "log").read_text().startswith("g2rpo ")
