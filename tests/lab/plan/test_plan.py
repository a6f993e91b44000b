"""`g2rpo plan` as a person meets it."""

import json
import re
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from g2rpo.config.algorithms import ALGORITHMS
from tests.support.commands import done, g2rpo, refused
from tests.support.runs import fits
from tests.support.variants import few


def told(capsys, *arguments):
    out = done(capsys, "plan", *arguments, "--json")
    return json.loads(out)


@pytest.mark.slow  # the whole model is traced twice
def test_the_papers_recipe_on_a_card_that_cannot_hold_it(capsys):
    plan = told(capsys, "flux1-dev-hps", "--device", "h200")
    assert (
        plan["device"] == "NVIDIA H200"
        and plan["counts"]["evaluations_per_prompt"] == 1700
        and plan["counts"]["the_run"]["evaluations"] == 8160000
    )
    assert plan["parameters"] == 11901408320 == plan["trained_parameters"]
    memory = plan["memory"]
    assert (
        not memory["fits"]
        and sum(memory["parts"][part] for part in ("trained weights", "gradients", "moments"))
        > 190e9
    )
    assert (
        "policy.tuning=lora" in plan["instead"]["overrides"]
        and plan["instead"]["needed"] <= memory["capacity"]
    )
    assert "of 989 TFLOP/s" in plan["seconds"]["basis"] and plan["seconds"]["run"] > 86400
    for missing in (
        "prompts.train=prompts/hpdv2_train.txt",
        "evaluation.prompts=prompts/hpdv2_test.txt",
    ):
        assert any(note.startswith(f"{missing}: prompt file") for note in plan["notes"])
    changed = told(capsys, "flux1-dev-hps", *plan["instead"]["overrides"], "--device", "h200")
    assert changed["memory"]["fits"] and changed["memory"]["needed"] == plan["instead"]["needed"]


@pytest.mark.slow  # a large model is traced
def test_the_sizes_of_what_is_downloaded_and_written(capsys):
    """FLUX.1-dev's own files: 23.80 GB transformer, 9.52 T5, .25 CLIP, .17 VAE; ViT-H/14 with .99 B
    parameters, once for HPS and once for CLIP, and ViT-H of PickScore, and .45 B of ImageReward's.
    A LoRA of rank 64 in float32."""
    plan = told(capsys, "flux1-dev-evening", "--device", "rtx4090")
    memory, adapter = plan["memory"], 4 * plan["trained_parameters"]
    assert memory["files"]["the model"] / 1e9 == pytest.approx(
        23.80 + 9.52 + 0.25 + 0.17, rel=0.002
    )
    assert memory["files"]["the rewards"] / 1e9 == pytest.approx(2 * (3 * 0.99 + 0.45), rel=0.03)
    assert (
        memory["checkpoint"] >= 3 * adapter
        and memory["written"] >= 3 * memory["checkpoint"] + adapter
    )


def test_a_plan_for_a_cpu_has_the_times_of_cards(capsys, tiny_config):
    plan = told(capsys, tiny_config, "policy.device=cpu")
    assert (
        plan["memory"]["fits"] and plan["seconds"] is None and plan["cards"]["rtx4090"]["run"] > 0
    )
    table = g2rpo(capsys, "plan", tiny_config, "policy.device=cpu")[1]
    assert (
        "rtx4090" in table
        and "It fits" in table
        and "download and disk: the files of the model" in table
    )


def schedules():
    """Every algorithm, and every value of a field that says which steps an iteration takes: where
    others inherit the field, they have `random`, which draws."""
    seen = set()
    for name, kind in ALGORITHMS.items():
        fields = {
            field: hint
            for field, hint in get_type_hints(kind).items()
            if field.endswith("schedule") and get_origin(hint) is Literal
        }
        choices = [(field, value) for field, hint in fields.items() for value in get_args(hint)]
        own = [choice for choice in choices if choice not in seen or choice[1] == "random"]
        seen.update(choices)
        words = [[f"algorithm.{field}={value}"] for field, value in own]
        yield from ([f"algorithm.name={name}", *fits(name), *word] for word in words or [[]])


QUICK = "mixgrpo"


def quick(words):
    name = words[0].removeprefix("algorithm.name=")
    return name == QUICK and (
        len(words) == 1 or words[-1].endswith("=random") or "schedule" not in words[-1]
    )


@pytest.mark.parametrize("words", few(schedules(), quick), ids=" ".join)
def test_every_schedule_of_every_algorithm_can_be_planned(capsys, tiny_config, words):
    """What is drawn anew in every iteration is drawn from real numbers, though memory is traced
    with fake tensors."""
    words = [*words, "algorithm.group_size=3", "sampling.num_steps=8"]
    plan = told(capsys, tiny_config, *words)  # seconds are another trace
    assert (
        plan["counts"]["an_iteration"]["training_rows"] > 0
        and plan["memory"]["working"]["training pass"] > 0
    )


def test_tables_tell_the_same(capsys, tiny_config, sd3_directory):
    model = [f"policy.path={sd3_directory}", "policy.guidance_scale=4.5"]
    out = done(capsys, "plan", tiny_config, *model, "--device", "a100")
    text = " ".join(out.split())
    assert "guidance takes two" in text and "by roofline" in text and "It fits" in text
    assert "network evaluations: 1 prompt x" in text


def test_evaluations_of_a_prompt_and_of_an_iteration_agree(capsys):
    """Iterations of a moving window differ: the product of a rounded mean would not be the mean of
    an iteration."""
    out = done(capsys, "plan", "scenes-fast", "--device", "a100")
    prompts, least, most, mean = re.search(
        r"(\d+) prompts x (\d+) to (\d+) *│ *([\d,.]+)", out
    ).groups()
    mean, least, most = (
        float(mean.replace(",", "")),
        int(prompts) * int(least),
        int(prompts) * int(most),
    )
    assert least < mean < most


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flux1-dev-hps", "--device", "h210"], "h200"),
        (["flux1-dev-hps", "--ranks", "3"], "cannot be divided evenly over 3 ranks"),
        (
            ["flux1-dev-hps", "--ranks", "12"],
            "--ranks-per-node 8: 12 ranks do not fill such nodes; give a divisor of 12",
        ),
        (["flux1-dev-hps", "trainer.sharding=full"], "plan for them with --ranks"),
        (["flux1-dev-hps", "policy.height=700"], "multiples of 16"),
        (
            ["scenes-fast", "algorithm.name=mixgrpo_flash", "sampling.tails.forecast=true"],
            "algorithm mixgrpo_flash does not fit sampling.tails: forecast",
        ),
        (
            ["sd35-medium-lora", "policy.path=black-forest-labs/FLUX.1-dev"],
            "is a FluxPipeline, but this recipe is for a",
        ),
        (["scenes", "policy.path=/no/such/model"], "is no directory"),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(capsys, arguments, message):
    assert message in " ".join(refused(capsys, "plan", *arguments).split())
