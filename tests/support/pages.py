"""README.md, docs/, benchmarks/ and studies/ as tests read them: blocks of code, commands as a shell understands them,
and what a command means.

An HTML comment on the line before a block says what a test does with it beyond the usual (readers
do not see it):

    <!-- run -->                    bash: the commands that take seconds run on the testbed, at the smallest size
    <!-- run by tests/FILE.py -->   python: that test runs the block
    <!-- compile only: REASON -->   python: it needs what a test does not have
"""

import importlib
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import typer
from torch.distributed.run import get_args_parser

from g2rpo.cli.main import app
from g2rpo.config.read import load_config
from g2rpo.config.resolve import parse_options, resolve_as
from g2rpo.lab import evaluate
from g2rpo.lab.compare import study as compare_arguments
from g2rpo.lab.judging import JudgingConfig
from g2rpo.lab.plan.plan import find_target
from g2rpo.rewards.catalogue import RewardConfig, check_rewards

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / ".github/CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/README.md",
    ROOT / "tools/README.md",
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
    *sorted(page for page in (ROOT / "studies").glob("*.md") if page.stem != "LOG"),
    *sorted((ROOT / "studies/results").glob("*.md")),
]
CLOSED = re.compile(r"^Its commands run at commit `\w+`", re.MULTILINE)
"""Said at the top of a page of results whose commands this version does not have."""
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = (
    "g2rpo",
    "python",
    "python3",
    "torchrun",
    "pytest",
    "make",
    "pip",
    "uv",
    "tensorboard",
    "hf",
)
BEGINS = re.compile(rf"^(?:time )?(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) ")
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.|…")
SEPARATORS = ("\x1f", "\x1e")
# writes once, so that programs that run beside each other do not write into each other's call
STUB = '#!/bin/sh\ncall=$(printf "%s\\037" "${0##*/}" "$@"; printf "\\036")\nprintf %s "$call" >> "$CALLS"\n'


@dataclass(frozen=True)
class Block:
    mark: str
    language: str
    code: str


