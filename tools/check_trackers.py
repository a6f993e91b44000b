"""Drives a run that is killed and resumed into the real wandb (offline) and trackio, and reads back
what arrived there.

The tests know these libraries as stand-ins only. In an environment that has them:

    python -m tools.check_trackers wandb trackio
"""

import json
import os
import sqlite3
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from g2rpo.train.monitor.trackers import build_trackers
from g2rpo.train.run.folder import Run
from tests.train.monitor.test_trackers import cut_short

BLOCK = 32768
EXPECTED = [
    ("eval", 0),
    ("train", 1),
    ("train", 2),
    ("eval", 2),
    ("train", 3),
    ("train", 4),
    ("eval", 4),
]


def records(path: Path) -> Iterator[bytes]:
    """The records of an offline file: seven bytes, then LevelDB's log format."""
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := BLOCK - position % BLOCK) < 7:  # too short for a header: filled with zeros
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def in_wandb(run: Path) -> tuple[list[tuple[str, int]], int]:
    """(kind, iteration) of every row in the offline files, in order, and the number of pictures."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = Record()
            record.ParseFromString(data)
            items = {
                "/".join(i.nested_key) or i.key: json.loads(i.value_json)
                for i in record.history.item
            }
            rows += [
                (kind, items["iteration"])
                for kind in ("train", "eval")
                if f"{kind}/seconds" in items
            ]
    return rows, len(list(run.glob("wandb/offline-run-*/files/media/images/eval/*.png")))


def in_trackio(home: Path) -> tuple[list[tuple[str, int]], int]:
    """The same from trackio's database."""
    (path,) = home.glob("g2rpo.db")
    with sqlite3.connect(path) as database:
        stored = database.execute("select step, metrics from metrics order by id").fetchall()
    rows = [
        (kind, step)
        for step, text in stored
        for kind in ("train", "eval")
        if f"{kind}/seconds" in json.loads(text)
    ]
    return rows, len(list(home.glob("media/**/*.png")))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "trackio"
        os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": str(home)}
        for name in sys.argv[1:]:
            run = Path(folder) / name
            cut_short(run, trackers=build_trackers([name]))
            assert len(Run(run).read_log()) == len(EXPECTED)
            rows, pictures = in_wandb(run) if name == "wandb" else in_trackio(home)
            print(f"{name}: {len(rows)} rows, {pictures} pictures")
            assert rows == EXPECTED and pictures == 3, rows


if __name__ == "__main__":
    main()
