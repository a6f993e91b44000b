"""Evaluations in a folder: the same pictures and numbers however they are cut, and nothing mixed up
or overwritten."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from g2rpo.core import statistics
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import interval
from g2rpo.lab.evaluate import with_controls
from g2rpo.lab.judging import EvaluationDirectory, Judging, JudgingConfig, scores_where
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.evaluation.controls import Control
from tests.support.adapters import random_adapter, write
from tests.support.commands import done, ended, own_reward, refused, small_files
from tests.support.runs import brightness, darkness
from tests.support.tables import rows
from tests.support.tiny import flux_pipeline
from tests.support.tiny_pipelines import klein
from tests.support.tolerances import near, network, rounding

PROMPTS = [str(number / 10) for number in range(7)]
PLAIN = {
    "policy": {"path": "none", "height": 4, "width": 4},
    "weights": "tuned",
    "prompts": "none",
    "rewards": {"bright": {"kind": "bright"}, "dark": {"kind": "dark"}},
    "steps": [4, 2],
    "shift": 3.0,
    "batch_size": 3,
    "seed": 5,
}


def judging(directory, **options):
    config = JudgingConfig.model_validate({**PLAIN, **options})
    return Judging(prompts=PROMPTS, config=config, files=EvaluationDirectory(directory))


def run(judged, chunks=None, rewards=None):
    """Does the missing chunks on the Gaussian policy, whose tuned weights are a mean of 0.5."""
    policy = GaussianPolicy()

    def use_weights():
        with torch.no_grad():
            policy.mean.fill_(0.5)

    rewards = rewards or {"bright": brightness, "dark": darkness}
    judged.run(judged.missing() if chunks is None else chunks, policy, use_weights, rewards)
    return policy


def files(directory):
    """But the lock, which says since when it was held last."""
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


ROUNDED = rounding(4 * 20, size=1.0)
"""Of pictures after four steps at most, in other batches."""


def test_results_are_the_means_and_intervals_of_the_scores(tmp_path, monkeypatch):
    """Up to the rounding of float32 pictures in batches of 3 or 7."""
    monkeypatch.setattr(statistics, "FEWEST_VALUES", len(PROMPTS))
    judged = judging(tmp_path)
    run(judged)
    results = json.loads(judged.write_results().read_text())["results"]
    lines = {(line["steps"], line["reward"]): line for line in results}
    assert [*lines] == [(2, "bright"), (2, "dark"), (4, "bright"), (4, "dark")]
    for steps in (2, 4):
        base, tuned = (
            brightness(judged.config.sampler(GaussianPolicy(mean), steps).pictures(PROMPTS), [])
            for mean in (0.0, 0.5)
        )
        for side, values in {"base": base, "tuned": tuned, "change": tuned - base}.items():
            expected = interval(values.double().numpy())
            found = [lines[steps, "bright"][side][key] for key in ("count", "mean", "low", "high")]
            assert found == near([7, expected.mean, expected.low, expected.high], ROUNDED)


@pytest.mark.parametrize("when", [1, 7])
def test_resumed_equals_uninterrupted(tmp_path, when):
    """Stopped in the middle of each side and step count: the same bytes in every file, and no chunk
    done twice."""
    calls = []

    def stopping(images, prompts):
        calls.append(1)
        if len(calls) == when + 1:
            raise KeyboardInterrupt
        return brightness(images, prompts)

    straight, cut = judging(tmp_path / "straight"), judging(tmp_path / "cut")
    rewards = {"bright": stopping, "dark": darkness}
    run(straight)
    with pytest.raises(KeyboardInterrupt):
        run(cut, rewards=rewards)
    assert len(cut.missing()) == 12 - when
    with pytest.raises(ValueError, match="is not finished"):
        cut.write_results()
    run(judging(tmp_path / "cut"), rewards=rewards)
    assert len(calls) == 12 + 1
    for judged in (straight, cut):
        judged.write_results()
    assert files(tmp_path / "straight") == files(tmp_path / "cut")


CONTROLS = """
[{KNOBS, best_of: 2}, {KNOBS, best_of: 4}] -> 2
[{cfg: 3, solver: euler, negative_prompt: "LONG"}, {cfg: 3, solver: sde, negative_prompt: "LONG"}] -> 2
[{cfg: 3, negative_prompt: blurry}, {cfg: 3, negative_prompt: Blurry}] -> 2
[{noise: 0.3}, {noise: 0.3}, {}] -> 1
"""


KNOBS = "noise: .5, steps: 4, cfg: 3, guided_steps: 3, solver: dpmpp2m"
AGAINST = "blurry, low quality, deformed hands, watermark, text, cropped, jpeg artefacts"


@pytest.mark.parametrize(("controls", "different"), rows(CONTROLS))
def test_every_control_has_pictures_of_its_own(tmp_path, controls, different):
    """Also where only the ends of long names differ; one that is named twice, and the base's own
    settings, are no further ones."""
    controls = yaml.safe_load(controls.replace("LONG", AGAINST).replace("KNOBS", KNOBS))
    once = {"weights": None, "steps": [2], "batch_size": len(PROMPTS)}
    chunks = judging(tmp_path, **once, controls=controls).chunks()
    assert len({chunk.folder for chunk in chunks}) == len(chunks) == 1 + int(different)


def test_the_draws_of_the_controls_begin_from_noises_of_their_own(tmp_path):
    """Each draw is that of the sampler, up to the rounding of float32 in other batches. Without
    weights, only the base is judged."""
    draws = [{"draw": draw} for draw in (1, 2, 3)]
    judged = judging(tmp_path, weights=None, steps=[2], controls=draws)
    policy = run(judged)
    assert not policy.mean.any()
    assert "tuned" not in json.loads(judged.write_results().read_text())["results"][0]
    sampler, rows = judged.config.sampler(policy, 2), judged.rows()
    for draw in (1, 2, 3):
        own = sampler.evaluate(PROMPTS, {"bright": brightness}, control=Control(draw=draw))
        found = scores_where(rows, control=f"draw {draw}")["bright"].float()
        torch.testing.assert_close(found, own.scores["bright"], **ROUNDED)
    assert len({row["scores"]["bright"] for row in rows}) == 4 * len(PROMPTS)
    means = {way.name: way.means["bright"] for way in judged.controls().ways}
    assert means["best of 4"] != means["base"]


def test_a_full_disk_is_named_and_finished_chunks_are_kept(tmp_path):
    judged = judging(tmp_path)
    run(judged, judged.chunks()[:2])
    refused = r"cannot be written \(.*the same command goes on"
    with small_files(50), pytest.raises(UserError, match=refused):  # less than a picture
        run(judged)
    assert len(judged.missing()) == 10
    run(judged)
    with small_files(50), pytest.raises(UserError, match=refused):
        judged.write_results()
    assert not (tmp_path / "results.json").exists() and not list(tmp_path.glob(".unfinished*"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory, flux_directory):
    """A folder with an evaluation of the tiny FLUX and of random LoRA weights, by a reward from a
    file; and the words that made it."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "asked.txt").write_text("a red circle\ntwo blue square\na square\n")
    source = "def it(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
    adapter = random_adapter(flux_pipeline().transformer)
    write(adapter, folder / "weights.safetensors", "diffusers", None)
    words = ["evaluate", "--model", flux_directory, "--size", 32, "--batch-size", 2]
    words += [*own_reward(folder / "reward.py", source)[1:], "--prompts", folder / "asked.txt"]
    words += ["policy.max_sequence_length=12", "--weights", folder / "weights.safetensors"]
    assert ended(*words, "--steps", "3,2", "--out", folder / "out") == 0
    return folder, words


