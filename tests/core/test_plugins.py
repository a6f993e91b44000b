"""Code from outside the package, by name: algorithms of every kind, rewards, and what is
refused."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from g2rpo.cli.main import from_home, plugins_first
from g2rpo.config.algorithms import algorithm_class, config_name
from g2rpo.config.resolve import codes_in
from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.core.plain import parse_json
from g2rpo.rewards.catalogue import RewardConfig, build_rewards
from g2rpo.train.run.folder import Run
from tests.support.commands import forget_code
from tests.support.runs import config, mean, trainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
SHORT = (
    "trainer.iterations=1 trainer.prompts_per_iteration=1 evaluation.num_prompts=2"
    " sampling.num_steps=5"
)
KINDS = {"forward": "Forward", "substeps": "SubSteps", "baseline": "Baseline"}


def named(kind: str) -> str:
    return f"{EXAMPLE}/g2rpo_example/{kind}.py:{KINDS[kind]}"


def trained(kind, *overrides, run_dir=None):
    options = [f"algorithm.name={named(kind)}", "algorithm.group_size=4", "sampling.num_steps=9"]
    return trainer(run_dir, *options, *overrides)


@pytest.mark.parametrize("kind", KINDS)
def test_an_algorithm_of_each_kind_moves_the_weights_toward_the_reward(kind):
    """Brightness is trained: the mean of the pictures is to rise, in every entry that the policy
    has."""
    t = trained(kind, "trainer.iterations=6", "optim.learning_rate=0.05")
    before = mean(t)
    rows = [row for row in t.train() if row["kind"] == "train"]
    assert float((mean(t) - before).mean()) > 0.02
    assert all(row["skipped_updates"] == 0 for row in rows)


def test_a_config_that_mentions_code_is_refused_until_the_user_names_it(tmp_path):
    given = config(f"algorithm.name={named('baseline')}", "algorithm.decay=0.25")
    (tmp_path / "config.yaml").write_text(given.to_yaml())
    forget_code()
    source = named("baseline").partition(":")[0]
    with pytest.raises(UserError, match=rf"is code that a config names.*add --plugin {source}"):
        Run(tmp_path).read_config(mention=False)
    mentioned = Run(tmp_path).read_config()
    assert config_name(mentioned.algorithm) == named("baseline")
    assert mentioned.to_yaml() == given.to_yaml()  # shown and kept, not run
    plugins.allow(source)
    assert Run(tmp_path).read_config(mention=False).algorithm == given.algorithm


def test_a_file_that_was_allowed_once_may_run_in_later_processes_until_it_changes(
    tmp_path, monkeypatch
):
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    for file in (mine, other):
        file.write_text("def it(images, prompts): ...\n")
    monkeypatch.chdir(tmp_path)

    def refused_code(name):
        plugins._allowed.clear()  # as in another process
        try:
            plugins.require(name)
        except plugins.CodeNotAllowed as error:
            return error.options
        return []

    plugins.allow("mine.py:it")
    assert refused_code("mine.py:it") == refused_code(f"{mine}:it") == []
    assert refused_code(f"{other}:it") == ["--plugin", str(other)]  # the same text in another place
    assert plugins.repeated() == []
    mine.write_text("def it(images, prompts): ...\nchanged = 1\n")
    assert refused_code("mine.py:it") == ["--plugin", "mine.py"]
    plugins.trusted_file().write_text("cut")
    with pytest.raises(UserError, match=r"trusted_code.json: is no JSON .*; delete it, and name"):
        plugins.require("mine.py:it")
    plugins.trusted_file().unlink()
    plugins.allow("json:loads")
    assert refused_code("json:loads") == ["--plugin", "json"]  # no file: a module may lie anywhere
    monkeypatch.setenv("XDG_STATE_HOME", str(other))  # a file: nothing can be kept there
    plugins.allow("mine.py")
    plugins.require("mine.py:it")
    assert refused_code("mine.py:it") == ["--plugin", "mine.py"]


def test_all_code_of_a_config_is_refused_in_one_message():
    keys = ("name", "kind", "target", "detector", "trackers")
    entries = [{key: f"{file}.py:It"} for key, file in zip(keys, "abcde", strict=True)]
    with pytest.raises(plugins.CodeNotAllowed) as caught:
        plugins.require_all(codes_in(entries))
    assert caught.value.options == [word for each in "abcde" for word in ("--plugin", f"{each}.py")]


@pytest.mark.parametrize("module", ["os:getcwd", "subprocess:run"])
def test_modules_of_pythons_own_are_refused_too(module):
    with pytest.raises(plugins.CodeNotAllowed):
        plugins.find_class("rewards", module, {})


@pytest.mark.parametrize("target", ["mine.py:it", "mine.py:é", "a:b/mine.py:it"])
def test_a_function_that_a_config_names_is_refused_however_it_is_written(tmp_path, target):
    file = tmp_path / target.rpartition(":")[0]
    file.parent.mkdir(exist_ok=True)
    leaves_a_mark = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef it(images, prompts): ...\né = it\n"
    file.write_text(leaves_a_mark, encoding="utf-8")
    options = {"target": f"{tmp_path}/{target}"}
    with pytest.raises(UserError):
        build_rewards({"it": RewardConfig(kind="function", options=options)})
    assert not (tmp_path / "ran").exists()


OWN = """
from typing import Literal

