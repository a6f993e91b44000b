"""The operations of the command line with Python objects.

trainer = api.trainer("scenes", rewards={"red": redness}, run_dir="runs/red")
rows = list(trainer.train())
table = trainer.finish()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from g2rpo.app.ahead import policy_after_encoding
from g2rpo.app.build import Request, build
from g2rpo.app.export import export as write_export
from g2rpo.app.quiet import quiet_bars, quiet_libraries
from g2rpo.assembly import components
from g2rpo.assembly.adapters import completed
from g2rpo.assembly.config import load_config
from g2rpo.config.given import OBJECT, mention
from g2rpo.config.schema import Config, RewardConfig
from g2rpo.core.errors import UserError
from g2rpo.core.input_pictures import check_inputs
from g2rpo.core.plain import read_as
from g2rpo.core.types import Algorithm, Policy, Scorer
from g2rpo.evaluation.heldout import Comparison, compare
from g2rpo.evaluation.sampler import Sampler, sampler_of
from g2rpo.lab.compare.study import parse_budget
from g2rpo.lab.compare.workflow import compare as compare_cells
from g2rpo.lab.report.page import write_page
from g2rpo.monitor.trackers import Tracker
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.embeddings import CachedPolicy, EncodedPrompts
from g2rpo.runs.directory import RunDirectory, StudyDirectory
from g2rpo.runs.lifecycle import entered, read_config
from g2rpo.training.trainer import Trainer


def trainer(
    recipe: str | Config,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    algorithm: Algorithm | None = None,
    policy: Policy | None = None,
    rewards: Mapping[str, Scorer] | None = None,
    judges: Mapping[str, Scorer] | None = None,
    prompts: Sequence[str] | None = None,
    heldout: Sequence[str] | None = None,
    trackers: Sequence[Tracker] | None = None,
    notify: Callable[[str], None] = print,
) -> Trainer:
    """A trainer as `g2rpo train` builds it; objects replace what the recipe names.

    `rewards` are trained on, with the weights that the config has for these names, else 1; `judges` only score held-out
    pictures. Without a `run_dir` nothing is written; one that contains a run needs `resume`, and `accept_changes` if prompts or
    reward code have changed. Its config.yaml only mentions objects (as "object:module.Class"), so commands that need them
    refuse: resume such a run from the program that began it. Raises UserError as the command does.
    """
    _check_lists(overrides=overrides, prompts=prompts, heldout=heldout)
    _check_tables(rewards=rewards, judges=judges)
    _check_objects(algorithm=algorithm, policy=policy)
    config = recipe if isinstance(recipe, Config) else load_config(recipe, overrides, notify)
    if policy is None:
        config = completed(config, notify)
    config = _mentioning(config, algorithm, policy, rewards, judges, prompts, heldout)
    objects = {
        "policy": policy,
        "rewards": rewards,
        "judges": judges,
        "prompts": prompts,
        "heldout": heldout,
        "trackers": trackers,
    }
    given = {name: thing for name, thing in objects.items() if thing is not None}
    if policy is None:
        _quiet()
    request = Request(config=config, given=given, resume=resume, accept_changes=accept_changes, notify=notify)
    if run_dir is None:
        return build(request)
    with entered(config, Path(run_dir), resume, notify) as directory:
        return build(replace(request, run_dir=directory))


def _quiet() -> None:
    """As the command line, without what libraries print as they load a model."""
    quiet_libraries()
    quiet_bars()


def _check_lists(**lists: Any) -> None:
    """Refuses one text where a list of texts is wanted, whose characters would be the list, and a list of no prompts."""
    for name, given in lists.items():
        if given is None:
            continue
        if isinstance(given, str | Mapping) or not all(isinstance(text, str) for text in given):
            example = "trainer.iterations=2" if name == "overrides" else "a red circle"
            raise UserError(f"{name}: should be a list of texts, such as ['{example}'], is {given!r:.80}")
        if name != "overrides" and not given:
            raise UserError(f"{name}: is empty; give at least one prompt")


def _check_tables(**tables: Any) -> None:
    """Refuses rewards without names, and what is no function or object that can be called."""
    for key, table in tables.items():
        if table is not None and not isinstance(table, Mapping):
            raise UserError(f"{key}: should be a mapping from names to functions or objects, is {table!r:.80}")
        for name, reward in (table or {}).items():
            if isinstance(reward, type):
                raise UserError(f"{key}[{name!r}]: is a class; give an object of it, such as {reward.__name__}()")
            if not callable(reward):
                raise UserError(f"{key}[{name!r}]: should be a function or an object that can be called, is {reward!r:.80}")


def _check_objects(**objects: Any) -> None:
    """Refuses a name or a class where an object is wanted."""
    for key, given in objects.items():
        if isinstance(given, str):
            path = "algorithm.name" if key == "algorithm" else "policy.path"
            raise UserError(f"{key}: should be an object; a name goes into the overrides: ['{path}={given}']")
        if isinstance(given, type):
            raise UserError(f"{key}: is a class; give an object of it, such as {given.__name__}()")


def _mentioning(
    config: Config,
    algorithm: Algorithm | None,
    policy: Policy | None,
    rewards: Mapping[str, Scorer] | None,
    judges: Mapping[str, Scorer] | None,
    prompts: Sequence[str] | None,
    heldout: Sequence[str] | None,
) -> Config:
    """`config` with a mention in place of the name of each given object."""
    changes: dict[str, object] = {}
    judged: dict[str, object] = {}
    if algorithm is not None:
        changes["algorithm"] = algorithm
    if policy is not None:
        changes["policy"] = config.policy.model_copy(update={"path": mention(policy), "pipeline": None})
    if rewards is not None:
        changes["rewards"] = _mentioned(rewards, config.rewards)
    if prompts is not None:
        changes["prompts"] = config.prompts.model_copy(update={"train": OBJECT})
    if heldout is not None:
        judged["prompts"] = OBJECT
    if judges is not None:
        judged["rewards"] = _mentioned(judges, config.evaluation.rewards)
    return config.model_copy(update={**changes, "evaluation": config.evaluation.model_copy(update=judged)})


def _mentioned(rewards: Mapping[str, Scorer], table: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """Mentions of `rewards`, with the weight and frames that `table` has for their names."""
    known = {name: entry.model_dump(include={"weight", "frames"}) for name, entry in table.items()}
    return {name: RewardConfig(kind=mention(reward), **known.get(name, {})) for name, reward in rewards.items()}


def sampler(run: str | Path, *, base: bool = False, seed: int = 0) -> Sampler:
    """A finished run's model, with its tuned weights unless `base`, as its evaluations sample it: `policy`, `sigmas`,
    `pictures(prompts)`."""
    _quiet()
    config = read_config(Path(run))
    policy = components.build_policy(config.policy, tuning="frozen")
    return sampler_of(config, _tuned(policy, config, run, base), seed=seed)


def _tuned(policy: DiffusersPolicy, config: Config, run: str | Path, base: bool = False) -> DiffusersPolicy:
    if not base:
        components.load_weights(policy, RunDirectory(Path(run)).weights, config.policy.path)
    return policy


def _loaded(run: str | Path) -> tuple[Config, Any]:
    _quiet()
    config = read_config(Path(run))
    return config, components.load_pipeline(config.policy, tuning="frozen")


def sample(run: str | Path, prompts: Sequence[str], *, base: bool = False, seed: int = 0) -> Tensor:
    """Pictures [B, 3, H, W] in [0, 1], or clips [B, T, 3, H, W], by a finished run's model.

    Picture i starts from noise (seed, i). A model that edits takes `Prompt("make it red", ["in.png"])`.
    """
    _check_lists(prompts=prompts)
    check_inputs(prompts)
    config, loaded = _loaded(run)
    encoded = EncodedPrompts(loaded.text, prompts)  # before the transformer is on the device
    policy = CachedPolicy(_tuned(loaded.policy(), config, run, base), encoded)
    return sampler_of(config, policy, seed=seed, decode_batch_size=8).pictures(prompts)


def evaluate(run: str | Path, rewards: Mapping[str, Scorer], prompts: Sequence[str], *, seed: int = 0) -> dict[str, Comparison]:
    """Base against tuned for any rewards on any prompts, from the same noise. Bootstrap intervals: `g2rpo evaluate`."""
    _check_lists(prompts=prompts)
    _check_tables(rewards=rewards)
    check_inputs(prompts)
    config, loaded = _loaded(run)
    cached = policy_after_encoding(loaded, config.prompts.cache, prompts, print)
    sampled = sampler_of(config, cached, seed=seed, decode_batch_size=8)
    base = sampled.evaluate(prompts, rewards)
    _tuned(cached.policy, config, run)  # base and tuned one after the other: only one model is on the device
    return compare(base, sampled.evaluate(prompts, rewards))


def study(
    recipe: str,
    cells: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    budget: str = "iterations=60",
    rates: Sequence[float] | None = None,
    seeds: int = 3,
    pilots: int = 3,
    steps: Sequence[int] | None = None,
    jobs: int = 1,
) -> dict[str, Any]:
    """Runs `g2rpo compare` in processes of their own; returns the content of results.json.

    `cells` has overrides by name, "budget=20000" among them for a budget of a cell's own. Called again, it finishes what is
    missing in `out`. Raises UserError as the command does.
    """
    folder = Path(out)
    asked = (parse_budget(budget), rates, seeds, pilots, steps, jobs)
    compare_cells(recipe, overrides, cells, *asked, out=folder)
    return read_as(dict[str, Any], StudyDirectory(folder).results)


def report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page of `g2rpo report`; returns its path."""
    return write_page([Path(run) for run in runs], Path(out) if out is not None else None)


def export(
    run: str | Path,
    format: str,
    *,
    checkpoint: int | str | None = None,
    out: str | Path | None = None,
    learnt: bool = False,
    assistant: bool = False,
) -> Path:
    """Writes what `g2rpo export` writes, and returns where."""
    which = None if checkpoint is None else str(checkpoint)
    return write_export(Path(run), format, which, Path(out) if out is not None else None, learnt, assistant)[0]
