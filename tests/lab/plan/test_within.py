"""Overrides by which a run ends in a given time on a card."""

import io

import pytest
from rich.console import Console

from g2rpo.cli.plan import show_within
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.fit import FEWEST_ITERATIONS, Within, for_time, overrides_of, plan_within
from g2rpo.lab.plan.plan import Planner, find_target
from tests.support.variants import few

LONG = [
    *("algorithm.branch_steps=[0,1]", "sampling.num_steps=4", "trainer.iterations=200"),
    # leaves few cuts to be tried
    *("algorithm.granularities=[1]", "sampling.tails.solver=dpmpp2m"),
    "trainer.prompts_per_iteration=9",
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "prompts"), [(1, 4), (3, 6)])
def test_cuts_are_made_until_the_run_fits_and_the_overrides_take_that_long(
    tiny_config, ranks, prompts
):
    """Three ranks cannot divide four prompts."""
    recipe = str(tiny_config)
    alone = plan_within(recipe, [*LONG, "evaluation.every_minutes=9"], "9999h", "h100", ranks)
    assert any("that the clock adds are not counted" in note for note in alone.notes)
    assert alone.steps == alone.overrides == () and alone.seconds == alone.before
    fitted = plan_within(recipe, LONG, f"{0.15 * alone.before:f}s", "h100", ranks)
    times = [alone.before, *(step.seconds for step in fitted.steps)]
    assert times == sorted(times, reverse=True) and len(times) > 2
    assert fitted.seconds == times[-1] <= 0.15 * alone.before
    assert fitted.steps[-1].overrides[0].startswith("trainer.iterations=")
    assert all(step.worth for step in fitted.steps) and fitted.needed <= fitted.capacity
    planner, card = Planner(recipe, LONG, ranks), find_target("h100")
    offered = overrides_of(list(for_time(planner.plan(), card)))
    assert f"trainer.prompts_per_iteration={prompts}" in offered
    plan = planner.plan(*fitted.overrides)
    assert plan.seconds(card.card).run == fitted.seconds


@pytest.mark.slow  # a plan
def test_a_run_with_fewer_held_out_prompts_or_iterations_is_counted_with_them(tiny_config):
    planner = Planner(str(tiny_config), ["evaluation.num_prompts=2", "trainer.iterations=40"])
    whole = planner.plan()
    less = planner.plan("evaluation.num_prompts=1", "trainer.iterations=1")
    assert (whole.counts.heldout, less.counts.heldout) == (2, 1)
    assert less.distinct_prompts < whole.distinct_prompts


@pytest.mark.slow  # a plan
def test_the_least_of_a_short_run_is_that_run(tiny_config):
    with pytest.raises(UserError, match="the least on .* s for 5 iterations"):
        plan_within(str(tiny_config), [*LONG, "trainer.iterations=5"], "0.001s", "h100")


@pytest.mark.slow
@pytest.mark.parametrize("scale", [4.5, 1.0])
def test_classifier_free_guidance_may_be_cut_from_training(tiny_config, sd3_directory, scale):
    own = [f"policy.path={sd3_directory}", f"policy.guidance_scale={scale}"]
    plan = Planner(str(tiny_config), own).plan()
    offered = overrides_of(list(for_time(plan, find_target("h100"))))
    assert ("sampling.guidance_scale=0" in offered) == (scale > 1)


@pytest.mark.parametrize(
    ("ranks", "launched"),
    [
        ((1, 1), "g2rpo"),
        ((4, 4), "torchrun --nproc-per-node 4 -m g2rpo"),
        ((16, 8), "torchrun --nnodes 2 --nproc-per-node 8 -m g2rpo"),
    ],
)
def test_the_command_has_the_overrides_that_were_given(ranks, launched):
    cuts = Within(
        recipe="my [1].yaml",
        card="H100",
        limit=3600,
        before=1e5,
        steps=(),
        overrides=("algorithm.granularities=[1]",),
        needed=2**30,
        capacity=2**31,
        seconds=3000,
        ranks=ranks[0],
        ranks_per_node=ranks[1],
        notes=("On the CPU: hps.",),
    )
    console = Console(file=io.StringIO(), width=80)
    show_within(cuts, ["policy.lora_rank=16"], "1h", console)
    *_, found, command, note = console.file.getvalue().splitlines()
    assert ("on each of 2 machines" in found) == (ranks[0] > ranks[1])
    assert note == "On the CPU: hps."
    assert command == (
        f"{launched} train 'my [1].yaml' policy.lora_rank=16 'algorithm.granularities=[1]' --within 1h"
    )


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
