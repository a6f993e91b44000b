"""Ctrl-C, SIGTERM and SIGHUP at any moment: a message, an exit code, and a run that goes on to what it
would have become."""

import errno
import fcntl
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress

import pytest
import torch

from g2rpo.core.errors import Interrupted, Preempted, UserError
from g2rpo.core.process import EXIT_CODES, NOTHING_KEPT, stopped_by
from g2rpo.core.stopping import Stopping, stoppable
from g2rpo.lab.compare import jobs
from g2rpo.lab.compare.jobs import Job, working
from g2rpo.train import checks
from g2rpo.train.run.checkpoint import newest_iteration
from tests.support import processes  # noqa: F401  which a study's jobs are forked from
from tests.support.commands import (
    adapter_of,
    done,
    ended,
    forget_code,
    g2rpo,
    own_reward,
    write_tiny,
)
from tests.support.runs import brightness, log, resumed, trainer
from tests.support.waiting import PATIENCE_S, until

REWARD = """
import os
import re
from pathlib import Path

folder = Path(__file__).parent

def it(images, prompts):
    calls = int((folder / "calls").read_text()) + 1 if (folder / "calls").exists() else 1
    (folder / "calls").write_text(str(calls))
    if (folder / "signals").exists() and calls == int((folder / "call").read_text()):
        for number in (folder / "signals").read_text().split():
            os.kill(os.getpid(), int(number))
    return images.flatten(1).mean(1)
"""
# Its calls: the base's evaluation; iteration 1, its evaluation; iteration 2, its evaluation;
# resumed, base against tuned
SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def hung_up():
    """SIGHUP ends these tests' commands, also where `nohup` began the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def no_trial(monkeypatch):
    """Calls are counted."""
    monkeypatch.setattr(checks, "CHECKS", checks.CHECKS[:-1])


def training(folder, flux_directory, source=REWARD):
    """The words that train the tiny FLUX on a reward."""
    words = own_reward(folder / "reward.py", source)
    return ["train", write_tiny(folder, flux_directory), *words, "--run-dir", folder / "run"]


def signals(folder, call, *numbers):
    """At that call, the reward sends them to its own process."""
    (folder / "call").write_text(str(call))
    (folder / "signals").write_text(" ".join(str(int(number)) for number in numbers))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, flux_directory):
    """The run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    assert ended(*training(folder, flux_directory)) == 0
    return folder / "run"


