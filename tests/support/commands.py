"""The command line as tests call it, and a disk that is full."""

import resource
from contextlib import contextmanager

import pytest
import yaml
from safetensors.torch import load_file

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


def own_reward(file, source="def it(images, prompts):\n    return images.flatten(1).mean(1)\n"):
    """Writes a reward `it` to a file; the words with which a command trains on that alone."""
    file.write_text(source)
    reward = f"rewards.it={{kind: function, options: {{target: {file}:it}}}}"
    return ["rewards=", reward, "--plugin", file]


def adapter_of(run_dir):
    """The tensors of the LoRA that a run left."""
    return load_file(run_dir / "adapter" / "pytorch_lora_weights.safetensors")


def ended(*arguments):
    """The exit code of one command."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


def g2rpo(capsys, *arguments):
    """(exit code, stdout, stderr) of one command."""
    code = ended(*arguments)
    out, err = capsys.readouterr()
    return code, out, err


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
