"""What a run leaves in its directory, also where the disk is full or the process killed."""

import errno
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

import g2rpo
from g2rpo import api
from g2rpo.app.push import push
from g2rpo.core.errors import Stopped, UserError
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.run import Run
from tests.cli.test_main import Hub
from tests.support import ranks
from tests.support.commands import g2rpo as command
from tests.support.commands import small_files
from tests.support.runs import brightness, finished, resumed, trainer
from tests.support.variants import few


def test_a_run_from_python_leaves_weights_and_a_card(tmp_path, tiny_config):
    t = finished(
        api.trainer(str(tiny_config), run_dir=tmp_path / "run", rewards={"bright": brightness})
    )
    card = tmp_path / "run" / "adapter" / "README.md"
    assert (
        api.sample(tmp_path / "run", ["a red circle"]).shape[0] == 1
        and "bright" in card.read_text()
    )
    push(tmp_path / "run", "me/mine", private=True, api=Hub())
    t.export()
    assert card.is_file()  # it is about these weights
    more = api.trainer(
        str(tiny_config),
        ["trainer.iterations=3"],
        tmp_path / "run",
        rewards={"bright": brightness},
        resume=True,
    )
    list(more.train())
    more.export()
    assert not card.exists()
    more.finish()
    assert card.is_file() and not list((tmp_path / "run").rglob(".unfinished*"))


def test_the_repr_of_a_trainer_is_one_line(tmp_path):
    t = trainer(tmp_path)
    next(t.train())
    assert repr(t) == f"Trainer('gaussian', iteration 0 of 4, run_dir={tmp_path})"


def test_a_start_names_the_commit_of_the_checkout(tmp_path, monkeypatch):
    source = tmp_path / "checkout" / "src" / "g2rpo" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.touch()
    monkeypatch.setattr(g2rpo, "__file__", str(source))
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init"], ["add", "."], [*who, "commit", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path / "checkout", check=True, capture_output=True)
    commits = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        Run(tmp_path / str(number)).record_start(0, torch.device("cpu"))
        commits.append(Run(tmp_path / str(number)).read_starts()[0].commit)
        source.write_text("changed")
    assert re.fullmatch("[0-9a-f]{12}", commits[0]) and commits[1] == f"{commits[0]}-dirty"


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
    finished(resumed(tmp_path))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md", "before_after.png", "curves.png", "gaussian.safetensors",
    ]  # fmt: skip
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]


# --- full disks


def begin(folder):
    """A whole run as `g2rpo train` makes it, after the policy is there."""
    t = trainer(folder, "alarms.decline=rollback", "evaluation.every=1", trackers=[])
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
    for moment in sorted({*range(3), *range(3, touches, 60), *range(touches - 3, touches)}):
        folder = tmp_path / str(moment)
        with disk.at(folder, moment, code), pytest.raises((Stopped, UserError), match=reason):
            begin(folder)
        assert code != errno.ENOSPC or not list(folder.rglob(".unfinished*")), moment


@pytest.mark.parametrize("size", [0, 1000, 20000])
def test_files_that_may_not_grow_are_a_message_too(tmp_path, size):
    """As libraries that write without Python meet it: safetensors, torch."""
    with small_files(size), pytest.raises((Stopped, UserError), match=r"cannot be written"):
        begin(tmp_path / "run")


@pytest.mark.parametrize("size", [0, 3000])
def test_commands_on_a_full_disk_end_with_a_message(capsys, tmp_path, tiny_config, size):
    with small_files(size):
        code, _, err = command(
            capsys,
            "train",
            tiny_config,
            "prompts.cache=off",
            "trackers=[]",
            "--run-dir",
            tmp_path / "run",
        )
    assert code in (1, 2) and "cannot be written" in err and "Traceback" not in err
