"""The command line's work from Python: objects take the place of names, and the rest is as the
recipe says."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import yaml

from g2rpo import api
from g2rpo.algorithms.flow_grpo import MixGRPO
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.run import Run
from tests.support import processes  # noqa: F401  which a study's jobs are forked from
from tests.support.commands import done, g2rpo, refused
from tests.support.runs import PROMPTS, brightness, darkness
from tests.support.variants import few


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
    notes, policy = Notes(), GaussianPolicy()
    objects = {
        "policy": policy,
        "prompts": PROMPTS,
        "heldout": PROMPTS[:3],
        "algorithm": MixGRPO(group_size=4),
    }
    shorter = [
        "trainer.iterations=2",
        "sampling.num_steps=6",
        "evaluation.every=2",
        "optim.learning_rate=0.05",
    ]

    def made(overrides=(), **more):
        rewards, judges = {"bright": brightness}, {"dark": darkness}
        return api.trainer(
            "scenes",
            [*shorter, *overrides],
            tmp_path / "run",
            rewards=rewards,
            judges=judges,
            trackers=[notes],
            **objects,
            **more,
        )

    trainer = made()
    assert (
        trainer.policy is policy
        and isinstance(trainer.algorithm, MixGRPO)
        and trainer.config.recipe == "scenes"
    )
    rows = list(trainer.train())
    assert [row["kind"] for row in rows] == ["eval", "train", "train", "eval"]
    assert rows == Run(tmp_path / "run").read_log()
    assert notes.seen == [
        ("start", "run", 0), ("eval", 0, ["eval/samples"]), ("train", 1, []), ("train", 2, []), ("eval", 2, ["eval/samples"]),
        ("finish", True),
    ]  # fmt: skip
    table = trainer.finish()
    assert table["bright"].tuned == pytest.approx(-table["dark"].tuned, abs=1e-6)
    again = [trainer.sample(["0", "0.1"], seed=seed) for seed in (3, 3, 4)]
    assert (
        again[0].shape[0] == 2
        and torch.equal(again[0], again[1])
        and not torch.equal(again[0], again[2])
    )

    with pytest.raises(UserError, match="already holds a run"):
        made()
    more = made(["trainer.iterations=3"], resume=True)
    assert [row["iteration"] for row in more.train()] == [3, 3]
    kept = Run(tmp_path / "run").read_config()
    assert (
        kept.rewards["bright"].kind == "object:tests.support.runs.brightness"
        and kept.prompts.train == "object"
    )


def test_a_weight_in_the_config_is_that_of_the_object():
    overrides = ["rewards.bright.weight=0.25", "trainer.iterations=1"]
    objects = {"policy": GaussianPolicy(), "prompts": PROMPTS, "heldout": PROMPTS}
    trainer = api.trainer(
        "scenes", overrides, rewards={"bright": brightness, "dark": darkness}, judges={}, **objects
    )
    assert trainer.loop.weights.tolist() == [0.25, 1.0] and trainer.judges == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"prompts": "a red circle"},
            r"prompts: should be a list of texts, such as \['a red circle'\], is 'a red circle'",
        ),
        ({"heldout": []}, "heldout: is empty; give at least one prompt"),
        (
            {"overrides": "trainer.iterations=2"},
            r"overrides: should be a list of texts, such as \['trainer.iterations=2'\]",
        ),
        (
            {"rewards": brightness},
            "rewards: should be a mapping from names to functions or objects, is <function brightness",
        ),
        (
            {"judges": {"red": "red.py:red"}},
            r"judges\['red'\]: should be a function or an object that can be called",
        ),
        (
            {"algorithm": "mixgrpo"},
            r"algorithm: should be an object; a name goes into the overrides: \['algorithm.name=mixgrpo'\]",
        ),
        (
            {"rewards": {"own": Notes}},
            r"rewards\['own'\]: is a class; give an object of it, such as Notes\(\)",
        ),
    ],
)
def test_what_is_no_list_and_no_mapping_of_rewards_is_refused_before_anything_is_loaded(
    monkeypatch, given, message
):
    monkeypatch.setattr(api, "load_config", None)  # would be called next
    with pytest.raises(UserError, match=message):
        api.trainer("scenes", **given)


@pytest.mark.parametrize(
    "call", [lambda text: api.sample("none", text), lambda text: api.evaluate("none", {}, text)]
)
def test_one_text_is_no_list_of_prompts(call):
    with pytest.raises(UserError, match="prompts: should be a list of texts"):
        call("a red circle")


def test_without_objects_it_is_what_the_recipe_says():
    trainer = api.trainer("scenes", ["evaluation.num_prompts=2", "trainer.iterations=1"])
    assert trainer.config == load_config(
        "scenes", ["evaluation.num_prompts=2", "trainer.iterations=1"]
    )
    assert (
        list(trainer.rewards) == ["scene_accuracy"]
        and len(trainer.heldout) == 2
        and trainer.run_dir is None
    )


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


@pytest.mark.parametrize("name", few(CLASSES, "OneAtATime".__eq__))
def test_an_algorithm_of_ones_own_is_recorded_as_what_it_is_and_never_taken_for_another(
    capsys, tmp_path, tiny_config, name
):
    run = tmp_path / "run"

    def made(**more):
        return api.trainer(str(tiny_config), run_dir=run, algorithm=CLASSES[name], **more)

    trainer = made()
    list(trainer.train())
    trainer.finish()
    kept = yaml.safe_load((run / "config.yaml").read_text())["algorithm"]
    assert kept.pop("name") == f"object:tests.test_api.{name}"
    assert kept["group_size"] == 4 and (
        name == "Own" or (kept["pause"], kept["shape"]) == (5, "object:math.sqrt")
    )
    assert f"tuned with tests.test_api.{name}" in (run / "adapter" / "README.md").read_text()
    assert list(made(resume=True).train()) == []
    with pytest.raises(UserError, match=r"algorithm\.group_size|algorithm\.pause"):
        api.trainer(str(tiny_config), run_dir=run, algorithm=OneAtATime(group_size=4), resume=True)

    for words in (
        ["train", "CONFIG"],
        ["train", "CONFIG", "--run-dir", run, "--resume"],
        ["plan", "CONFIG"],
        ["demo", run],
    ):
        assert (
            f"algorithm.name=object:tests.test_api.{name}: was given as a Python object"
            in refused(
                capsys, *[run / "config.yaml" if word == "CONFIG" else word for word in words]
            )
        )
    for words in (["report", run], ["sample", run, "a red circle", "--out", tmp_path / "pictures"]):
        done(capsys, *words)
    assert f"object:tests.test_api.{name}" in (run / "report.html").read_text()
    named = [
        "train",
        run / "config.yaml",
        "algorithm.name=mixgrpo",
        "algorithm.group_size=3",
        "--run-dir",
        tmp_path / "mix",
    ]
    assert (
        g2rpo(capsys, *named)[0] == 0
        and Run(tmp_path / "mix").read_config().algorithm.name == "mixgrpo"
    )


def test_a_finished_run_paints_is_judged_and_reported(tmp_path, tiny_config):
    run = tmp_path / "run"
    trainer = api.trainer(
        str(tiny_config), ["optim.learning_rate=0.05"], run, rewards={"bright": brightness}
    )
    list(trainer.train())
    trainer.finish()
    trainer.export()
    pictures = api.sample(run, ["a red circle", "two blue squares"])
    torch.testing.assert_close(
        pictures, trainer.sample(["a red circle", "two blue squares"]), atol=1e-5, rtol=0
    )
    base = api.sample(run, ["a red circle", "two blue squares"], base=True)
    assert not torch.allclose(pictures, base, atol=1e-4)
    sampler = api.sampler(run)
    assert torch.equal(sampler.sigmas, trainer.evaluator.sampler.sigmas)
    torch.testing.assert_close(
        sampler.pictures(["a red circle", "two blue squares"]), pictures, atol=1e-5, rtol=0
    )
    table = api.evaluate(run, {"bright": brightness}, ["a red circle", "two blue squares"])
    assert table["bright"].tuned == pytest.approx(
        float(brightness(pictures, None).mean()), abs=1e-5
    )
    assert table["bright"].base == pytest.approx(float(brightness(base, None).mean()), abs=1e-5)
    assert (
        api.report(run) == run / "report.html"
        and "a red circle" in (run / "report.html").read_text()
    )


def test_a_study_from_python_is_the_commands(tmp_path, tiny_config):
    cells = {"one": ["algorithm.granularities=[1]"], "more": ["budget=2"]}
    results = api.study(
        str(tiny_config), cells, tmp_path / "study", budget="iterations=1", seeds=1, jobs=2
    )
    assert {name: spent["iterations"] for name, spent in results["spent"].items()} == {
        "one": 1,
        "more": 2,
    }
    assert cells["more"] == ["budget=2"]  # is left alone
    with pytest.raises(UserError, match="cell one: algorithm: branch_steps"):
        api.study(str(tiny_config), {"one": ["algorithm.branch_steps=[99]"]}, tmp_path / "other")


def test_a_reward_that_compares_sees_the_base_beside_tuned_weights(tmp_path, tiny_config):
    """Also where the base's weights were all replaced."""
    run, pairs = tmp_path / "run", []

    def compares(images, prompts):
        pairs.append(images)
        return torch.zeros(len(images))

    compares.group = True
    settings = ["policy.tuning=full", "optim.learning_rate=0.01", "trainer.iterations=1"]
    trainer = api.trainer(str(tiny_config), settings, run, rewards={"bright": brightness})
    list(trainer.train())
    trainer.finish()
    api.evaluate(run, {"it": compares}, ["a red circle"])
    base, tuned = (api.sample(run, ["a red circle"], base=base) for base in (True, False))
    assert not torch.allclose(base, tuned, atol=1e-4)
    torch.testing.assert_close(pairs[-1], torch.cat([tuned, base]), atol=1e-5, rtol=0)