@pytest.mark.slow  # Gaussian runs below are stopped in the same places
@pytest.mark.parametrize(
    ("call", "sent", "message", "iteration"),
    [
        (2, [SIGINT], "stopped after iteration 1, as asked", 1),
        (3, [SIGTERM, SIGTERM], "stopped after iteration 1, as asked", 1),
        (4, [SIGINT, SIGINT], "stopped at once", 1),
        (4, [SIGTERM, SIGINT], "stopped at once", 1),
        (6, [SIGTERM], "all iterations are done", 2),
    ],
)
def test_a_run_that_is_stopped_says_how_to_go_on_and_comes_to_the_same_end(
    capfd, tmp_path, flux_directory, straight, call, sent, message, iteration
):
    signals(tmp_path, call, *sent)
    code, _, err = g2rpo(capfd, *training(tmp_path, flux_directory))
    run = tmp_path / "run"
    if call == 6:
        assert code == 0
        (run / "adapter/README.md").unlink()  # as if it had not been compared
        code, _, err = g2rpo(capfd, "resume", run)
    command = f"resume {run} --plugin {tmp_path / 'reward.py'}"
    assert code == EXIT_CODES[sent[0]] and "Traceback" not in err, err
    asked = "press again to stop at once" if sent[0] == SIGINT else "(SIGTERM)"
    assert message in err and f"`g2rpo {command}`" in err and (asked in err) == (call != 6)
    assert newest_iteration(run / "checkpoints") == iteration
    assert all(signal.getsignal(number) != Stopping.handle for number in EXIT_CODES)

    forget_code()  # as for another process
    done(capfd, *command.split())
    assert log(run) == log(straight)
    one, two = adapter_of(run), adapter_of(straight)
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize("number", EXIT_CODES)
def test_a_signal_while_a_run_starts_leaves_nothing_behind(
    capsys, tmp_path, flux_directory, number
):
    source = f"import os\nos.kill(os.getpid(), {int(number)})\ndef it(images, prompts): pass\n"
    code, _, err = g2rpo(capsys, *training(tmp_path, flux_directory, source))
    assert code == EXIT_CODES[number] and "stopped before training began" in err
    assert "Traceback" not in err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("module", "number", "code", "said"),
    [
        ("typer/__init__", SIGINT, 130, "stopped by Ctrl-C"),
        ("g2rpo/cli/models", SIGTERM, 143, "stopped by SIGTERM"),
        ("torch/_utils_internal", SIGTERM, 75, "stopped before training began"),
    ],
)
def test_a_signal_while_a_command_is_imported_ends_it_with_one_line(
    tmp_path, module, number, code, said
):
    """Sent when Python says that it begins to load a module, as a delay would depend on the
    machine's load. The line may stand behind one of Python's, cut where the pipe was full."""
    words = ["-v", "-m", "g2rpo", "train", "scenes", "--run-dir", str(tmp_path / "run")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, *words], **quiet, text=True, errors="replace"
    ) as process:
        next(line for line in process.stderr if module in line)
        process.send_signal(number)
        told = process.stderr.read()
    assert process.returncode == code and told.count(f"g2rpo: {said}") == 1
    assert "Traceback (most recent" not in told and not (tmp_path / "run").exists()


def test_a_signal_while_torch_is_imported_raises_nothing():
    """What is raised in a call of torch's C++ at that time ends in std::terminate, one time in
    fifty."""
    imports = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    code = f"""
from g2rpo.core.stopping import *
with stoppable("here"):
    try:
        exec(compile({imports!r}, "x", "exec"), dict(__name__="torch.distributed"))
    except BaseException:
        os.abort()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (75, "g2rpo: here\n")


@pytest.mark.slow  # starts a process
def test_a_run_whose_terminal_is_closed_saves(tmp_path, flux_directory):
    """As a lost connection does."""
    source = REWARD.replace("    return", "    __import__('time').sleep(0.5)\n    return")
    words = [str(word) for word in training(tmp_path, flux_directory, source)]
    here, there = os.openpty()

    def begin():
        fcntl.ioctl(there, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "g2rpo", *words]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), there)
    with subprocess.Popen(command, **streams, start_new_session=True, preexec_fn=begin) as process:
        os.close(there)
        until(lambda: (tmp_path / "calls").exists() or process.poll() is not None)
        os.close(here)
    assert process.returncode == 75
    assert newest_iteration(tmp_path / "run" / "checkpoints") < 2


def test_a_run_whose_output_nobody_reads_any_more_saves(tmp_path, flux_directory):
    """As behind `| head -1`, a `| tee` that was killed, or `ssh` without a terminal."""
    source = REWARD.replace("    return", "    __import__('time').sleep(0.2)\n    return")
    words = [*training(tmp_path, flux_directory, source), "trainer.iterations=40"]
    command = [sys.executable, "-m", "g2rpo", *map(str, words)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        log = tmp_path / "run/metrics.jsonl"
        while process.poll() is None and not (log.is_file() and "train" in log.read_text()):
            time.sleep(0.05)
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 75
    assert 1 <= newest_iteration(tmp_path / "run" / "checkpoints") < 40
    assert f"`g2rpo resume {tmp_path / 'run'}" in said and "Traceback" not in said


PRINTING = shlex.join([sys.executable, "-m", "g2rpo", "recipes", "words"])


def without_signs_of_life(stderr):
    """How many there are depends on the machine's load."""
    return re.sub(r"g2rpo: recipes: still working, \d+ s.*\n", "", stderr)


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>&-", ">/dev/full", ">/dev/full 2>&1"])
def test_without_a_stream_or_room_for_its_lines_a_command_does_its_work(streams):
    """As services and cron begin commands; nothing that cannot be printed is an error."""
    line = ["sh", "-c", f"exec {PRINTING} {streams}"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, without_signs_of_life(done.stderr)) == (0, "")


