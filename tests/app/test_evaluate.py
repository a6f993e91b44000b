"""Evaluations in a folder: the same pictures and numbers however they are cut, and nothing mixed up
or overwritten."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from g2rpo.app.evaluate import with_controls
from g2rpo.core import statistics
from g2rpo.core.errors import UserError
from g2rpo.core.statistics import interval
from g2rpo.evaluation.controls import Control
from g2rpo.evaluation.sampler import Sampler
from g2rpo.evaluation.sweep import Judging, JudgingConfig, scores_where
from g2rpo.policies.gaussian import GaussianPolicy
from tests.support.commands import done, refused, small_files
from tests.support.runs import brightness, darkness
from tests.support.tiny import flux_pipeline
from tests.support.tiny_pipelines import klein, save_tiny

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
    return Judging(JudgingConfig.model_validate({**PLAIN, **options}), PROMPTS, directory)


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
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_results_are_the_means_and_intervals_of_the_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "FEWEST_VALUES", len(PROMPTS))
    judged = judging(tmp_path)
    run(judged)
    report = json.loads(judged.write_results().read_text())
    assert [(line["steps"], line["reward"]) for line in report["results"]] == [
        (2, "bright"), (2, "dark"), (4, "bright"), (4, "dark"),
    ]  # fmt: skip
    for steps in (2, 4):
        scores = []
        for mean in (0.0, 0.5):
            policy = GaussianPolicy(mean=mean)
            images = Sampler(policy=policy, shift=3.0, num_steps=steps, seed=5).pictures(PROMPTS)
            scores.append(brightness(images, PROMPTS).double().numpy())
        line = next(
            line
            for line in report["results"]
            if (line["steps"], line["reward"]) == (steps, "bright")
        )
        for name, values in (
            ("base", scores[0]),
            ("tuned", scores[1]),
            ("change", scores[1] - scores[0]),
        ):
            expected = interval(values)
            assert line[name]["count"] == 7
            for key in ("mean", "low", "high"):  # float32 pictures in batches of 3 or 7
                assert line[name][key] == pytest.approx(getattr(expected, key), abs=1e-6), (
                    name,
                    key,
                )
        assert line["change"]["low"] > 0


def test_pictures_do_not_depend_on_how_they_are_cut(tmp_path):
    one, many = judging(tmp_path / "one", batch_size=100), judging(tmp_path / "many", batch_size=1)
    for judged in (one, many):
        run(judged)
    scores = [
        [row["scores"]["bright"] for row in sorted(j.rows(), key=lambda row: row["picture"])]
        for j in (one, many)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


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
    run(straight)
    with pytest.raises(KeyboardInterrupt):
        run(cut, rewards={"bright": stopping, "dark": darkness})
    assert len(cut.missing()) == 12 - when
    run(judging(tmp_path / "cut"), rewards={"bright": stopping, "dark": darkness})
    assert len(calls) == 12 + 1
    for judged in (straight, cut):
        judged.write_results()
    assert files(tmp_path / "straight") == files(tmp_path / "cut")


def test_the_draws_of_the_controls_begin_from_noises_of_their_own(tmp_path):
    """Each draw is that of the sampler, and the best of them is no worse than the base."""
    judged = judging(
        tmp_path, weights=None, steps=[2], controls=[{"draw": draw} for draw in (1, 2, 3)]
    )
    policy = run(judged)
    sampler = judged.config.sampler(policy, 2)
    for draw in (1, 2, 3):
        own = sampler.evaluate(PROMPTS, {"bright": brightness}, control=Control(draw=draw)).scores[
            "bright"
        ]
        assert torch.allclose(
            scores_where(list(judged.rows()), control=f"draw {draw}")["bright"].float(),
            own,
            atol=1e-6,
        )
    assert len({row["scores"]["bright"] for row in judged.rows()}) == 4 * len(PROMPTS)
    means = {way.name: way.means["bright"] for way in judged.controls().ways}
    assert means["best of 4"] != means["base"]


def test_an_unfinished_evaluation_has_no_results(tmp_path):
    judged = judging(tmp_path)
    run(judged, judged.chunks()[:-1])
    with pytest.raises(ValueError, match="is not finished"):
        judged.write_results()


def test_missing_scores_are_null_and_leave_their_pair_out(tmp_path):
    def sometimes(images, prompts):
        scores = brightness(images, prompts)
        scores[[prompt == "0.2" for prompt in prompts]] = float("nan")
        return scores

    judged = judging(tmp_path)
    run(judged, rewards={"bright": sometimes, "dark": darkness})
    report = json.loads(judged.write_results().read_text())
    bright = report["results"][0]
    assert bright["base"]["count"] == bright["change"]["count"] == 6
    assert [row["scores"]["bright"] for row in judged.rows()].count(None) == 4


def test_without_weights_only_the_base_is_judged(tmp_path):
    judged = judging(tmp_path, weights=None)
    policy = run(judged)
    assert float(policy.mean.detach().abs().max()) == 0  # use_weights was never called
    assert "tuned" not in json.loads(judged.write_results().read_text())["results"][0]


def test_a_full_disk_is_named_and_finished_chunks_are_kept(tmp_path):
    judged = judging(tmp_path)
    run(judged, judged.chunks()[:2])
    refused = r"cannot be written \(.*the same command goes on"
    with small_files(50), pytest.raises(UserError, match=refused):  # less than a picture
        run(judged)
    assert len(judged.missing()) == 10
    run(judged)
    assert judged.missing() == []
    with small_files(50), pytest.raises(UserError, match=refused):
        judged.write_results()
    assert not (tmp_path / "results.json").exists() and not list(tmp_path.glob(".unfinished*"))


@pytest.fixture
def model(tmp_path, flux_directory):
    """Arguments that judge the tiny FLUX by a reward from a Python file."""
    (tmp_path / "asked.txt").write_text("a red circle\ntwo blue square\na square\n")
    (tmp_path / "mine.py").write_text(
        "def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
    )
    rewards = {
        "red": {"kind": "function", "options": {"target": f"{tmp_path / 'mine.py'}:redness"}}
    }
    (tmp_path / "rewards.yaml").write_text(yaml.safe_dump(rewards))
    files = [
        "--plugin",
        tmp_path / "mine.py",
        "--prompts",
        tmp_path / "asked.txt",
        "--rewards",
        tmp_path / "rewards.yaml",
    ]
    return [
        "evaluate",
        "--model",
        flux_directory,
        "--size",
        32,
        "--batch-size",
        2,
        *files,
        "policy.max_sequence_length=12",
    ]


def adapter(tiny_config, directory, capsys):
    """A trained run whose adapter is made strong enough to be seen."""
    done(capsys, "train", tiny_config, "trainer.iterations=1", "--run-dir", directory)
    path = directory / "adapter" / "pytorch_lora_weights.safetensors"
    generator = torch.Generator().manual_seed(0)
    stronger = {
        name: value + 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in load_file(path).items()
    }
    save_file(stronger, path, metadata={"format": "pt"})
    return directory


def test_evaluate_from_the_command_line(model, tiny_config, tmp_path, capsys):
    weights = adapter(tiny_config, tmp_path / "run", capsys) / "adapter"
    out = tmp_path / "out"
    arguments = [*model, "--weights", weights, "--steps", "3,2", "--out", out]
    shown = done(capsys, *arguments)
    report = json.loads((out / "results.json").read_text())
    assert [line["steps"] for line in report["results"]] == [2, 3]
    change = report["results"][1]["change"]
    assert abs(change["mean"]) > 1e-4
    words = " ".join(shown.split())
    assert "95 % intervals" in words and f"{change['mean']:+.3f}" in words
    assert {path.name for path in out.glob("grid_*.png")} == {
        "grid_steps_002.png",
        "grid_steps_003.png",
    }

    before = files(out)
    again = done(capsys, *arguments)
    assert "building" not in again and "95 % intervals" in again and files(out) == before

    for gone in ("chunks/steps_002_tuned_000002.json", "results.json"):
        (out / gone).unlink()
    shown = done(capsys, *arguments, "policy.device=cpu")
    assert "7 of 8 chunks" in shown and files(out).keys() == before.keys()
    assert json.loads((out / "results.json").read_text()) == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--steps", "2,3"], "steps: [2] there, [2, 3] here"),
        (["policy.guidance_scale=2"], "policy.guidance_scale: None there, 2.0 here"),
        (["rewards.red.options.target=x"], "unknown"),
    ],
)
def test_changed_settings_are_refused_and_nothing_is_overwritten(
    model, tmp_path, capsys, change, message
):
    out = tmp_path / "out"
    done(capsys, *model, "--steps", "2", "--out", out)
    before = files(out)
    err = refused(
        capsys,
        *model,
        *(["--steps", "2"] if "--steps" not in change else []),
        *change,
        "--out",
        out,
    )
    assert files(out) == before
    assert message in err or "rewards.red.options.target" in err


def test_changed_prompts_and_weights_under_the_same_name_are_refused(
    model, tiny_config, tmp_path, capsys
):
    weights = adapter(tiny_config, tmp_path / "run", capsys) / "adapter"
    arguments = [*model, "--weights", weights, "--steps", "2", "--out", tmp_path / "out"]
    done(capsys, *arguments)
    (weights / "note").write_text("new")
    err = refused(capsys, *arguments)
    assert "contents.weights" in err and "contents.prompts" not in err
    (weights / "note").unlink()
    (tmp_path / "asked.txt").write_text("a red circle\ntwo blue square\ntwo\n")
    err = refused(capsys, *arguments)
    assert "contents.prompts" in err and "contents.weights" not in err


def test_a_run_is_judged_as_it_judged_itself(tiny_config, tmp_path, capsys, monkeypatch):
    """Same prompts, noise, steps and batches: the run's own table, up to the order of float32
    additions."""
    (tmp_path / "mine.py").write_text(
        "def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
    )
    run_dir = tmp_path / "run"
    reward = [
        "rewards.scene_accuracy=",
        "rewards.red.kind=function",
        f"rewards.red.options.target={tmp_path}/mine.py:redness",
    ]
    done(capsys, "train", tiny_config, *reward, "optim.learning_rate=0.1", "--run-dir", run_dir)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "other").touch()
    for _ in range(2):
        out = done(capsys, "evaluate", run_dir)
        assert "evaluation-2/results.json" in out
    own = json.loads((run_dir / "results.json").read_text())["rewards"]
    (line,) = json.loads((tmp_path / "evaluation-2" / "results.json").read_text())["results"]
    assert line["base"]["mean"] == pytest.approx(own["red"]["base"], abs=1e-5)
    assert line["tuned"]["mean"] == pytest.approx(own["red"]["tuned"], abs=1e-5)
    assert abs(line["change"]["mean"]) > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "ten"], "--steps ten: should be numbers"),
        (["--steps", "0"], "steps.0: input should be greater than or equal to 1"),
        (["--num-prompts", "9" * 20], "num_prompts: input should be less than or equal to 1000000"),
        (
            ["--steps", "2", "strength=1e39"],
            "strength: should be 0, or from 1e-18 to 1e+18 in size, got 1e+39",
        ),
        ([], "'steps' is missing"),
        (["--steps", "2", "--rewards", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--steps", "2", "--weights", "nowhere"], "weights nowhere: is no folder"),
        (["--steps", "2", "guidance_scale=3"], "Did you mean 'policy.guidance_scale'?"),
        (["--steps", "2", "policy.height=31"], "multiples of"),
        (
            ["--steps", "2", "controls=[{stps: 3}]"],
            "unknown key 'controls.0.stps'. Did you mean 'controls.0.steps'?",
        ),
    ],
)
def test_wrong_input_is_one_message_and_nothing_is_begun(
    model, tmp_path, capsys, arguments, message
):
    assert message in refused(capsys, *model, *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("scale", "guided"), [(0.8, True), (0.0, False)])
def test_the_controls_of_a_model_are_guided_where_the_model_says(tmp_path, scale, guided):
    """Z-Image is guided from 0 on, others from 1."""
    folder = save_tiny("ZImagePipeline", tmp_path / "z")
    policy = {"path": str(folder), "height": 32, "width": 32, "guidance_scale": scale}
    assert offered_guidance(policy) is guided


def offered_guidance(policy):
    """Whether the default controls of a model change its own guidance; guidance by hand is offered
    else."""
    config = with_controls(
        JudgingConfig.model_validate({**PLAIN, "policy": policy, "prompts": "starter:heldout"})
    )
    own = any(control.guidance is not None for control in config.controls)
    assert own or any(control.cfg is not None for control in config.controls)
    return own


@pytest.mark.parametrize("build", [flux_pipeline, klein])
def test_models_whose_scale_does_nothing_are_offered_no_other_scale(tmp_path, build):
    """FLUX.1-schnell has no input for it, distilled klein ignores it; FLUX.1-dev and klein-base do
    not."""
    for acts in (True, False):
        pipeline = (
            build(guidance_embeds=acts) if build is flux_pipeline else build(distilled=not acts)
        )
        folder = tmp_path / str(acts)
        pipeline.save_pretrained(folder)
        assert (
            offered_guidance(
                {"path": str(folder), "height": 32, "width": 32, "guidance_scale": 3.5}
            )
            is acts
        )
