"""`g2rpo plan` as a person meets it."""

import io
import json
import re
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from rich.console import Console

from g2rpo.cli.plan import show_cards
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.core.devices import usable_memory
from g2rpo.lab.plan import answer, cards
from g2rpo.lab.plan.models import RewardCost
from g2rpo.lab.plan.plan import _cautions, find_target
from tests.support.commands import done, refused
from tests.support.runs import config, fits
from tests.support.tables import rows


def told(capsys, *arguments):
    return json.loads(done(capsys, "plan", *arguments, "--json"))


@pytest.mark.slow  # the whole model is traced twice
def test_the_papers_recipe_on_a_card_that_cannot_hold_it(capsys):
    plan = told(capsys, "flux1-dev-hps", "--device", "h200")
    counts, memory, instead = plan["counts"], plan["memory"], plan["instead"]
    assert plan["device"] == "NVIDIA H200" and counts["evaluations_per_prompt"] == 1700
    assert counts["the_run"]["evaluations"] == 8160000
    assert plan["parameters"] == 11901408320 == plan["trained_parameters"]
    trained = sum(memory["parts"][part] for part in ("trained weights", "moments"))
    assert not memory["fits"] and trained > 140e9
    assert "policy.tuning=lora" in instead["overrides"]
    assert instead["needed"] <= memory["capacity"]
    assert "of 989 TFLOP/s" in plan["seconds"]["basis"] and plan["seconds"]["run"] > 86400
    for missing in ("prompts.train=prompts/hpdv2_train", "evaluation.prompts=prompts/hpdv2_test"):
        assert any(note.startswith(f"{missing}.txt: prompt file") for note in plan["notes"])
    changed = told(capsys, "flux1-dev-hps", *instead["overrides"], "--device", "h200")["memory"]
    assert changed["fits"] and changed["needed"] == instead["needed"]


@pytest.mark.slow  # a large model is traced
def test_the_sizes_of_what_is_downloaded_and_written(capsys):
    """FLUX.1-dev's own files: 23.80 GB transformer, 9.52 T5, .25 CLIP, .17 VAE; ViT-H/14 with .99 B
    parameters, once for HPS and once for CLIP, and ViT-H of PickScore, and .45 B of ImageReward's.
    A LoRA of rank 64 in float32."""
    plan = told(capsys, "flux1-dev-evening", "--device", "rtx4090")
    memory, adapter = plan["memory"], 4 * plan["trained_parameters"]
    model, rewards = (memory["files"][f"the {part}"] / 1e9 for part in ("model", "rewards"))
    assert model == pytest.approx(23.80 + 9.52 + 0.25 + 0.17, rel=0.002)
    assert rewards == pytest.approx(2 * (3 * 0.99 + 0.45), rel=0.03)
    assert memory["checkpoint"] >= 3 * adapter
    assert memory["written"] >= 3 * memory["checkpoint"] + adapter


def test_the_tables_of_a_plan_for_a_cpu(capsys, tiny_config, sd3_directory):
    """Iterations of steps drawn at random differ: the product of a rounded mean would not be the
    mean of an iteration."""
    words = f"""policy.device=cpu policy.path={sd3_directory} policy.guidance_scale=4.5 --all
        algorithm.branch_schedule=random trainer.iterations=5 trainer.prompts_per_iteration=2"""
    text = " ".join(done(capsys, "plan", tiny_config, *words.split()).split())
    for said in (
        "with --within 5m it stops in time. On GPUs: --cards, or --device rtx4090.",
        "It fits this machine's CPU",
        "download and disk: the files of the model",
        "guidance takes two",
    ):
        assert said in text
    found = re.search(r"(\d+) prompts x (\d+) to (\d+) *│ *([\d.]+)", text)
    prompts, least, most, mean = map(float, found.groups())
    assert prompts * least < mean < prompts * most


def schedules():
    """Every algorithm, and every value of a field that says which steps an iteration takes: where
    others inherit the field, they have `random`, which draws."""
    seen = set()
    for name, kind in ALGORITHMS.items():
        choices = [
            (field, value)
            for field, hint in get_type_hints(kind).items()
            if field.endswith("schedule") and get_origin(hint) is Literal
            for value in get_args(hint)
        ]
        own = [choice for choice in choices if choice not in seen or choice[1] == "random"]
        seen.update(choices)
        words = [[f"algorithm.{field}={value}"] for field, value in own]
        yield from ([f"algorithm.name={name}", *fits(name), *word] for word in words or [[]])


