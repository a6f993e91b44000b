"""Lines while a command works in silence."""

import io
import re
import time

import pytest
from rich.console import Console

from g2rpo.app import events
from g2rpo.cli import life, output
from g2rpo.cli.output import Heard, Output


@pytest.fixture
def fast(monkeypatch):
    """A hundredth of the usual patience."""
    for name, seconds in {
        "FIRST_SILENCE": 0.05,
        "EVERY": 0.1,
        "LATER": 1e9,
        "PATIENT": 0.6,
        "POLL": 0.01,
    }.items():
        monkeypatch.setattr(life, name, seconds)


def lines(capsys):
    said = capsys.readouterr().err.splitlines()
    assert all(re.fullmatch(r"g2rpo: plan: still working, \d+ s", line) for line in said), said
    return len(said)


def test_a_silence_is_broken_again_and_again_but_less_often_when_it_is_long(fast, capsys):
    with life.LIFE.of("plan"):
        time.sleep(1.5)
    assert 2 <= lines(capsys) <= 7  # at .05, .15, ... .65; fewer on a machine that is busy
    time.sleep(0.2)
    assert lines(capsys) == 0


def test_what_is_printed_is_a_sign_of_life(fast, capsys, monkeypatch):
    monkeypatch.setattr(life, "FIRST_SILENCE", 0.5)
    console = Heard(file=io.StringIO())
    with life.LIFE.of("plan"):
        for _ in range(40):
            console.print("a line")
            time.sleep(0.02)
    assert lines(capsys) == 0


def test_bars_and_servers_are_waited_for_in_silence(fast, capsys):
    show = Output(Console(file=io.StringIO()))
    for event in (
        events.Progress("encoding", "prompts", 0, 9),
        events.Serving("at http://127.0.0.1"),
    ):
        with life.LIFE.of("plan"):
            show(event)
            show.console.print("a line beside it")
            time.sleep(0.3)
            assert lines(capsys) == 0
            show(events.Progress("encoding", "prompts", 9, 9))
            time.sleep(0.3)
            assert lines(capsys) >= 1
    assert output.LIFE is life.LIFE
