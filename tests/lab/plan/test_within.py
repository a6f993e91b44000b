"""Overrides by which a run ends in a given time on a card."""

import pytest

from g2rpo.core.errors import UserError
from g2rpo.lab.plan.fit import FEWEST_ITERATIONS, for_time, overrides_of, plan_within
from g2rpo.lab.plan.plan import Planner, find_target
from tests.support.commands import done
from tests.support.variants import few

LONG = [
    *("algorithm.branch_steps=[0,1]", "sampling.num_steps=4", "trainer.iterations=200"),
    # leaves few cuts to be tried
    *("algorithm.granularities=[1]", "sampling.tails.solver=dpmpp2m"),
    "trainer.prompts_per_iteration=8",
]


@pytest.mark.slow
def test_cuts_are_made_until_the_run_fits_and_the_overrides_take_that_long(tiny_config):
    recipe = str(tiny_config)
    alone = plan_within(recipe, LONG, "9999h", "h100")
    assert alone.steps == alone.overrides == () and alone.seconds == alone.before
    fitted = plan_within(recipe, LONG, f"{0.15 * alone.before:f}s", "h100")
    times = [alone.before, *(step.seconds for step in fitted.steps)]
    assert times == sorted(times, reverse=True) and len(times) > 2
    assert fitted.seconds == times[-1] <= 0.15 * alone.before
    assert fitted.steps[-1].overrides[0].startswith("trainer.iterations=")
    assert all(step.worth for step in fitted.steps) and fitted.needed <= fitted.capacity
    plan = Planner(recipe, [*LONG, *fitted.overrides]).plan()
    # fewer prompts are encoded
    assert plan.seconds(find_target("h100").card).run == pytest.approx(fitted.seconds, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [4.5, 1.0])
def test_classifier_free_guidance_may_be_cut_from_training(tiny_config, sd3_directory, scale):
    own = [f"policy.path={sd3_directory}", f"policy.guidance_scale={scale}"]
    plan = Planner(str(tiny_config), own).plan()
    offered = overrides_of(list(for_time(plan, find_target("h100"))))
    assert ("sampling.guidance_scale=0" in offered) == (scale > 1)


@pytest.mark.slow
def test_the_command_prints_what_to_run(capsys, tiny_config):
    out = done(capsys, "plan", tiny_config, *LONG, "--device", "h100", "--within", "3h")
    assert out.rstrip().endswith("--within 3h") and f"g2rpo train {tiny_config}" in out


@pytest.mark.parametrize(
    ("device", "time", "message"),
    few(
        [
            ("h100", "0.001s", f"the least on .* for {FEWEST_ITERATIONS} iterations"),
            ("cpu", "1h", "name a card"),
        ],
        lambda each: each[0] == "cpu",
    ),
)
def test_what_cannot_be_is_one_message(tiny_config, device, time, message):
    with pytest.raises(UserError, match=f"--within: .*{message}"):
        plan_within(str(tiny_config), LONG, time, device)