def blocks(text: str) -> list[Block]:
    return [
        Block(found["mark"] or "", found["language"], found["code"])
        for found in FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    return FENCE.sub("", text)


def inline(text: str) -> list[str]:
    """Code spans of the prose."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(text))


def inline_commands(text: str) -> list[str]:
    """Code spans that are whole commands, without placeholders such as RECIPE."""
    commands = [span for span in inline(text) if BEGINS.match(span)]
    return [
        command
        for command in commands
        if not PLACEHOLDER.search(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command))
    ]


def calls(script: str, folder: Path) -> list[list[str]]:
    """The programs that a script starts, with their arguments, found by running it in bash with
    stand-ins for all of them.

    A program without a stand-in fails: no documented script can touch this machine.
    """
    tools, record = folder / "bin", folder / "calls"
    if not tools.exists():
        _put_stand_ins(tools)
        environment_of_make(folder, tools)
    record.write_text("")
    environment = {"PATH": str(tools), "CALLS": str(record), "TIMEFORMAT": ""}
    command = ["/bin/bash", "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    unit, end = SEPARATORS
    return [call.split(unit)[:-1] for call in record.read_text().split(end)[:-1]]


def _put_stand_ins(tools: Path) -> None:
    tools.mkdir()
    for program in PROGRAMS:
        (tools / program).write_text(STUB)
    (tools / "srun").write_text('#!/bin/sh\nexec "$@"\n')  # starts what it is given
    (tools / "scontrol").write_text("#!/bin/sh\necho node0\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tools / "bash").symlink_to("/bin/bash")
    (tools / "head").symlink_to("/usr/bin/head")


def environment_of_make(folder: Path, programs: Path) -> None:
    """What `make` leaves in a clone: .venv/bin with programs, and `activate`."""
    inside = folder / ".venv" / "bin"
    inside.mkdir(parents=True, exist_ok=True)
    (inside / "activate").write_text(f"PATH={inside}:$PATH\n")
    for program in PROGRAMS:
        (inside / program).unlink(missing_ok=True)
        (inside / program).symlink_to(programs / program)


def check(call: list[str], monkeypatch) -> None:
    """Refuses a call whose program, options, recipe, overrides or files are not what they were."""
    program, *arguments = call
    match program, arguments:
        case "g2rpo", _:
            check_g2rpo(arguments)
        case "torchrun", _:
            options = get_args_parser().parse_args(arguments)
            assert options.module
            check(
                ["python", "-m", options.training_script, *options.training_script_args],
                monkeypatch,
            )
        case "python", ["-m", "g2rpo", *rest]:
            check_g2rpo(rest)
        case "python", ["-m", "pytest", *rest]:
            check_pytest(rest)
        case "python", ["-m", "timeit", *_]:
            pass
        case "python", ["-m", module, *rest]:
            if module.startswith("tools."):  # they need libraries that the tests do without
                assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
            else:
                check_module(module, rest, monkeypatch)
        case "python", [script, *_]:
            assert (ROOT / script).is_file(), script
        case "pytest", _:
            check_pytest(arguments)
        case "make", targets:
            assert {f"{target}:" for target in targets} <= {
                line.split(" ")[0].strip() for line in (ROOT / "Makefile").open()
            }
        case ("python3", ["-m", "venv", ".venv"]) | ("uv", ["venv"]):
            pass
        case "uv", ["pip", *rest]:
            check(["pip", *rest], monkeypatch)
        case "pip", ["install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                "optional-dependencies"
            ]
            assert {
                one
                for found in re.findall(r"\[(.+?)\]", " ".join(packages))
                for one in found.split(",")
            } <= extras.keys()
            assert "g2rpo" not in " ".join(packages), (
                "nothing of this name is on PyPI: install the clone"
            )
        case ("tensorboard", ["--logdir", _]) | ("hf", ["download" | "auth", *_]):
            pass
        case _:
            raise AssertionError(f"no check for {call}")


def check_g2rpo(arguments: list[str]) -> None:
    """Parses a command as the command line does, and resolves the config, cells or rewards that it
    names."""
    if arguments == ["--version"]:
        return
    group = typer.main.get_command(app)
    name, command, rest = group.resolve_command(group.make_context("g2rpo", ["recipes"]), arguments)
    if not rest and name != "recipes":
        return  # `g2rpo train` in a sentence: the command itself
    if hasattr(command, "commands"):
        name, command, rest = command.resolve_command(command.make_context(name, list(rest)), rest)
    given = command.make_context(name, list(rest)).params
    overrides = given.get("overrides") or []
    if name in ("train", "plan", "encode"):
        check_config(given["recipe"], overrides)
        if given.get("device"):
            find_target(given["device"])
    elif name == "compare":
        cells = compare_arguments.parse_cells(given["algorithms"], given["cell"] or [])
        compare_arguments.parse_budget(given["budget"])
        for own in cells.values():
            check_config(
                given["recipe"],
                [*overrides, *(word for word in own if not word.startswith("budget="))],
            )
        evaluate.step_counts(given["steps"] or "10")
    elif name == "evaluate":
        settings = (
            evaluate.model_settings(given["model"], given["size"], given["guidance"])
            if given["model"]
            else {}
        )
        settings = settings or evaluate.config_settings(load_config("scenes", []))
        named = {
            "prompts": given["prompts"],
            "rewards": evaluate.rewards_named(given["rewards"]) if given["rewards"] else None,
            "steps": evaluate.step_counts(given["steps"]) if given["steps"] else None,
        }
        # the first may be a run
        keys = [word for word in overrides if "=" in word or word != overrides[0]]
        resolve_as(
            JudgingConfig, settings | {key: value for key, value in named.items() if value}, keys
        )
    elif name == "serve-reward":
        options = parse_options(given["options"] or [])
        check_rewards({given["kind"]: RewardConfig(kind=given["kind"], options=options)})
    elif name == "recipes" and given["name"]:
        load_config(given["name"], [])


def check_config(recipe: str, overrides: list[str]) -> None:
    """Resolves a config; one that only a reader has, such as runs/mine/config.yaml, stands for the
    testbed's recipe."""
    own = "policy.adapter="  # a file of the reader's, which is read at once
    overrides = [override for override in overrides if not override.startswith(own)]
    config = load_config("scenes" if recipe.endswith(".yaml") else recipe, overrides)
    check_rewards({**config.rewards, **config.evaluation.rewards})
    assert config.algorithm.plans(config.sampling.num_steps)


def check_module(name: str, arguments: list[str], monkeypatch) -> None:
    """Parses what a benchmark is given with its own parser."""
    module = importlib.import_module(name)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    given = module.arguments()
    if overrides := getattr(given, "overrides", []):
        load_config(getattr(given, "recipe", "scenes"), overrides)


def check_pytest(arguments: list[str]) -> None:
    """The files exist, and one of them has a test that -k chooses."""
    files = [argument for argument in arguments if argument.startswith("tests/")]
    text = "".join((ROOT / file).read_text() for file in files)
    assert files, arguments
    if "-k" in arguments:
        word = arguments[arguments.index("-k") + 1]
        assert re.search(rf"^def test_\w*{word}", text, re.MULTILINE), (
            f"no test_*{word}* in {files}"
        )
