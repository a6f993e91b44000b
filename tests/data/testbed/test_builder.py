"""A few steps of everything that builds the testbed's weights."""

import json

import pytest
import torch
from diffusers import FluxPipeline

from g2rpo.data.testbed import assets_dir
from tools.testbed.__main__ import main

SHIPPED = {"words": assets_dir() / "words/figures.json", "scenes": assets_dir() / "figures.json"}


@pytest.mark.slow  # two minutes
@pytest.mark.parametrize("task", ["words", "scenes"])
def test_a_quick_build_runs_end_to_end_and_continues(task, tmp_path, capsys):
    before = torch.random.get_rng_state()
    results = []
    for trained in (True, False):  # what is there is not trained again
        main([task, "--out", str(tmp_path), "--quick"])
        assert ("loss" in capsys.readouterr().out) == trained
        results.append((tmp_path / "figures.json").read_text())
    assert (
        results[0] == results[1]
        and json.loads(results[0]).keys() == json.loads(SHIPPED[task].read_text()).keys()
    )
    assert torch.equal(before, torch.random.get_rng_state())
    FluxPipeline.from_pretrained(tmp_path / "pipeline")
