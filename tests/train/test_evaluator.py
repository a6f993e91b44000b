"""What a run's evaluations leave: verdicts, grids, and how much pictures of a prompt differ."""

import json
import math

import pytest
import torch

from g2rpo.core.distributed import World
from g2rpo.core.rewards import Reward
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train import evaluator
from g2rpo.train.command import compare_all
from g2rpo.train.evaluation.heldout import chosen, read_picture, read_rows, right_of
from g2rpo.train.monitor.alarms import Alarms, alike
from g2rpo.train.run.folder import Run
from tests.support.runs import brightness, darkness, finished, log, trainer


def results_of(run_dir, *overrides, **options):
    """What a run of two iterations leaves, and its rows of evaluations."""
    finished(trainer(run_dir, "trainer.iterations=2", *overrides, **options))
    rows = [row for row in log(run_dir) if row["kind"] == "eval"]
    return json.loads((run_dir / "results.json").read_text()), rows


def test_the_final_comparison_ends_where_it_said(tmp_path):
    t = trainer(tmp_path, "trainer.iterations=1", judges={"dark": darkness})
    list(t.train())
    t.final, told = None, []
    compare_all(t, told.append)
    dones = [event.done for event in told]
    assert {event.total for event in told} == {dones[-1]} and dones == sorted(set(dones))


def test_what_is_not_known_is_null_in_the_files_of_a_run(tmp_path):
    """The error of one prompt."""
    results, _ = results_of(tmp_path, prompts=["0"])
    assert results["rewards"]["bright"]["error"] is None
    assert math.isnan(Run(tmp_path).read_results().rewards["bright"].error)


class Collapsing(GaussianPolicy):
    """Once it is trained, its pictures of a prompt differ by a share of what the base's do."""

    share = 0.3

    def decode(self, x):
        trained = bool((self.mean != self._base_mean).any()) and not self._in_base
        return 0.5 + (super().decode(x) - 0.5) * (self.share if trained else 1)


def test_a_policy_whose_pictures_become_alike_raises_an_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "SPREAD_SHARE", math.inf)
    results, rows = results_of(tmp_path, "alarms.pictures=off", policy=Collapsing())
    found = results["diversity"]
    assert "diversity" in rows[-1]["alarms"] and (found["prompts"], found["noises"]) == (3, 4)
    assert found["tuned"] / found["base"] == pytest.approx(Collapsing.share, rel=0.1)


@pytest.mark.parametrize(
    ("base", "now", "said"),
    [
        ((0.4, 0.1), (0.1, 0.09), None),
        ((0.4, 0.1), (0.3, 0.04), "right pictures of one prompt"),
        ((0.4, None), (0.1, 0.09), "pictures of one prompt"),
        ((0.4, 0.1), (0.3, None), None),
    ],
)
def test_where_right_pictures_are_known_their_diversity_raises_the_alarm(base, now, said):
    """Wrong pictures differ from right ones, so pictures become alike when more of them are
    right."""
    rows = [
        {"kind": "eval", "iteration": iteration, "diversity": every, "diversity_right": right}
        for iteration, (every, right) in ((0, base), (80, now))
    ]
    found = alike(Alarms([], 1.0, rows=rows))
    assert found is said or found.startswith(said)


class Half(Reward):
    """A picture is right if it is at least half bright."""

    right = 0.5

    def __call__(self, images, prompts):
        return brightness(images, prompts)


def test_a_run_says_how_many_pictures_are_right(tmp_path):
    run = finished(trainer(tmp_path, "trainer.iterations=2", rewards={"bright": Half()}))
    said = json.loads((tmp_path / "results.json").read_text())["right"]
    rows = [row for row in log(tmp_path) if row["kind"] == "eval"]
    sides = run.evaluator.baseline, run.score_heldout()
    shares = [float((side.scores["bright"] >= 0.5).float().mean()) for side in sides]
    assert [said["base"], said["tuned"]] == [rows[0]["right"], rows[-1]["right"]] == shares
    assert said["error"] == rows[-1]["right_stderr"] and rows[0]["right_stderr"] == 0
    table = read_rows(run.run.scores(2))
    assert torch.equal(right_of(table), sides[1].right)
    kept = read_picture(run.run.pictures(2) / "000000.png")
    assert torch.equal(kept, sides[1].images[0])


def test_pictures_before_and_after_are_in_the_proportions_of_all():
    """Ten prompts: 4 became right, 1 wrong, 2 stayed right, 2 wrong, 1 has no verdict. Of 4 that is
    1.6, .4, .8, .8 and .4: 1 by rounding down, and the three largest remainders are those of both
    that stayed and of what became right."""
    before = torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 0, 0, math.nan])
    after = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 1, 1, 1])
    places, how = chosen([before, after], 4, 10)
    assert places == [0, 2, 3, 6]
    assert "2 of 4 that became right, 0 of 1 that became wrong, 1 of 2 that stayed right" in how
    for right in ([before], [before, None], [None, None]):
        assert chosen(right, 4, 10)[0] == [0, 1, 2, 3]
    assert chosen([None], 8, 3)[0] == [0, 1, 2]


def test_ranks_that_all_score_all_prompts_take_the_scores_of_rank_0(monkeypatch):
    """A judge that answers one rank and not another would let them decide differently."""
    t = trainer(None, "trainer.prompts_per_iteration=8", world=World(1, 8))
    monkeypatch.setattr(World, "gather", lambda self, own: torch.cat([torch.zeros_like(own), own]))
    scores = t.evaluator.evaluate(0, lambda rows: None).scores
    assert all(not values.any() and len(values) == 3 for values in scores.values())