@pytest.mark.slow
@pytest.mark.parametrize("words", [*schedules()], ids=" ".join)
def test_every_schedule_of_every_algorithm_can_be_planned(capsys, tiny_config, words):
    """What is drawn anew in every iteration is drawn from real numbers, though memory is traced
    with fake tensors."""
    small = "algorithm.group_size=3", "sampling.num_steps=8"
    with_gradient = "rewards.scene_accuracy=", "rewards.brightness=1"
    plan = told(capsys, tiny_config, *words, *small, *with_gradient, "--device", "a100")
    assert plan["counts"]["an_iteration"]["training_rows"] > 0
    assert plan["memory"]["working"]["training pass"] > 0


REFUSED = """
words policy.lora_above=0 policy.tuning=full policy.quantize=int8 --cards -> is for weights that are not trained
flux1-dev-hps --device h210 -> h200
flux1-dev-hps --ranks 3 -> cannot be divided evenly over 3 ranks
flux1-dev-hps --ranks 12 -> --ranks-per-node 8: 12 ranks do not fill such nodes; give a divisor of 12
flux1-dev-hps trainer.sharding=full -> plan for them with --ranks
TINY policy.height=33 -> multiples of 4
sd35-medium-lora policy.path=black-forest-labs/FLUX.1-dev -> is a FluxPipeline, but this recipe is for a
scenes policy.path=/no/such/model -> is no directory
"""


@pytest.mark.parametrize(("words", "message"), rows(REFUSED))
def test_wrong_input_is_one_message_and_exit_2(capsys, tiny_config, words, message):
    arguments = words.replace("TINY", str(tiny_config)).split()
    assert message in refused(capsys, "plan", *arguments)


@pytest.mark.slow  # a plan for every card
def test_cards_that_are_too_small_say_so(capsys, tiny_config, monkeypatch):
    """1 GiB is what CUDA itself is taken to need."""
    small = cards.Card("a small card", 1.0, 10, 5, 100, 100, 10, True, "none")
    monkeypatch.setitem(cards.CARDS, "small", small)
    own = "policy.dtype=bfloat16", "evaluation.every_minutes=9"
    fitting = told(capsys, tiny_config, *own, "--cards")
    assert fitting["h100"]["fits"] and fitting["h100"]["overrides"] == []
    assert not fitting["small"]["fits"] and fitting["small"]["overrides"] is None
    assert any("that the clock adds are not counted" in note for note in fitting["h100"]["notes"])


@pytest.mark.parametrize(("name", "said"), [("refl", True), ("g2rpo", False)])
def test_activations_that_the_gradient_of_rewards_keeps_are_said_to_be_missing(name, said):
    own = config(f"algorithm.name={name}", "trainer.micro_batch_size=2")
    costs = {key: RewardCost(size, 0.0, "cuda", "float32") for key, size in (("a", 9), ("b", 0))}
    result = SimpleNamespace(memory=SimpleNamespace(unknown=()), reward_costs=costs, config=own)
    own.rewards.update(dict.fromkeys(costs, next(iter(own.rewards.values()))))
    notes = list(_cautions(result, own))
    assert len(notes) == said and all("of 2 latents by a." in note for note in notes)


def test_a_table_of_80_columns_breaks_no_override():
    longest = [f"evaluation.rewards.{name}.options.device=cpu" for name in ("image_reward", "hps")]
    console = Console(file=io.StringIO(), width=80)
    row = answer.OnCard(longest, 2**34, 2**35, 1e5, ("Assumed.", "On the CPU: hps."))
    large = answer.OnCard([], 2**34, 2**36, 1e5, ("Assumed.",))
    show_cards("flux1-dev-lora", {"rtx6000ada": row, "a6000": row, "h100": large}, console)
    *table, commands, note, of_changes = console.file.getvalue().splitlines()
    assert f"changes 1: {' '.join(longest)}" == commands
    assert (note, of_changes) == ("Assumed.", "changes 1: On the CPU: hps.")
    assert not any("Assumed." in line for line in table)
    assert any("rtx6000ada" in line for line in table)
    assert all(len(line) <= 80 for line in table if not line.startswith("changes"))


@pytest.mark.parametrize("device", ["cpu:0", "mps"])
def test_what_shares_the_machines_memory_is_planned_with_it(monkeypatch, device):
    """They were taken for names of cards, and refused."""
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    target = find_target(device)
    assert (target.cuda, target.card, target.capacity) == (False, None, usable_memory())


@pytest.mark.slow  # a plan that tries all that would make the run fit
def test_ram_is_not_taken_for_a_cards_memory(capsys, tiny_config, monkeypatch):
    monkeypatch.setattr("g2rpo.lab.plan.plan.usable_memory", lambda: 1)
    narrow = "policy.device=cpu", "policy.dtype=bfloat16", "policy.quantize=int8"
    out = " ".join(done(capsys, "plan", tiny_config, *narrow).split())
    assert "does not fit" in out and "this machine's RAM" in out and "On GPUs: --cards" in out
