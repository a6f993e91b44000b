"""`g2rpo demo`: a run's model, or any pipeline, in the browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.app.evaluate import model_settings
from g2rpo.app.events import Emit, Line, silent
from g2rpo.app.serving import check_address, refused, token_for
from g2rpo.assembly import components
from g2rpo.assembly.prompts import build_prompts
from g2rpo.assembly.rewards import build_rewards, check_rewards
from g2rpo.config import recipes
from g2rpo.config.algorithms import title_of
from g2rpo.config.resolve import resolve, resolve_as
from g2rpo.config.schema import Config, PolicyConfig, RewardTable, SamplingConfig, Section
from g2rpo.core.data import Precision
from g2rpo.core.errors import UserError, loading
from g2rpo.core.types import Algorithm
from g2rpo.lab.demo.opening import Opening, opening_of
from g2rpo.lab.demo.studio import Studio, Tuned, draw, learn
from g2rpo.lab.report.history import Run, read_runs
from g2rpo.lab.report.verdict import summary
from g2rpo.lab.report.words import model_name
from g2rpo.rollout.scoring import RewardFailed
from g2rpo.runs.directory import RunDirectory, check_weights
from g2rpo.runs.lifecycle import read_config
from g2rpo.runtime.memory import batch_sizes

EXAMPLES = 4
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Cast:
    """The settings of a demo, by name: from a run's config, or defaults for a pipeline."""

    title: str
    policy: PolicyConfig
    algorithm: Algorithm
    sampling: SamplingConfig
    precision: Precision
    rewards: RewardTable
    judges: RewardTable = field(default_factory=dict)
    seed: int = 42
    prompts: str = ""
    """A source of held-out prompts."""
    num_prompts: int | None = None
    """The number of held-out prompts to use."""
    steps: int | None = None
    """Step count of the run's evaluations."""
    story: str = "as it is"
    """A description of the training."""

    def check(self) -> None:
        """Checks before anything is loaded."""
        components.locate_pipeline(self.policy.path, self.policy.pipeline, self.policy.kind)
        check_rewards({**self.rewards, **self.judges})
        components.check_plans(self.algorithm, self.sampling)


class _Named(Section):
    rewards: RewardTable


def of_run(run: Path) -> Cast:
    """The cast of a run."""
    c = read_config(run, mention=False)
    weights = "an adapter" if c.policy.tuning == "lora" else "all weights"
    story = f"before and after training {weights} with {title_of(c.algorithm)[0]} on {' and '.join(c.rewards)}"
    cast = _of_config(f"Run {run.resolve().name}", c)
    return replace(cast, steps=c.evaluation.num_steps, story=story)


def _of_config(title: str, c: Config) -> Cast:
    e = c.evaluation
    return Cast(
        title=title,
        policy=c.policy,
        algorithm=c.algorithm,
        sampling=c.sampling,
        precision=c.precision,
        rewards=c.rewards,
        judges=e.rewards,
        seed=c.trainer.seed,
        prompts=e.prompts,
        num_prompts=e.num_prompts,
    )


RECIPES = {"testbed": ("The testbed", "scenes"), "words": ("Words", "words")}
"""Title and recipe of the embedded models."""


def of_model(model: str, size: int | None, guidance: float | None, rewards: dict[str, Any] | None) -> Cast:
    """The cast of a pipeline: an embedded one comes with its recipe, any other with the paper's algorithm."""
    policy = resolve_as(PolicyConfig, model_settings(model, size, guidance)["policy"], source="--model")
    table = resolve_as(_Named, {"rewards": rewards or {}}, source="--rewards").rewards
    if model not in RECIPES:
        return Cast(
            title=model,
            policy=policy,
            algorithm=GranularGRPO(),
            sampling=SamplingConfig(num_steps=16, shift="model"),
            precision=Precision(network=getattr(torch, policy.dtype)),
            rewards=table,
        )
    title, recipe = RECIPES[model]
    cast = replace(_of_config(title, resolve(recipes.settings(recipe), source=f"recipe {recipe}")), policy=policy)
    return replace(cast, rewards=table, judges={}) if table else cast


def open_studio(cast: Cast, weights: Path | None, notify: Say, heldout: Sequence[str] = ()) -> Studio:
    """Builds the objects of `cast`, and loads tuned weights."""
    device = components.pick_device(cast.policy.device)
    rewards, judges = (build_rewards(table, device) for table in (cast.rewards, cast.judges))
    policy = components.build_policy(cast.policy, tuning="frozen", keep_base=True)
    policy.text.park()  # they are on the device only while they encode
    tuned: Tuned = "nothing"
    if weights is not None:
        with loading(f"{weights}: the weights do not fit {cast.policy.path}"):
            policy.load(weights)
        tuned = "adapter" if getattr(policy.tuning.transformer, "peft_config", None) else "all weights"
    return Studio(
        policy=policy,
        algorithm=cast.algorithm,
        sampling=cast.sampling,
        precision=cast.precision,
        sizes=batch_sizes(cast.sampling.batch_size, cast.sampling.decode_batch_size, 1, policy.device, notify),
        rewards=rewards,
        weights=torch.tensor([entry.weight for entry in cast.rewards.values()]),
        judges=judges,
        tuned=tuned,
        seed=cast.seed,
        heldout=heldout,
        steps=cast.steps,
        **({"explain": EXPLAIN[cast.policy.path]} if cast.policy.path in EXPLAIN else {}),
    )


