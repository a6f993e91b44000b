"""Checkpoints: the newest that can be used is used, and the last intact one is never removed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g2rpo import __version__
from g2rpo.core.errors import Stopped, UserError
from g2rpo.lab.tuned_weights import _checkpoint
from g2rpo.train.run.checkpoint import (
    _digest,
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    newest_iteration,
    save_checkpoint,
)
from tests.security.test_security import forged
from tests.support.policies import make
from tests.support.runs import fallen_back, mean, resumed, trainer
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline


def save(root, iteration, keep=2):
    return save_checkpoint(
        root, iteration, {"weights": [torch.full((2,), float(iteration))]}, {}, keep
    )


@pytest.mark.parametrize(
    ("alpha", "average", "files"),
    [
        (8, False, ["pytorch_lora_weights"]),
        (8, True, ["pytorch_lora_weights", "weights"]),
        (6, False, ["pytorch_lora_weights", "weights"]),  # a factor that rounds
    ],
)
def test_a_checkpoint_is_the_adapter_that_is_exported_and_the_run_goes_on_from(
    alpha, average, files, tmp_path
):
    """With the average of the weights, if there is one; the weights are there twice only where the
    adapter's are not theirs bit for bit."""
    options = {"height": 32, "width": 32, "lora_rank": 4, "lora_alpha": alpha}
    policy = make(CLASSES["FluxPipeline"], tiny_pipeline("FluxPipeline"), **options)
    values = [torch.randn_like(value) for value in policy.trainable_parameters()]
    tensors = {"weights": values} | ({"average": [2 * v for v in values]} if average else {})
    file = policy.adapter_file
    folder = save_checkpoint(tmp_path, 1, tensors, {"seen": 3}, keep=1, file=file)
    assert sorted(path.stem for path in folder.glob("*.safetensors")) == files
    _, found, state = load_checkpoint(folder)
    assert state == {"seen": 3} and found.keys() == tensors.keys()
    for name, own in tensors.items():
        assert all(map(torch.equal, found[name], own)), name

    own = zip(policy.trainable_parameters(), tensors.get("average", values), strict=True)
    for parameter, value in own:
        parameter.data.copy_(value)
    policy.save(tmp_path)
    adapter = "pytorch_lora_weights.safetensors"
    assert (folder / adapter).read_bytes() == (tmp_path / adapter).read_bytes()


def damage(path, cut=False):
    """Turns a bit of the weights, or loses their last byte."""
    file = path / "weights.safetensors"
    *whole, last = file.read_bytes()
    file.write_bytes(bytes(whole if cut else [*whole, last ^ 1]))


def names(root):
    return [int(path.name.split("_")[1]) for path in checkpoints(root)]


@pytest.mark.parametrize(
    ("keep", "before", "after", "cut"), [(1, [4, 5], [5], False), (2, [3, 4, 5], [4, 5], True)]
)
def test_a_damaged_newer_checkpoint_neither_counts_nor_outlives_the_intact_one(
    tmp_path, keep, before, after, cut
):
    """As after a resume that fell back from 5 to 3 and was stopped after 4."""
    for iteration in (3, 5):
        save(tmp_path, iteration, keep=9)
    damage(tmp_path / "iteration_000005", cut)
    save(tmp_path, 4, keep)
    assert names(tmp_path) == before
    (iteration, tensors, _), complaints = latest_checkpoint(tmp_path)
    assert iteration == 4 and tensors["weights"][0].tolist() == [4, 4]
    assert "iteration_000005" in complaints[0] and "weights.safetensors" in complaints[0]
    save(tmp_path, 5, keep)
    assert names(tmp_path) == after and load_checkpoint(tmp_path / "iteration_000005")[0] == 5


def test_a_checkpoint_too_many_goes_when_the_run_is_resumed(tmp_path):
    """As of a process that was killed between a checkpoint and the removal of the oldest."""
    often = ["trainer.checkpoint_every=1", "trainer.iterations=3", "evaluation.every=9"]
    list(trainer(tmp_path, *often, "trainer.keep_checkpoints=9").train())
    assert names(tmp_path / "checkpoints") == [1, 2, 3]
    resumed(tmp_path, "trainer.keep_checkpoints=2")
    assert names(tmp_path / "checkpoints") == [2, 3]


def ones(file):
    """Other tensors under the names of those in a file."""
    save_file({name: torch.ones(1) for name in load_file(file)}, file)


def test_a_checkpoint_that_another_version_wrote_says_so_if_it_does_not_fit(tmp_path, whole_run):
    run = shutil.copytree(whole_run[0], tmp_path / "run")
    newest = run / "checkpoints" / "iteration_000004"
    forged(newest, weights=ones)
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["g2rpo"] == __version__
    (newest / "manifest.json").write_text(json.dumps(manifest | {"g2rpo": "9.9.9"}))
    _, complaint = fallen_back(run, *AVERAGED)
    said = f"; g2rpo 9.9.9 wrote it and this is {__version__}: install that one to go on"
    assert said in complaint


