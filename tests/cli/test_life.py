"""Lines while a command works in silence."""

import io
from importlib import import_module
from types import SimpleNamespace

import pytest
from rich.console import Console

from g2rpo.cli import life
from g2rpo.cli.life import LIFE
from g2rpo.cli.output import Heard, Output
from g2rpo.core import events
from tests.support.waiting import until

LOOK = life.LOOK_SECONDS


class Clock:
    """The time is what passes here, from 0 on; what is said meanwhile."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(life, "FIRST_SILENCE", 0.5)  # the suite has none
        monkeypatch.setattr(life, "time", SimpleNamespace(monotonic=lambda: self.now))
        LIFE.go_on()

    def passes(self, seconds):
        lines = []
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            lines.append(LIFE.line("plan", 0.0))
        return [line.removeprefix("g2rpo: plan: still working, ") for line in lines if line]


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_silence_is_broken_again_and_again_but_less_often_when_it_is_long(clock):
    two_minutes = [round(0.5 + 5 * line) for line in range(24)]
    later = [round(115.5 + 60 * line) for line in (1, 2, 3)]
    assert clock.passes(300) == [f"{seconds} s" for seconds in two_minutes + later]


def test_what_takes_the_time_is_named(clock, monkeypatch, tmp_path):
    """The innermost work, and nothing once it has ended; imports, before any work begins."""
    with events.doing("loading a"), events.doing("reading b"):
        assert clock.passes(1) == ["0 s: reading b"]
    with events.doing("loading a"):
        assert clock.passes(5) == ["6 s: loading a"]
    assert clock.passes(5) == ["10 s"]
    (tmp_path / "slow_library.py").write_text("import builtins; said = builtins.passes(5)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.passes", clock.passes, raising=False)
    assert import_module("slow_library").said == ["16 s: loading libraries"]


def test_what_is_printed_is_a_sign_of_life(clock):
    console = Heard(file=io.StringIO())
    for _ in range(40):
        console.print("a line")
        assert clock.passes(0.25) == []
    assert len(clock.passes(0.5)) == 1


@pytest.mark.parametrize(
    "event", [events.Progress("encoding", "prompts", 0, 9), events.Serving("at http://127.0.0.1")]
)
def test_bars_and_servers_are_waited_for_in_silence(clock, event):
    show = Output(Console(file=io.StringIO()))
    show(event)
    show.console.print("a line beside it")
    assert clock.passes(9) == []
    show(events.Progress("encoding", "prompts", 9, 9))
    assert len(clock.passes(1)) == 1


def test_the_lines_go_to_stderr_while_a_command_works(capsys, monkeypatch):
    monkeypatch.setattr(life, "FIRST_SILENCE", 0.0)
    with LIFE.of("plan"):
        until(lambda: capsys.readouterr().err.startswith("g2rpo: plan: still working, 0 s"))
