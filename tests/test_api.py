"""The command line's work from Python: objects take the place of names, and the rest is as the recipe says."""

import pytest
import torch

from g2rpo import api
from g2rpo.algorithms.mixgrpo import MixGRPO
from g2rpo.commands.train import load_config
from g2rpo.errors import UserError
from g2rpo.metrics import read_metrics
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.runs import read_config
from tests.runs import PROMPTS, brightness, darkness


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


def test_objects_take_the_place_of_everything_that_a_recipe_names(tmp_path):
    notes, policy = Notes(), GaussianPolicy()
    objects = {"policy": policy, "prompts": PROMPTS, "heldout": PROMPTS[:3], "algorithm": MixGRPO(group_size=4)}
    shorter = ["trainer.iterations=2", "sampling.num_steps=6", "evaluation.every=2", "optim.learning_rate=0.05"]

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
    assert trainer.policy is policy and isinstance(trainer.algorithm, MixGRPO) and trainer.config.recipe == "scenes"
    rows = list(trainer.train())
    assert [row["kind"] for row in rows] == ["eval", "train", "train", "eval"]
    assert rows == read_metrics(tmp_path / "run")
    assert notes.seen == [
        ("start", "run", 0), ("eval", 0, ["eval/samples"]), ("train", 1, []), ("train", 2, []), ("eval", 2, ["eval/samples"]),
        ("finish", True),
    ]  # fmt: skip
    table = trainer.finish()
    assert table["bright"].tuned == pytest.approx(-table["dark"].tuned, abs=1e-6)
    again = [trainer.sample(["0", "0.1"], seed=seed) for seed in (3, 3, 4)]
    assert again[0].shape[0] == 2 and torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])

    with pytest.raises(UserError, match="already holds a run"):
        made()
    more = made(["trainer.iterations=3"], resume=True)
    assert [row["iteration"] for row in more.train()] == [3, 3]
    assert read_config(tmp_path / "run").rewards["bright"].kind == api.OBJECT


def test_a_weight_in_the_config_is_that_of_the_object():
    overrides = ["rewards.bright.weight=0.25", "trainer.iterations=1"]
    objects = {"policy": GaussianPolicy(), "prompts": PROMPTS, "heldout": PROMPTS}
    trainer = api.trainer("scenes", overrides, rewards={"bright": brightness, "dark": darkness}, judges={}, **objects)
    assert trainer.weights.tolist() == [0.25, 1.0] and trainer.judges == {}


def test_without_objects_it_is_what_the_recipe_says():
    trainer = api.trainer("scenes", ["evaluation.num_prompts=2", "trainer.iterations=1"])
    assert trainer.config == load_config("scenes", ["evaluation.num_prompts=2", "trainer.iterations=1"])
    assert list(trainer.rewards) == ["scene_accuracy"] and len(trainer.heldout) == 2 and trainer.run_dir is None


def test_a_finished_run_paints_is_judged_and_reported(tmp_path, tiny_config):
    run = tmp_path / "run"
    trainer = api.trainer(str(tiny_config), ["optim.learning_rate=0.05"], run, rewards={"bright": brightness})
    list(trainer.train())
    trainer.finish()
    trainer.export()
    pictures = api.sample(run, ["a red circle", "two blue squares"])
    torch.testing.assert_close(pictures, trainer.sample(["a red circle", "two blue squares"]), atol=1e-5, rtol=0)
    base = api.sample(run, ["a red circle", "two blue squares"], base=True)
    assert not torch.allclose(pictures, base, atol=1e-4)
    table = api.evaluate(run, {"bright": brightness}, ["a red circle", "two blue squares"])
    assert table["bright"].tuned == pytest.approx(float(brightness(pictures, None).mean()), abs=1e-5)
    assert table["bright"].base == pytest.approx(float(brightness(base, None).mean()), abs=1e-5)
    assert api.report(run) == run / "report.html" and "a red circle" in (run / "report.html").read_text()


def test_a_study_from_python_is_the_commands(tmp_path, tiny_config):
    cells = {"one": ["algorithm.granularities=[1]"], "more": ["budget=2"]}
    results = api.study(str(tiny_config), cells, tmp_path / "study", budget="iterations=1", seeds=1, jobs=2)
    assert {name: spent["iterations"] for name, spent in results["spent"].items()} == {"one": 1, "more": 2}
    assert cells["more"] == ["budget=2"]  # is left alone
    with pytest.raises(UserError, match="cell one: algorithm: branch_steps"):
        api.study(str(tiny_config), {"one": ["algorithm.branch_steps=[99]"]}, tmp_path / "other")
