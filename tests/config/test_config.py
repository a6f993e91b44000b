"""What people get wrong, and what they are told."""

import dataclasses
import re
import shlex

import pytest
import yaml

from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.recipes import names, recipe_settings
from g2rpo.config.resolve import differences, read_yaml, resolve
from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.train.run.folder import Run, entered
from tests.support.runs import PLAIN, config
from tests.support.tables import rows


@pytest.mark.parametrize("name", names())
def test_every_recipe_is_a_valid_config_and_survives_its_own_file(name):
    built = resolve(recipe_settings(name))
    assert resolve(yaml.safe_load(built.to_yaml())) == built


def test_overrides_reach_their_keys_and_take_rewards_out():
    built = config(
        "algorithm.granularities=[1,3]",
        "optim.learning_rate=2e-6",
        "rewards.bright=0.5",
        "rewards.extra.kind=scene_clip",
        "algorithm.tail=closed",
    )
    assert built.algorithm.granularities == (1, 3) and built.algorithm.tail == "closed"
    assert built.optim.learning_rate == 2e-6
    assert (built.rewards["bright"].weight, built.rewards["bright"].kind) == (0.5, "bright")
    assert built.rewards["extra"].kind == "scene_clip"
    for empty in ("", "~", "null"):
        taken = config("rewards.other=1", f"rewards.bright={empty}")
        assert set(taken.rewards) == {"other"}


def test_numbers_are_numbers_and_quoted_ones_are_text(tmp_path):
    """At the command line and in files alike, at every depth, and in the file that a run writes."""
    options = "{a: 1e-4, b: [-2.5E+3, .5e1], c: '1e-4', d: '1984', e: 1.2.3e4, f: 'x #1', g: yes}"
    wanted = {"a": 1e-4, "b": [-2500.0, 5.0], "c": "1e-4", "d": "1984", "e": "1.2.3e4"}
    wanted |= {"f": "x #1", "g": True}
    made = config("policy.negative_prompt='1e3'", f"rewards.bright.options={options}")
    assert made.rewards["bright"].options == wanted and made.policy.negative_prompt == "1e3"
    (tmp_path / "config.yaml").write_text(made.to_yaml())
    assert resolve(read_yaml(tmp_path / "config.yaml")) == made


WRONG = """
algorithm.gruop_size=4 -> unknown key 'algorithm.gruop_size'. Did you mean 'algorithm.group_size'?
learning_rate=1 -> unknown key 'learning_rate'. Did you mean 'optim.learning_rate'?
rewards.brigt= -> there is no reward 'brigt' to remove. Did you mean 'bright'?
rewards.brigt=null -> there is no reward 'brigt' to remove. Did you mean 'bright'?
alarms.hackin=off -> unknown key 'alarms.hackin'. Did you mean 'alarms.hacking'
algorithm.beta=0.1 -> unknown key 'algorithm.beta'. Did you mean 'algorithm.kl_weight'?
rewards.own/mine.py:tilt=1 -> not its name; write rewards.tilt.kind=own/mine.py:tilt
rewards.tilt=own/mine.py:tilt -> got 'own/mine.py:tilt'; write rewards.tilt.kind=own/mine.py:tilt
algorithm=mine.py:Mine -> got 'mine.py:Mine'; write algorithm.name=mine.py:Mine
evaluation.rewards.own.mine:tilt=1 -> write evaluation.rewards.tilt.kind=own.mine:tilt
'trainer={FLUX.1: 1}' -> unknown key 'trainer.FLUX.1'. Known: checkpoint_every
rewards={bright:1.0} -> rewards.bright:1.0 is no name: write letters, digits and . _ + -; YAML needs
algorithm.group_size=many -> algorithm.group_size: input should be a valid integer
algorithm.name=mixgpro -> unknown algorithm 'mixgpro'. Did you mean 'mixgrpo' or 'mixgrpo_flash'?
algorithm.name=mixgrpo algorithm.granularities=[1] -> granularities'. Known: advantage_clip
algorithm.name=mixgrpo algorithm.update_every=often -> should be 'rollout' or 'branch', got 'often'
nonsense -> 'nonsense' is no override; write key=value
trainer.iterations=[1 -> '[1' is no value
trainer.seed=0512 -> '0512' is no value (it has 0512, which YAML reads to base 8: 330
trainer.seed=1:30 -> '1:30' is no value (it has 1:30, which YAML reads to base 60: 90
optim.learning_rate=1:30.5 -> it has 1:30.5, which YAML reads to base 60: 90.5
optim.weight_decay=1.1e18 -> should be 0, or from 1e-18 to 1e+18 in size, got 1.1e+18
trainer.iterations=yes -> trainer.iterations: should be a number, got True
algorithm.granularities=[1,true] -> algorithm.granularities.1: should be a number, got True
rewards.bright.weight=on -> rewards.bright.weight: should be a number, got True
rewards.bright.options.colour=#f00 -> '#f00' has a comment, from the # on; write 'rewards
"prompts.train=file #2.txt" -> from the # on; write 'prompts.train="file #2.txt"'
"""
"""Overrides, and words that the message must have."""


