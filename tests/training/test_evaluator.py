"""What a run's evaluations leave: verdicts, grids, free knobs of the base model, and how much
pictures of a prompt differ."""

import json
import math

import pytest
import torch

from g2rpo.core.statistics import FEWEST_VALUES
from g2rpo.core.types import Reward
from g2rpo.evaluation.controls import CONTROL_PROMPTS, prompts_within
from g2rpo.evaluation.untrained import Controls
from g2rpo.monitor.alarms import Alarms, alike
from g2rpo.monitor.scores import chosen, read_picture, read_rows, right_of, scores_of
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.run import Run
from g2rpo.runtime.distributed import World
from tests.support.runs import brightness, finished, trainer


def results_of(run_dir, *overrides, **options):
    finished(trainer(run_dir, "trainer.iterations=2", *overrides, **options))
    rows = [row for row in Run(run_dir).read_log() if row["kind"] == "eval"]
    return json.loads((run_dir / "results.json").read_text()), rows


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_run_samples_free_knobs_of_the_untrained_model(tmp_path, tuning):
    """Before training or after it. Without initial noise, the base's pictures are sigmoid(prompt)
    all over."""
    results, _ = results_of(tmp_path, "evaluation.controls=true", f"policy.tuning={tuning}")
    controls = results["controls"]
    ways = {way["name"]: way for way in controls["ways"]}
    found = Controls.model_validate(controls)
    expected = torch.tensor([0.0, 0.1, 0.2]).sigmoid()
    assert controls["prompts"] == 3 and controls["training"] > 0
    assert ways["initial noise x 0"]["means"]["bright"] == pytest.approx(
        float(expected.mean()), abs=1e-5
    )
    by_hand = [way for name, way in ways.items() if name.startswith("guidance by hand")]
    # of six steps
    assert [way["evaluations"] for way in by_hand] == [8, 12] and ways["best of 16"][
        "readings"
    ] == 16
    assert (
        ways["best of 16"]["means"]["bright"]
        > ways["best of 2"]["means"]["bright"]
        > ways["base"]["means"]["bright"]
    )
    knobs = [way for name, way in ways.items() if not name.startswith(("base", "best of", "tuned"))]
    for name in ("bright", "dark"):
        best, row = found.best[name], results["rewards"][name]
        assert best.means[name] == max(way["means"][name] for way in knobs)
        base, tuned, half = (
            ways[way]["means"][name] for way in ("base", "tuned", "tuned, initial noise x 0.5")
        )
        assert best.leads[name].mean == pytest.approx(tuned - best.means[name], abs=1e-6)
        assert (base, tuned) == pytest.approx((row["base"], row["tuned"]), abs=1e-6)
        assert ways["tuned, initial noise x 0.5"]["leads"][name]["mean"] == pytest.approx(
            tuned - half, abs=1e-6
        )
    card = next(tmp_path.glob("*/README.md")).read_text()
    assert "with the best free knob" in card and "Training took" in card


def test_free_knobs_are_sampled_where_they_are_cheap(tmp_path):
    results, rows = results_of(tmp_path)
    assert "controls" not in results and not any("diversity" in row for row in rows)
    assert prompts_within("auto", 192, cost=100, evaluations=15_000) == 30
    assert prompts_within("auto", 192, cost=100, evaluations=10**7) == CONTROL_PROMPTS
    assert prompts_within("auto", 192, cost=100, evaluations=500 * FEWEST_VALUES - 1) == 0
    assert (prompts_within(True, 20, 100, 0), prompts_within(False, 20, 100, 10**7)) == (20, 0)


class Collapsing(GaussianPolicy):
    """Once it is trained, its pictures of a prompt differ by a share of what the base's do."""

    share = 0.3

    def decode(self, x):
        trained = bool((self.mean != self._base_mean).any())
        return 0.5 + (super().decode(x) - 0.5) * (
            self.share if trained and not self._in_base else 1
        )


@pytest.mark.parametrize(("share", "raised"), [(0.3, True), (0.8, False)])
def test_a_policy_whose_pictures_become_alike_raises_an_alarm(tmp_path, share, raised):
    policy = Collapsing()
    policy.share = share
    off = "alarms.pictures=off"
    results, rows = results_of(
        tmp_path, "evaluation.controls=true", off, policy=policy, rewards={"bright": brightness}
    )
    found = results["diversity"]
    assert ("diversity" in rows[-1].get("alarms", {})) == raised
    assert found["tuned"] / found["base"] == pytest.approx(share, rel=0.1) and (
        found["prompts"],
        found["noises"],
    ) == (3, 4)


