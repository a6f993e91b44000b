"""What tuned weights say of themselves: a model card for people, and the header of an adapter for
programs."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from g2rpo import __version__
from g2rpo.config.algorithms import title_of
from g2rpo.config.schema import Config
from g2rpo.core.errors import counted
from g2rpo.core.files import is_hub_id, write_whole
from g2rpo.core.images import images_of
from g2rpo.core.statistics import Comparison
from g2rpo.core.types import Policy
from g2rpo.models import catalogue
from g2rpo.models.adapters import ABOVE_KEY
from g2rpo.models.options import PolicyConfig
from g2rpo.train.monitor.pictures import clip_of
from g2rpo.train.run.folder import Run

CARD = "README.md"
THIS, MERGED = "THIS FOLDER OR REPOSITORY", "FOLDER OF g2rpo export RUN --format merged"


def copy_card(weights: Path, to: Path) -> None:
    """Copies the card of the folder `weights`, if it has one, with its pictures."""
    for name in (CARD, *(picture.name for picture in _pictures(Run(weights)))):
        if (weights / name).is_file():
            shutil.copy(weights / name, to / name)


def _pictures(run: Run) -> tuple[Path, ...]:
    """The pictures of a card; the last only for clips."""
    return run.before_after, run.curves, clip_of(run.before_after)


def write_card(
    run: Run,
    weights: Path,
    config: Config,
    iteration: int,
    table: Mapping[str, Comparison],
    heldout: Sequence[str],
    policy: Policy,
) -> Path:
    """Writes README.md, with its pictures, beside the weights of a finished run, which are those
    after `iteration`; `weights` is a file or a folder.

    A policy may have `deployed`, further arguments of the pipeline's call, and `lora_loader`, what
    loads an adapter (None: merged weights are loaded).
    """
    deployed = getattr(policy, "deployed", None)
    lora_loader = getattr(policy, "lora_loader", "load_lora_weights")
    edits = any(images_of(prompt) for prompt in heldout)
    folder = weights if weights.is_dir() else weights.parent
    still, curves, clips = _pictures(run)
    moves = clips.is_file()
    task = f"{'image' if edits else 'text'}-to-{'video' if moves else 'image'}"
    for picture in (still, curves, *([clips] if moves else [])):
        shutil.copy(picture, folder / picture.name)
    lora = config.policy.tuning == "lora"
    path, prompts = config.policy.path, counted(len(heldout), "held-out prompt")
    results = [
        EvalResult(task, "prompts", prompts, name, round(row.tuned, 4))
        for name, row in table.items()
        if math.isfinite(row.tuned)
    ]
    pictured = {"text": str(heldout[0]), "output": {"url": (clips if moves else still).name}}
    header = ModelCardData(
        base_model=path if is_hub_id(path) else None,  # the hub refuses a local folder
        **_licence(config.policy),
        library_name="diffusers",
        pipeline_tag=task,
        tags=["g2rpo", "reinforcement-learning", task, *(["lora"] if lora else [])],
        widget=[pictured],
        model_name=f"{base_name(path)} tuned with {title_of(config.algorithm)[0]}"
        if results
        else None,
        eval_results=results or None,
    )
    card = folder / CARD
    text = (
        "\n\n".join(
            [
                f"---\n{header.to_yaml().strip()}\n---",
                f"# {_code(config.policy.path)}, tuned with {title_of(config.algorithm)[0]}",
                _what(config, iteration),
                f"![before and after]({(clips if moves else still).name})",
                _results(config, table, len(heldout)),
                f"![curves]({curves.name})",
                "## Use",
                _block(
                    "python",
                    _lora_usage(config, task, deployed, lora_loader)
                    if lora and lora_loader
                    else _full_usage(config, task, deployed, MERGED if lora else THIS),
                ),
                "`g2rpo export RUN --format comfyui` writes the file that ComfyUI reads, `--format merged` the base model with "
                "these weights in it."
                if not config.policy.lora_above
                else "The adapter was trained to act in these steps alone; in all of them it costs detail. `g2rpo export RUN "
                "--format comfyui` writes the file that ComfyUI reads; there, keyframes of a LoRA hook end it.",
                "## Config",
                _block("yaml", config.to_yaml().strip()),
            ]
        )
        + "\n"
    )
    write_whole(card, text.encode())  # written last: its presence means that the run has finished
    return card


def _code(text: str) -> str:
    """Text from users as a code span, so that nothing in it is a heading, a link or HTML."""
    text = " ".join(text.split())
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    room = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{room}{text}{room}{ticks}"


def _block(language: str, code: str) -> str:
    """A code block that nothing in `code` can end."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", code))])
    return f"{fence}{language}\n{code}\n{fence}"


def _licence(policy: PolicyConfig) -> dict[str, Any]:
    """The licence of the base model as the hub's cards have it; {} if it is not known. The hub has
    names of its own for general licences only."""
    licence = catalogue.licence_of(policy.path, policy.kind)
    if licence in (None, "Apache-2.0"):
        return {} if licence is None else {"license": licence.lower()}
    name = "-".join(re.findall(r"[\w.]+", licence.split(":")[0].lower()))
    return {
        "license": "other",
        "license_name": name,
        "license_link": f"https://huggingface.co/{policy.path}",
    }


