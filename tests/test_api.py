"""The command line's work from Python: objects take the place of names, and the rest is as the
recipe says."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import yaml

from g2rpo import api
from g2rpo.algorithms.flow_grpo import MixGRPO
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.run.folder import Run
from tests.support import processes  # noqa: F401  which a study's jobs are forked from
from tests.support.runs import PROMPTS, brightness, darkness
from tests.support.tolerances import near, network


class Notes:
    """A tracker that keeps what it is shown."""

    def __init__(self):
        self.seen = []

    def start(self, run_dir, iteration, config):
        self.seen.append(("start", run_dir.name, iteration))

    def log(self, row, pictures):
        self.seen.append((row["kind"], row["iteration"], sorted(pictures)))

    def finish(self, ok):
        self.seen.append(("finish", ok))


@pytest.mark.slow  # half a minute: a process that imports and builds everything
def test_libraries_are_as_quiet_as_at_the_command_line():
    code = "from g2rpo import api; api.trainer('scenes', ['evaluation.num_prompts=2', 'prompts.cache=off'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == ended.stderr == ""


def test_objects_take_the_place_of_everything_that_a_recipe_names(tmp_path):
    notes, policy, run = Notes(), GaussianPolicy(), Run(tmp_path / "run")

    def made(*overrides, **more):
        shorter = "trainer.iterations=2", "sampling.num_steps=6", "evaluation.every=2"
        return api.trainer(
            "scenes",
            [*shorter, *overrides],
            run.path,
            algorithm=MixGRPO(group_size=4),
            **{**given(policy), "trackers": [notes], **more},
        )

    trainer = made()
    assert trainer.policy is policy and isinstance(trainer.algorithm, MixGRPO)
    rows = list(trainer.train())
    assert [row["kind"] for row in rows] == ["eval", "train", "train", "eval"]
    assert rows == run.read_log()
    (start, *logged, end) = notes.seen
    assert (start, end) == (("start", "run", 0), ("finish", True))
    first, last = (("eval", iteration, ["eval/samples"]) for iteration in (0, 2))
    assert logged == [first, ("train", 1, []), ("train", 2, []), last]
    table = trainer.finish()
    assert table["bright"].tuned == -table["dark"].tuned
    one, same, other = (trainer.sample(["0", "0.1"], seed=seed) for seed in (3, 3, 4))
    assert len(one) == 2 and torch.equal(one, same) and not torch.equal(one, other)

    with pytest.raises(UserError, match="already holds a run"):
        made()
    more = made("trainer.iterations=3", resume=True)
    assert [row["iteration"] for row in more.train()] == [3, 3]
    kept = run.read_config()
    assert kept.rewards["bright"].kind == kept.prompts.train == kept.policy.path == "python"


def given(policy):
    """Objects for all that a recipe names."""
    scored = {"rewards": {"bright": brightness}, "judges": {"dark": darkness}}
    return {"policy": policy, "prompts": PROMPTS, "heldout": PROMPTS[:3], **scored}


def test_the_weight_in_the_config_is_that_of_the_object():
    """What is not given is what the recipe says."""
    objects = {**given(GaussianPolicy()), "rewards": {"bright": brightness, "dark": darkness}}
    weight = ["rewards.bright.weight=0.25"]
    trainer = api.trainer("scenes", weight, **{**objects, "judges": {}})
    assert trainer.reward_weights.tolist() == [0.25, 1.0] and trainer.judges == {}
    overrides = ["evaluation.num_prompts=2", "trainer.iterations=1"]
    trainer = api.trainer("scenes", overrides)
    assert trainer.config == load_config("scenes", overrides)
    assert list(trainer.rewards) == ["scene_accuracy"] and len(trainer.heldout) == 2
    assert trainer.run_dir is None


NO_LIST = "should be a list of texts, such as"
WRONG = [
    ({"prompts": "a red circle"}, rf"prompts: {NO_LIST} \['a red circle'\], is 'a red circle'"),
    ({"prompts": 5}, f"prompts: {NO_LIST}"),
    ({"prompts": (text for text in PROMPTS)}, f"prompts: {NO_LIST}.* is <generator"),
    ({"heldout": []}, "heldout: is empty; give at least one prompt"),
    ({"overrides": "trainer.iterations=2"}, rf"overrides: {NO_LIST} \['trainer.iterations=2'\]"),
    (
        {"rewards": brightness},
        "rewards: should be a mapping from names to functions or objects, is <f",
    ),
    ({"judges": {"red": "red.py:red"}}, r"judges\['red'\]: should be a function or an object that"),
    ({"algorithm": "mixgrpo"}, r"a name goes into the overrides: \['algorithm.name=mixgrpo'\]"),
    ({"rewards": {"own": Notes}}, r"rewards\['own'\]: is a class; give an object of it, such as N"),
    (
        {"trackers": ["tensorboard"]},
        r"trackers\[0\]: is no tracker, it lacks start, log, finish: 'te",
    ),
    ({"trackers": Notes()}, "trackers: should be a list of trackers, is <"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_what_is_no_list_and_no_mapping_of_rewards_is_refused_before_anything_is_loaded(
    monkeypatch, given, message
):
    monkeypatch.setattr(api, "load_config", None)  # would be called next
    with pytest.raises(UserError, match=message):
        api.trainer("scenes", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overrides": ["trainer.iterations=2"]}, "overrides: are for a recipe's name or a file"),
        ({"rewards": {"my own": brightness}}, "rewards.my own is no name: write letters"),
    ],
)
def test_a_config_is_taken_as_it_is_and_names_are_those_that_its_file_can_hold(given, message):
    """A run whose config.yaml could not be read would be lost for every command."""
    with pytest.raises(UserError, match=message):
        api.trainer(load_config("scenes", []), **given)


@pytest.mark.parametrize(
    "call", [lambda text: api.sample("none", text), lambda text: api.evaluate("none", {}, text)]
)
def test_one_text_is_no_list_of_prompts(call):
    with pytest.raises(UserError, match="prompts: should be a list of texts"):
        call("a red circle")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: api.study("scenes", {"one": "lr=1"}, "study"), "cell one: should be a list"),
        (api.report, "report: name a run"),
    ],
    ids=["study", "report"],
)
def test_a_cell_that_is_one_text_and_a_report_without_runs_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_recipe_may_be_a_path(tmp_path):
    (tmp_path / "own.yaml").write_text(load_config("scenes", ["trainer.iterations=3"]).to_yaml())
    trainer = api.trainer(tmp_path / "own.yaml", **given(GaussianPolicy()))
    assert trainer.config.trainer.iterations == 3


@dataclass(frozen=True)
class OneAtATime(GranularGRPO):
    """An algorithm of one's own, by inheritance, with a field that is no number."""

    pause: int = 3
    shape: Callable[[float], float] = math.sqrt

    def plans(self, num_steps, iteration=0, seed=0):
        every = super().plans(num_steps, iteration, seed)
        return [every[iteration % len(every)]]


