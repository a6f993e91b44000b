"""What messages share."""

import pytest

from g2rpo.core.errors import did_you_mean, where
from g2rpo.core.types import Plan


def test_near_matches_come_before_words_that_contain_it_before_all_that_are_known():
    known = ["flux2-klein-lora", "scenes", "words"]
    assert did_you_mean("scnes", known) == " Did you mean 'scenes'?"
    assert did_you_mean("klein", known) == " Did you mean 'flux2-klein-lora'?"
    # too short to be a part of a name
    assert did_you_mean("le", known) == " Known: flux2-klein-lora, scenes, words."
    assert did_you_mean("x", []) == " There are none."


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("G\u00b2RPO", "g2rpo"),
        ("Flow-GRPO", "flow_grpo"),
        ("flow grpo", "flow_grpo"),
        ("AWM", "awm"),
    ],
)
def test_a_name_as_it_is_printed_is_the_one_that_is_meant(word, meant):
    known = ["awm", "dgpo", "flow_grpo", "flow_grpo_fast", "g2rpo", "mixgrpo"]
    assert did_you_mean(word, known) == f" Did you mean '{meant}'?"


def test_a_message_points_into_own_code():
    """And not into the `__init__` that a dataclass generates, which has no file."""
    with pytest.raises(ValueError, match="branch <= merge") as error:
        Plan(1, 0, ())
    assert where(error.value).endswith("test_errors.py:35: Plan(1, 0, ()))")
