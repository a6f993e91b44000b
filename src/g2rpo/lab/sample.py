"""`g2rpo sample`: pictures from a run, or from any pipeline with or without tuned weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from g2rpo.config.resolve import resolve_as
from g2rpo.config.schema import Steps
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError
from g2rpo.core.files import is_empty, local, whole_file, writing
from g2rpo.core.images import check_inputs, images_of, to_pil
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.embeddings import EncodedPrompts
from g2rpo.models.load import load_pipeline, load_weights
from g2rpo.models.pipeline_files import check_weights
from g2rpo.rewards.catalogue import RewardTable, build_rewards
from g2rpo.train.evaluation.controls import NO_CONTROL, Control
from g2rpo.train.evaluation.heldout import SHOWN
from g2rpo.train.evaluation.sampler import Drawing, Sampler
from g2rpo.train.monitor.pictures import (
    PictureRow,
    pil_of,
    reduced,
    save_clip,
    save_grid,
    seconds_of,
)
from g2rpo.train.persistence import take_stored
from g2rpo.train.run.lock import enter_fresh, held


@dataclass(frozen=True)
class Sampled:
    """So many pictures, or clips, are in `folder`, and the first ones side by side in `grid`."""

    count: int
    in_grid: int
    clips: bool
    folder: Path

    @property
    def grid(self) -> Path:
        return self.folder / ("grid.webp" if self.clips else "grid.png")


class SampleConfig(Drawing):
    """What `g2rpo sample` draws with."""

    steps: Steps = 28
    control: Control = NO_CONTROL
    rewards: RewardTable = Field(default_factory=dict)
    trained: list[str] = Field(default_factory=list)
    """The rewards that choose the best of several pictures, those of a run."""
    video: Literal["webp", "mp4"] = "webp"


def sample_config(
    settings: Mapping[str, Any], knobs: Sequence[str] = (), **named: Any
) -> SampleConfig:
    """The model and sampling of the `settings` of an evaluation, but for what is `named` and not
    None, with `knobs`, each KEY=VALUE of a `Control`. UserError for the best of several pictures
    without a reward that chooses it."""
    control = resolve_as(Control, {}, knobs, "--knob")
    given = {**settings, "control": control}
    if "steps" in settings:
        given["steps"] = settings["steps"][0]
    given |= {key: value for key, value in named.items() if value is not None}
    if control.best_of == 1:
        given["rewards"] = {}
    elif not given.get("rewards"):
        raise UserError("--knob best_of: the rewards of a run choose the best picture; name a run")
    own = {key: given[key] for key in given.keys() & SampleConfig.model_fields.keys()}
    return resolve_as(SampleConfig, own, source="sample")


def tune(policy: DiffusersPolicy, config: Drawing) -> None:
    """Loads the tuned weights of `config`, if any, into the policy."""
    if config.weights is not None:
        load_weights(policy, local(config.weights), config.policy.path, config.strength)


def painter(
    config: SampleConfig,
    prompts: Sequence[str] | None = None,
    notify: Callable[[str], None] = print,
) -> Sampler:
    """The sampler of a model with its weights. `prompts` are encoded before the transformer is on
    the device, and are then the only ones that it draws; `notify` is told of those that are not
    read to their end."""
    loaded = load_pipeline(config.policy, tuning="frozen")
    loaded.warn_of(prompts or (), notify)
    stored = None
    if prompts is not None:
        stored = EncodedPrompts(loaded.text, config.control.guiding.encoded(prompts))
    policy = loaded.policy(stored=stored)
    tune(policy, config)
    return config.sampler(policy, config.steps)


def sample(
    prompts: Sequence[str],
    config: SampleConfig,
    out: Path | None = None,
    notify: Callable[[str], None] = print,
) -> Sampled:
    """Draws prompts: writes `out/NNNN.png`, `out/prompts.jsonl` (the prompt of each picture, beside
    copies of input pictures) and `out/grid.png`. Clips are NNNN.webp, which needs no further
    library, or NNNN.mp4. Without `out` it is the first of samples, samples-2 ... that does not
    exist. `notify` is told what rewards that choose pictures have learnt."""
    libraries = ("imageio", "imageio_ffmpeg")
    if config.video == "mp4" and not all(map(importlib.util.find_spec, libraries)):
        raise UserError(
            "--video mp4 needs imageio and ffmpeg: pip install imageio imageio-ffmpeg, or take --video webp"
        )
    if not prompts:
        raise UserError(
            "give prompts as arguments, after the run if you name one, or a file of them with --prompts"
        )
    check_inputs(prompts)
    if config.weights is not None:
        check_weights(local(config.weights))
    with ExitStack() as stack:  # two commands at a time take different folders
        if out is None:
            out = enter_fresh(stack, Path(), "samples")
        else:
            _check_empty(out)  # before it is touched
            stack.enter_context(held(out))
            _check_empty(out)
        shown, seconds = _write_all(painter(config, prompts, notify), prompts, config, out, notify)
        with writing(out / "grid.png"):
            save_grid(out / "grid.png", [PictureRow(shown)], prompts[:SHOWN], seconds=seconds)
        return Sampled(len(prompts), len(shown), shown.ndim == 5, out)


def _check_empty(out: Path) -> None:
    if not is_empty(out):
        raise UserError(f"{out} is {'not empty' if out.is_dir() else 'a file'}; name another --out")


def _drawing(
    sampler: Sampler, config: SampleConfig, notify: Callable[[str], None]
) -> Callable[[Sequence[str], int], Tensor]:
    """Draws some prompts, of which the first has this index, as the config says."""
    if config.control.best_of == 1:
        return partial(sampler.pictures, control=config.control)
    rewards = build_rewards(config.rewards, pick_device(config.policy.device))
    if config.weights is not None:
        take_stored(rewards, local(config.weights).parent, notify)
    chosen_by = {name: config.rewards[name] for name in config.trained or config.rewards}
    weights = {name: entry.weight for name, entry in chosen_by.items()}
    chosen = {name: rewards[name] for name in weights}

    def draw(prompts: Sequence[str], first: int) -> Tensor:
        return sampler.best(
            prompts,
            chosen,
            weights,
            first=first,
            control=config.control,
            kept=lambda images: images,
        ).images

    return draw


def _write_all(
    sampler: Sampler,
    prompts: Sequence[str],
    config: SampleConfig,
    out: Path,
    notify: Callable[[str], None],
) -> tuple[Tensor, float]:
    """Writes every picture or clip, and the list of them; returns the first ones and the seconds of
    a clip."""
    shown: list[Tensor] = []
    draw, control = _drawing(sampler, config, notify), config.control
    knobs = (
        {}
        if control == NO_CONTROL
        else {"knobs": str(control), "price": control.price(sampler.num_steps)}
    )
    # unbuffered, so that closing does not repeat a write that a full disk refused
    with (out / "prompts.jsonl").open("wb", buffering=0) as listing:
        # written as they come: clips are large
        for start in range(0, len(prompts), sampler.batch_size):
            part = prompts[start : start + sampler.batch_size]
            images = draw(part, start)
            seconds = seconds_of(sampler.policy, images.shape[1])
            shown += reduced(images[: max(0, SHOWN - start)])
            with writing(out):
                for number, (prompt, image) in enumerate(zip(part, images, strict=True), start):
                    name = _save(out / f"{number:04d}", image, seconds, config.video).name
                    copies = {
                        f"{number:04d}_input{place}{Path(path).suffix}": path
                        for place, path in enumerate(images_of(prompt))
                    }
                    # so that the list can be read again
                    for copy, path in copies.items():
                        shutil.copyfile(local(path), out / copy)
                    inputs = {"images": list(copies)} if copies else {}
                    line = {
                        "file": name,
                        "prompt": prompt,
                        **inputs,
                        "seed": sampler.seed,
                        "index": number,
                        **knobs,
                    }
                    listing.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
    return torch.stack(shown), seconds


def _save(path: Path, image: Tensor, seconds: float, video: str) -> Path:
    """Writes a picture or a clip beside `path`, with a suffix, and returns where."""
    path = path.with_suffix(".png" if image.ndim == 3 else f".{video}")
    with whole_file(path) as unfinished:
        if image.ndim == 3:
            pil_of(image).save(unfinished)
        elif video == "mp4":
            from diffusers.utils import export_to_video

            export_to_video(to_pil(image), str(unfinished), fps=len(image) / seconds)
        else:
            save_clip(unfinished, image, seconds)
    return path