@pytest.mark.parametrize(
    ("before", "said"),
    [("", f"g2rpo: {stopped_by(signal.SIGHUP)}\n129\n"), ("trap '' HUP; ", "0\n")],
)
def test_a_command_that_nobody_reads_ends_as_by_a_hang_up(before, said):
    """`nohup` goes on."""
    line = f"{before}{PRINTING}; echo $? >&2"
    with subprocess.Popen(["sh", "-c", line], stdout=-1, stderr=-1, text=True) as process:
        process.stdout.close()
        assert without_signs_of_life(process.stderr.read()) == said


def test_what_is_opened_without_streams_gets_nothing_that_is_printed(tmp_path):
    """The first file would have the number of stdout."""
    code = f"""
from g2rpo.core.process import *
steady_streams()
with open({str(tmp_path / "file")!r}, "w"):
    print("a line", flush=True)
    os.write(2, b"another")
"""
    line = shlex.join([sys.executable, "-c", code])
    assert subprocess.run(["sh", "-c", f"exec {line} >&- 2>&-"], check=False).returncode == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(("at", "kept"), [(0, []), (2, ["eval", "train", "train"])])
def test_a_run_is_stopped_within_an_evaluation_and_goes_on_with_it(tmp_path, at, kept):
    straight = trainer(tmp_path / "straight")
    list(straight.train())
    t = trainer(tmp_path / "run")
    velocity = t.policy.velocity

    def asked_to_stop(x, sigma, cond):
        t.stopping = len(x) == len(cond) == 3 and t.iteration == at
        return velocity(x, sigma, cond)

    t.policy.velocity = asked_to_stop
    with pytest.raises(Preempted, match=f"stopped after iteration {at}, as asked"):
        list(t.train())
    assert [row["kind"] for row in log(tmp_path / "run")] == kept
    assert newest_iteration(tmp_path / "run" / "checkpoints") == at
    again = resumed(tmp_path / "run")
    list(again.train())
    assert log(tmp_path / "run") == log(tmp_path / "straight")
    assert torch.equal(again.policy.mean, straight.policy.mean)


def test_an_evaluation_that_is_stopped_is_finished_by_the_same_command(
    capsys, tmp_path, flux_directory
):
    signals(tmp_path, 2, SIGTERM)
    reward = own_reward(tmp_path / "reward.py", REWARD)
    write_tiny(tmp_path, flux_directory)
    pictures = ["--size", 32, "--prompts", tmp_path / "prompts.txt", "--steps", 2]
    words = ["evaluate", "--model", flux_directory, *pictures, *reward, "--batch-size", 1]
    words += ["policy.max_sequence_length=12", "--out", tmp_path / "out"]
    code, _, err = g2rpo(capsys, *words)
    assert code == 75 and "finished chunks are kept" in err and "Traceback" not in err, err
    assert ended(*words) == 0 and (tmp_path / "calls").read_text() == "3"


