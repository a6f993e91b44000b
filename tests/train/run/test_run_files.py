"""What a run leaves in its directory, also where the disk is full or the process killed."""

import errno
import os
import re
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import g2rpo
from g2rpo.core.errors import Stopped, UserError
from g2rpo.core.files import whole_file, write_whole
from g2rpo.lab.sample import _write_all
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.evaluation.controls import NO_CONTROL
from g2rpo.train.run.folder import Run
from tests.support import ranks
from tests.support.commands import g2rpo as command
from tests.support.commands import small_files
from tests.support.runs import config, finished, resumed, trainer
from tests.support.variants import few


def test_a_card_goes_with_the_weights_that_it_is_about(tmp_path):
    card = tmp_path / "adapter" / "README.md"
    t = finished(trainer(tmp_path, "trainer.iterations=1"))
    t.export()
    assert card.is_file()
    more = resumed(tmp_path, "trainer.iterations=2")
    list(more.train())
    more.export()
    assert not card.exists()
    with whole_file(tmp_path / "report.html") as report:  # as `g2rpo report` writes it meanwhile
        more.finish()
        report.touch()
    assert card.is_file() and not list(tmp_path.rglob(".unfinished*"))


@pytest.mark.parametrize("answers", [0, 1])
def test_a_session_goes_on_by_its_answers_and_is_not_begun_over_its_weights(tmp_path, answers):
    """Sessions have no checkpoints: their answers are repeated. Here these were emptied."""
    run, settings = Run(tmp_path), config()
    run.claim(settings)
    run.adapter.mkdir()
    run.mark_saved()
    run.votes.write_text("{}\n" * answers)
    with nullcontext() if answers else pytest.raises(UserError, match="holds adapter of a run"):
        run.check(settings, resume=True)


def test_a_start_names_the_commit_of_the_checkout(tmp_path, monkeypatch):
    checkout, run = tmp_path / "checkout", tmp_path
    source = checkout / "src" / "g2rpo" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.touch()
    monkeypatch.setattr(g2rpo, "__file__", str(source))
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init"], ["add", "."], [*who, "commit", "-m", "first"]):
        subprocess.run(["git", *words], cwd=checkout, check=True, capture_output=True)
    Run(run).record_start(0, torch.device("cpu"))
    source.write_text("changed")
    Run(run).record_start(1, torch.device("cpu"))
    one, two = (start.commit for start in Run(run).read_starts())
    assert re.fullmatch("[0-9a-f]{12}", one) and two == f"{one}-dirty"


class Killed(GaussianPolicy):
    """Dies while its weights are written, as safetensors leaves them then."""

    def save(self, directory):
        (directory / ".tmpAb12Cd").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def exports(world, folder):
    finished(trainer(folder, policy=Killed(), world=world))


def test_a_kill_while_weights_are_written_leaves_no_half_of_them(tmp_path):
    (victim,) = ranks.start(1, exports, tmp_path)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL and not (tmp_path / "adapter").exists()
    more = resumed(tmp_path)
    Run(tmp_path).claim(more.config)  # as every command that resumes it
    finished(more)
    weights = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"README.md", "gaussian.safetensors"} <= weights
    assert [path.name for path in tmp_path.rglob(".*")] == [".lock"]


# --- full disks


def begin(folder):
    """A whole run as `g2rpo train` makes it, after the policy is there."""
    options = ["trainer.iterations=2"]
    t = trainer(folder, *options, trackers=[])
    Run(folder).claim(t.config)
    Run(folder).record_start(0, t.policy.device)
    finished(t)


WRITES = (
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
)


class FailingDisk:
    """An audit hook by which the disk fails from the n-th write below a folder on, while entered. A
    full disk (ENOSPC) refuses what takes room; another one refuses to remove as well, and with EIO
    and ESTALE to read. Python cannot remove the hook, so it is made once."""

    def __init__(self):
        self.folder, self.left, self.touches, self.code = None, 0, 0, errno.ENOSPC
        sys.addaudithook(self.touched)

    def touched(self, event, arguments):
        if self.folder is None or not str(arguments[0] if arguments else "").startswith(
            str(self.folder)
        ):
            return
        opens_to_write = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        takes_room = opens_to_write or event in ("os.rename", "os.mkdir")
        self.touches += takes_room
        refused = {errno.ENOSPC: takes_room, errno.EROFS: takes_room or event in WRITES}
        any_access = event in (*WRITES, "open", "os.listdir", "os.scandir")
        if self.touches > self.left and refused.get(self.code, any_access):
            raise OSError(self.code, os.strerror(self.code), str(arguments[0]))

    def at(self, folder, left, code=errno.ENOSPC):
        self.folder, self.left, self.touches, self.code = folder, left, 0, code
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.folder = None


@pytest.fixture(scope="module")
def disk():
    return FailingDisk()


CODES = [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE]


@pytest.mark.parametrize("code", few(CODES, errno.ENOSPC.__eq__), ids=errno.errorcode.get)
def test_a_disk_that_fails_from_any_moment_on_is_a_message_and_the_run_can_go_on(
    tmp_path, disk, code
):
    """The message has the first error, not that of a clean-up which the same disk refuses."""
    with disk.at(tmp_path / "straight", 10**6):
        begin(tmp_path / "straight")
    touches = disk.touches
    assert touches > 50
    reason = rf"cannot be (written|read).*{os.strerror(code)}"
    step = 90 if code == errno.ENOSPC else 30
    for moment in sorted({0, *range(1, touches, step), touches - 2, touches - 1}):
        folder = tmp_path / str(moment)
        with disk.at(folder, moment, code), pytest.raises((Stopped, UserError), match=reason):
            begin(folder)
        assert code != errno.ENOSPC or not list(folder.rglob(".unfinished*")), moment


def test_pictures_that_find_no_room_are_a_message_too(tmp_path):
    def pictures(prompts, first, control):
        return torch.rand(len(prompts), 3, 32, 32)

    drawn = SimpleNamespace(pictures=pictures, batch_size=1, num_steps=2, seed=0, policy=None)
    config = SimpleNamespace(control=NO_CONTROL, video="webp")
    with small_files(0), pytest.raises(Stopped, match="cannot be written"):
        _write_all(drawn, ["a"], config, tmp_path, print)


def test_a_file_system_that_syncs_no_directories_can_be_written(tmp_path, monkeypatch):
    """As that of VirtualBox's shared folders."""

    def sync(descriptor, synced=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    write_whole(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


@pytest.mark.parametrize("size", [0, 3000])
def test_commands_on_a_full_disk_end_with_a_message(capsys, tmp_path, tiny_config, size):
    words = ["prompts.cache=off", "trackers=[]", "--run-dir", tmp_path / "run"]
    with small_files(size):
        code, _, err = command(capsys, "train", tiny_config, *words)
    assert code in (1, 2) and "cannot be written" in err and "Traceback" not in err
