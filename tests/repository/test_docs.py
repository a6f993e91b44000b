"""README.md, docs/, benchmarks/ and studies/: commands work, code runs, links lead somewhere."""

import importlib
import json
import math
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from g2rpo import api
from g2rpo.cli.main import main
from g2rpo.config import recipes
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.complaints import members_of
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config
from g2rpo.core import plugins
from g2rpo.rewards.catalogue import check_rewards
from tests.published.sources import SOURCES, table
from tests.support.figures import cited, figures, sentences
from tests.support.pages import (
    CLOSED,
    PAGES,
    ROOT,
    blocks,
    calls,
    check,
    environment_of_make,
    inline,
    inline_commands,
    prose,
)
from tests.support.runs import brightness, darkness, trainer
from tests.support.variants import few

QUICK = ("recipes", "train", "resume", "sample", "evaluate", "report", "export")
FEW_PROMPTS = ["trainer.prompts_per_iteration=1", "evaluation.num_prompts=2"]
SMALLEST = ["algorithm.group_size=2", "sampling.num_steps=6", "trainer.iterations=1", *FEW_PROMPTS]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix()


TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
OPEN = {page: text for page, text in TEXTS.items() if not CLOSED.search(text)}
"""Those with commands, keys and files of this version."""


def pages_with(pattern: str, slow: tuple[str, ...] = ()):
    """A test is of every page in which the pattern is, and slow for pages of these names."""
    those = [page for page, text in OPEN.items() if re.search(pattern, text, re.MULTILINE)]
    marked = few(those, lambda page: page.stem not in slow)
    return pytest.mark.parametrize("page", marked, ids=name_of)


page = pages_with("")
any_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def save_named(text: str) -> None:
    """Writes the Python blocks that begin with a file's name into the current folder; commands
    beside them name it."""
    for block in blocks(text):
        if named := re.match(r"# (\w+\.py)\n", block.code):
            Path(named[1]).write_text(block.code)