from pydantic import PositiveInt

from g2rpo.algorithms.flow_grpo import GRPO, window
from g2rpo.core.plain import hyper_parameters


@hyper_parameters
class Mine(GRPO):
    name: Literal["mine"] = "mine"
    noisy: PositiveInt = 2

    def plans(self, num_steps, iteration=0, seed=0):
        return [window(0, self.noisy, num_steps, self.shared_noise)]
"""


@pytest.mark.slow
def test_an_algorithm_is_one_file(tmp_path, says, refuses):
    """Written as the built-in ones are; planned, and tried and checked before a run begins."""
    (tmp_path / "mine.py").write_text(OWN)
    chosen = "scenes algorithm.name=mine.py:Mine algorithm.group_size=2"
    planned = parse_json(says(f"plan {chosen} algorithm.noisy=3 --json"))
    assert planned["counts"]["evaluations_per_prompt"] == 2 * 10
    says(f"train {chosen} algorithm.noisy=3 {SHORT} --run-dir run")
    wrong = refuses(f"train {chosen} algorithm.noisy=0 --run-dir other")
    assert "algorithm.noisy: input should be greater than 0, got 0" in wrong


NO_ALGORITHM = {
    "def f(:": "SyntaxError",
    "class Other: ...": "no 'Mine'.*Known: Other",
    "import dataclasses\n@dataclasses.dataclass\nclass Mine: ...": "lacks plans, advantages",
    "from g2rpo.algorithms.epg import EPG\nclass Mine(EPG):\n how: int = 1": "how would be no setting",
}


@pytest.mark.parametrize("code", NO_ALGORITHM)
def test_code_that_is_no_algorithm_is_one_message(tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    plugins.allow(str(tmp_path / "mine.py"))
    with pytest.raises(UserError, match=NO_ALGORITHM[code]):
        algorithm_class(f"{tmp_path}/mine.py:Mine")


@pytest.mark.parametrize("group", ["algorithms", "policies", "rewards", "trackers"])
def test_a_file_without_a_name_in_it_is_no_misspelt_built_in(group):
    with pytest.raises(UserError, match=r"^mine\.py is a file; .*mine\.py:NAME$"):
        plugins.find_class(group, "mine.py", {"mine": "x:Mine"})


def test_plugins_may_be_allowed_anywhere_on_the_command_line():
    given = ["train", "x", "--plugin", "a.py", "k=v", "--plugin=b"]
    assert plugins_first(given) == ["--plugin", "a.py", "--plugin=b", "train", "x", "k=v"]


def test_an_option_may_name_a_path_from_home(monkeypatch):
    """No shell expands the ~ of `--run-dir=~/x`."""
    monkeypatch.setenv("HOME", "/home/me")
    given = ["--run-dir=~/x", "~/x", "policy.adapter=~/x", "--format=a"]
    assert [from_home(word) for word in given] == ["--run-dir=/home/me/x", *given[1:]]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example as an installer leaves it, with the entry points of its pyproject.toml: found by
    Python while a test runs."""
    site = tmp_path / "site"
    settings = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    for package in settings["tool"]["setuptools"]["packages"]:
        shutil.copytree(EXAMPLE / package, site / package)
    project = settings["project"]
    about = site / "g2rpo_example-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {project['name']}\nVersion: 1\n")
    groups = [
        f"[{group}]\n" + "\n".join(map(" = ".join, names.items()))
        for group, names in project["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.syspath_prepend(site)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "g2rpo_example"]:
        del sys.modules[name]


@pytest.mark.slow
def test_an_installed_package_offers_names(installed, says, refuses, tmp_path):
    """`forward` and `redness` by entry point, in train and the model card; misspelt, with a near
    match."""
    small = f"algorithm.name=forward algorithm.group_size=2 rewards.redness=1 {SHORT}"
    says(f"train scenes {small} --run-dir run")
    card = (tmp_path / "run" / "transformer" / "README.md").read_text()
    assert "redness" in card and "forward" in card
    assert "Did you mean 'forward'?" in refuses("plan scenes algorithm.name=forwrad")


@pytest.mark.slow
def test_suggested_commands_allow_the_code_that_they_need(says, tmp_path, tiny_config):
    (tmp_path / "mine.py").write_text("from g2rpo.models.catalogue import flux as Mine\n")
    kind = "policy.kind=mine.py:Mine trainer.iterations=1"
    out = says(f"train tiny.yaml {kind} --run-dir run")
    for what in ("draw", "repeat"):
        (command,) = re.findall(f" +{what}  g2rpo (.*)", out)
        forget_code()
        says(command)
        assert command.endswith(" --plugin mine.py")
    assert Run(Path("run")).command == "`g2rpo resume run --plugin mine.py`"
