"""README.md, docs/, benchmarks/ and studies/: commands work, code runs, links lead somewhere."""

import importlib
import json
import math
import pkgutil
import re
import subprocess
import sys
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


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def save_named(text: str) -> None:
    """Writes the Python blocks that begin with a file's name into the current folder; commands
    beside them name it."""
    for block in blocks(text):
        if named := re.match(r"# (\w+\.py)\n", block.code):
            Path(named[1]).write_text(block.code)


@pages_with("^```bash|`", slow=("extending", "performance", "recipes", "train", "tutorial"))
def test_every_command_can_be_given_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("benchmarks", "examples", "studies"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    save_named(TEXTS[page])
    scripts = [block.code for block in blocks(TEXTS[page]) if block.language == "bash"]
    commands = inline_commands(TEXTS[page])
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


# several trainings each; their commands are checked above
LONG_PAGES = ("alarms", "extending", "neighbours", "pairs", "rewards", "train", "tutorial")


@pages_with("^```python|^<!-- run -->", slow=LONG_PAGES)
def test_what_a_page_shows_runs(page, tmp_path, monkeypatch):
    """Python blocks in order, in one namespace and folder, trainers with few prompts; commands of
    marked blocks in between, at the smallest size."""
    monkeypatch.chdir(tmp_path)
    trainer_of = api.trainer

    def smaller(recipe, given=(), *more, **named):
        return trainer_of(recipe, [*given, *FEW_PROMPTS], *more, **named)

    monkeypatch.setattr(api, "trainer", smaller)
    save_named(TEXTS[page])
    names = {"__name__": page.stem}
    for block in blocks(TEXTS[page]):
        if elsewhere := re.match("run by (.*)", block.mark):
            assert page.name in (ROOT / elsewhere[1]).read_text()
        elif block.language == "python":
            code = compile(block.code, str(page), "exec")
            if not block.mark.startswith("compile only: "):
                exec(code, names)
        elif block.mark == "run":
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
    scenes = recipes.recipe_settings("scenes")
    for block in blocks(TEXTS[page]):
        if block.language == "yaml":
            config = resolve({**scenes, **yaml.safe_load(block.code)}, source=page.name)
            for entry in config.rewards.values():
                if plugins.is_code(str(entry.options.get("target"))):
                    plugins.allow(entry.options["target"])  # as --plugin does
            check_rewards({**config.rewards, **config.evaluation.rewards})


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[page])):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        there = (page.parent / path) if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text("utf-8").lower(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading) for heading in headings]  # as GitHub's
            assert anchor in [name.replace(" ", "-") for name in anchors], target


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
            if groups.get(group) and key != "py" and key not in groups[group]:
                assert hasattr(importlib.import_module(f"g2rpo.{group}"), key), span


@pages_with("pytest |python -m")
def test_figures_are_in_the_tests_and_results_that_are_cited_for_them(page):
    """Every number of a sentence or row that names a test or a script: in the test's source, or in
    the committed results."""
    for sentence, paragraph in sentences(page):
        there = cited(sentence, paragraph, page)
        missing = [figure.text for figure in figures(sentence) if not figure.is_in(there)]
        assert not missing, f"{missing} in: {sentence}"


@every_page
def test_numbers_are_written_as_programs_print_them(page):
    """.94 beside a program's 0.94, and 94% beside the 94 % of pages and programs."""
    text = re.sub(r"```.*?```|`[^`]*`", "", TEXTS[page], flags=re.S)
    assert not re.findall(r"\b\d+%(?! ?\d)", text)
    assert not re.findall(r"(?<![\w\d/'\"\\\]).])[-+−±]?\.\d\S*", TEXTS[page])


FOUND = [
    ("architecture", r"^- `([\w.]+)`: ", 35),  # where something is
    ("log", r"`((?:train|rollout)\.\w+\.[\w.]+)`", 8),  # what computes a value
    ("neighbours", r"[(,] ?([A-Z]\w+\.\w+)(?=[,)])", 20),  # beside a formula: (AWM.member_loss)
]


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