def test_a_run_that_is_stopped_after_falling_back_can_go_on(tmp_path):
    overrides = ["trainer.keep_checkpoints=1", "trainer.iterations=2"]
    list(trainer(tmp_path, *overrides).train())
    save(tmp_path / "checkpoints", 9, keep=9)  # of another model: intact, and no use
    damage(tmp_path / "checkpoints" / "iteration_000002")
    with pytest.raises(UserError, match="No usable checkpoint"):
        resumed(tmp_path, *overrides)
    t = trainer(tmp_path, *overrides)
    t.iterate()
    t.save()
    again = trainer(tmp_path, *overrides)
    complaint, _ = again.resume()
    assert again.iteration == 1
    said = "does not fit this model (it has a tensor of shape [2] instead of [3, 4, 4])"
    assert f"iteration_000009: {said}" in complaint


@pytest.mark.parametrize("part", ["weights", "average", "exp_avg"])
def test_a_checkpoint_of_another_models_tensors_is_named_and_the_one_before_is_used(
    tmp_path, whole_run, part
):
    """Tensors that copying would broadcast, behind digests that are right."""
    folder, weights = whole_run
    run = shutil.copytree(folder, tmp_path / "run")
    forged(run / "checkpoints" / "iteration_000004", **{part: ones})
    again, complaint = fallen_back(run, *AVERAGED)
    assert "iteration_000004: does not fit this model" in complaint
    again.iterate(), again.iterate()
    assert torch.equal(again.policy.mean, weights)


def test_weights_that_are_no_numbers_are_not_taken_whatever_the_digests_say(tmp_path):
    save(tmp_path, 1)
    save_checkpoint(tmp_path, 2, {"weights": [torch.tensor([1.0, torch.nan])]}, {}, 2)
    (iteration, _, _), complaints = latest_checkpoint(tmp_path)
    assert iteration == 1 and "not finite" in complaints[0]


def test_pieces_that_ranks_wrote_are_whole_tensors_again(tmp_path):
    """The second rank has no row of the second tensor. Weights are exported from them, and a piece
    that is gone is named."""
    whole = [torch.arange(12.0).reshape(4, 3), torch.ones(1, 2)]
    folder = save_checkpoint(tmp_path / "checkpoints", 1, {"weights": whole}, {}, 1)
    (folder / "weights.safetensors").unlink()
    for rank, rows in enumerate((slice(0, 3), slice(3, 4))):
        piece = {f"{i}": value[rows].contiguous() for i, value in enumerate(whole)}
        save_file(piece, folder / f"weights.0000{rank}.safetensors")
    manifest = {"g2rpo": __version__, "iteration": 1}
    manifest["files"] = {path.name: _digest(path) for path in folder.glob("[!m]*")}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    pieces = load_checkpoint(folder)[1]["weights"]
    for loaded in ([each.whole() for each in pieces], _checkpoint(tmp_path, "last")[1]["weights"]):
        assert all(torch.equal(mine, value) for mine, value in zip(loaded, whole, strict=True))
    (folder / "weights.00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"weights\.00001\.safetensors is missing"):
        load_checkpoint(folder)


def test_memory_that_runs_out_is_no_fault_of_the_checkpoint(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)

    def full(found):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        latest_checkpoint(tmp_path, full)


def test_an_error_without_words_leaves_no_part_of_a_checkpoint(tmp_path, monkeypatch):
    """It would have counted as the newest one, and the intact one would have been removed."""
    save(tmp_path, 1, keep=1)

    def full(*given):
        raise MemoryError

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Stopped, match=r"iteration_000002: cannot be written \(MemoryError\)"):
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == [1] and latest_checkpoint(tmp_path)[0][0] == 1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("iteration_00000٩", Path.mkdir),
        ("iteration_0000009", Path.mkdir),
        ("iteration_000009", Path.touch),
    ],
)
def test_what_only_resembles_a_checkpoint_is_none(tmp_path, name, make):
    make(tmp_path / name)
    assert newest_iteration(tmp_path) == 0 and latest_checkpoint(tmp_path) == (None, [])


def test_rotation_keeps_the_newest_intact_ones(tmp_path):
    for iteration in range(1, 6):
        save(tmp_path, iteration, keep=3)
    assert names(tmp_path) == [3, 4, 5]
    damage(tmp_path / "iteration_000005")
    save(tmp_path, 6)
    assert names(tmp_path) == [4, 6]


AVERAGED = ["optim.ema_decay=0.9", "optim.weight_decay=0", "evaluation.every=9"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The directory of a finished run, and its weights."""
    folder = tmp_path_factory.mktemp("whole")
    t = trainer(folder, *AVERAGED)
    list(t.train())
    return folder, mean(t)
