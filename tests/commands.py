"""The command line as tests call it, and a disk that is full."""

import resource
from contextlib import contextmanager

import pytest

from g2rpo.cli import main

TINY = {
    "algorithm": {"group_size": 3, "branch_steps": [0, 1], "granularities": [1, 2]},
    "rewards": {"scene_accuracy": 1.0},
    "sampling": {"num_steps": 4},
    "optim": {"learning_rate": 1e-3},
    "trainer": {"iterations": 2, "prompts_per_iteration": 1, "checkpoint_every": 1},
    "evaluation": {"num_prompts": 3, "every": 1, "pictures": 2},
}
"""A run of the tiny random FLUX, but for its policy and prompts."""


def g2rpo(capsys, *arguments):
    """(exit code, stdout, stderr) of one command."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


@contextmanager
def small_files(size):
    """While entered, no file of this process may grow beyond `size` bytes: a write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
