"""The operations of the command line with Python objects.

trainer = api.trainer("scenes", rewards={"red": redness}, run_dir="runs/red")
rows = list(trainer.train())
table = trainer.finish()

Whatever loads a model first silences warnings and bars of model libraries, in the whole process, as
the command line does (`core.process`). DIFFUSERS_VERBOSITY and TRANSFORMERS_VERBOSITY win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from g2rpo.config.read import completed, load_config
from g2rpo.config.resolve import resolve_as
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError, refuse, shown
from g2rpo.core.files import local
from g2rpo.core.images import check_inputs
from g2rpo.core.plain import read_as
from g2rpo.core.plugins import PYTHON
from g2rpo.core.process import quiet_libraries
from g2rpo.core.rewards import Scorer
from g2rpo.core.statistics import Comparison
from g2rpo.core.types import Algorithm, Policy
from g2rpo.lab.compare.study import parse_budget
from g2rpo.lab.compare.workflow import compare as compare_cells
from g2rpo.lab.evaluate import run_settings
from g2rpo.lab.export import export as write_export
from g2rpo.lab.plan.plan import predict
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import write_page
from g2rpo.lab.sample import SampleConfig, painter, sample_config, tune
from g2rpo.models.load import load_pipeline, quiet_bars
from g2rpo.rewards.catalogue import RewardConfig
from g2rpo.train.build import Request, build
from g2rpo.train.evaluation.heldout import compare_evaluations
from g2rpo.train.evaluation.sampler import Sampler
from g2rpo.train.found import Given
from g2rpo.train.monitor.trackers import METHODS, Tracker
from g2rpo.train.run.folder import Run, entered
from g2rpo.train.trainer import Trainer

PICTURES_AT_ONCE = 8
"""Pictures that are decoded and scored at once."""


def trainer(
    recipe: str | Path | Config,
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

    `rewards` are trained on, with the weights that the config has for these names;
    `judges` only score held-out pictures. Without a `run_dir` nothing is written; one that contains a run
    needs `resume`, and `accept_changes` if prompts or reward code have changed. In its
    config.yaml the name of an object is "python", so commands that need it refuse: resume such a
    run from the program that began it. Raises UserError as the command does.
    """
    given = Given(
        policy=policy,
        rewards=rewards,
        judges=judges,
        prompts=prompts,
        heldout=heldout,
        trackers=trackers,
    )
    refuse(_faults_of_texts("overrides", overrides))
    refuse(_faults(given, algorithm))
    if isinstance(recipe, Config) and overrides:
        raise UserError(
            "overrides: are for a recipe's name or a file; change the Config itself, by model_copy"
        )
    config = recipe if isinstance(recipe, Config) else load_config(str(recipe), overrides, notify)
    if policy is None:
        config = completed(config, notify)
    config = _without_objects(config, given, algorithm)
    # a name or value that config.yaml could not hold would make the run one that nothing reads
    resolve_as(Config, config.model_dump(mode="json"), mention=True)
    if policy is None:
        _quiet()
    request = Request(
        config=config,
        given=given,
        resume=resume,
        accept_changes=accept_changes,
        notify=notify,
        predict=predict,
    )
    if run_dir is None:
        return build(request)
    with entered(config, local(run_dir), resume, notify) as directory:
        return build(replace(request, run_dir=directory))


def _quiet() -> None:
    """As the command line, without what libraries print as they load a model."""
    quiet_libraries()
    quiet_bars()


def _faults(given: Given, algorithm: Algorithm | None) -> Iterator[str]:
    """Of objects: names, classes and values in their place."""
    for name, thing, key in (
        ("algorithm", algorithm, "algorithm.name"),
        ("policy", given.policy, "policy.path"),
    ):
        if isinstance(thing, str):
            yield f"{name}: should be an object; a name goes into the overrides: ['{key}={thing}']"
        yield from _faults_of_class(name, thing)
    yield from _faults_of_prompts("prompts", given.prompts)
    yield from _faults_of_prompts("heldout", given.heldout)
    yield from _faults_of_rewards("rewards", given.rewards)
    yield from _faults_of_rewards("judges", given.judges)
    if not isinstance(given.trackers or (), Sequence):
        yield f"trackers: should be a list of trackers, is {shown(given.trackers)}"
    for number, tracker in enumerate(given.trackers or ()):
        place = f"trackers[{number}]"
        yield from _faults_of_class(place, tracker)
        lacks = [method for method in METHODS if not callable(getattr(tracker, method, None))]
        if lacks:
            yield f"{place}: is no tracker, it lacks {', '.join(lacks)}: {shown(tracker)}"


def _faults_of_class(place: str, thing: object) -> Iterator[str]:
    if isinstance(thing, type):
        yield f"{place}: is a class; give an object of it, such as {thing.__name__}()"


def _faults_of_prompts(name: str, prompts: Any) -> Iterator[str]:
    if prompts is not None:
        yield from _faults_of_texts(name, prompts, "a red circle")
        if not len(prompts):
            yield f"{name}: is empty; give at least one prompt"


def _faults_of_texts(name: str, texts: Any, example: str = "trainer.iterations=2") -> Iterator[str]:
    """Of one text the characters would be the list; what has no length can be read only once."""
    no_list = isinstance(texts, str | Mapping) or not isinstance(texts, Sized)
    if no_list or not all(isinstance(text, str) for text in texts):
        yield f"{name}: should be a list of texts, such as ['{example}'], is {shown(texts)}"


