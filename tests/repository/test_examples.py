"""The examples run as a reader would run them, and do what they say."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.rewards.learned import save_dino
from tests.support.pictures import noise
from tests.support.tolerances import near, network, rounding

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_gaussian_reaches_the_grey_that_is_wanted(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "gaussian.png"
    monkeypatch.setattr(sys, "argv", ["gaussian.py", str(picture)])
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(EXAMPLES / "gaussian.py"), run_name="__main__")
    said = capsys.readouterr().out
    found = re.search(r"-> (.+); the grey that is wanted lies at (.+)", said)
    reached, wanted = map(float, found.groups())
    assert reached == pytest.approx(wanted, abs=0.1)  # it began 2.1 away
    assert picture.is_file()


@pytest.mark.slow
def test_the_policy_of_pixels_learns_what_the_text_says():
    """Also that its ratio is 1 before the first update: what is trained is what has sampled. The
    text has two digits, and held-out prompts are others than those of the first row; the rounding
    of another processor moved neither number by 1e-5."""
    world = runpy.run_path(str(EXAMPLES / "pixels.py"))
    source = (EXAMPLES / "pixels.py").read_text("utf-8")
    said = re.search(r"rises from ([\d.]+) to ([\d.]+)", source)
    assert world["trainer"].iteration == 20 and world["row"]["ratio_deviation"] == 0
    assert world["row"]["reward/saturation"] == pytest.approx(float(said[2]), abs=0.02)
    with torch.no_grad(), world["trainer"].policy.base():
        base = world["trainer"].score_heldout().means()["saturation"]
    assert base == pytest.approx(float(said[1]), abs=0.1)


def test_the_trainer_of_ones_own_learns_by_its_own_rule(capsys):
    """From the best against the worst of each group: brighter pictures, by more than ten times what
    two prompts differ."""
    world = runpy.run_path(str(EXAMPLES / "own_trainer.py"))
    assert world["trainer"].iteration == 20
    before, after = (world[name]["reward/bright"] for name in ("before", "after"))
    assert after > before + 0.1 and f"{before:.2f} -> {after:.2f}" in capsys.readouterr().out


def test_a_blind_packet_counts_the_pictures_that_people_prefer(tmp_path, monkeypatch, capsys):
    """Who always prefers the tuned picture has chosen it in every answer, on whichever side it is."""
    example = runpy.run_path(str(EXAMPLES / "blind_packet.py"))
    drawn = {True: torch.zeros(6, 3, 4, 4), False: torch.ones(6, 3, 4, 4)}
    monkeypatch.setattr("g2rpo.api.sample", lambda run, texts, base=False: drawn[base])
    (tmp_path / "prompts.txt").write_text("\n".join("abcdef"))
    example["make"]("run", str(tmp_path / "prompts.txt"), str(tmp_path / "look"))
    page, white = (tmp_path / "look.html").read_text("utf-8"), example["data_uri"](drawn[False][0])
    shown = re.findall(r'src="([^"]+)" alt="(left|right)"', page)
    answers = dict(enumerate(side for picture, side in shown if picture == white))
    (tmp_path / "ada.json").write_text(json.dumps(answers))
    example["count"](str(tmp_path / "look.key.json"), str(tmp_path / "ada.json"))
    assert "preferred in 6 of 6 answers: 1.00 [0.54, 1.00]" in capsys.readouterr().out


def test_flow_dpo_prefers_the_chosen_pictures_of_a_table(tmp_path, capsys):
    """Two pairs of the embedded model's own pictures, learnt for three updates; before the first, the
    gains are 0 and the loss is log 2, exact in float64."""
    example = runpy.run_path(str(EXAMPLES / "flow_dpo.py"))
    levels = {"dark": 40, "bright": 200}
    for name, level in levels.items():
        Image.new("RGB", (64, 64), (level, level, level)).save(tmp_path / f"{name}.png")
    rows = [{"prompt": word, "chosen": "dark.png", "rejected": "bright.png"} for word in ("a", "b")]
    table = tmp_path / "pairs.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    adapter = example["train"]("scenes", table, tmp_path / "run", updates=3)
    said = capsys.readouterr().out
    assert adapter.is_file() and "update 1/3: loss 0.6931, right 0.00" in said
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < losses[0]


def test_a_page_of_the_space_that_there_is_not_is_said(monkeypatch, capsys):
    monkeypatch.setenv("G2RPO_PAGE", "draw")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "space/app.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "G2RPO_PAGE='draw': should be demo or teach\n"


def test_the_reward_with_a_model_of_its_own_scores_by_its_weights(tmp_path):
    """Red minus blue, of 8-bit pictures: exact but for float32's rounding of 1/255."""
    weight = torch.tensor([[1.0, 0.0, -1.0]])
    save_file({"weight": weight, "bias": torch.zeros(1)}, tmp_path / "warmth.safetensors")
    example = runpy.run_path(str(EXAMPLES / "plugin" / "g2rpo_example" / "warmth.py"))
    pictures = torch.zeros(2, 3, 4, 4)
    pictures[0, 0] = pictures[1, 2] = 1
    warmth = example["Warmth"](str(tmp_path), device="cpu")
    torch.testing.assert_close(warmth(pictures, ["", ""]), torch.tensor([1.0, -1.0]), **rounding(4))
    assert warmth.device == torch.device("cpu")  # as `Reward` has it, and no text


@pytest.mark.parametrize(
    "name", ["video_align:VideoAlign", "hpsv3pp:HPSv3PlusPlus", "local_vlm_judge:LocalVLMJudge"]
)
def test_a_reward_with_published_weights_starts_and_says_that_they_are_missing(tmp_path, name):
    file, kind = name.split(":")
    example = runpy.run_path(str(EXAMPLES / "rewards" / f"{file}.py"))
    more = {} if kind == "LocalVLMJudge" else {"instruction": str(tmp_path)}
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path} has no "):
        example[kind](path=str(tmp_path), **more)


def test_rewards_of_clips_tell_motion_and_steadiness(tmp_path):
    """A clip that stands still is the steadiest and does not move."""
    clip = noise(4, 56, 56)[None]
    still = clip[:, :1].expand(-1, 4, -1, -1, -1)
    one = runpy.run_path(str(EXAMPLES / "rewards" / "clips.py"))
    steady = one["ClipConsistency"](save_dino(tmp_path / "dino"), size=16)
    assert steady(still, [""]) == near(1, network(1.0)) and steady(clip, [""]) < 1 - 1e-4
    assert one["Motion"]()(still, [""]) == 0 < one["Motion"]()(clip, [""])
