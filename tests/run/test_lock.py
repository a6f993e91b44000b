"""One process at a time in a folder, folders that are whole or absent, and a message where a disk
refuses."""

import errno
import fcntl
import os
import platform
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.files import LOCK, is_empty, open_regular, whole, whole_file, write_whole, writing
from g2rpo.run.lock import InUse, held
from g2rpo.run.run import Run, entered
from tests.support.commands import refused, small_files
from tests.support.ranks import CONTEXT
from tests.support.runs import config, trainer


def holds(folder, pipe):
    with held(folder):
        pipe.send("ready")
        pipe.recv()


class Holder:
    """Another process that holds a folder while entered."""

    def __init__(self, folder):
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=holds, args=(folder, other))
        self.process.start()
        assert self.pipe.poll(60) and self.pipe.recv() == "ready"

    def __enter__(self):
        return self.process

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()


def test_a_folder_is_one_processs_and_the_message_says_whose(tmp_path):
    with Holder(tmp_path) as other:
        with (
            pytest.raises(
                InUse, match=f"in use by process {other.pid} on {platform.node()}, .* since 20"
            ),
            held(tmp_path),
        ):
            pass
        os.kill(other.pid, signal.SIGKILL)  # a crash leaves no lock behind
        other.join()
        with held(tmp_path):
            pass


def test_a_folder_in_which_nothing_was_written_goes_again_with_those_made_for_it(tmp_path):
    with held(tmp_path / "a" / "b"):
        write_whole(tmp_path / "a" / "b" / ".unfinished_x", b"")  # as a killed process leaves it
    assert list(tmp_path.iterdir()) == []
    with held(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "x").touch()
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [LOCK, "x"]
    (tmp_path / "mine").mkdir()
    with held(tmp_path / "mine"):
        pass
    assert is_empty(tmp_path / "mine") and (tmp_path / "mine").is_dir()


def comes_and_goes(folder, times, meetings):
    for _ in range(times):
        try:
            with held(folder):
                os.close(os.open(folder.with_name("alone"), os.O_CREAT | os.O_EXCL))
                folder.with_name("alone").unlink()
                meetings.value += 1
        except InUse:
            pass


def test_processes_that_make_and_remove_one_folder_never_meet_in_it(tmp_path):
    """A lock on a file that its last holder has removed is no lock."""
    meetings = CONTEXT.Value("i", 0, lock=False)  # written by the holder alone
    processes = [
        CONTEXT.Process(target=comes_and_goes, args=(tmp_path / "it", 400, meetings))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and meetings.value > 30


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
    with (
        pytest.raises(UserError, match=r"file: cannot be written \(File exists\)"),
        held(tmp_path / "file"),
    ):
        pass


def interrupted_at(path):
    (path / "half" if path.is_dir() else path).write_text("half")
    raise KeyboardInterrupt


def test_a_folder_is_whole_or_as_it_was(tmp_path):
    for content in ("one", "two"):
        with whole(tmp_path / "it") as folder:
            (folder / content).touch()
        assert [path.name for path in (tmp_path / "it").iterdir()] == [content]
    for writer in (whole(tmp_path / "it"), whole_file(tmp_path / "it" / "two")):
        with pytest.raises(KeyboardInterrupt), writer as unfinished:
            interrupted_at(unfinished)
    assert [path.name for path in tmp_path.rglob("*")] == ["it", "two"] and (
        tmp_path / "it" / "two"
    ).read_text() == ""


@pytest.mark.parametrize("fails", ["first rename", "second rename"])
def test_a_disk_that_fails_while_a_folder_is_replaced_leaves_the_old_one_and_says_its_first_error(
    tmp_path, monkeypatch, fails
):
    """And that of a clean-up does not hide it."""
    with whole(tmp_path / "it") as folder:
        (folder / "one").touch()
    rename, left = Path.rename, [fails == "second rename", False, True]

    def refused(path, target=None):
        if target is not None and left.pop(0):
            return rename(path, target)
        raise OSError(errno.EIO if target else errno.ESTALE, "first" if target else "second")

    monkeypatch.setattr(Path, "rename", refused)
    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(OSError, match="first"), whole(tmp_path / "it") as folder:
        (folder / "two").touch()
    assert [path.name for path in (tmp_path / "it").iterdir()] == ["one"]


def test_what_was_left_unfinished_in_a_run_is_removed_when_it_is_opened(tmp_path):
    Run(tmp_path).claim(config())
    for left in (
        tmp_path / "samples" / ".unfinished_1",
        tmp_path / "checkpoints" / ".unfinished_2",
    ):
        left.mkdir(parents=True)
        (left / ".tmpAb12Cd").touch()  # as safetensors leaves it
    (tmp_path / "samples" / ".unfinished_3").touch()
    Run(tmp_path).claim(config())
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "checkpoints",
        "config.yaml",
        "samples",
    ]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_kept_open_is_a_file_and_no_link(tmp_path, kind):
    target, place = tmp_path / "target", tmp_path / "run" / LOCK
    target.write_text("mine")
    place.parent.mkdir()
    if kind == "link":
        place.symlink_to(target)
    else:
        os.mkfifo(place)
    with (
        pytest.raises(UserError, match=r"cannot be written \(\.lock is a link, or no file\)"),
        held(place.parent),
    ):
        pass
    for mode in ("ab", "w"):
        with (
            pytest.raises(OSError, match="is a link, or no file"),
            open(place, mode, opener=open_regular),
        ):
            pass
    assert target.read_text() == "mine"


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_all_files_have_the_mode_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        with whole(tmp_path / "adapter") as folder:
            # it writes files for their owner alone
            save_file({"a": torch.zeros(1)}, folder / "weights.safetensors")
        with whole_file(tmp_path / "one.safetensors") as file:
            save_file({"a": torch.zeros(1)}, file)
        write_whole(tmp_path / "text", b"")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(0o666 & ~umask)} and len(
        files
    ) == 3


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_it_is_used(
    tmp_path, monkeypatch
):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd)),
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("renamed"), replace(*paths)))
    write_whole(tmp_path / "x", b"1")
    assert done[0] == "x" and done[-2:] == ["renamed", tmp_path.name]