@pytest.mark.parametrize(("overrides", "message"), rows(WRONG))
def test_wrong_overrides_are_refused_with_a_hint(overrides, message):
    with pytest.raises(UserError) as refusal:
        config(*shlex.split(overrides))
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_another_algorithm_comes_with_its_own_defaults(name):
    """What a recipe says about one algorithm says nothing about another; what the command line
    says, counts, in any order."""
    own = {"refl": "ceiling", "fdfo": "churn", "self_opd": "eta"}
    heard, key = [], own.get(name, "advantage_clip")
    overrides = [f"algorithm.{key}=3", f"algorithm.name={name}", "algorithm.group_size=8"]
    built = resolve(PLAIN, overrides, "here", heard.append)
    if name == "g2rpo":
        expected = dataclasses.replace(config().algorithm, advantage_clip=3, group_size=8)
        assert heard == []
    else:
        expected = ALGORITHMS[name](**{"group_size": 8, key: 3})
        said = rf"algorithm.name={name}: its published defaults; here's .* are left out"
        assert re.fullmatch(said, heard[0]) and "branch_steps=[0, 1, 2]" in heard[0]
        assert ("group_size=6" in heard[0]) == (ALGORITHMS[name].group_size != 6)
    assert built.algorithm == expected and type(built.algorithm) is type(expected)
    assert resolve(yaml.safe_load(built.to_yaml())) == built


def test_naming_the_algorithm_that_it_is_changes_nothing():
    assert config("algorithm.name='mixgrpo'") == config("algorithm.name=mixgrpo")
    assert config("algorithm.name=g2rpo") == config()
    mix = resolve({**PLAIN, "algorithm": {"name": "mixgrpo", "window_size": 2}})
    assert resolve(yaml.safe_load(mix.to_yaml()), ["algorithm.name=mixgrpo"]) == mix


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UserError) as refusal:
        config("algorithm.gruop_size=4", "trainer.iterations=soon", "optim=3", "lr=1")
    said = [line.split(": ", 2)[1] for line in str(refusal.value).splitlines()]
    assert said == [
        "unknown key 'algorithm.gruop_size'. Did you mean 'algorithm.group_size'?",
        "optim is a group of settings, got 3; write optim.KEY=VALUE",
        "trainer.iterations",
        "unknown key 'lr'. Did you mean 'optim.learning_rate'?",
    ]
    with pytest.raises(UserError, match=r"'optim\.learning_rate' is missing"):
        resolve({**PLAIN, "optim": {}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is no YAML: line 1, column 6: "),
        (b"a:\n\tb: 1\n", "line 2, column 1: found character '\\\\t' .*; indent with spaces"),
        (b"- 1", "but holds none"),
        (b"# nothing yet", "but is empty"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"!!python/object:os.system {}", "has a tag"),
    ],
)
def test_unreadable_configs_are_refused(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_yaml(path)
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        read_yaml(tmp_path / "nowhere.yaml")


def open_run(config, run_dir, resume):
    with entered(config, run_dir, resume) as directory:
        Run(directory).claim(config)
    return directory


def test_a_run_directory_is_never_taken_over(tmp_path):
    directory = open_run(config(), tmp_path / "run", resume=False)
    written = (directory / "config.yaml").read_text()
    with pytest.raises(UserError, match="already holds a run"):
        open_run(config(), directory, resume=False)
    with pytest.raises(UserError, match=r"algorithm\.group_size: 6 there, 8 here"):
        open_run(config("algorithm.group_size=8"), directory, resume=True)
    assert (directory / "config.yaml").read_text() == written
    open_run(config("trainer.iterations=9"), directory, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_things_is_no_run(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="is not empty"):
        open_run(config(), tmp_path, resume)


def test_differences_are_dotted():
    changed = differences(config(), config("optim.learning_rate=1", "rewards.x=1"))
    of_reward = {f"rewards.x.{key}" for key in ("kind", "weight", "options")}
    assert changed.keys() == {"optim.learning_rate", *of_reward}


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("", {"branch_steps": (0, 1, 2), "group_size": 6}),
        ("    branch_steps: tuple[int, ...] = (1,)", {"branch_steps": (1,), "group_size": 6}),
    ],
)
def test_a_variant_of_the_recipes_algorithm_keeps_what_it_does_not_redefine(body, kept, tmp_path):
    """So that it is compared with the recipe's algorithm by what it changes alone."""
    source = tmp_path / "own.py"
    head = "from dataclasses import dataclass\nfrom g2rpo.algorithms.{module} import {base}\n"
    text = head + "@dataclass(frozen=True)\nclass Own({base}):\n    pause: int = 1\n{body}\n"
    source.write_text(text.format(module="g2rpo", base="GranularGRPO", body=body))
    (tmp_path / "mix.py").write_text(text.format(module="flow_grpo", base="MixGRPO", body=""))
    heard = []
    overrides = [f"algorithm.name={source}:Own", "algorithm.granularities=[1]"]
    algorithm = resolve(PLAIN, overrides, "here", heard.append).algorithm
    assert {key: getattr(algorithm, key) for key in kept} == kept and algorithm.pause == 1
    assert re.fullmatch(
        rf"algorithm.name={source}:Own: a GranularGRPO, so here's .* stay", heard[0]
    )
    assert algorithm.granularities == (1,) and "granularities=" not in heard[0]
    other = resolve(PLAIN, [f"algorithm.name={tmp_path}/mix.py:Own"], "here").algorithm
    assert other.group_size == ALGORITHMS["mixgrpo"].group_size


@pytest.mark.parametrize(
    "override", ["trackers=[{}:It]", "trackers={}:It", "rewards.mine={{kind: {}:it}}"]
)
def test_code_that_the_command_line_names_is_allowed_wherever_it_stands(override, tmp_path):
    """In a list and in a mapping too."""
    (tmp_path / "own.py").write_text("class It: ...\n\n\ndef it(images, prompts): ...\n")
    named = override.format(tmp_path / "own.py")
    config(named)
    assert plugins.find_class("trackers", f"{tmp_path}/own.py:It", {}).__name__ == "It"


def test_the_limits_of_numbers_that_a_message_names_are_taken():
    for limit in (1e-18, 1e18):
        assert config(f"optim.weight_decay={limit}").optim.weight_decay == limit
