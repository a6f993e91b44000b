"""Ctrl-C and SIGTERM at any moment: a message, an exit code, and a run that goes on to what it
would have become."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from g2rpo.app.process import EXIT_CODES, NOTHING_KEPT, stopped_by
from g2rpo.app.stopping import Stopping, stoppable
from g2rpo.cli.main import main
from g2rpo.core.errors import Interrupted, Preempted, Stopped, UserError
from g2rpo.lab.compare.jobs import Job, working
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rewards.analytic import load_function
from g2rpo.run.checkpoint import newest_iteration
from tests.support import processes  # noqa: F401  which a study's jobs are forked from
from tests.support.commands import done, forget_code, g2rpo, write_tiny
from tests.support.runs import brightness, trainer
from tests.support.variants import few
from tests.training.test_faults import log

REWARD = """
import os, signal
from pathlib import Path

folder = Path(__file__).parent

def brightness(images, prompts):
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
def no_trial(monkeypatch):
    """Calls are counted."""
    monkeypatch.setattr("g2rpo.app.build.try_own_code", lambda *_: None)


def train(capsys, folder, flux_directory):
    """Begins a run with that reward."""
    (folder / "reward.py").write_text(REWARD)
    reward = (
        f"rewards.it={{kind: function, options: {{target: {folder / 'reward.py'}:brightness}}}}"
    )
    plugin = ["--plugin", folder / "reward.py"]
    return g2rpo(
        capsys,
        "train",
        write_tiny(folder, flux_directory),
        "rewards=",
        reward,
        "--run-dir",
        folder / "run",
        *plugin,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory, flux_directory):
    """The run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "reward.py").write_text(REWARD)
    reward = (
        f"rewards.it={{kind: function, options: {{target: {folder / 'reward.py'}:brightness}}}}"
    )
    command = [
        "train",
        str(write_tiny(folder, flux_directory)),
        "rewards=",
        reward,
        "--run-dir",
        str(folder / "run"),
    ]
    command += ["--plugin", str(folder / "reward.py")]
    with pytest.raises(SystemExit) as done:
        main(command)
    assert not done.value.code
    return folder / "run"


@pytest.mark.parametrize(
    ("call", "signals", "code", "message", "iteration"),
    few(
        [
            (1, [SIGTERM], 75, "stopped after iteration 0, as asked", 0),
            (2, [SIGINT], 130, "stopped after iteration 1, as asked", 1),
            (2, [SIGTERM, SIGTERM], 75, "stopped after iteration 1, as asked", 1),
            (3, [SIGTERM], 75, "stopped after iteration 1, as asked", 1),
            (4, [SIGINT, SIGINT], 130, "stopped at once", 1),
            (4, [SIGTERM, SIGINT], 75, "stopped at once", 1),
            (5, [SIGINT], 130, "stopped after iteration 2, as asked", 2),
            (6, [SIGTERM], 75, "all iterations are done", 2),
            (6, [SIGINT], 130, "all iterations are done", 2),
        ],
        lambda case: (
            case[:2] in ((1, [SIGTERM]), (2, [SIGINT]), (4, [SIGINT, SIGINT]), (6, [SIGTERM]))
        ),
    ),
)
def test_a_run_that_is_stopped_says_how_to_go_on_and_comes_to_the_same_end(
    capfd, tmp_path, flux_directory, straight, call, signals, code, message, iteration
):
    (tmp_path / "call").write_text(str(call))
    (tmp_path / "signals").write_text(" ".join(str(int(number)) for number in signals))
    stopped, _, err = train(capfd, tmp_path, flux_directory)
    run = tmp_path / "run"
    if call == 6:
        assert stopped == 0
        stopped, _, err = g2rpo(capfd, "resume", run)
    command = f"resume {run} --plugin {tmp_path / 'reward.py'}"
    assert (
        stopped == code
        and message in err
        and f"`g2rpo {command}`" in err
        and "Traceback" not in err
    ), err
    asked = (
        "stopping after this iteration; press again to stop at once"
        if signals[0] == SIGINT
        else "(SIGTERM)"
    )
    assert (asked in err) == (call != 6)
    assert newest_iteration(run / "checkpoints") == iteration
    assert all(signal.getsignal(number) != Stopping.handle for number in EXIT_CODES)

    forget_code()  # as for another process
    done(capfd, *command.split())
    assert log(run) == log(straight)
    one, two = (
        load_file(folder / "adapter" / "pytorch_lora_weights.safetensors")
        for folder in (run, straight)
    )
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize("number", EXIT_CODES)
def test_a_signal_while_a_run_starts_leaves_nothing_behind(
    capsys, tmp_path, flux_directory, number
):
    (tmp_path / "reward.py").write_text(
        f"import os\nos.kill(os.getpid(), {int(number)})\ndef it(images, prompts): pass\n"
    )
    reward = f"rewards.it={{kind: function, options: {{target: {tmp_path / 'reward.py'}:it}}}}"
    config = write_tiny(tmp_path, flux_directory)
    words = [
        "train",
        config,
        "rewards=",
        reward,
        "--run-dir",
        tmp_path / "run",
        "--plugin",
        tmp_path / "reward.py",
    ]
    code, _, err = g2rpo(capsys, *words)
    assert (
        code == EXIT_CODES[number]
        and "stopped before training began" in err
        and "Traceback" not in err
    )
    assert not (tmp_path / "run").exists()


def test_a_signal_while_libraries_are_loaded_is_handled_too(tmp_path):
    """Sent when Python says that it has begun to load torch."""
    command = [
        sys.executable,
        "-v",
        "-m",
        "g2rpo",
        "train",
        "scenes",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace"
    ) as process:
        for line in process.stderr:
            if "import 'torch._utils_internal'" in line or "torch/_utils_internal" in line:
                process.send_signal(SIGTERM)
                break
        said = process.stderr.read()
    assert process.returncode == 75 and "stopped before training began" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", EXIT_CODES)
@pytest.mark.parametrize(
    "importing", ["typer/__init__", "rich/console", "g2rpo/core/errors", "g2rpo/cli/models"]
)
def test_a_signal_while_the_command_line_is_imported_ends_it_with_one_line(importing, number):
    """Sent when Python says that it has begun to load that module: a delay in seconds would depend
    on the machine's load."""
    command = [sys.executable, "-v", "-m", "g2rpo", "plan", "words"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace"
    ) as process:
        for line in process.stderr:
            if importing in line:
                process.send_signal(number)
                break
        # the line may stand behind one of Python's, cut where the pipe was full
        said = process.stderr.read()
    assert process.returncode == NOTHING_KEPT[number]
    assert (
        said.count(f"g2rpo: {stopped_by(number)}\n") == 1 and "Traceback (most recent" not in said
    )