def _what(config: Config, iteration: int) -> str:
    weighted = [f"{name} (weight {entry.weight:g})" for name, entry in config.rewards.items()]
    rewards = ", ".join(weighted)
    kind = (
        f"LoRA of rank {config.policy.lora_rank}"
        if config.policy.tuning == "lora"
        else "fully tuned transformer"
    )
    recipe = f" with the recipe {_code(config.recipe)}" if config.recipe else ""
    method, paper = title_of(config.algorithm)
    source = f"{method}, arXiv {paper}" if paper else f"the algorithm {method}"
    licence = catalogue.licence_of(config.policy.path, config.policy.kind)
    brought = config.policy.adapter and f"It continues {_code(base_name(config.policy.adapter))}. "
    return (
        f"A {kind}, trained by g2rpo {__version__}{recipe} ({source}) for "
        f"{counted(iteration, 'iteration')} of "
        f"{counted(config.trainer.prompts_per_iteration, 'prompt')}. Trained on: {rewards}. "
        f"{brought or ''}The licence of the base model applies{f': {licence}' if licence else ''}."
    )


def _results(config: Config, table: Mapping[str, Comparison], prompts: int) -> str:
    rows = ["| reward | use | base | tuned | change |\n|---|---|---|---|---|\n"]
    for name, row in table.items():
        use = "trained on" if name in config.trained else "judged only"
        rows.append(f"| {name} | {use} | {' | '.join(row.cells)} |\n")
    caption = f"{counted(prompts, 'held-out prompt')} from the same noise; ± is the 95 % interval of the paired change."
    return "## Results\n\n" + "".join(rows) + f"\n{caption}"


def _lora_usage(config: Config, task: str, deployed: Mapping[str, Any] | None, loader: str) -> str:
    call = _call(config, task, deployed)
    if above := config.policy.lora_above:
        call = f"""

def until(pipe, step, time, tensors):
    if pipe.scheduler.sigmas[step + 1] <= {above:g}:  # where the next step begins
        pipe.transformer.disable_lora()
    return tensors


pipe.transformer.enable_lora()
{_call(config, task, deployed, ", callback_on_step_end=until")}"""
    return f"""from diffusers import DiffusionPipeline{_helpers(task)}

pipe = DiffusionPipeline.from_pretrained({config.policy.path!r})
pipe.{loader}("{THIS}", weight_name="pytorch_lora_weights.safetensors")
{call}"""


def _full_usage(config: Config, task: str, deployed: Mapping[str, Any] | None, where: str) -> str:
    return f"""from diffusers import AutoModel, DiffusionPipeline{_helpers(task)}

transformer = AutoModel.from_pretrained("{where}")
pipe = DiffusionPipeline.from_pretrained({config.policy.path!r}, transformer=transformer)
{_call(config, task, deployed)}"""


def _helpers(task: str) -> str:
    names = [
        *(["export_to_video"] if "video" in task else []),
        *(["load_image"] if task.startswith("image") else []),
    ]
    return f"\nfrom diffusers.utils import {', '.join(names)}" if names else ""


def _call(config: Config, task: str, deployed: Mapping[str, Any] | None, more: str = "") -> str:
    size = f"height={config.judged.height}, width={config.judged.width}"
    scale = config.policy.guidance_scale
    further = (
        deployed if deployed is not None else {} if scale is None else {"guidance_scale": scale}
    )
    named = (
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in further.items()
    )
    steps = ", ".join([f"num_inference_steps={config.judged_steps}", *named])
    length = config.policy.max_sequence_length
    tokens = f", max_sequence_length={length}" if length else ""
    image = 'image=load_image("in.png"), ' if task.startswith("image") else ""
    made = f"""pipe(
    "...", {image}{size}, {steps}{tokens}{more}
)"""
    if "video" in task:
        return f'export_to_video({made}.frames[0], "out.mp4")'
    return f"picture = {made}.images[0]"


def header_of(config: Config, iteration: int) -> dict[str, str]:
    """Text for the header of an adapter that a run of `config` saved after `iteration`: the same
    for equal runs, so no dates.

    Where the base model's architecture has a name, the fields of ModelSpec 1.0.1
    (github.com/Stability-AI/ModelSpec) are there.
    """
    method, paper = title_of(config.algorithm)
    own = {
        "version": __version__,
        "algorithm": method,
        **({"arxiv": paper} if paper else {}),
        "rewards": json.dumps({name: entry.weight for name, entry in config.rewards.items()}),
        "base_model": base_name(config.policy.path),
        **({"adapter": base_name(config.policy.adapter)} if config.policy.adapter else {}),
        "iteration": str(iteration),
        "size": f"{config.policy.width}x{config.policy.height}",
    }
    above = {ABOVE_KEY: str(config.policy.lora_above)} if config.policy.lora_above else {}
    return {
        **{f"g2rpo.{name}": text for name, text in own.items()},
        **above,
        **_modelspec(config, method),
    }


def base_name(path: str) -> str:
    """A base model's name: its hub id, or the name of its folder without its path, which is
    private."""
    return path if is_hub_id(path) else Path(path).name


def _modelspec(config: Config, method: str) -> dict[str, str]:
    base = config.policy.path
    _, model = catalogue.model_of(base, config.policy.kind) or (None, None)
    if model is None or model.architecture is None:
        return {}
    fields = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{model.architecture}/lora",
        "implementation": "diffusers",
        "title": f"{base_name(base)} tuned with {method}",
        "description": f"Trained on {', '.join(config.trained)} by g2rpo {__version__}",
        "resolution": f"{config.policy.width}x{config.policy.height}",
        "license": model.licence,
    }
    return {f"modelspec.{name}": text for name, text in fields.items()}
