"""Clips for people: reduced, in numbers, moving in files, grids and evaluations."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from g2rpo.core.images import to_uint8
from g2rpo.train.monitor.image_statistics import image_statistics
from g2rpo.train.monitor.pictures import (
    CLIP_FRAMES,
    CLIP_SIDE,
    read_clip,
    read_webp,
    reduced,
    save_clip,
)
from tests.lab.test_evaluate import judging
from tests.support.commands import g2rpo
from tests.support.runs import Clips, Loaded, brightness, finished, log, trainer
from tests.support.tolerances import near, rounding

LOSSY = 4  # grey levels that a flat frame may be off after WebP's quality 80


def flat(*values, side=16):
    """A clip [T, 3, side, side] whose frames are of one colour each."""
    return torch.tensor(values).reshape(-1, 1, 1, 1).expand(-1, 3, side, side)


def test_a_reduced_clip_has_few_small_frames():
    """Of every fourth frame, by the means of pixels. Small clips and all pictures stay as they
    are."""
    clip = torch.arange(81).reshape(1, 81, 1, 1, 1).expand(1, 81, 3, 60, 512) / 81
    few = reduced(clip)
    assert few.shape == (1, 21, 3, 30, CLIP_SIDE) and few.shape[1] <= CLIP_FRAMES
    assert few[0, :, 0, 5, 5].tolist() == [round(255 * number / 81) for number in range(0, 81, 4)]
    halves = torch.eye(2).repeat(256, 256).expand(1, 2, 3, 512, 512)
    assert reduced(halves).unique().tolist() == [128]
    for images in (torch.rand(2, 5, 3, 4, 6), torch.rand(2, 3, 300, 4)):
        assert torch.equal(reduced(images), to_uint8(images))


def test_a_saved_clip_moves_and_lasts_as_long_as_it_should(tmp_path):
    path, levels = tmp_path / "clip.webp", [0.1, 0.9, 0.5]
    save_clip(path, flat(*levels), seconds=1.5)
    frames, durations = read_webp(path)
    assert durations == [500] * 3
    for frame, value in zip(frames, levels, strict=True):
        assert np.abs(np.asarray(frame).astype(int) - 255 * value).max() <= LOSSY
    again, seconds = read_clip(path)
    expected = [255 * value for value in levels for _ in range(CLIP_FRAMES // 3)]
    assert again[:, 0, 0, 0].tolist() == pytest.approx(expected, abs=LOSSY) and seconds == 1.5


def test_a_run_keeps_its_clips(tmp_path):
    """Of 3 frames of 4 x 4."""
    finished(trainer(tmp_path, "trainer.iterations=2", policy=Clips()))
    samples = tmp_path / "samples"
    grids = {path.name for path in samples.iterdir()}
    kept = {path.name for path in (samples / "iteration_000002").iterdir()}
    for kind in ("png", "webp"):
        assert {f"before_after.{kind}", f"iteration_000002.{kind}"} <= grids
        assert {f"{number:06d}.{kind}" for number in range(3)} <= kept
    assert read_webp(samples / "before_after.webp")[1] == [500] * 3
    baseline = load_file(tmp_path / "baseline.safetensors")["images"]
    assert baseline.shape == (3, 3, 3, 4, 4) and baseline.dtype == torch.uint8
    (first, *_) = log(tmp_path)
    motion = float(image_statistics(baseline)["motion"].mean())
    assert first["image/motion"] == near(motion, rounding(20)) != 0


def test_an_evaluation_keeps_whole_clips_and_a_moving_grid(tmp_path):
    judged, policy = judging(tmp_path, steps=[2], weights=None), Clips(frames=30)
    rewards = {"bright": brightness, "dark": brightness}
    judged.run(judged.missing(), policy, lambda: None, rewards)
    rows = list(judged.rows())
    first = tmp_path / rows[0]["clip"]
    assert rows[0]["clip"] == rows[0]["picture"].replace(".png", ".webp") and len(rows) == 7
    assert read_webp(first)[1][0] % 50 == 0 and read_clip(first)[1] == 1.5  # 30 frames
    judged.save_grid(2)
    durations = read_webp(tmp_path / "grid_steps_002.webp")[1]
    assert 9 < len(durations) <= CLIP_FRAMES
    assert sum(durations) == pytest.approx(1500, abs=CLIP_FRAMES)
    (tmp_path / rows[4]["clip"]).unlink()
    assert [chunk.start for chunk in judged.missing()] == [3]
    judged.run(judged.missing(), policy, lambda: None, rewards)
    assert (tmp_path / rows[4]["clip"]).is_file()


def sampled(capsys, monkeypatch, folder, *options):
    """Two samples of a policy of clips: (exit code, stdout, stderr)."""
    loaded = Loaded(Clips(frames=6, size=32))
    monkeypatch.setattr("g2rpo.lab.sample.load_pipeline", lambda *args, **more: loaded)
    words = ["sample", "0", "0.5", "--model", "testbed", "--steps", 2, "--out", folder]
    return g2rpo(capsys, *words, *options)


def test_sample_writes_clips_and_a_moving_grid(tmp_path, capsys, monkeypatch):
    code, out, _ = sampled(capsys, monkeypatch, tmp_path, "--batch-size", 1)
    assert code == 0 and "2 clips in" in out and "grid.webp" in " ".join(out.split())
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == ["0000.webp", "0001.webp"]
    frames, durations = read_webp(tmp_path / "0001.webp")
    assert len(frames) == 6 == len(read_webp(tmp_path / "grid.webp")[0])
    assert durations == [250] * 6


@pytest.mark.slow  # runs ffmpeg
def test_sample_writes_mp4_if_asked(tmp_path, capsys, monkeypatch):
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    assert sampled(capsys, monkeypatch, tmp_path, "--video", "mp4")[0] == 0
    clip = {"uri": tmp_path / "0000.mp4", "plugin": "FFMPEG"}
    assert imageio.immeta(**clip)["fps"] == pytest.approx(4) and len([*imageio.imiter(**clip)]) == 6


@pytest.mark.parametrize(
    ("video", "said"),
    [("mp4", "pip install imageio imageio-ffmpeg"), ("gif", "input should be 'webp' or 'mp4'")],
)
def test_videos_that_cannot_be_written_are_refused_first(
    tmp_path, capsys, monkeypatch, video, said
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = sampled(capsys, monkeypatch, tmp_path / "out", "--video", video)
    assert code == 2 and said in err and not (tmp_path / "out").exists()
