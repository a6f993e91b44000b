"""Hyper-parameters out of range: refused for every algorithm, by the same limits in a config and in
Python."""

import dataclasses
import re

import pytest
import yaml

from g2rpo.config.algorithms import ALGORITHMS, title_of
from g2rpo.core.errors import UserError
from tests.support.runs import config
from tests.support.tables import rows


def test_a_misspelt_field_is_refused_in_python_too():
    with pytest.raises(ValueError, match="gruop_size"):
        ALGORITHMS["g2rpo"](gruop_size=4)


WRONG = """
group_size -> 1 0 many
branch_steps -> [] [-1] [1,1] all
granularities -> [] [0] auto [[1,2]]
segments -> [1] [2,2]
merged_steps -> [] [0,1,1,1,1,1,1,1]
step_weights -> [] [-1] all
update_every -> often 0 1.5 -0.5
ceiling -> high
old_schedule -> [-1,0,0] [0,-1,0] [0,0,1] [0,0,-0.1]
kl_weight strength good_weight bad_weight -> -1
compression share power -> 0 1.5
churn eta clip_range advantage_clip divergence_limit noise_weight mixing -> 0 -0.1
radius advantage_scale beta -> 0 -0.1
query_sigma -> 0 1
held_out -> -0.1 1
window_size window_iterations times target_steps steps_drawn -> 0 -3 many
"""
"""Fields, and values that they cannot have. Of a ceiling any number may be one; ReFL's group may be
a single picture."""
VALUES = {field: values.split() for fields, values in rows(WRONG) for field in fields.split()}
LIMITS = {
    (each.name, str(each.type)): (name, each)
    for name, kind in ALGORITHMS.items()
    for each in dataclasses.fields(kind)
}
"""Every field with every limit that it has, and an algorithm with it."""


@pytest.mark.parametrize(
    ("name", "field"), LIMITS.values(), ids=lambda part: getattr(part, "name", part)
)
def test_a_value_out_of_range_is_refused_by_its_key(name, field):
    """All fields that hold numbers; words and switches have no other values."""
    chosen = getattr(ALGORITHMS[name](), field.name)
    if field.name == "name" or (isinstance(chosen, str | bool) and field.name != "update_every"):
        return
    alone = (name, field.name) == ("refl", "group_size")
    for wrong in VALUES["times" if alone else field.name]:
        with pytest.raises(UserError, match=rf"^config: algorithm\.{field.name}[.:]") as refusal:
            config(f"algorithm.name={name}", f"algorithm.{field.name}={wrong}")
        assert "literal" not in str(refusal.value) and "constrained" not in str(refusal.value)
        with pytest.raises(ValueError, match=field.name):
            ALGORITHMS[name](**{field.name: yaml.safe_load(wrong)})


SAID = """
flow_cps algorithm.eta=1 -> algorithm.eta: input should be less than 1, got 1
flow_grpo algorithm.batch_std=false -> unknown key 'algorithm.batch_std'
pave_grpo algorithm.update_every=branch -> algorithm.update_every
e_grpo algorithm.merged_steps=[1,2] -> one number for each of branch_steps
refl algorithm.eta=0.7 -> algorithm.eta
"""


@pytest.mark.parametrize(("overrides", "said"), rows(SAID))
def test_the_message_says_what_would_be_right(overrides, said):
    with pytest.raises(UserError) as refusal:
        config(*f"algorithm.name={overrides}".split())
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_names_itself_and_its_paper(name):
    """Of its own class: a class of the user's that inherits from one is not that paper's.
    DiffusionOPSD's has no number yet."""
    title, paper = title_of(ALGORITHMS[name]())
    assert title and (re.fullmatch(r"\d{4}\.\d{5}", paper) or name == "opsd")
