"""Overrides by which a run ends in a given time on a card."""

import pytest

from g2rpo.core.errors import UserError
from g2rpo.lab.plan.fit import FEWEST_ITERATIONS, for_time, overrides_of, plan_within
from g2rpo.lab.plan.plan import Planner, find_target
from tests.support.commands import done
from tests.support.variants import few

LONG = [
    "algorithm.branch_steps=[0,1]",
    "sampling.num_steps=4",
    "trainer.iterations=200",
    "trainer.prompts_per_iteration=8",
]
# leaves few cuts to be tried
LONG += ["algorithm.granularities=[1]", "sampling.tails.solver=dpmpp2m"]


def planned(recipe, overrides):
    return Planner(str(recipe), overrides).plan()


def test_cuts_are_made_until_the_run_fits_and_the_overrides_take_that_long(tiny_config):
    alone = plan_within(str(tiny_config), LONG, "9999h", "h100")
    before = alone.before
    assert alone.steps == alone.overrides == () and alone.seconds == before
    fitted = plan_within(str(tiny_config), LONG, f"{0.15 * before:f}s", "h100")
    times = [before, *(step.seconds for step in fitted.steps)]
    assert (
        times == sorted(times, reverse=True)
        and fitted.seconds == times[-1] <= 0.15 * before
        and len(times) > 2
    )
    assert fitted.steps[-1].overrides[0].startswith("trainer.iterations=")
    assert all(step.worth for step in fitted.steps) and fitted.needed <= fitted.capacity
    seconds = planned(tiny_config, [*LONG, *fitted.overrides]).seconds(find_target("h100").card)
    assert seconds.run == pytest.approx(fitted.seconds, rel=0.02)  # fewer prompts are encoded


@pytest.mark.parametrize("scale", [4.5, 1.0])
def test_classifier_free_guidance_may_be_cut_from_training(tiny_config, sd3_directory, scale):
    plan = planned(tiny_config, [f"policy.path={sd3_directory}", f"policy.guidance_scale={scale}"])
    offered = overrides_of(list(for_time(plan, find_target("h100"))))
    assert ("sampling.guidance_scale=0" in offered) == (scale > 1)


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