@pytest.mark.parametrize(("page", "pattern", "least"), FOUND)
def test_functions_that_a_page_finds_are_there(page, pattern, least):
    names = re.findall(pattern, TEXTS[ROOT / f"docs/{page}.md"], re.MULTILINE)
    loaded = [module for name, module in [*sys.modules.items()] if name.startswith("g2rpo.")]
    classes = {name: module.__name__ for module in loaded for name in dir(module)}
    assert len(names) >= least
    for name in names:
        owner = name.partition(".")[0]
        pkgutil.resolve_name(f"{classes[owner] if owner[0].isupper() else 'g2rpo'}.{name}")


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
    ran = TEXTS[ROOT / "studies/published.md"]
    for source in SOURCES.values():
        assert (ROOT / source.beside).is_file()
        assert source.repository in ran and source.commit in ran, source


def test_the_page_of_recipes_has_every_one_and_no_other():
    which = TEXTS[ROOT / "docs/recipes.md"].split("## Which one")[1].split("\n## ")[0]
    listed = re.findall(r"`([\w-]+)`[,;:.]", which)
    assert sorted(listed) == recipes.names()


def test_hours_in_the_readme_are_those_of_the_plans_on_the_cards_of_their_columns():
    """Of benchmarks/results/recipes.json."""
    plans = json.loads((ROOT / "benchmarks/results/recipes.json").read_text())
    readme = TEXTS[ROOT / "README.md"]
    assert f"any of [{len(ALGORITHMS)} algorithms]" in readme
    assert f"and {len(ALGORITHMS) - 1} more." in readme
    evenings = re.findall(r"`([\w-]+-evening)` \| ([\d.]+) h \| (\d+) min \|", readme)
    assert {name for name, *_ in evenings} == {name for name in plans if name.endswith("-evening")}
    for name, *told in evenings:
        runs = plans[name]["runs"]
        assert told == [f"{runs['rtx4090'] / 3600:.1f}", f"{runs['h100'] / 60:.0f}"], name


LOG = TEXTS[ROOT / "docs/log.md"]


def glossary() -> dict[str, list[str]]:
    """Per kind of row, the names that docs/log.md explains."""
    explained = {}
    for section in LOG.split('Rows with `"kind": "')[1:]:
        cells = re.findall(r"^- (`[^:]+`): ", section, re.MULTILINE)
        names = re.findall(r"`([^`]+)`", " ".join(cells))
        explained[section.partition('"')[0]] = names
    return explained


def some(images, prompts):
    """A reward that scores one of the prompts."""
    return torch.tensor([1.0 if prompt == "0" else math.nan for prompt in prompts])


def bright(images, prompts):
    return brightness(images, prompts)


bright.right, bright.differentiable = 0.5, True


def test_the_glossary_has_every_name_that_runs_log_and_no_other(monkeypatch):
    """Runs that log all there is: overlapped scoring, a KL term, what is chosen, losses on finished
    latents, weights of samples, a reward that says what is right, a judge with few scores."""
    monkeypatch.setattr("g2rpo.train.evaluator.SPREAD_SHARE", math.inf)
    logged = {"train": set(), "eval": set()}
    rewards = {"rewards": {"bright": bright}, "judges": {"dark": darkness, "some": some}}
    others = (f"algorithm.name={name}" for name in ("diffusion_nft", "opsd", "self_opd"))
    for words in ("trackers=[]", "algorithm.kl_weight=0.1", *others):
        small = "algorithm.group_size=4", "trainer.iterations=1"
        for row in trainer(None, words, *small, **rewards).train():
            logged[row["kind"]] |= row.keys() - {"kind", "iteration", "alarms"}
    explained = glossary()
    assert explained.keys() == logged.keys()
    places = {"NAME": r"[a-z]+", "PHASE": r"\w+", "K": r"\d+", "M": r"\d+", "R": r"\d+"}
    for kind, entries in explained.items():
        patterns = {
            re.sub(r"\b(NAME|PHASE|K|M|R)\b", lambda place: places[place[0]], name)
            for name in entries
        } - {"memory_peak"}  # of accelerators alone
        met = {(name, p) for name in logged[kind] for p in patterns if re.fullmatch(p, name)}
        assert logged[kind] - {name for name, _ in met} == set(), "not in docs/log.md"
        assert patterns - {pattern for _, pattern in met} == set(), "not logged"
