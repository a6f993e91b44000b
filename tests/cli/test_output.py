"""What commands show while they work, on terminals of any width and in files."""

import io
import re
import shlex

import pytest
from rich.console import Console

from g2rpo.cli.output import Bar, Output, fit_in_line
from g2rpo.cli.results import command, run_table
from g2rpo.core.errors import UserError
from g2rpo.core.events import Caution, Line, Progress
from g2rpo.core.statistics import Comparison
from g2rpo.train.command import train_all
from tests.support.runs import brightness, trainer
from tests.support.waiting import until

ITEMS = [
    ("scene_accuracy", "0.633"),
    ("scene_clip", "-0.083"),
    ("a_reward_with_a_very_long_name", "27.559"),
]


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def pipe():
    return Console(file=io.StringIO(), force_terminal=False, width=10_000)


def written(console):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_items_are_fitted_by_shorter_names_then_by_fewer_items_and_numbers_stay_whole():
    assert (
        fit_in_line(ITEMS, 200)
        == "scene_accuracy 0.633  scene_clip -0.083  a_reward_with_a_very_long_name 27.559"
    )
    assert fit_in_line(ITEMS, 55) == "scene_acc… 0.633  scene_clip -0.083  a_reward_… 27.559"
    assert fit_in_line(ITEMS, 25) == "sc… 0.633  sc… -0.083  +1"
    for width in range(100):
        line = fit_in_line(ITEMS, width)
        shown = re.findall(r"-?\d+\.\d+", line)
        assert shown == [value for _, value in ITEMS][: len(shown)] and shown
        assert len(line) <= width or len(shown) == 1
        assert ("+" in line) == (len(shown) < 3)
    assert fit_in_line([], 10) == ""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_line_of_training_is_one_line_with_whole_numbers(width):
    """A bar, rewards with long names, an alarm, rate and time left."""
    names = [f"a_reward_with_a_very_long_name_{i}" for i in range(4)]
    console = terminal(width)
    rewards = dict.fromkeys(names, brightness)
    run = trainer(
        None, *(f"rewards.{name}=1" for name in names), "rewards.bright=", rewards=rewards
    )
    iterate = run.iterate
    run.iterate = lambda: {**iterate(), "alarms": {"silent": "", "masked": ""}}
    with Output(console) as output:
        train_all(run, output)
    lines = [line for line in re.split(r"[\r\n]+", written(console)) if re.match(r"[1-4]/4 ", line)]
    assert lines and all(len(line.rstrip()) <= width for line in lines)
    assert all(re.match(r"\d/4 [━╸╺ ]{12} \S+ 2  ", line) for line in lines)  # two alarms
    assert all(re.search(r" [\d,]+ eval/s  \d+:\d\d:\d\d left", line) for line in lines)
    shown = {number for line in lines for number in re.findall(r"(?<= )-?\d+\.\S+", line)}
    assert all(re.fullmatch(r"-?\d\.\d{3}", number) for number in shown) and (shown or width == 60)


def test_a_bar_ends_with_its_work_or_with_the_output():
    console = terminal(80)
    with Output(console) as output:
        output(Progress("encoding", "prompts", 1, 3))
        output(Caution("the disk is [nearly] full"))  # no markup
        output(Progress("judging", "pictures", 0, 2))
        output(Progress("judging", "pictures", 2, 2))
        output(Line(" on 2 ranks", title="[scenes]"))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", written(console)) if line.strip()]
    assert "the disk is [nearly] full" in lines and lines[-1] == "[scenes] on 2 ranks"
    ends = [line for line in lines if re.match(r"encoding .* 1/3|judging .* 2/2", line)]
    assert [line.split()[0] for line in ends][-1] == "judging" and lines.index(ends[-1]) < len(
        lines
    ) - 1


def test_a_bar_ends_also_where_teaching_cannot_begin(refuses, monkeypatch):
    """The terminal's cursor stayed hidden."""
    ended = []

    def interrupted(*arguments, emit, **more):
        emit(Progress("encoding", "prompts", 1, 3))
        raise UserError("no room")

    monkeypatch.setattr("g2rpo.lab.teach.command.teach", interrupted)
    monkeypatch.setattr(Bar, "stop", lambda bar: ended.append(bar.work))
    assert "no room" in refuses("teach scenes") and ended == ["encoding"]


def test_training_writes_plain_lines_into_a_pipe():
    """Iteration, rewards, rate and time left; evaluations too; and a line however long an iteration
    takes."""
    console = pipe()
    run = trainer(None, "trainer.iterations=2")
    iterate = run.iterate

    def slow():
        until(lambda: f"  {run.iteration}/2 iterations, " in written(console))
        return iterate()

    run.iterate = slow
    with Output(console, quiet=0.2) as output:
        train_all(run, output)
    lines = written(console).splitlines()
    assert "\x1b" not in console.file.getvalue()
    assert sum(line.startswith("held-out pictures after iteration") for line in lines) >= 2
    training = [line for line in lines if " iterations, " in line]
    # while the first iteration goes on
    assert any("  0/2 iterations, 0.0 %" in line for line in training)
    told = next(line for line in training if "  1/2 iterations, 50.0 %" in line)
    assert re.search(r"  bright [\d.]+  ", told)
    assert re.search(r"  [\d.,e+]+ evaluations/s  \d+:\d\d:\d\d left$", told)


def test_what_takes_long_before_the_first_iteration_is_named():
    """Silence without a reason while the base is scored by a slow reward."""
    console = pipe()

    def slow(images, prompts):
        said = re.compile(r"  0/1 iterations, 0.0 %  scoring \d pictures? by bright\n")
        until(lambda: said.search(written(console)))  # at the first call
        return brightness(images, prompts)

    run = trainer(None, "trainer.iterations=1", rewards={"bright": slow})
    with Output(console, quiet=0.1) as output:
        train_all(run, output)


@pytest.mark.parametrize("width", [45, 60, 80, 120, 200])
@pytest.mark.parametrize("name", ["a_reward_with_a_very_long_name", "scene_preference", "hps"])
def test_names_and_numbers_of_a_table_are_never_cut(width, name):
    console = terminal(width)
    console.print(run_table({name: Comparison(0.1234, 0.4321, 0.05, 10**6)}, 192, [name], width))
    text = written(console)
    assert "…" not in text and all(len(line) <= width for line in text.splitlines())
    assert name in text or len(name) > width // 4  # in one piece where there is room
    rows = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    columns = ["".join(cells).replace(" ", "") for cells in zip(*rows, strict=True)]
    assert (columns[0], columns[1], columns[3]) == (name, "0.123", "+0.309±0.098")


@pytest.mark.parametrize(
    "prompt", ["'barn' in purple", "a $ and 'b'", 'a "b"', "plain", "it's `x`!"]
)
def test_suggested_commands_are_read_back_by_a_shell(prompt):
    assert shlex.split(command("sample", prompt)) == ["g2rpo", "sample", prompt]
    assert command("sample", "'barn' in purple") == """g2rpo sample "'barn' in purple\""""