@pages_with("^```bash|`", slow=("extending", "performance", "recipes", "train", "tutorial"))
def test_every_command_can_be_given_as_it_stands(page, tmp_path, monkeypatch):
    text = TEXTS[page]
    monkeypatch.chdir(tmp_path)
    for folder in ("benchmarks", "examples", "studies"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    save_named(text)
    scripts = [block.code for block in blocks(text) if block.language == "bash"]
    commands = inline_commands(text)
    for script in [*scripts, "\n".join(commands)]:
        found = calls(script, tmp_path) if script else []
        assert found or not script or script.startswith("source "), f"starts nothing: {script}"
        for call in found:
            check(call, monkeypatch)
    assert len(found) >= len(commands)


def test_the_readme_from_top_to_bottom_in_a_clean_shell(tmp_path):
    """A reader has what the system has, and what `make` or pip put into .venv: no g2rpo until that
    is activated."""
    system, clone = tmp_path / "system", tmp_path / "clone"
    for folder in (system, clone):
        folder.mkdir()
    calls("g2rpo", system)  # makes the stand-ins
    (system / "bin" / "g2rpo").rename(system / "g2rpo")
    environment_of_make(clone, system / "bin")
    (clone / ".venv" / "bin" / "g2rpo").unlink()
    (clone / ".venv" / "bin" / "g2rpo").symlink_to(system / "g2rpo")
    for program in ("pip", "torchrun"):
        (clone / ".venv" / "bin" / program).unlink()
        (system / "bin" / program).rename(clone / ".venv" / "bin" / program)
    readme = blocks(TEXTS[ROOT / "README.md"])
    script = "\n".join(block.code for block in readme if block.language == "bash")
    environment = {"PATH": str(system / "bin"), "CALLS": str(tmp_path / "calls"), "TIMEFORMAT": ""}
    done = subprocess.run(
        ["/bin/bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True
    )
    assert "g2rpo" in (tmp_path / "calls").read_text() and not done.stderr, done.stderr


def test_the_script_for_slurm_is_one_that_its_check_can_shorten(tmp_path):
    """tools/check_slurm.sh replaces the page's recipe, folder and address in it, and tells if it
    does not find them."""
    check = (ROOT / "tools/check_slurm.sh").read_text()
    part = re.search(r"^small=.*?^grep -q [^\n]*", check, re.MULTILINE | re.DOTALL)[0]
    names = {"PATH": "/usr/bin:/bin", "root": str(ROOT), "folder": str(tmp_path)}
    command = ["/bin/bash", "-euo", "pipefail", "-c", part]
    done = subprocess.run(command, cwd=tmp_path, env=names, check=False)
    assert done.returncode == 0, (tmp_path / "job.sh").read_text()


# several trainings each; their commands are checked above
LONG_PAGES = ("alarms", "extending", "neighbours", "pairs", "rewards", "train", "tutorial")


@pages_with("^```python|^<!-- run -->", slow=LONG_PAGES)
def test_what_a_page_shows_runs(page, tmp_path, monkeypatch):
    """Python blocks in order, in one namespace and folder, trainers with few prompts; commands of
    marked blocks in between, at the smallest size."""
    monkeypatch.chdir(tmp_path)
    trainer_of = api.trainer
    monkeypatch.setattr(
        api,
        "trainer",
        lambda recipe, given=(), *a, **more: trainer_of(recipe, [*given, *FEW_PROMPTS], *a, **more),
    )
    names = {"__name__": page.stem}
    for block in blocks(TEXTS[page]):
        if block.language == "python":
            if (file := re.match("run by (.*)", block.mark)) is not None:
                assert page.name in (ROOT / file[1]).read_text()
                continue
            code = compile(block.code, str(page), "exec")
            saved_as = re.match(r"# (\w+\.py)\n", block.code)
            if saved_as:
                Path(saved_as[1]).write_text(block.code)
            if not block.mark.startswith("compile only: "):
                exec(code, names)
        elif block.mark == "run":
            assert block.language == "bash"
            for call in calls(block.code, tmp_path):
                if call[0] == "g2rpo" and call[1] in QUICK:
                    run(call[1:])


def run(arguments: list[str]) -> None:
    small = SMALLEST if arguments[0] == "train" else []
    steps = ["--steps", "2,3"] if "--steps" in arguments else []
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *small, *steps])
    assert ended.value.code == 0, arguments


@pages_with("^```yaml")
def test_settings_in_yaml_are_a_config(page):
    """What a page shows of a config, in the place of the testbed recipe's own."""
    for block in blocks(TEXTS[page]):
        if block.language == "yaml":
            config = resolve(
                {**recipes.recipe_settings("scenes"), **yaml.safe_load(block.code)},
                source=page.name,
            )
            for entry in config.rewards.values():
                if plugins.is_code(str(entry.options.get("target"))):
                    plugins.allow(entry.options["target"])  # as --plugin does
            check_rewards({**config.rewards, **config.evaluation.rewards})


@any_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[page])):
        path, _, anchor = target.partition("#")
        if not path.startswith("http"):
            there = (page.parent / path) if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@page
def test_files_keys_and_functions_that_are_named_exist(page):
    """Code spans such as `tests/support/tiny.py`, `policy.lora_rank` (or with =value),
    `flow.sde_step`."""
    groups = {
        name: set(members_of(field.annotation)) for name, field in Config.model_fields.items()
    }
    groups["algorithm"] = {"name"}.union(*map(members_of, ALGORITHMS.values()))
    for span in inline(TEXTS[page]):
        if re.match(r"(src|tests|docs|benchmarks|studies|tools|examples)/[\w./-]+\w$", span):
            assert (ROOT / span).exists(), span
        elif found := re.match(r"(\w+)\.(\w+)(=.*)?$", span):
            group, key = found[1], found[2]
            if group in groups and groups[group] and key != "py" and key not in groups[group]:
                assert hasattr(importlib.import_module(f"g2rpo.{group}"), key), (
                    f"{span} is neither a key nor a function"
                )


@pages_with("pytest |python -m")
def test_figures_are_in_the_tests_and_results_that_are_cited_for_them(page):
    """Every number of a sentence or row that names a test or a script: in the test's source, or in
    the committed results."""
    for sentence, paragraph in sentences(page):
        there = cited(sentence, paragraph, page)
        missing = [figure.text for figure in figures(sentence) if not figure.is_in(there)]
        assert not missing, f"{missing} in: {sentence}"