def test_a_signal_while_torch_is_imported_raises_nothing():
    """What is raised in a call of torch's C++ at that time ends in std::terminate, one time in
    fifty."""
    imports = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    code = f"""
from g2rpo.app.stopping import *
with stoppable("here"):
    try:
        exec(compile({imports!r}, "x", "exec"), dict(__name__="torch.distributed"))
    except BaseException:
        os.abort()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (75, "g2rpo: here\n")


def test_importing_the_package_sets_no_signal_handlers():
    import importlib

    before = [signal.getsignal(number) for number in EXIT_CODES]
    importlib.reload(importlib.import_module("g2rpo.__main__"))
    assert [signal.getsignal(number) for number in EXIT_CODES] == before


@pytest.mark.parametrize("first", [True, False])
def test_a_run_is_stopped_within_an_evaluation_and_goes_on_with_it(tmp_path, first):
    """The base's evaluation or the one after iteration 2, at its third network call."""

    class Policy(GaussianPolicy):
        calls = 0

        def velocity(self, x, sigma, cond):
            if (
                len(x) == 3
                and not x.requires_grad
                and len(cond) == 3
                and t.iteration == (0 if first else 2)
            ):
                self.calls += 1
                t.stopping = self.calls == 3
            return super().velocity(x, sigma, cond)

    straight = trainer(tmp_path / "straight")
    list(straight.train())
    t = trainer(tmp_path / "run", policy=Policy())
    with pytest.raises(Preempted, match=f"stopped after iteration {0 if first else 2}, as asked"):
        list(t.train())
    assert [row["kind"] for row in log(tmp_path / "run")] == (
        [] if first else ["eval", "train", "train"]
    )
    assert newest_iteration(tmp_path / "run" / "checkpoints") == (0 if first else 2)
    again = trainer(tmp_path / "run")
    again.resume()
    list(again.train())
    assert log(tmp_path / "run") == log(tmp_path / "straight")
    assert torch.equal(again.policy.mean, straight.policy.mean)


def test_an_evaluation_that_is_stopped_is_finished_by_the_same_command(
    capsys, tmp_path, flux_directory
):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "signals").write_text(str(int(SIGTERM)))
    (tmp_path / "call").write_text("2")
    write_tiny(tmp_path, flux_directory)
    (tmp_path / "rewards.yaml").write_text(
        f"it: {{kind: function, options: {{target: {tmp_path / 'reward.py'}:brightness}}}}\n"
    )
    pictures = [
        "--size",
        "32",
        "--prompts",
        tmp_path / "prompts.txt",
        "--steps",
        "2",
        "--batch-size",
        "1",
    ]
    rewards = ["--rewards", tmp_path / "rewards.yaml", "--plugin", tmp_path / "reward.py"]
    words = [
        "evaluate",
        "--model",
        flux_directory,
        *pictures,
        *rewards,
        "policy.max_sequence_length=12",
        "--out",
        tmp_path / "out",
    ]
    code, _, err = g2rpo(capsys, *words)
    assert code == 75 and "finished chunks are kept" in err and "Traceback" not in err, err
    assert g2rpo(capsys, *words)[0] == 0 and (tmp_path / "calls").read_text() == "3"