@pytest.mark.parametrize(
    ("base", "now", "said"),
    [
        ((0.4, 0.1), (0.1, 0.09), ""),
        ((0.4, 0.1), (0.3, 0.04), "right pictures"),
        ((0.4, None), (0.1, 0.09), "pictures"),
        ((0.4, 0.1), (0.3, None), ""),
    ],
)
def test_where_right_pictures_are_known_their_diversity_raises_the_alarm(base, now, said):
    """Wrong pictures differ from right ones, so pictures become alike when more of them are
    right."""
    values = [{"diversity": every, "diversity_right": right} for every, right in (base, now)]
    rows = [{"iteration": number, **own} for number, own in enumerate(values)]
    found = alike(Alarms([], [], 1.0, rows=rows)) or ""
    assert found.startswith(f"{said} of one prompt" if said else "") and bool(found) == bool(said)


class Half(Reward):
    """A picture is right if it is at least half bright."""

    right = 0.5

    def __call__(self, images, prompts):
        return brightness(images, prompts)


def test_a_run_says_how_many_pictures_are_right(tmp_path):
    run = finished(trainer(tmp_path, rewards={"bright": Half()}))
    said = json.loads((tmp_path / "results.json").read_text())["right"]
    rows = [row for row in Run(tmp_path).read_log() if row["kind"] == "eval"]
    sides = base, tuned = run.evaluator.baseline, run.score_heldout()
    shares = [float((side.scores["bright"] >= 0.5).float().mean()) for side in sides]
    assert [said["base"], said["tuned"]] == [rows[0]["right"], rows[-1]["right"]] == shares
    assert said["error"] == rows[-1]["right_stderr"] and rows[0]["right_stderr"] == 0
    assert said["least"] == {"bright": 0.5} and "in_words" not in said
    places, _ = chosen([base.right, tuned.right], 8, 3)
    for iteration, side in zip((0, 4), sides, strict=True):
        table = read_rows(run.run.scores(iteration))
        assert torch.equal(scores_of(table)["bright"], side.scores["bright"]) and torch.equal(
            right_of(table), side.right
        )
        for place in places:
            assert torch.equal(
                read_picture(run.run.pictures(iteration) / f"{place:06d}.png"), side.images[place]
            )


def test_pictures_before_and_after_are_in_the_proportions_of_all():
    """Ten prompts: 4 became right, 1 wrong, 2 stayed right, 2 wrong, 1 has no verdict. Of 4 that is
    1.6, .4, .8, .8 and .4: 1 by rounding down, and the three largest remainders are those of both
    that stayed and of what became right."""
    before = torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 0, 0, math.nan])
    after = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 1, 1, 1])
    places, how = chosen([before, after], 4, 10)
    assert places == [0, 2, 3, 6]
    assert how == (
        "4 of 10 held-out prompts, in the proportions of all: 2 of 4 that became right, 0 of 1 that became wrong, "
        "1 of 2 that stayed right, 1 of 2 that stayed wrong, 0 of 1 that have no verdict"
    )
    assert chosen([before[:5], before[:5]], 2, 5)[1].endswith(
        "none that became right, none that became wrong, 1 of 2 that stayed right, 1 of 3 that stayed wrong"
    )
    for right in ([before], [before, None], [None, None]):
        assert chosen(right, 4, 10) == (
            [0, 1, 2, 3],
            "The first 4 of 10 held-out prompts, in their order",
        )
    assert chosen([None], 8, 3)[0] == [0, 1, 2]


def test_ranks_that_all_score_all_prompts_take_the_scores_of_rank_0(monkeypatch):
    """A judge that answers one rank and not another would let them decide differently."""
    t = trainer(None, "trainer.prompts_per_iteration=8", world=World(1, 8))
    monkeypatch.setattr(World, "gather", lambda self, own: torch.cat([torch.zeros_like(own), own]))
    scores = t.evaluator.evaluate(0, lambda rows: None).scores
    assert all(not values.any() and len(values) == 3 for values in scores.values())
