"""Lines while a command works in silence."""

import io
import re
import threading
from importlib import import_module
from types import SimpleNamespace

import pytest
from rich.console import Console

from g2rpo.cli import life, output
from g2rpo.cli.output import Heard, Output
from g2rpo.core import events

POLL = 0.25


class Clock:
    """The time that passes for `life` is what `passes` says: its thread looks at the clock once in
    POLL seconds of it, and waits meanwhile."""

    def __init__(self, monkeypatch):
        clock, self.now = self, 0.0
        self.look, self.looked = threading.Semaphore(0), threading.Semaphore(0)

        class Over(threading.Event):
            def wait(self, seconds):
                assert seconds == POLL
                clock.looked.release()
                clock.look.acquire()
                return self.is_set()

            def set(self):
                super().set()
                clock.look.release()

        parts = SimpleNamespace(Event=Over, Thread=threading.Thread)
        monkeypatch.setattr(life, "threading", parts)
        monkeypatch.setattr(life, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(life, "LOOK_SECONDS", POLL)

    def passes(self, seconds):
        for _ in range(round(seconds / POLL)):
            assert self.looked.acquire(timeout=60)
            self.now += POLL
            self.look.release()
        assert self.looked.acquire(timeout=60)
        self.looked.release()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(life, "FIRST_SILENCE", 0.5)  # the suite has none
    return Clock(monkeypatch)


def told(capsys):
    """The seconds that are named, line by line."""
    said = capsys.readouterr().err.splitlines()
    found = [re.fullmatch(r"g2rpo: plan: still working, (\d+) s", line) for line in said]
    assert all(found), said
    return [int(line[1]) for line in found]


def test_a_silence_is_broken_again_and_again_but_less_often_when_it_is_long(clock, capsys):
    with life.LIFE.of("plan"):
        clock.passes(300)
    two_minutes = [round(0.5 + 5 * line) for line in range(24)]
    assert told(capsys) == [*two_minutes, *(round(115.5 + 60 * more) for more in (1, 2, 3))]
    clock.now += 1000
    assert told(capsys) == []


def test_what_takes_the_time_is_named(clock, capsys):
    """The innermost work, and nothing once it has ended."""
    with life.LIFE.of("plan"):
        with events.doing("loading a"), events.doing("reading b"):
            clock.passes(1)
        with events.doing("loading a"):
            clock.passes(5)
        clock.passes(5)
    lines = capsys.readouterr().err.splitlines()
    assert [re.split(r"\d s", line)[1] for line in lines] == [": reading b", ": loading a", ""]


def test_libraries_that_take_the_time_are_named(clock, capsys, monkeypatch, tmp_path):
    """Seconds of imports, before any work begins, without a reason."""
    (tmp_path / "slow_library.py").write_text("import builtins; builtins.while_imported()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.while_imported", lambda: clock.passes(1), raising=False)
    with life.LIFE.of("plan"):
        import_module("slow_library")
    assert capsys.readouterr().err.endswith("s: loading libraries\n")


def test_what_is_printed_is_a_sign_of_life(clock, capsys):
    console = Heard(file=io.StringIO())
    with life.LIFE.of("plan"):
        for _ in range(40):
            console.print("a line")
            clock.passes(0.25)
        assert told(capsys) == []
        clock.passes(0.5)
        assert len(told(capsys)) == 1


def test_bars_and_servers_are_waited_for_in_silence(clock, capsys):
    show = Output(Console(file=io.StringIO()))
    for event in (
        events.Progress("encoding", "prompts", 0, 9),
        events.Serving("at http://127.0.0.1"),
    ):
        with life.LIFE.of("plan"):
            show(event)
            show.console.print("a line beside it")
            clock.passes(9)
            assert told(capsys) == []
            show(events.Progress("encoding", "prompts", 9, 9))
            clock.passes(1)
            assert len(told(capsys)) == 1
    assert output.LIFE is life.LIFE
