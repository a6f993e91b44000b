"""`g2rpo evaluate RUN --packet DIR`: a page for other people, and its key in the run's folder."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from g2rpo.app.evaluate import evaluate
from g2rpo.app.events import Emit, silent
from g2rpo.config.resolve import resolve_as
from g2rpo.core.data import Row
from g2rpo.core.errors import placed, refuse
from g2rpo.core.files import digest_of, is_empty, write_whole
from g2rpo.evaluation.sweep import Judging, JudgingConfig
from g2rpo.lab.packet.key import CONTROLS, SIDES, Key, Pair, Side, file_of, places
from g2rpo.lab.report.page import templates_of
from g2rpo.lab.report.pictures import data_uri, picture_of_file, webp_uri
from g2rpo.monitor.clips import clip_of
from g2rpo.monitor.pictures import beside
from g2rpo.run.run import Run

PAIRS = 24
"""Prompts that are compared, if no other number is asked for."""
LOSSLESS = 256 * 256
"""Pixels of the largest picture that a page has without loss. Larger ones of both models have
`QUALITY`, so that the page can be sent."""
QUALITY = 90
INPUT = 384
"""Pixels a side, at most, of a picture that a prompt changes."""


@dataclass(frozen=True)
class Made:
    """A page that was written, and its key."""

    page: Path
    key: Key


def make_packet(
    folder: Path,
    settings: dict[str, Any],
    overrides: Sequence[str],
    directory: Path,
    pairs: int = PAIRS,
    emit: Emit = silent,
) -> Made:
    """Evaluates a run with these settings on prompts that are drawn by their seed, in RUN/packets,
    and writes the page into `directory`, which is new or empty. Order and sides are drawn by a
    secret seed."""
    run, drawn = Run(folder), {**settings, "drawn": pairs + CONTROLS}
    config = resolve_as(JudgingConfig, drawn, overrides, "evaluation")
    refuse(_faults(config, directory, run))
    fresh = str(run.packets / "evaluation")
    judging = evaluate(drawn, overrides, None, emit=emit, fresh=fresh)
    return write_packet(judging, run, directory, pairs, secrets.randbits(62))


def _faults(config: JudgingConfig, directory: Path, run: Run) -> Iterator[str]:
    if not is_empty(directory):
        yield f"--packet {directory}: is not empty; name a new folder"
    if run.packets.resolve().is_relative_to(directory.resolve()):
        yield f"--packet {directory}: the key would lie in it; name a folder outside {run.path}"
    if not config.base or config.weights is None:
        yield "--packet compares base and tuned pictures; leave base=false out"
    if len(set(config.steps)) > 1:
        yield f"--packet shows pictures of one step count, got {config.steps}"


def write_packet(judging: Judging, run: Run, directory: Path, pairs: int, seed: int) -> Made:
    """Writes the page of a finished evaluation into `directory`, and the key into the run."""
    rows = {(row["side"], row["index"]): row for row in judging.rows()}
    asked, kept = [], []
    for place in places(len(judging.prompts), pairs, seed):
        prompt = judging.prompts[place.index]
        both: dict[Side, Row] = {side: rows[side, place.index] for side in SIDES}
        files = {side: judging.directory / row["picture"] for side, row in both.items()}
        shown = {side: shown_of(file) for side, file in files.items()}
        given = beside(prompt, INPUT, INPUT)
        asked.append(
            {
                "prompt": str(prompt),
                "input": "" if given is None else data_uri(given, INPUT),
                "left": shown[place.left],
                "right": shown[place.right],
            }
        )
        kept.append(
            Pair(
                prompt=str(prompt),
                left=place.left,
                right=place.right,
                pictures={side: os.path.relpath(files[side], run.packets) for side in SIDES},
                scores={
                    name: {side: row["scores"][name] for side, row in both.items()}
                    for name in judging.config.rewards
                },
            )
        )
    key = Key(
        packet=digest_of(asked)[:12],
        seed=seed,
        weights=str(judging.config.weights),
        contents=judging.config.contents,
        steps=judging.config.steps[0],
        trained=judging.config.trained,
        pairs=kept,
    )
    page = directory / f"look-{key.packet}.html"
    template = templates_of("g2rpo.lab.packet").get_template("look.html")
    with placed(f"{directory}: cannot be written (", OSError, after=")"):
        directory.mkdir(parents=True, exist_ok=True)
        # first the key, without which a page is of no use
        write_whole(file_of(run, key.packet, "key.json"), key.model_dump_json(indent=1).encode())
        write_whole(page, template.render(packet=key.packet, pairs=asked).encode())
    return Made(page, key)


def shown_of(file: Path) -> str:
    """A picture within a page, encoded alike for both models, without metadata; of a clip the
    evaluation's own file."""
    if (clip := clip_of(file)).is_file():
        return webp_uri(clip.read_bytes())
    again = "); delete it and the same command paints it again"
    with placed(f"{file}: is damaged (", OSError, ValueError, after=again):
        picture = picture_of_file(file)
    out, lossless = io.BytesIO(), picture.width * picture.height <= LOSSLESS
    Image.fromarray(np.asarray(picture)).save(out, "WEBP", lossless=lossless, quality=QUALITY)
    return webp_uri(out.getvalue())