@any_page
def test_numbers_are_written_as_programs_print_them(page):
    """.94 beside a program's 0.94, and 94% beside the 94 % of pages and programs."""
    assert not re.findall(
        r"\b\d+%(?! ?\d)", re.sub(r"```.*?```|`[^`]*`", "", TEXTS[page], flags=re.S)
    )
    assert not re.findall(r"(?<![\w\d/'\"\\\]).])[-+−±]?\.\d\S*", TEXTS[page])


def test_the_tree_in_the_page_of_the_architecture_is_the_repository():
    """One line for every file and folder of the package, and for the folders beside it; none for
    what is not there."""
    page = TEXTS[ROOT / "docs/architecture.md"]
    tree = next(block.code for block in blocks(page) if block.code.startswith("src/g2rpo/"))
    package = re.findall(r"^  ([\w.]+)/? ", tree, re.MULTILINE)
    beside = re.findall(r"^(\w+)/ ", tree, re.MULTILINE)
    there = [
        p.name
        for p in (ROOT / "src" / "g2rpo").iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    ]
    assert sorted(package) == sorted(name for name in there if not name.startswith("__"))
    folders = {p.parent.name for p in ROOT.glob("[!._]*/*.*") if p.suffix in (".py", ".md")}
    assert set(beside) == folders - {"runs", "build", "dist"}
    lines = [line for line in tree.splitlines() if not line.endswith("/")]
    assert all(re.match(r" {0,2}[\w./]+ +\S.{5,}", line) for line in lines)


@pytest.mark.parametrize(
    ("page", "pattern", "least"),
    [
        ("architecture", r"^- `([\w.]+)`: ", 35),  # where something is
        ("log", r"`((?:train|rollout)\.\w+\.[\w.]+)`", 8),  # what computes a value
    ],
)
def test_functions_that_a_page_finds_are_there(page, pattern, least):
    names = re.findall(pattern, TEXTS[ROOT / f"docs/{page}.md"], re.MULTILINE)
    assert len(names) >= least
    for name in names:
        pkgutil.resolve_name(f"g2rpo.{name}")


def test_what_stands_beside_a_formula_exists():
    """Names such as (AWM.member_loss)."""
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    names = re.findall(r"[(,] ?([A-Z]\w+)\.(\w+)(?=[,)])", TEXTS[ROOT / "docs/neighbours.md"])
    assert len(names) > 20
    for owner, member in names:
        assert re.search(rf"^class {owner}\b", source, re.MULTILINE), owner
        assert re.search(rf"\b{member}\b", source), member


def test_the_way_of_an_iteration_is_short():
    page = TEXTS[ROOT / "docs/architecture.md"]
    way = re.findall(r"^\d+\. .*?`([\w/]+\.py)`", page, re.MULTILINE)
    steps = way[: way.index("train/updater.py") + 1]
    assert len(steps) <= 9 and steps[0] == "cli/train.py" and len(way) > len(steps)
    assert all((ROOT / "src" / "g2rpo" / file).is_file() for file in way)


