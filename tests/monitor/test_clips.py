"""Clips for people: reduced, in numbers, moving in files, grids, evaluations and the report."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from g2rpo.app.evaluate import _save_grid
from g2rpo.assembly import components
from g2rpo.core.images import to_uint8
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import render
from g2rpo.monitor.clips import (
    CLIP_FRAMES,
    CLIP_SIDE,
    read_clip,
    read_webp,
    reduced,
    save_clip,
    stills,
)
from g2rpo.monitor.image_statistics import image_statistics
from g2rpo.monitor.pictures import PictureRow, _canvas, save_grid
from g2rpo.run.run import Run
from tests.app.test_evaluate import judging
from tests.support.commands import g2rpo
from tests.support.runs import Clips, Loaded, brightness, config, finished, trainer

LOSSY = 4  # grey levels that a flat frame may be off after WebP's quality 80


def flat(*values, side=16):
    """A clip [T, 3, side, side] whose frames are of one colour each."""
    return torch.tensor(values).reshape(-1, 1, 1, 1).expand(-1, 3, side, side)


def test_a_reduced_clip_has_few_small_frames():
    clip = torch.arange(81).reshape(1, 81, 1, 1, 1).expand(1, 81, 3, 480, 832) / 81
    few = reduced(clip)
    assert (
        few.shape == (1, 21, 3, 148, 256)
        and few.shape[1] <= CLIP_FRAMES
        and max(few.shape[-2:]) == CLIP_SIDE
    )
    assert few[0, :, 0, 5, 5].tolist() == [round(255 * number / 81) for number in range(0, 81, 4)]
    chess = (
        (torch.arange(512)[:, None] + torch.arange(512))
        .remainder(2)
        .float()
        .expand(1, 2, 3, 512, 512)
    )
    assert reduced(chess).unique().tolist() == [128]  # means of pixels, not some of them
    small, pictures = torch.rand(2, 5, 3, 4, 6), torch.rand(2, 3, 300, 4)
    assert torch.equal(reduced(small), to_uint8(small)) and torch.equal(
        reduced(pictures), to_uint8(pictures)
    )
    assert torch.equal(stills(small), small[:, 2]) and torch.equal(stills(pictures), pictures)


def test_a_saved_clip_moves_and_lasts_as_long_as_it_should(tmp_path):
    save_clip(tmp_path / "clip.webp", flat(0.1, 0.9, 0.5), seconds=1.5)
    frames, durations = read_webp(tmp_path / "clip.webp")
    assert durations == [500] * 3
    for frame, value in zip(frames, (0.1, 0.9, 0.5), strict=True):
        assert np.abs(np.asarray(frame).astype(int) - 255 * value).max() <= LOSSY
    again, seconds = read_clip(tmp_path / "clip.webp", frames=6)
    assert (
        again[:, 0, 0, 0].tolist()
        == pytest.approx([25.5, 25.5, 229.5, 229.5, 127.5, 127.5], abs=LOSSY)
        and seconds == 1.5
    )


def test_a_moving_grid_has_every_clip_in_its_place(tmp_path):
    values = [[(0.0, 0.4), (0.2, 0.6)], [(0.8, 0.1), (1.0, 0.5)]]
    strips = [
        PictureRow(torch.stack([flat(*clip) for clip in row]), label)
        for row, label in zip(values, "ab", strict=True)
    ]
    save_grid(tmp_path / "grid.png", strips, ["one", "two"], seconds=2)
    frames, durations = read_webp(tmp_path / "grid.webp")
    assert durations == [1000, 1000]
    canvas, corners, (width, height) = _canvas(strips, ["one", "two"], "")
    for places, clips_of_row in zip(corners, values, strict=True):
        for (x, y), clip in zip(places, clips_of_row, strict=True):
            for frame, value in zip(frames, clip, strict=True):
                inner = np.asarray(frame.crop((x + 8, y + 8, x + width - 8, y + height - 8)))
                assert np.abs(inner.astype(int) - 255 * value).max() <= LOSSY
            assert canvas.getpixel((x, y))[0] == round(255 * clip[1])  # the middle one of two


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of clips: 3 frames of 4 x 4."""
    folder = tmp_path_factory.mktemp("runs") / "clips"
    Run(folder).claim(config())
    Run(folder).record_start(0, torch.device("cpu"))
    finished(trainer(folder, policy=Clips()))
    return folder


