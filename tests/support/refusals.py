"""What is said of a config that is refused before anything is loaded."""

import pytest

from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError


def refusal(*overrides):
    """The message of the recipe "scenes" with these overrides."""
    with pytest.raises(UserError) as told:
        check(load_config("scenes", overrides))
    return str(told.value)
