"""Hyper-parameters out of range: refused for every algorithm, by the same limits in a config and in
Python."""

import dataclasses
import re

import pytest

from g2rpo.algorithms.reward_gradient import FDFO
from g2rpo.config.algorithms import ALGORITHMS, title_of
from g2rpo.core.errors import UserError
from tests.support.runs import config

COUNT = [0, -3, "many"]
POSITIVE = ("churn", "eta", "clip_range", "advantage_clip", "divergence_limit")
POSITIVE += ("noise_weight", "mixing", "radius", "advantage_scale")
WRONG = {
    "group_size": [1, 0, "many"],
    "branch_steps": ["[]", "[-1]", "[1,1]", "all"],
    "granularities": ["[]", "[0]", "auto", "[[1,2]]"],
    "segments": ["[1]", "[2,2]"],
    "merged_steps": ["[]", "[0,1,1,1,1,1,1,1]"],
    "step_weights": ["[]", "[-1]", "all"],
    "update_every": ["often", 0, 1.5, -0.5],
    "ceiling": ["high"],  # any number may be one
    "old_schedule": ["[-1,0,0]", "[0,-1,0]", "[0,0,1]", "[0,0,-0.1]"],
    "kl_weight": [-1],
    "strength": [-1],
    **{key: [0, 1.5] for key in ("compression", "share", "power")},
    **{key: [0, -1e-4] for key in POSITIVE},
    "query_sigma": [0, 1],
    "beta": [0, -1],
    "held_out": [-0.1, 1],
    **{key: [-1] for key in ("good_weight", "bad_weight")},
    **dict.fromkeys(
        ("window_size", "window_iterations", "times", "target_steps", "steps_drawn"), COUNT
    ),
}
OWN = {("refl", "group_size"): COUNT}
FIELDS = {
    (each.name, str(each.type)): (name, each)
    for name, kind in ALGORITHMS.items()
    for each in dataclasses.fields(kind)
}
"""Every field with every limit that it has, and an algorithm with it."""


@pytest.mark.parametrize(
    ("name", "field"), FIELDS.values(), ids=lambda part: getattr(part, "name", part)
)
def test_a_value_out_of_range_is_refused_by_its_key(name, field):
    """All fields that hold numbers; words and switches have no other values."""
    chosen = getattr(ALGORITHMS[name](), field.name)
    if field.name == "name" or (isinstance(chosen, str | bool) and field.name != "update_every"):
        return
    for wrong in OWN.get((name, field.name), WRONG[field.name]):
        with pytest.raises(UserError, match=rf"^config: algorithm\.{field.name}[.:]") as refusal:
            config(f"algorithm.name={name}", f"algorithm.{field.name}={wrong}")
        assert "literal" not in str(refusal.value) and "constrained" not in str(refusal.value)
        if not isinstance(wrong, str):
            with pytest.raises(ValueError, match=field.name):
                ALGORITHMS[name](**{field.name: wrong})


SAID = """
name=flow_cps algorithm.eta=1 -> algorithm.eta: input should be less than 1, got 1
name=flow_grpo algorithm.batch_std=false -> unknown key 'algorithm.batch_std'
name=pave_grpo algorithm.update_every=branch -> algorithm.update_every
name=e_grpo algorithm.merged_steps=[1,2] -> one number for each of branch_steps
name=dgpo algorithm.times=0 -> algorithm.times
name=refl algorithm.eta=0.7 -> algorithm.eta
"""


@pytest.mark.parametrize("row", SAID.strip().splitlines())
def test_the_message_says_what_would_be_right(row):
    overrides, said = row.split(" -> ")
    with pytest.raises(UserError) as refusal:
        config(*f"algorithm.{overrides}".split())
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_updates_may_be_a_share_of_a_rollout():
    built = config("algorithm.name=fdfo", "algorithm.update_every=0.5")
    assert built.algorithm == FDFO(update_every=0.5)


def test_a_misspelt_field_is_refused_in_python_too():
    with pytest.raises(ValueError, match="gruop_size"):
        ALGORITHMS["g2rpo"](gruop_size=4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_names_itself_and_its_paper(name):
    """Of its own class: a class of the user's that inherits from one is not that paper's.
    DiffusionOPSD's has no number yet."""
    title, paper = title_of(ALGORITHMS[name]())
    assert title and (re.fullmatch(r"\d{4}\.\d{5}", paper) or name == "opsd")