def test_evaluate_from_the_command_line(judged, capsys):
    folder, words = judged
    out = folder / "out"
    command = [*words, "--steps", "3,2", "--out", out]
    before, report = files(out), json.loads((out / "results.json").read_text())
    assert [line["steps"] for line in report["results"]] == [2, 3]
    change = report["results"][1]["change"]["mean"]
    shown = " ".join(done(capsys, *command).split())
    assert "95 % intervals" in shown and f"{change:+.3f}" in shown and abs(change) > 1e-4
    assert "building" not in shown and files(out) == before

    for gone in ("chunks/steps_002_tuned_000002.json", "results.json"):
        (out / gone).unlink()
    shown = done(capsys, *command, "policy.device=cpu")
    assert "7 of 8 chunks" in shown and files(out).keys() == before.keys()
    assert json.loads((out / "results.json").read_text()) == report


def other_prompts(folder):
    (folder / "asked.txt").write_text("a red circle\ntwo blue square\ntwo\n")


def other_weights(folder):
    tensors = load_file(folder / "weights.safetensors")
    save_file({name: 2 * value for name, value in tensors.items()}, folder / "weights.safetensors")


def other_reward(folder):
    own_reward(
        folder / "reward.py", "def it(images, prompts):\n    return images[:, 1].mean((1, 2))\n"
    )