@pytest.mark.slow  # starts a server in a process
def test_the_jobs_of_a_study_end_with_it_and_import_nothing_of_the_current_folder(
    tmp_path, monkeypatch
):
    """A server stands for a run: it would not end by itself."""
    said = tmp_path / "server.log"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yaml.py").write_text("open('imported', 'w')\n")

    def stop():
        until(lambda: said.exists() and re.search("at http|Error", said.read_text()))
        os.kill(os.getpid(), SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with (
        pytest.raises(Interrupted, match="the same command does what is missing") as end,
        working(tmp_path / "study", 1) as workers,
    ):
        workers.run([Job("serving", ("serve-reward", "brightness", "--port", "0"), said)])
    assert end.value.exit_code == 75
    assert not (tmp_path / "imported").exists() and not multiprocessing.active_children()


def test_a_job_that_begins_as_a_study_is_stopped_ends_too(tmp_path, monkeypatch):
    """The process that jobs are forked from takes seconds to begin."""
    ended = threading.Event()

    class Process:
        exitcode = -15

        def terminate(self):
            ended.set()

        def join(self):
            ended.wait(PATIENCE_S)

    def beginning(*arguments):
        os.kill(os.getpid(), SIGINT)
        time.sleep(0.2)
        return Process()

    monkeypatch.setattr(jobs, "begin", beginning)
    with pytest.raises(Interrupted), working(tmp_path / "study", 1) as workers:
        workers.run([Job("any", (), tmp_path / "log")])
    assert ended.wait(PATIENCE_S)


# --- code that is not ours


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def it(images, prompts):\n    exit(0)\n", "SystemExit: 0"),
        ("import sys\nsys.exit(0)\n", "sys.exit(0)"),
    ],
    ids=["called", "loaded"],
)
def test_code_that_calls_exit_does_not_end_a_command_as_if_it_were_done(
    capsys, tmp_path, flux_directory, source, said
):
    code, _, err = g2rpo(capsys, *training(tmp_path, flux_directory, source))
    assert code != 0 and said in err and "reward.py" in err and "Traceback" not in err


def test_a_terminal_that_is_gone_does_not_keep_a_run_from_saving(monkeypatch):
    asked, stopping = [], Stopping()

    def gone(descriptor, words):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", gone)
    with stopping.after(lambda: asked.append(True)):
        stopping.handle(signal.SIGTERM, None)
    assert asked


def test_what_a_reward_does_to_its_pictures_and_prompts_stays_with_it():
    def vandal(images, prompts):
        scores = brightness(images, prompts)
        images.numpy()[:] = 0  # as torch cannot see
        prompts.clear()
        return scores

    rewards = {"vandal": vandal, "bright": brightness, "last": brightness}
    row = trainer(None, "rewards.vandal=1", "rewards.last=1", rewards=rewards).evaluate()
    expected = trainer(None).evaluate()["reward/bright"]
    assert [row[f"reward/{name}"] for name in rewards] == [expected] * 3 and expected > 0


@pytest.mark.parametrize("after", ["nothing", "an error", "training"])
def test_a_signal_that_a_library_swallows_is_honoured(after):
    """As an import may: the signal's exception is caught, and at best comes back as another one."""

    def swallowing(stopping):
        with suppress(BaseException):
            os.kill(os.getpid(), SIGTERM)
        if after == "an error":
            raise UserError("the pipeline cannot be loaded")
        if after == "training":
            with stopping.after(lambda: None):
                pytest.fail("training has begun")

    with pytest.raises(Interrupted, match="here") as stop, stoppable("here") as stopping:
        swallowing(stopping)
    assert stop.value.exit_code == 75


@pytest.mark.parametrize(
    ("work", "words", "number"),
    [
        ("g2rpo.lab.plan.answer.plan", ["plan", "words"], SIGINT),
        ("g2rpo.lab.serving.serve_reward", ["serve-reward", "brightness"], SIGTERM),
    ],
)
def test_every_command_ends_on_a_signal_with_one_line(work, words, number, monkeypatch, capsys):
    monkeypatch.setattr(work, lambda *given, **more: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    code, _, err = g2rpo(capsys, *words)
    assert (code, err) == (NOTHING_KEPT[number], f"g2rpo: {stopped_by(number)}\n")
    assert signal.getsignal(number) is before
