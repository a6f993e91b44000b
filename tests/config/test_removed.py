"""Configs of runs that older versions began."""

import pytest

from g2rpo.config.removed import REMOVED
from g2rpo.config.resolve import resolve
from g2rpo.core.errors import UserError
from tests.support.runs import config

NOW = config("rewards.bright.frames={every: 4}")


def with_old(options):
    """A config's data, as config.yaml has it, with `options` added."""
    data = NOW.model_dump(mode="json")
    for key, value in options.items():
        *groups, last = key.replace("*", "bright").split(".")
        inner = data
        for group in groups:
            inner = inner[group]
        inner[last] = value
    return data


def test_removed_options_that_ask_for_nothing_are_dropped():
    assert resolve(with_old(REMOVED)) == NOW


@pytest.mark.parametrize("key", REMOVED)
def test_removed_options_that_ask_for_something_are_refused(key):
    with pytest.raises(UserError, match=r"config: .*=else: this option was removed; CHANGELOG"):
        resolve(with_old({key: "else"}))
