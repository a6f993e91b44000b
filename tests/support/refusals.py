"""What is said of a config that is refused before anything is loaded."""

import pytest

from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.train.checks import check


def refusal(*overrides):
    """The message of the recipe "scenes" with these overrides."""
    with pytest.raises(UserError) as told:
        check(load_config("scenes", overrides))
    return str(told.value)
