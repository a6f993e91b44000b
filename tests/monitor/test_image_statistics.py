"""Statistics of pictures and clips by hand."""

import math

import pytest
import torch

from g2rpo.monitor.image_statistics import image_statistics, spread


def test_image_statistics_by_hand():
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    chess = ((rows + columns) % 2).float().expand(3, 8, 8)
    ramp = (columns * 17.0 / 255).expand(3, 8, 8)
    red = torch.zeros(3, 8, 8)
    red[0] = 1
    grey = torch.full((3, 8, 8), 0.5)
    s = image_statistics(torch.stack([chess, ramp, red, grey]))
    assert s["brightness"].tolist() == pytest.approx([0.5, 3.5 / 15, 0.299, 128 / 255])
    assert s["contrast"].tolist() == pytest.approx([0.5, math.sqrt(5.25) / 15, 0, 0], abs=1e-12)
    assert s["saturation"].tolist() == pytest.approx([0, 0, 1, 0])
    assert s["clipped"].tolist() == pytest.approx([1, 1 / 8, 1, 0])
    assert s["detail"].tolist() == pytest.approx([1, 0, 0, 0], abs=1e-12)
    assert image_statistics(torch.ones(1, 3, 2, 2))["detail"].tolist() == [0]  # no inner pixel


def test_what_is_stored_has_the_same_statistics():
    """The base's pictures come back from disk in 8 bit: a resumed run must log the same bits."""
    pictures = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    again = image_statistics((pictures * 255).round().to(torch.uint8))
    assert all(
        torch.equal(values, again[name]) for name, values in image_statistics(pictures).items()
    )


def test_statistics_of_clips_are_means_over_frames_and_motion():
    noise = torch.rand(3, 3, 8, 8)
    moving = torch.tensor([0.0, 0.2, 0.6, 0.4])[:, None, None, None].expand(-1, 3, 8, 8)
    found = image_statistics(
        torch.stack([moving, noise[:1].expand(4, -1, -1, -1), torch.cat([noise, noise[:1]])])
    )
    assert found["motion"].tolist()[:2] == pytest.approx([0.8 / 3, 0]) and found["motion"][2] > 0.1
    alone = image_statistics(noise)
    for name, values in alone.items():
        expected = [float(values[0]), float(torch.cat([values, values[:1]]).mean())]
        assert found[name].tolist()[1:] == pytest.approx(expected), name
    assert "motion" not in alone and image_statistics(noise[None, :1])["motion"].tolist() == [0]


def test_spread_by_hand():
    """Two prompts: equal pictures, and pictures whose pixels all differ by .5, .5 and 0; a
    chessboard averages to grey."""
    pictures = torch.zeros(2, 3, 3, 4, 4)
    pictures[1, 2] = 0.5
    assert spread(pictures) == pytest.approx((0 + (0 + 0.5 + 0.5) / 3) / 2)
    assert spread((pictures * 255).to(torch.uint8)) == pytest.approx(1 / 6, abs=1 / 255)
    right = torch.tensor([[True, False, False], [True, False, True]])
    assert spread(pictures, right) == pytest.approx(0.5)  # the first prompt has no pair
    assert math.isnan(spread(pictures[:1], right[:1]))
    fine = torch.zeros(1, 2, 3, 64, 64)
    fine[0, 0, :, ::2, ::2] = fine[0, 0, :, 1::2, 1::2] = 1
    fine[0, 1] = 0.5
    assert spread(fine) == pytest.approx(0)
    assert spread(torch.stack([fine, fine], 2)) == pytest.approx(0)  # a clip