def test_a_full_disk_is_a_message(tmp_path):
    with (
        small_files(3),
        pytest.raises(Stopped, match=r"x: cannot be written \(File too large\)"),
        writing(tmp_path / "x"),
    ):
        write_whole(tmp_path / "x", b"four")
    assert list(tmp_path.iterdir()) == []


# --- run directories


def test_commands_leave_a_folder_alone_that_another_process_holds(capsys, tmp_path, tiny_config):
    (tmp_path / "run").mkdir()
    Run(tmp_path / "run").claim(config())
    judged = [
        "--model=testbed",
        "--rewards=scene_accuracy",
        "--prompts=testbed:heldout",
        "--steps=2",
    ]
    with Holder(tmp_path / "run") as other, Holder(tmp_path / "new") as second:
        for arguments, holder in (
            (
                [
                    "train",
                    tmp_path / "run" / "config.yaml",
                    "--run-dir",
                    tmp_path / "run",
                    "--resume",
                ],
                other,
            ),
            (["train", tiny_config, "--run-dir", tmp_path / "new"], second),
            (["evaluate", *judged, "--out", tmp_path / "new"], second),
            (["compare", tiny_config, "--cell", "a:", "--out", tmp_path / "new"], second),
        ):
            assert f"in use by process {holder.pid} on" in refused(capsys, *arguments)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK, "config.yaml"]
    assert is_empty(tmp_path / "new")


def test_a_trainer_holds_its_run_directory_while_it_writes(tmp_path):
    t = trainer(tmp_path)
    rows = t.train()
    next(rows)
    other = CONTEXT.Process(target=holds, args=(tmp_path, CONTEXT.Pipe()[0]))
    other.start()
    other.join()
    assert other.exitcode == 1
    rows.close()
    with Holder(tmp_path):
        for write in (t.save, t.export, lambda: next(t.train())):
            with pytest.raises(InUse):
                write()
    t.save()


def enters(cwd, barrier, names):
    os.chdir(cwd)
    barrier.wait(60)
    with entered(config(), None, resume=False) as directory:
        Run(directory).claim(config())
        names.put(directory.name)


def test_runs_that_begin_at_one_time_get_a_folder_each(tmp_path):
    barrier, names = CONTEXT.Barrier(4), CONTEXT.Queue()
    processes = [CONTEXT.Process(target=enters, args=(tmp_path, barrier, names)) for _ in range(4)]
    for process in processes:
        process.start()
    assert sorted(names.get(timeout=60) for _ in processes) == [
        "gaussian",
        "gaussian-2",
        "gaussian-3",
        "gaussian-4",
    ]
    for process in processes:
        process.join()


@pytest.mark.parametrize("name", ["..", ".", "..."])
def test_a_recipe_whose_name_is_no_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("mine")
    with (
        pytest.raises(UserError, match="cannot name a folder"),
        entered(config(f"recipe='{name}'"), None, resume=False),
    ):
        pass
    assert (tmp_path / "config.yaml").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_the_old_folder_is_there_until_the_new_one_is(tmp_path, monkeypatch):
    folder, names = tmp_path / "kept", []
    folder.mkdir()
    (folder / "old").touch()
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda self, to: names.append((self.name, to.name)) or rename(self, to)
    )
    monkeypatch.setattr(
        "g2rpo.core.files.remove",
        lambda path: names.append((path.name, None)) or shutil.rmtree(path),
    )
    with whole(folder) as unfinished:
        (unfinished / "new").touch()
    assert names[0][0] == "kept" and names[-1][1] is None  # moved aside first, removed last
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and [
        path.name for path in folder.iterdir()
    ] == ["new"]
