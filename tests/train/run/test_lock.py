"""One process at a time in a folder, folders that are whole or absent, and a message where a disk
refuses."""

import errno
import fcntl
import os
import platform
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.files import LOCK, is_empty, open_regular, whole, whole_file, write_whole, writing
from g2rpo.train.run.folder import Run, entered
from g2rpo.train.run.lock import InUse, held
from tests.support.commands import refused, small_files
from tests.support.ranks import CONTEXT
from tests.support.runs import config, trainer
from tests.support.waiting import PATIENCE_S


def holds(folder, pipe):
    with held(folder):
        pipe.send("ready")
        pipe.recv()


def started(count, work, *arguments):
    """That many processes that do some work."""
    processes = [CONTEXT.Process(target=work, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


def exit_codes(processes):
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


@contextmanager
def held_by_another(folder):
    """Another process holds a folder while this is entered."""
    pipe, other = CONTEXT.Pipe()
    (process,) = started(1, holds, folder, other)
    assert pipe.poll(60) and pipe.recv() == "ready"
    yield process
    process.kill()  # a crash leaves no lock behind
    process.join()


def takes(folder):
    with held(folder):
        pass


def test_a_folder_is_one_processs_and_the_message_says_whose(tmp_path):
    with held_by_another(tmp_path) as other:
        said = f"in use by process {other.pid} on {platform.node()}, .* since 20"
        with pytest.raises(InUse, match=said):
            takes(tmp_path)
    takes(tmp_path)


def test_a_folder_in_which_nothing_was_written_goes_again_with_those_made_for_it(tmp_path):
    folder = tmp_path / "a" / "b"
    with held(folder):
        write_whole(folder / ".unfinished_x", b"")  # as a killed process leaves it
    assert list(tmp_path.iterdir()) == []
    with held(folder):
        (folder / "x").touch()
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, "x"]
    (tmp_path / "mine").mkdir()
    takes(tmp_path / "mine")
    assert is_empty(tmp_path / "mine") and (tmp_path / "mine").is_dir()


def comes_and_goes(folder, times, meetings):
    for _ in range(times):
        with suppress(InUse), held(folder):
            os.close(os.open(folder.with_name("alone"), os.O_CREAT | os.O_EXCL))
            folder.with_name("alone").unlink()
            meetings.value += 1


def test_processes_that_make_and_remove_one_folder_never_meet_in_it(tmp_path):
    """A lock on a file that its last holder has removed is no lock."""
    meetings = CONTEXT.Value("i", 0, lock=False)  # written by the holder alone
    processes = started(3, comes_and_goes, tmp_path / "it", 400, meetings)
    assert exit_codes(processes) == [0, 0, 0] and meetings.value > 30


def test_where_there_are_no_locks_a_warning_says_so(tmp_path, monkeypatch):
    def none(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    said = []
    with held(tmp_path, said.append):
        pass
    assert "has no locks (No locks available)" in said[0]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: cannot be written \(File exists\)"):
        takes(tmp_path / "file")
    with (
        small_files(3),
        pytest.raises(Stopped, match=r"x: cannot be written \(File too large\)"),
        writing(tmp_path / "x"),
    ):
        write_whole(tmp_path / "x", b"four")
    assert not (tmp_path / "x").exists()


def test_a_folder_is_whole_or_as_it_was(tmp_path):
    for content in ("one", "two"):
        with whole(tmp_path / "it") as folder:
            (folder / content).touch()
        assert [path.name for path in (tmp_path / "it").iterdir()] == [content]

    def interrupted(writer):
        with writer as unfinished:
            (unfinished / "half" if unfinished.is_dir() else unfinished).write_text("half")
            raise KeyboardInterrupt

    for writer in (whole(tmp_path / "it"), whole_file(tmp_path / "it" / "two")):
        with pytest.raises(KeyboardInterrupt):
            interrupted(writer)
    assert [path.name for path in tmp_path.rglob("*")] == ["it", "two"]
    assert (tmp_path / "it" / "two").read_text() == ""


def test_what_a_killed_process_left_is_no_obstacle_to_one_with_its_number(tmp_path):
    """In a container the number of a command is always the same."""
    killed = whole(tmp_path / "it")
    killed.__enter__()
    with whole(tmp_path / "it") as folder:
        (folder / "one").touch()
    assert (tmp_path / "it" / "one").exists()


@pytest.mark.parametrize("done", [0, 1])
def test_a_disk_that_fails_while_a_folder_is_replaced_leaves_the_old_one_and_says_its_first_error(
    tmp_path, monkeypatch, done
):
    """After that many renames, of the old one aside and of the new one. The error of a clean-up
    does not hide it."""
    with whole(tmp_path / "it") as folder:
        (folder / "one").touch()
    rename, works = Path.rename, iter([True] * done + [False, True])

    def refused(path, target=None):
        if target is not None and next(works):
            return rename(path, target)
        raise OSError(errno.EIO if target else errno.ESTALE, "first" if target else "second")

    monkeypatch.setattr(Path, "rename", refused)
    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(OSError, match="first"), whole(tmp_path / "it") as folder:
        (folder / "two").touch()
    assert [path.name for path in (tmp_path / "it").iterdir()] == ["one"]


def test_what_was_left_unfinished_in_a_run_is_removed_when_it_is_opened(tmp_path):
    """But what another process is writing: an export of a checkpoint takes minutes."""
    Run(tmp_path).claim(config())
    for folder, name in (("samples", ".unfinished_1"), ("checkpoints", ".unfinished_2")):
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / ".tmpAb12Cd").touch()  # as safetensors leaves it
    (tmp_path / "samples" / ".unfinished_3").touch()
    with held(tmp_path / "export"), whole(tmp_path / "export" / "merged") as export:
        Run(tmp_path).claim(config())
        (export / "weights").touch()
    left = sorted(path.name for path in tmp_path.rglob("[!.]*"))
    assert left == ["checkpoints", "config.yaml", "export", "merged", "samples", "weights"]


def test_what_another_process_finishes_while_a_run_is_opened_is_no_error(tmp_path, monkeypatch):
    """A report is written without the run's lock; a folder goes before it is listed, and a file
    before it is removed."""
    for name in ("samples/.unfinished_1", "samples/deep/.unfinished_2"):
        (tmp_path / name).mkdir(parents=True)
    scandir, rmtree = os.scandir, shutil.rmtree

    def listed(folder):
        if str(folder).endswith("deep"):
            rmtree(folder)
        return scandir(folder)

    def removed(folder, **how):
        rmtree(folder)
        rmtree(folder, **how)

    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    Run(tmp_path).claim(config())
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.rglob("[!.]*")) == ["config.yaml", "samples"]


