"""What messages share."""

import pytest

from g2rpo.core.errors import Stopped, UserError, did_you_mean, shown, where
from g2rpo.core.plans import Plan
from tests.support.tables import rows


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
    assert where(error.value).endswith("test_errors.py:36: Plan(1, 0, ()))")


LONG = ("x" * 70_000, "ab cd, " * 10_000, 'it\'s "so" ' * 7_000, "'a " * 23_000, "\n" * 70_000)


@pytest.mark.parametrize("given", LONG)
@pytest.mark.parametrize("kind", [UserError, Stopped])
def test_a_message_shows_the_begin_of_a_long_input_and_all_of_its_advice(kind, given):
    """70,000 letters of input came back on the terminal."""
    advice = "take one of the names that `g2rpo recipes` lists"
    for text in (
        f"unknown recipe '{given}'; {advice}",
        f"{given}: {advice}",
        f"{given!r}: {advice}",
    ):
        said = str(kind(text))
        assert len(said) < 3000 and said.endswith(advice)
    assert len(shown(given)) <= 103
    whole = f"{'/long/path' * 30}: is no run; 'a quotation' and {'words ' * 100}"
    assert str(kind(whole)) == whole
    between = f"'one' is wrong, {'words ' * 100}take 'another'"
    assert str(kind(between)) == between


@pytest.mark.parametrize(
    ("text", "said"),
    rows("""
http://user:hunter2@host:1/v1 -> http://***@host:1/v1
http:/user:hunter2@host -> http:/***@host
https://host/v1?key=hunter2hunter2&x=1 -> https://host/v1?key=***&x=1
Authorization: Bearer abc.def-123 -> Authorization: Bearer ***
got 'sk-proj-Abc123Abc123Abc123' -> got '***'
hf_abcdefghij1234567890 -> ***
endpoint.token=0123456789abcdef is -> endpoint.token=*** is
endpoint.token_env=MY_OPENAI_TOKEN -> endpoint.token_env=MY_OPENAI_TOKEN
max_tokens=16000000000, hf_transfer_download -> max_tokens=16000000000, hf_transfer_download
"""),
)
def test_no_message_repeats_a_token(text, said):
    assert str(UserError(text)) == str(Stopped(text)) == said
    assert shown(text) == repr(said)