def test_the_jobs_of_a_study_end_with_it_and_import_nothing_of_the_current_folder(
    tmp_path, monkeypatch
):
    """A server stands for a run: it would not end by itself."""
    log = tmp_path / "server.log"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yaml.py").write_text("open('imported', 'w')\n")

    def stop():
        while not log.exists() or not any(said in log.read_text() for said in ("at http", "Error")):
            time.sleep(0.05)
        os.kill(os.getpid(), SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with (
        pytest.raises(Interrupted, match="the same command does what is missing") as end,
        working(tmp_path / "study", 1) as workers,
    ):
        workers.run([Job("serving", ("serve-reward", "brightness", "--port", "0"), log)])
    assert end.value.exit_code == 75
    assert not (tmp_path / "imported").exists() and not multiprocessing.active_children()


# --- code that is not ours


def test_code_that_calls_exit_does_not_end_a_command_as_if_it_were_done(
    capsys, tmp_path, flux_directory
):
    for place, lines, said in (
        ("call", "def it(images, prompts):\n    exit(0)\n", "SystemExit: 0"),
        ("load", "import sys\nsys.exit(0)\n", "sys.exit(0)"),
    ):
        (tmp_path / f"{place}.py").write_text(lines)
        reward = f"rewards.it={{kind: function, options: {{target: {tmp_path / place}.py:it}}}}"
        config = write_tiny(tmp_path, flux_directory)
        words = [
            "train",
            config,
            "rewards=",
            reward,
            "--run-dir",
            tmp_path / place,
            "--plugin",
            tmp_path / f"{place}.py",
        ]
        code, _, err = g2rpo(capsys, *words)
        assert code != 0 and said in err and f"{place}.py" in err and "Traceback" not in err
    with pytest.raises(Stopped, match=r"sys\.exit\(0\)"), stoppable("stopped"):
        load_function(str(Path(__file__)) + ":Leaves")()


class Leaves:
    def __init__(self):
        sys.exit(0)


def test_what_a_reward_does_to_its_pictures_and_prompts_stays_with_it():
    def vandal(images, prompts):
        scores = brightness(images, prompts)
        images.numpy()[:] = 0  # as torch cannot see
        prompts.clear()
        return scores

    rewards = {"bright": brightness, "last": brightness}
    names = ["rewards.vandal=1", "rewards.last=1"]
    before, after = (
        trainer(None, *names, rewards={"vandal": one, **rewards}).evaluate()
        for one in (brightness, vandal)
    )
    assert (
        after["reward/bright"]
        == after["reward/last"]
        == after["reward/vandal"]
        == before["reward/bright"]
        > 0
    )


def swallowing():
    """As an import may: the signal's exception is caught, and at best comes back as another one."""
    with suppress(BaseException):
        os.kill(os.getpid(), SIGTERM)


def failing():
    swallowing()
    raise UserError("the pipeline cannot be loaded")


@pytest.mark.parametrize("code", [swallowing, failing])
def test_a_signal_that_a_library_swallows_is_honoured(code):
    with pytest.raises(Interrupted, match="here") as stop, stoppable("here"):
        code()
    assert stop.value.exit_code == 75
    with pytest.raises(Interrupted), stoppable("here") as stopping:
        goes_on(stopping)


def goes_on(stopping):
    swallowing()
    with stopping.after(lambda: None):
        pytest.fail("training has begun")


COMMANDS = {
    "plan": ("g2rpo.lab.plan.answer.plan", ["words"]),
    "sample": ("g2rpo.app.sample.sample", ["a red circle", "--model", "testbed"]),
    "serve-reward": ("g2rpo.app.serving.serve_reward", ["brightness"]),
}


@pytest.mark.parametrize("number", EXIT_CODES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_on_a_signal_with_one_line(command, number, monkeypatch, capsys):
    target, arguments = COMMANDS[command]
    monkeypatch.setattr(target, lambda *given, **more: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    code, _, err = g2rpo(capsys, command, *arguments)
    assert (code, err) == (
        NOTHING_KEPT[number],
        f"g2rpo: {stopped_by(number)}\n",
    ) and signal.getsignal(number) is before