class Own:
    """The same from nothing but the protocol."""

    def __init__(self):
        self.inner = GranularGRPO(group_size=4, branch_steps=(0, 1), granularities=(1, 2))
        self.group_size = 4

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


CLASSES = {
    "OneAtATime": OneAtATime(group_size=4, branch_steps=(0, 1), granularities=(1, 2), pause=5),
    "Own": Own(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_an_algorithm_of_ones_own_is_recorded_as_what_it_is_and_never_taken_for_another(
    says, refuses, tmp_path, tiny_config, name
):
    run = tmp_path / "run"

    def made(algorithm=CLASSES[name], **more):
        return api.trainer(str(tiny_config), run_dir=run, algorithm=algorithm, **more)

    trainer = made()
    list(trainer.train())
    trainer.finish()
    kept = yaml.safe_load((run / "config.yaml").read_text())["algorithm"]
    assert kept.pop("name") == "python" and kept["group_size"] == 4
    own_fields = name == "Own" or (kept["pause"], kept["shape"]) == (5, "python")
    assert own_fields
    assert f"tuned with {name}" in (run / "adapter" / "README.md").read_text()
    assert list(made(resume=True).train()) == []
    with pytest.raises(UserError, match=r"algorithm\.group_size|algorithm\.pause"):
        made(OneAtATime(group_size=4), resume=True)

    given = "algorithm.name=python: this run was begun from Python with an object for it"
    again = "train run/config.yaml"
    on = "resume run trainer.iterations=9"
    for command in (again, on, "plan run/config.yaml", "demo run"):
        assert given in refuses(command)
    says("report run")
    says("sample run 'a red circle' --out pictures")
    says(f"{again} algorithm.name=mixgrpo algorithm.group_size=3 --run-dir mix")
    assert Run(tmp_path / "mix").read_config().algorithm.name == "mixgrpo"


DRAWN = network(1.0, passes=5)
"""A picture after four steps and the decoder, in other batches."""


@pytest.mark.slow
def test_a_finished_run_paints_is_judged_and_reported(tmp_path, monkeypatch, tiny_config):
    run, prompts = tmp_path / "run", ["a red circle", "two blue squares"]
    rewards, same = {"bright": brightness}, partial(torch.testing.assert_close, **DRAWN)
    trainer = api.trainer(str(tiny_config), ["optim.learning_rate=0.05"], run, rewards=rewards)
    list(trainer.train())
    trainer.finish()
    trainer.export()
    pictures, base = (api.sample(run, prompts, base=base) for base in (False, True))
    same(pictures, trainer.sample(prompts))
    assert not torch.allclose(pictures, base, atol=1e-4)
    sampler = api.sampler(run)
    assert torch.equal(sampler.sigmas, trainer.evaluator.sampler.sigmas)
    same(sampler.pictures(prompts), pictures)
    found = api.evaluate(run, rewards, prompts)["bright"]
    for value, painted in ((found.tuned, pictures), (found.base, base)):
        assert value == near(float(brightness(painted, None).mean()), DRAWN)
    monkeypatch.setenv("HOME", str(run.parent))
    assert api.report(f"~/{run.name}") == run / "report.html"
    assert "a red circle" in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_study_from_python_is_the_commands(tmp_path, tiny_config):
    cells = {"one": ["algorithm.granularities=[1]"], "more": ["budget=2"]}
    size = {"budget": "iterations=1", "seeds": 1, "jobs": 2}
    spent = api.study(str(tiny_config), cells, tmp_path / "study", **size)["spent"]
    assert [spent[name]["iterations"] for name in cells] == [1, 2]
    assert cells["more"] == ["budget=2"]  # is left alone
    with pytest.raises(UserError, match="cell one: algorithm: branch_steps"):
        api.study(tiny_config, {"one": ["algorithm.branch_steps=[99]"]}, tmp_path / "other")
