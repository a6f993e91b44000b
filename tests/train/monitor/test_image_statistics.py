"""Statistics of pictures and clips by hand."""

import math

import pytest
import torch

from g2rpo.train.monitor.image_statistics import image_statistics, spread


def test_image_statistics_by_hand():
    columns = torch.arange(8.0).expand(3, 8, 8)
    red = torch.zeros(3, 8, 8)
    red[0] = 1
    pictures = {
        "chess": (columns + columns.mT) % 2,
        "ramp": columns * 17 / 255,
        "red": red,
        "grey": torch.full((3, 8, 8), 0.5),
    }
    found = image_statistics(torch.stack([*pictures.values()]))
    for name, expected in {
        "brightness": [0.5, 3.5 / 15, 0.299, 128 / 255],
        "contrast": [0.5, math.sqrt(5.25) / 15, 0, 0],
        "saturation": [0, 0, 1, 0],
        "clipped": [1, 1 / 8, 1, 0],
        "detail": [1, 0, 0, 0],
    }.items():
        assert found[name].tolist() == pytest.approx(expected, abs=1e-12), name
    assert image_statistics(torch.ones(1, 3, 2, 2))["detail"].tolist() == [0]  # no inner pixel


def test_statistics_of_clips_are_means_over_frames_and_motion():
    levels, noise = torch.tensor([0.0, 0.2, 0.6, 0.4]), torch.rand(4, 3, 8, 8)
    moving = levels[:, None, None, None].expand(-1, 3, 8, 8)
    found, alone = image_statistics(torch.stack([moving, noise])), image_statistics(noise)
    assert float(found["motion"][0]) == pytest.approx(0.8 / 3) and found["motion"][1] > 0.1
    for name, values in alone.items():
        assert float(found[name][1]) == pytest.approx(float(values.mean())), name
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
    fine = torch.full((1, 2, 3, 64, 64), 0.5)
    fine[0, 0] = (torch.arange(64)[:, None] + torch.arange(64)) % 2
    assert spread(fine) == pytest.approx(0)
    assert spread(torch.stack([fine, fine], 2)) == pytest.approx(0)  # a clip