@pytest.mark.parametrize(
    ("change", "steps", "words", "said"),
    [
        (None, "2", [], "steps: [3, 2] there, [2] here"),
        (None, "3,2", ["policy.guidance_scale=2"], "policy.guidance_scale: None there, 2.0 here"),
        (other_prompts, "3,2", [], "contents.prompts"),
        (other_weights, "3,2", [], "contents.weights"),
        (other_reward, "3,2", [], "contents.rewards.it: 'reward.py: sha256"),
    ],
)
def test_changed_settings_are_refused_and_nothing_is_overwritten(
    judged, tmp_path, capsys, change, steps, words, said
):
    folder, command = judged
    before = files(folder)
    if change is not None:
        change(folder)
    err = refused(capsys, *command, "--steps", steps, *words, "--out", folder / "out")
    for name in ("asked.txt", "weights.safetensors", "reward.py"):
        (folder / name).write_bytes(before[Path(name)])
    assert said in err and err.count("contents.") == (change is not None)
    assert files(folder) == before


def test_a_run_is_judged_as_it_judged_itself(tiny_config, tmp_path, capsys, monkeypatch):
    """Same prompts, noise, steps and batches: the run's own table, up to the order of float32
    additions. A folder that is there already is not written into."""
    run_dir = tmp_path / "run"
    reward = own_reward(tmp_path / "reward.py")
    few = ["optim.learning_rate=0.1", "trainer.iterations=1", "--run-dir", run_dir]
    done(capsys, "train", tiny_config, *reward, *few)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "other").touch()
    assert "evaluation-2/results.json" in done(capsys, "evaluate", run_dir)
    own = json.loads((run_dir / "results.json").read_text())["rewards"]["it"]
    (line,) = json.loads((tmp_path / "evaluation-2" / "results.json").read_text())["results"]
    for side in ("base", "tuned"):
        assert line[side]["mean"] == near(own[side], network(1.0, passes=5))
    assert abs(line["change"]["mean"]) > 1e-3


REFUSED = """
--steps ten -> --steps ten: should be numbers
--steps 0 -> steps.0: input should be greater than or equal to 1
--num-prompts 99999999999999999999 -> num_prompts: input should be less than or equal to 1000000
--steps 2 strength=1e39 -> from 1e-18 to 1e+18 in size, got 1e+39
--batch-size 2 -> 'steps' is missing
--steps 2 --weights nowhere -> weights nowhere: is no folder
--steps 2 policy.height=31 -> multiples of
--steps 2 note=LONG -> unknown key 'note'
--steps 2 'controls=[{stps: 3}]' -> Did you mean 'controls.0.steps'?
--steps 2 'controls=[{noise: .5}, {noise: .5}, {noise: 0.5000001}]' -> two are named 'initial noise x 0.5': their numbers
"""
"""LONG is longer than the name of a file may be."""


@pytest.mark.parametrize(("words", "said"), rows(REFUSED))
def test_wrong_input_is_one_message_and_nothing_is_begun(judged, tmp_path, capsys, words, said):
    given = shlex.split(words.replace("LONG", "x" * 300))
    assert said in refused(capsys, *judged[1], *given, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def schnell():
    """A FLUX.1-schnell."""
    pipeline = flux_pipeline()
    config = {**pipeline.transformer.config, "guidance_embeds": False}
    pipeline.transformer = type(pipeline.transformer).from_config(config)
    return pipeline


@pytest.mark.parametrize(
    ("make", "acts"),
    [
        (flux_pipeline, True),
        (schnell, False),  # no input for it
        (partial(klein, distilled=False), True),
        (partial(klein, distilled=True), False),  # it ignores the scale
    ],
)
def test_models_whose_scale_does_nothing_are_offered_no_other_scale(tmp_path, make, acts):
    """Guidance by hand is offered instead."""
    make().save_pretrained(tmp_path)
    policy = {"path": str(tmp_path), "height": 32, "width": 32, "guidance_scale": 3.5}
    asked = {**PLAIN, "policy": policy, "prompts": "starter:heldout"}
    controls = with_controls(JudgingConfig.model_validate(asked)).controls
    assert any(control.guidance is not None for control in controls) == acts
    assert acts or any(control.cfg is not None for control in controls)