@pytest.mark.parametrize("folder", ["benchmarks", "studies", "tools"])
def test_the_index_of_a_folder_has_its_scripts_and_pages_and_these_its_results(folder):
    pages = [page for page in PAGES if page.is_relative_to(ROOT / folder)]
    index = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    text = "".join(TEXTS[page] for page in pages)
    scripts = {script.stem for script in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert not [name for name in scripts if not re.search(rf"\b{name}\b", index)]
    assert not [page.name for page in pages if page.stem != "README" and page.name not in text]
    results = [path.name for path in (ROOT / folder / "results").glob("*")]
    assert not [name for name in results if name not in text]


def test_published_code_has_the_table_and_the_commits_of_its_one_source():
    """tests/published/sources.py; studies/published.md has the commits that were run."""
    assert table() in TEXTS[ROOT / "docs/reproduction.md"]
    ran = (ROOT / "studies/published.md").read_text(encoding="utf-8")
    for name, source in SOURCES.items():
        assert (ROOT / source.beside).is_file()
        row = re.search(rf"^\| {re.escape(name)} \| (\S+/\S+) (\w+), ", ran, re.MULTILINE)
        if row:
            assert row.groups() == (source.repository, source.commit), name
        else:  # G2RPO's own, of which the page has a part
            assert source.repository in ran and source.commit in ran, name


def test_the_page_of_recipes_has_every_one_and_no_other():
    which = TEXTS[ROOT / "docs/recipes.md"].split("## Which one")[1].split("\n## ")[0]
    listed = re.findall(r"`([\w-]+)`[,;:.]", which)
    assert sorted(listed) == recipes.names()


def test_hours_in_the_readme_are_those_of_the_plans_on_the_cards_of_their_columns():
    """Of benchmarks/results/recipes.json."""
    plans = json.loads((ROOT / "benchmarks/results/recipes.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert f"any of [{len(ALGORITHMS)} algorithms]" in readme
    assert f"and {len(ALGORITHMS) - 1} more." in readme
    evenings = re.findall(r"`([\w-]+-evening)` \| ([\d.]+) h \| (\d+) min \|", readme)
    assert {name for name, *_ in evenings} == {name for name in plans if name.endswith("-evening")}
    for name, rtx4090, h100 in evenings:
        runs = plans[name]["runs"]
        assert (rtx4090, h100) == (f"{runs['rtx4090'] / 3600:.1f}", f"{runs['h100'] / 60:.0f}"), (
            name
        )


LOG = TEXTS[ROOT / "docs/log.md"]


def glossary() -> dict[str, list[str]]:
    """Per kind of row, the names that docs/log.md explains."""
    explained = {}
    for section in LOG.split('Rows with `"kind": "')[1:]:
        cells = re.findall(r"^- (`[^:]+`): ", section, re.MULTILINE)
        names = re.findall(r"`([^`]+)`", " ".join(cells))
        explained[section.partition('"')[0]] = names
    return explained


class Bright:
    """A reward that says what is right."""

    right = 0.5
    differentiable = True

    def __call__(self, images, prompts):
        return brightness(images, prompts)


def some(images, prompts):
    """A reward that scores one of the prompts."""
    return torch.tensor([1.0 if prompt == "0" else math.nan for prompt in prompts])


def test_the_glossary_has_every_name_that_runs_log_and_no_other(monkeypatch):
    """Runs that log all there is: overlapped scoring, a KL term, what is chosen, losses on finished
    latents, weights of samples, a judge with few scores."""
    monkeypatch.setattr("g2rpo.train.evaluator.SPREAD_SHARE", math.inf)
    explained = glossary()
    assert explained.keys() == {"train", "eval"}
    logged = {"train": set(), "eval": set()}
    for overrides in (
        [],
        ["algorithm.kl_weight=0.1"],
        ["algorithm.name=diffusion_nft", "algorithm.group_size=4"],
        ["algorithm.name=opsd", "algorithm.group_size=4"],
        ["algorithm.name=self_opd", "algorithm.group_size=4"],
    ):
        rewards = {"rewards": {"bright": Bright()}, "judges": {"dark": darkness, "some": some}}
        for row in trainer(None, *overrides, "trainer.iterations=1", **rewards).train():
            logged[row["kind"]] |= row.keys() - {"kind", "iteration", "alarms"}
    places = {"NAME": r"[a-z]+", "PHASE": r"\w+", "K": r"\d+", "M": r"\d+", "R": r"\d+"}
    for kind, entries in explained.items():
        patterns = {
            re.sub(r"\b(NAME|PHASE|K|M|R)\b", lambda place: places[place[0]], name)
            for name in entries
        }
        met = {
            (name, each) for name in logged[kind] for each in patterns if re.fullmatch(each, name)
        }
        unexplained = logged[kind] - {name for name, _ in met}
        assert not unexplained, f"not in docs/log.md: {sorted(unexplained)}"
        # memory is of accelerators alone
        gone = patterns - {each for _, each in met} - {"memory_peak"}
        assert not gone, f"in docs/log.md, but not logged: {sorted(gone)}"
