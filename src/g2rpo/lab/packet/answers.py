"""`g2rpo evaluate RUN --answers FILE...`: opens the key of a packet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field

from g2rpo.core.data import Row
from g2rpo.core.errors import UserError, placed, refuse
from g2rpo.core.files import write_whole
from g2rpo.core.plain import as_json, printable, read_as
from g2rpo.core.statistics import Agreement, Interval, agreement, share, sign_test
from g2rpo.lab.packet.key import PLAIN, Key, PacketId, Pair, file_of
from g2rpo.monitor.scores import save_rows
from g2rpo.rewards.taste import agreement_of, mean_agreement
from g2rpo.run.run import Run

Answer = Literal["left", "right", "same", "cannot tell"]
AGAIN = "ask for the file that the page saves"
CATEGORIES = {"base": 0.0, "tuned": 1.0, "same": 2.0}
"""Of agreement; who cannot tell has not answered."""


class Answers(BaseModel):
    """What a page saves: a person's answers by the pair's number, from 1. `sheet` is a random name
    that the page gives a person; `check` tells whether answers were changed since (`check_of`)."""

    model_config = PLAIN

    packet: PacketId
    sheet: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    name: Annotated[str, Field(max_length=80)] = ""
    answers: Annotated[dict[int, Answer], Field(min_length=1)]
    check: str


@dataclass(frozen=True)
class Person:
    """The counts of a person's answers: to pairs, how often the left picture was chosen, and to
    controls."""

    name: str
    answered: int
    tuned: int
    base: int
    same: int
    cannot_tell: int
    left: int
    controls: int
    controls_same: int


@dataclass(frozen=True)
class Judge:
    """How often a reward orders two pictures as people did (`taste.mean_agreement`, over pairs)."""

    agrees: Interval
    trained: bool


@dataclass(frozen=True)
class Opened:
    """What people say of a packet. `preferred` is the share of tuned pictures among decided
    answers, `left` that of left ones; `p` is the sign test's over pairs, by the majority of
    people. `agreement` is None for one person."""

    packet: str
    pairs: int
    controls: int
    people: list[Person]
    preferred: Interval
    p: float
    left: Interval
    agreement: Agreement | None
    judges: dict[str, Judge]


def open_key(folder: Path, files: Sequence[Path]) -> tuple[Opened, Path, Path]:
    """What these files say of the packet of a run, and the files with the numbers and with the pairs."""
    run = Run(folder)
    if not run.config.is_file():
        raise UserError(f"{folder} is no run directory (no config.yaml)")
    sheets = [read_as(Answers, path, AGAIN) for path in files]
    refuse(_faults_of_files(run, files, sheets))
    packet = sheets[0].packet
    key = read_as(Key, file_of(run, packet, "key.json"))
    for path, sheet in zip(files, sheets, strict=True):
        refuse(f"{path}: {fault}; {AGAIN}" for fault in _faults_of_answers(sheet, key))
    opened = opened_by(key, sheets)
    results, pairs = (file_of(run, packet, name) for name in ("results.json", "pairs.jsonl"))
    with placed(f"{run.packets}: cannot be written (", OSError, after=")"):
        write_whole(results, as_json(opened, 1).encode())
        save_rows(pairs, decided(key, sheets))
    return opened, results, pairs


def _faults_of_files(run: Run, files: Sequence[Path], sheets: Sequence[Answers]) -> Iterator[str]:
    first: dict[str, Path] = {}
    for path, sheet in zip(files, sheets, strict=True):
        if not file_of(run, sheet.packet, "key.json").is_file():
            yield f"{path}: is of packet {sheet.packet}, of which {run.path} has no key; name its run"
        if sheet.packet != sheets[0].packet:
            yield f"{path}: is of another packet than {files[0]}; open one packet at a time"
        if sheet.sheet in first:
            yield f"{first[sheet.sheet]} and {path}: are of one person; name the newer file alone"
        first[sheet.sheet] = path


def _faults_of_answers(sheet: Answers, key: Key) -> Iterator[str]:
    if beyond := [number for number in sheet.answers if not 1 <= number <= len(key.pairs)]:
        yield f"answers pair {beyond[0]}; the packet has pairs 1 to {len(key.pairs)}"
    if sheet.check != check_of(sheet.packet, sheet.sheet, sheet.answers):
        yield "was changed after the page wrote it"


def check_of(packet: str, sheet: str, answers: dict[int, Answer]) -> str:
    """A checksum (FNV-1a, 32 bit), as the page computes it: it tells slips, and hinders nobody."""
    told = " ".join(f"{number}={answers[number]}" for number in sorted(answers))
    found = 0x811C9DC5
    for byte in f"{packet} {sheet} {told}".encode():
        found = (found ^ byte) * 0x01000193 % 2**32
    return f"{found:08x}"


def opened_by(key: Key, sheets: Sequence[Answers]) -> Opened:
    """What these answers say of the packet of `key`."""
    numbers = [number for number, pair in enumerate(key.pairs, 1) if not pair.control]
    pairs = [key.pairs[number - 1] for number in numbers]
    chosen = [
        [_chosen(sheet.answers.get(n), pair) for n, pair in zip(numbers, pairs, strict=True)]
        for sheet in sheets
    ]
    coded = np.array([[CATEGORIES.get(str(one), math.nan) for one in row] for row in chosen])
    tuned = np.where(coded < 2, coded, math.nan)
    on_left = np.array([float(pair.left == "tuned") for pair in pairs])
    votes = np.nansum(2 * tuned - 1, axis=0)  # of a pair: people for tuned less those for base
    return Opened(
        packet=key.packet,
        pairs=len(pairs),
        controls=len(key.pairs) - len(pairs),
        people=[_person(place, sheet, key) for place, sheet in enumerate(sheets, 1)],
        preferred=share(tuned),
        p=sign_test(int((votes > 0).sum()), int((votes < 0).sum())),
        left=share(np.where(np.isnan(tuned), math.nan, tuned == on_left)),
        agreement=agreement(coded) if len(sheets) > 1 else None,
        judges={name: _judge(name, key, pairs, tuned) for name in pairs[0].scores},
    )


def decided(key: Key, sheets: Sequence[Answers]) -> list[Row]:
    """A row for each answer that prefers one of two pictures."""
    rows: list[Row] = []
    for sheet in sheets:
        for number, pair in enumerate(key.pairs, 1):
            answer = sheet.answers.get(number)
            if pair.control or answer not in ("left", "right"):
                continue
            chosen, rejected = pair.left, pair.right
            if answer == "right":
                chosen, rejected = rejected, chosen
            files = {"chosen": pair.pictures[chosen], "rejected": pair.pictures[rejected]}
            rows.append({"prompt": pair.prompt, **files})
    return rows


def _chosen(answer: Answer | None, pair: Pair) -> str | None:
    """The model whose picture is better, or what else was answered, if anything."""
    sides: dict[str | None, str] = {"left": pair.left, "right": pair.right}
    return sides.get(answer, answer)


def _person(place: int, sheet: Answers, key: Key) -> Person:
    given = [(answer, key.pairs[number - 1]) for number, answer in sheet.answers.items()]
    said = [_chosen(answer, pair) for answer, pair in given if not pair.control]
    of_controls = [answer for answer, pair in given if pair.control]
    return Person(
        name=printable(sheet.name).strip() or f"person {place}",
        answered=len(said),
        tuned=said.count("tuned"),
        base=said.count("base"),
        same=said.count("same"),
        cannot_tell=said.count("cannot tell"),
        left=sum(answer == "left" for answer, pair in given if not pair.control),
        controls=len(of_controls),
        controls_same=of_controls.count("same"),
    )


def _judge(name: str, key: Key, pairs: Sequence[Pair], tuned: np.ndarray) -> Judge:
    agreed = []
    for place, pair in enumerate(pairs):
        scores = np.array([pair.scores[name][side] for side in ("base", "tuned")], dtype=np.float64)
        better = tuned[~np.isnan(tuned[:, place]), place]
        if len(better) and not np.isnan(scores).any():
            agreed.append(float(np.mean([agreement_of(scores, (int(one),)) for one in better])))
    return Judge(mean_agreement(agreed), name in key.trained)
