"""Overrides by which a run ends in a given time on a card."""

import json

import pytest

from g2rpo.core.errors import UserError
from g2rpo.lab.plan.plan import find_target
from g2rpo.lab.plan.planner import Planner
from g2rpo.lab.plan.within import LEAST, cuts, plan_within
from tests.support.commands import g2rpo

LONG = ["algorithm.branch_steps=[0,1]", "sampling.num_steps=4", "trainer.iterations=200", "trainer.prompts_per_iteration=8"]


def planned(recipe, overrides):
    return Planner(str(recipe), overrides).plan()


def test_a_run_within_its_time_is_left_alone(tiny_config):
    fitted = plan_within(str(tiny_config), LONG, 1e9, "h100")
    assert fitted.steps == () and fitted.overrides == () and fitted.seconds == fitted.before


def test_cuts_are_made_until_the_run_fits_and_the_overrides_take_that_long(tiny_config):
    before = plan_within(str(tiny_config), LONG, 1e9, "h100").before
    mild, harsh = (plan_within(str(tiny_config), LONG, share * before, "h100") for share in (0.8, 0.15))
    assert mild.steps == harsh.steps[: len(mild.steps)] and len(mild.steps) < len(harsh.steps)
    times = [before, *(step.seconds for step in harsh.steps)]
    assert times == sorted(times, reverse=True) and harsh.seconds == times[-1] <= 0.15 * before
    assert harsh.steps[-1].overrides[0].startswith("trainer.iterations=")
    for fitted in (mild, harsh):
        assert all(step.worth for step in fitted.steps) and fitted.needed <= fitted.capacity
        seconds = planned(tiny_config, [*LONG, *fitted.overrides]).seconds(find_target("h100").card)
        assert seconds.run == pytest.approx(fitted.seconds, rel=0.02)  # fewer prompts are encoded


@pytest.mark.parametrize("scale", [4.5, 1.0])
def test_classifier_free_guidance_may_be_cut_from_training(tiny_config, sd3_directory, scale):
    plan = planned(tiny_config, [f"policy.path={sd3_directory}", f"policy.guidance_scale={scale}"])
    offered = [override for cut in cuts(plan, find_target("h100")) for override in cut.overrides]
    assert ("sampling.guidance_scale=0" in offered) == (scale > 1)


def test_the_command_prints_what_to_run(capsys, tiny_config):
    code, out, err = g2rpo(capsys, "plan", tiny_config, *LONG, "--device", "h100", "--within", "3h", "--json")
    assert code == 0 and json.loads(out)["limit"] == 10800, err
    code, out, err = g2rpo(capsys, "plan", tiny_config, *LONG, "--device", "h100", "--within", "3h")
    assert code == 0 and out.rstrip().endswith("--within 3h") and f"g2rpo train {tiny_config}" in out, err


@pytest.mark.parametrize(
    ("device", "limit", "message"), [("h100", 1e-6, f"the least on .* for {LEAST} iterations"), ("cpu", 3600.0, "name a card")]
)
def test_what_cannot_be_is_one_message(tiny_config, device, limit, message):
    with pytest.raises(UserError, match=f"--within: .*{message}"):
        plan_within(str(tiny_config), LONG, limit, device)