def _grammar(prompt: str) -> str:
    """Why a prompt is none of the testbed's scenes; "" if it is one."""
    from g2rpo.testbed.grammar import parse

    try:
        parse(prompt)
    except ValueError as error:
        return str(error)
    return ""


def _spelling(prompt: str) -> str:
    """The same for its words."""
    from g2rpo.testbed.words.language import COLOURS, parse

    wanted = "a word of three to six letters in quotes and a colour, such as 'tiger' in red"
    return "" if parse(prompt) else f"it takes {wanted} ({', '.join(COLOURS)})"


EXPLAIN = {"testbed": _grammar, "words": _spelling}


def facts(cast: Cast, log: Run | None) -> str:
    """A description of model, training and results for the top of the page."""
    name = model_name(cast.policy)
    line = f"{'The' + name[3:] if name.startswith('the ') else name}, {cast.story}."
    return f"{line} {summary(log)}" if log is not None else line


def demo(
    run: Path | None,
    cast: Cast,
    weights: Path | None,
    *,
    host: str,
    port: int,
    token_env: str | None,
    stop: threading.Event | None = None,
    emit: Emit = silent,
) -> None:
    """Serves the demo until interrupted, or until `stop` is set."""
    token = token_for(host, token_env)
    own = run is not None and weights is None
    if run is not None:
        weights = weights or RunDirectory(run).weights
    if weights is not None:
        check_weights(weights)
    cast.check()
    check_address(host, port)
    try:
        from g2rpo.lab.demo import app
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UserError("the demo needs Gradio: pip install gradio") from None
    from g2rpo.lab.demo.views import run_html

    def say(words: str) -> None:
        emit(Line(words))

    say(f"{cast.title}: building the policy and {len(cast.rewards) + len(cast.judges)} rewards ...")
    heldout = _heldout(cast, say)
    studio = open_studio(cast, weights, say, heldout)
    log, opening = _history(run, studio if own else None, say)
    if run is None and weights is not None:
        cast = replace(cast, story="with and without tuned weights")
    examples = [str(prompt) for prompt in dict.fromkeys([*heldout[opening.number :][:1], *heldout])][:EXAMPLES]
    drawn, lesson = _first_views(cast, studio, examples[0], opening, say) if examples else ("", "")
    report = (lambda: run_html(read_runs([run])[0])) if run is not None else None
    page = app.build(app.Stage(studio, cast.title, facts(cast, log), examples, drawn, lesson, report))
    with refused(host, port):
        address = app.serve(page, host, port, token, uploads=studio.input_pictures[1] > 0)
    say(f"{address} (ends with Ctrl-C)")
    try:
        (stop or threading.Event()).wait()
    except KeyboardInterrupt:
        say("stopped")
    finally:
        page.close(verbose=False)


def _heldout(cast: Cast, say: Say) -> Sequence[str]:
    """The held-out prompts of `cast`; none if their source cannot be read."""
    if not cast.prompts:
        return []
    try:
        return build_prompts(cast.prompts, "evaluation.prompts")[: cast.num_prompts]
    except UserError as error:
        say(f"no examples: {error}")
        return []


def _history(run: Path | None, studio: Studio | None, say: Say) -> tuple[Run | None, Opening]:
    """The log of a run, and what a page about its own weights in `studio` opens with."""
    if run is None:
        return None, Opening()
    log = None
    try:
        log = read_runs([run])[0]
        if studio is not None:
            return log, opening_of(log, {**studio.rewards, **studio.judges}, list(studio.rewards))
    except UserError as error:
        say(f"the run's log tells nothing: {error}")
    return log, Opening()


def _first_views(cast: Cast, studio: Studio, prompt: str, opening: Opening, say: Say) -> tuple[str, str]:
    """HTML of the drawing and the group that the page opens with; of large models no group, which takes minutes."""
    from g2rpo.lab.demo.views import drawing_html, lesson_html

    say("drawing a held-out prompt to open with ...")
    scale, steps = studio.policy.guidance_scale, studio.steps or studio.sampling.num_steps
    drawn = lesson = ""
    try:
        drawing = draw(studio, prompt, seed=studio.seed, steps=steps, guidance=scale)
        drawn = drawing_html(drawing, opening.rule)
        if cast.policy.path in RECIPES:
            lesson = lesson_html(learn(studio, prompt, seed=studio.seed, plan=0, tuned=False))
    except (UserError, RewardFailed) as error:
        say(f"it was not drawn: {error}")
    return drawn, lesson