@pytest.mark.parametrize("make", [lambda place: place.symlink_to("target"), os.mkfifo])
def test_what_is_kept_open_is_a_file_and_no_link(tmp_path, make):
    (tmp_path / "target").write_text("mine")
    make(tmp_path / LOCK)
    with pytest.raises(UserError, match=r"cannot be written \(\.lock is a link, or no file\)"):
        takes(tmp_path)
    for mode in ("ab", "w"):
        refused = pytest.raises(OSError, match="is a link, or no file")
        with refused, open(tmp_path / LOCK, mode, opener=open_regular):
            pass
    assert (tmp_path / "target").read_text() == "mine"


def test_all_files_have_the_mode_of_the_umask(tmp_path):
    """safetensors writes files for their owner alone."""
    tensors, before = {"a": torch.zeros(1)}, os.umask(0o027)
    try:
        with whole(tmp_path / "adapter") as folder:
            save_file(tensors, folder / "weights.safetensors")
        with whole_file(tmp_path / "one.safetensors") as file:
            save_file(tensors, file)
        write_whole(tmp_path / "text", b"")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()]
    assert modes == [0o640] * 3


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_it_is_used(
    tmp_path, monkeypatch
):
    done, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("renamed") or replace(*paths))
    write_whole(tmp_path / "x", b"1")
    assert done[0] == "x" and done[-2:] == ["renamed", tmp_path.name]


# --- run directories


EVALUATE = ["evaluate", "--model=testbed", "--rewards=scene_accuracy", "--steps=2"]
EVALUATE += ["--prompts=testbed:heldout"]


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (["train", "{config}", "--resume", "--run-dir"], "run"),
        (["train", "{tiny}", "--run-dir"], "new"),
        ([*EVALUATE, "--out"], "new"),
        (["compare", "{tiny}", "--cell", "a:", "--out"], "new"),
    ],
)
def test_commands_leave_a_folder_alone_that_another_process_holds(
    capsys, tmp_path, tiny_config, command, place
):
    folder, own = tmp_path / place, tmp_path / "run" / "config.yaml"
    own.parent.mkdir()
    Run(own.parent).claim(config())
    words = [word.format(config=own, tiny=tiny_config) for word in command]
    before = {path.name for path in own.parent.iterdir()}
    with held_by_another(folder) as other:
        assert f"in use by process {other.pid} on" in refused(capsys, *words, folder)
    assert {path.name for path in folder.iterdir()} <= {LOCK, *before}


def test_a_trainer_holds_its_run_directory_while_it_writes(tmp_path):
    t = trainer(tmp_path)
    rows = t.train()
    next(rows)
    assert exit_codes(started(1, holds, tmp_path, CONTEXT.Pipe()[0])) == [1]
    rows.close()
    with held_by_another(tmp_path):
        for write in (t.save, t.export, lambda: next(t.train())):
            with pytest.raises(InUse):
                write()
    t.save()


def enters(cwd, barrier, names):
    os.chdir(cwd)
    barrier.wait(PATIENCE_S)
    with entered(config(), None, resume=False) as directory:
        Run(directory).claim(config())
        names.put(directory.name)


def test_runs_that_begin_at_one_time_get_a_folder_each(tmp_path):
    barrier, names = CONTEXT.Barrier(3), CONTEXT.Queue()
    processes = started(3, enters, tmp_path, barrier, names)
    found = sorted(names.get(timeout=PATIENCE_S) for _ in processes)
    assert found == ["gaussian", "gaussian-2", "gaussian-3"]
    assert exit_codes(processes) == [0, 0, 0]


@pytest.mark.parametrize("name", ["..", ".", "..."])
def test_a_recipe_whose_name_is_no_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    directory = entered(config(f"recipe='{name}'"), None, resume=False)
    with pytest.raises(UserError, match="cannot name a folder"):
        directory.__enter__()
    assert not list(tmp_path.iterdir())