def _faults_of_rewards(name: str, rewards: Any) -> Iterator[str]:
    if not isinstance(rewards or {}, Mapping):
        yield f"{name}: should be a mapping from names to functions or objects, is {shown(rewards)}"
    for key, reward in (rewards or {}).items():
        place = f"{name}[{key!r}]"
        yield from _faults_of_class(place, reward)
        if not callable(reward):
            yield f"{place}: should be a function or an object that can be called, is {shown(reward)}"


def _without_objects(config: Config, given: Given, algorithm: Algorithm | None) -> Config:
    """`config` with `PYTHON` in place of the name of each given object."""
    changes: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
    if given.rewards is not None:
        changes["rewards"] = _entries(given.rewards, config.rewards)
    if given.policy is not None:
        config = config.changed("policy", path=PYTHON, pipeline=None)
    if given.prompts is not None:
        config = config.changed("prompts", train=PYTHON)
    if given.heldout is not None:
        config = config.changed("evaluation", prompts=PYTHON)
    if given.judges is not None:
        judges = _entries(given.judges, config.evaluation.rewards)
        config = config.changed("evaluation", rewards=judges)
    return config.model_copy(update=changes)


def _entries(
    rewards: Mapping[str, Scorer], table: Mapping[str, RewardConfig]
) -> dict[str, RewardConfig]:
    """Entries for `rewards`, with the weight and frames that `table` has for their names."""
    kept = {"weight", "frames"}
    known = {name: entry.model_dump(include=kept) for name, entry in table.items()}
    return {name: RewardConfig(kind=PYTHON, **known.get(name, {})) for name in rewards}


def sampler(run: str | Path, *, base: bool = False, seed: int = 0) -> Sampler:
    """A finished run's model, with its tuned weights unless `base`, as its evaluations sample it:
    `policy`, `sigmas`, `pictures(prompts)`."""
    return painter(_sample_config_of(run, base, seed))


def _sample_config_of(run: str | Path, base: bool, seed: int) -> SampleConfig:
    _quiet()
    return sample_config(run_settings(local(run), base=base), seed=seed, batch_size=16)


def sample(run: str | Path, prompts: Sequence[str], *, base: bool = False, seed: int = 0) -> Tensor:
    """Pictures [B, 3, H, W] in [0, 1], or clips [B, T, 3, H, W], by a finished run's model.

    Picture i starts from noise (seed, i). A model that edits takes `Prompt("make it red",
    ["in.png"])`.
    """
    refuse(_faults_of_prompts("prompts", prompts))
    check_inputs(prompts)
    sampled = painter(_sample_config_of(run, base, seed), prompts)
    return replace(sampled, decode_batch_size=PICTURES_AT_ONCE).pictures(prompts)


def evaluate(
    run: str | Path, rewards: Mapping[str, Scorer], prompts: Sequence[str], *, seed: int = 0
) -> dict[str, Comparison]:
    """Base against tuned for any rewards on any prompts, from the same noise. Bootstrap intervals:
    `g2rpo evaluate`."""
    refuse(_faults_of_prompts("prompts", prompts))
    refuse(_faults_of_rewards("rewards", rewards))
    check_inputs(prompts)
    config = _sample_config_of(run, False, seed)
    loaded = load_pipeline(config.policy, tuning="frozen")
    loaded.warn_of(prompts, print)
    cache = Run(local(run)).read_config().prompts.cache
    policy = loaded.policy_after_encoding(prompts, cache, print)
    sampled = replace(config.sampler(policy, config.steps), decode_batch_size=PICTURES_AT_ONCE)
    base = sampled.evaluate(prompts, rewards)
    # base and tuned one after the other: only one model is on the device
    tune(policy, config)
    return compare_evaluations(base, sampled.evaluate(prompts, rewards))


def study(
    recipe: str | Path,
    cells: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    budget: str = "iterations=60",
    seeds: int = 3,
    steps: Sequence[int] = (),
    jobs: int = 1,
    controls: bool = False,
) -> dict[str, Any]:
    """Runs `g2rpo compare` in processes of their own; returns the content of results.json.

    `cells` has overrides by name, "budget=20000" among them for a budget of a cell's own. Called
    again, it finishes what is missing in `out`. Raises UserError and Stopped as the command does.
    """
    refuse(_faults_of_texts("overrides", overrides))
    for cell, own in cells.items():
        refuse(_faults_of_texts(f"cell {cell}", own))
    folder = compare_cells(
        str(recipe),
        overrides,
        cells,
        parse_budget(budget),
        seeds=seeds,
        steps=steps,
        jobs=jobs,
        out=local(out),
        controls=controls,
    )
    return read_as(dict[str, Any], folder.results)


def report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page of `g2rpo report`; returns its path."""
    if not runs:
        raise UserError("report: name a run")
    return write_page(
        read_runs([local(run) for run in runs]), local(out) if out is not None else None
    )


def export(
    run: str | Path,
    format: str,
    *,
    checkpoint: int | str | None = None,
    out: str | Path | None = None,
    learnt: bool = False,
    notify: Callable[[str], None] = print,
) -> Path:
    """Writes what `g2rpo export` writes, and returns where; `notify` is called with what that
    warns of."""
    which = None if checkpoint is None else str(checkpoint)
    place = local(out) if out is not None else None
    return write_export(local(run), format, which, place, learnt, notify)
