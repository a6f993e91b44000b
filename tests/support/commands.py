"""The command line as tests call it, and a disk that is full."""

import resource
from contextlib import contextmanager

import pytest
import yaml

from g2rpo.cli.main import main
from g2rpo.core import plugins

TINY = {
    "algorithm": {"group_size": 3, "branch_steps": [0, 1], "granularities": [1, 2]},
    "rewards": {"scene_accuracy": 1.0},
    "sampling": {"num_steps": 4},
    "optim": {"learning_rate": 1e-3},
    "trainer": {"iterations": 2, "prompts_per_iteration": 1, "checkpoint_every": 1},
    "evaluation": {"num_prompts": 3, "every": 1},
}
"""A run of the tiny random FLUX, but for its policy and prompts."""


def forget_code():
    """As for another user, who has allowed nothing."""
    plugins._allowed.clear()
    plugins.trusted_file().unlink(missing_ok=True)


def write_tiny(folder, flux_directory):
    """Writes a config for that run, and its prompts; returns its path."""
    (folder / "prompts.txt").write_text("a red circle\ntwo blue squares\n")
    prompts = str(folder / "prompts.txt")
    policy = {
        "path": str(flux_directory),
        "height": 32,
        "width": 32,
        "max_sequence_length": 12,
        "lora_rank": 2,
    }
    data = {**TINY, "policy": policy, "prompts": {"train": prompts}}
    data["evaluation"] = {**TINY["evaluation"], "prompts": prompts}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def g2rpo(capsys, *arguments):
    """(exit code, stdout, stderr) of one command."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def done(capsys, *arguments):
    """What one command prints, which ends with 0."""
    code, out, err = g2rpo(capsys, *arguments)
    assert code == 0, err
    return out


def refused(capsys, *arguments):
    """The message, in one line, of one command that is wrong input: exit code 2 and no
    traceback."""
    code, _, err = g2rpo(capsys, *arguments)
    assert code == 2 and "Traceback" not in err, err
    return " ".join(err.split())


@contextmanager
def small_files(size):
    """While entered, no file of this process may grow beyond `size` bytes: a write fails as on a
    full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