def test_a_run_keeps_its_clips(run):
    names = sorted(path.name for path in (run / "samples").iterdir())
    stems = ["before_after", *(f"iteration_{i:06d}" for i in (0, 2, 4))]
    grids = ["first_group.png", *(f"{stem}.{kind}" for stem in stems for kind in ("png", "webp"))]
    assert names == sorted([*grids, "first_group", *stems[1:]])
    kept = [f"{number:06d}.{kind}" for number in range(3) for kind in ("png", "webp")]
    assert sorted(path.name for path in (run / "samples" / "iteration_000002").iterdir()) == kept
    frames, durations = read_webp(run / "samples" / "before_after.webp")
    assert len(frames) == 3 and durations == [500] * 3
    baseline = load_file(run / "baseline.safetensors")["images"]
    assert baseline.shape == (3, 3, 3, 4, 4) and baseline.dtype == torch.uint8
    rows = [row for row in Run(run).read_log() if row["kind"] == "eval"]
    assert (
        rows[0]["image/motion"]
        == pytest.approx(float(image_statistics(baseline)["motion"].mean()))
        != 0
    )
    assert {"image/motion/low", "image/motion/below", "image/brightness"} <= rows[-1].keys()


def test_the_report_shows_them_moving_and_stills_to_who_asked_for_no_motion(run):
    page = render(read_runs([run]))
    shown = page.count(
        '<picture><source media="(prefers-reduced-motion: reduce), print" srcset="data:image/webp;base64,'
    )
    assert shown == 3 * 3 and page.count('loading="lazy"') == shown  # prompts, evaluations
    assert "Motion" in page


def test_an_evaluation_keeps_whole_clips_and_a_moving_grid(tmp_path):
    judged = judging(tmp_path, steps=[2], weights=None)
    policy = Clips(frames=30)

    def judge():
        judged.run(
            judged.missing(), policy, lambda: None, {"bright": brightness, "dark": brightness}
        )

    judge()
    rows = list(judged.rows())
    assert [row["clip"] for row in rows] == [
        row["picture"].replace(".png", ".webp") for row in rows
    ] and len(rows) == 7
    first = tmp_path / rows[0]["clip"]
    assert read_webp(first)[1][0] % 50 == 0 and read_clip(first)[1] == 1.5  # 30 frames
    _save_grid(judged, 2)
    durations = read_webp(tmp_path / "grid_steps_002.webp")[1]
    assert 9 < len(durations) <= CLIP_FRAMES and sum(durations) == pytest.approx(
        1500, abs=CLIP_FRAMES
    )
    (tmp_path / rows[4]["clip"]).unlink()
    assert [chunk.start for chunk in judged.missing()] == [3]
    judge()
    assert (tmp_path / rows[4]["clip"]).is_file()


def sampled(capsys, monkeypatch, tmp_path, *options, policy=None):
    monkeypatch.setattr(
        components, "load_pipeline", lambda *args, **more: Loaded(policy or Clips(frames=5))
    )
    return g2rpo(
        capsys,
        "sample",
        "0",
        "0.5",
        "--model",
        "testbed",
        "--steps",
        2,
        "--out",
        tmp_path / "out",
        *options,
    )


def test_sample_writes_clips_and_a_moving_grid(tmp_path, capsys, monkeypatch):
    code, out, _ = sampled(capsys, monkeypatch, tmp_path, "--batch-size", 1)
    assert code == 0 and "2 clips in" in out and "grid.webp" in " ".join(out.split())
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "0000.webp", "0001.webp", "grid.png", "grid.webp", "prompts.jsonl",
    ]  # fmt: skip
    frames, durations = read_webp(folder / "0001.webp")
    assert len(frames) == 5 and durations == [300] * 5
    names = [
        json.loads(line)["file"] for line in (folder / "prompts.jsonl").read_text().splitlines()
    ]
    assert names == ["0000.webp", "0001.webp"] and len(read_webp(folder / "grid.webp")[0]) == 5


def test_sample_writes_mp4_if_asked(tmp_path, capsys, monkeypatch):
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    code, _, _ = sampled(
        capsys, monkeypatch, tmp_path, "--video", "mp4", policy=Clips(frames=6, size=32)
    )
    assert code == 0
    clip = tmp_path / "out" / "0000.mp4"
    fps, frames = (
        imageio.immeta(clip, plugin="FFMPEG")["fps"],
        list(imageio.imiter(clip, plugin="FFMPEG")),
    )
    assert fps == pytest.approx(4) and len(frames) == 6


@pytest.mark.parametrize(
    ("video", "message"),
    [
        ("mp4", "pip install imageio imageio-ffmpeg"),
        ("gif", "video: input should be 'webp' or 'mp4'"),
    ],
)
def test_videos_that_cannot_be_written_are_refused_first(
    tmp_path, capsys, monkeypatch, video, message
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = sampled(capsys, monkeypatch, tmp_path, "--video", video)
    assert code == 2 and message in err and not (tmp_path / "out").exists()
