"""What a run samples beside its held-out pictures: free knobs of the base model, and how much pictures of one prompt differ."""

import json

import pytest
import torch

from g2rpo.evaluation.controls import FEWEST, PROMPTS, prompts_within
from g2rpo.monitor.image_statistics import spread
from g2rpo.policies.gaussian import GaussianPolicy
from tests.support.runs import brightness, trainer


def finished(run_dir, *overrides, **options):
    t = trainer(run_dir, "trainer.iterations=2", *overrides, **options)
    rows = list(t.train())
    t.finish()
    return json.loads((run_dir / "results.json").read_text()), rows


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_run_samples_free_knobs_of_the_untrained_model(tmp_path, tuning):
    """Before training or after it. Without first noise, the base's pictures are sigmoid(prompt) all over."""
    results, _ = finished(tmp_path, "evaluation.controls=true", f"policy.tuning={tuning}")
    controls = results["controls"]
    expected = torch.tensor([0.0, 0.1, 0.2]).sigmoid()
    assert controls["prompts"] == 3
    assert controls["means"]["first noise x 0"]["bright"] == pytest.approx(float(expected.mean()), abs=1e-5)
    for name in ("bright", "dark"):
        best = controls["best"][name]
        assert best["mean"] == max(means[name] for means in controls["means"].values())
        assert best["lead"]["mean"] == pytest.approx(best["tuned"] - best["mean"], abs=1e-6)
        assert best["base"] == pytest.approx(results["rewards"][name]["base"], abs=1e-6)
    assert "Without training, the best of" in next(tmp_path.glob("*/README.md")).read_text()


def test_free_knobs_are_sampled_where_they_are_cheap(tmp_path):
    results, rows = finished(tmp_path)
    assert "controls" not in results and not any("diversity" in row for row in rows)
    assert prompts_within("auto", 192, cost=100, evaluations=34_000) == 34
    assert prompts_within("auto", 192, cost=100, evaluations=10**7) == PROMPTS
    assert prompts_within("auto", 192, cost=100, evaluations=1000 * FEWEST - 1) == 0
    assert (prompts_within(True, 20, 100, 0), prompts_within(False, 20, 100, 10**7)) == (20, 0)


def test_spread_by_hand():
    """Two prompts: equal pictures, and pictures whose pixels all differ by .5, .5 and 0; a chessboard averages to grey."""
    pictures = torch.zeros(2, 3, 3, 4, 4)
    pictures[1, 2] = 0.5
    assert spread(pictures) == pytest.approx((0 + (0 + 0.5 + 0.5) / 3) / 2)
    assert spread((pictures * 255).to(torch.uint8)) == pytest.approx(1 / 6, abs=1 / 255)
    fine = torch.zeros(1, 2, 3, 64, 64)
    fine[0, 0, :, ::2, ::2] = fine[0, 0, :, 1::2, 1::2] = 1
    fine[0, 1] = 0.5
    assert spread(fine) == pytest.approx(0)
    assert spread(torch.stack([fine, fine], 2)) == pytest.approx(0)  # a clip


class Collapsing(GaussianPolicy):
    """Once it is trained, its pictures of a prompt differ by a share of what the base's do."""

    share = 0.3

    def decode(self, x):
        trained = bool((self.mean != self._base_mean).any())
        return 0.5 + (super().decode(x) - 0.5) * (self.share if trained and not self._in_base else 1)


@pytest.mark.parametrize(("share", "raised"), [(0.3, True), (0.8, False)])
def test_a_policy_whose_pictures_become_alike_raises_an_alarm(tmp_path, share, raised):
    policy = Collapsing()
    policy.share = share
    off = "alarms.pictures=off"
    results, rows = finished(tmp_path, "evaluation.controls=true", off, policy=policy, rewards={"bright": brightness})
    last = [row for row in rows if row["kind"] == "eval"][-1]
    assert ("diversity" in last.get("alarms", {})) == raised
    assert results["diversity"]["tuned"] / results["diversity"]["base"] == pytest.approx(share, rel=0.1)
    assert (results["diversity"]["prompts"], results["diversity"]["noises"]) == (3, 4)
