"""Pipelines that cannot be trained are refused by their small files, in one message; distilled ones get a caution."""

import json
import shutil

import pytest

from g2rpo.assembly import blueprint, components, pipeline_check
from g2rpo.config.schema import PolicyConfig
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from tests.support.commands import refused, write_tiny

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


def folder_of(tmp_path, kind="QwenImagePipeline", scheduler=FLOW, missing=(), **entries):
    """The small files of a pipeline."""
    index = {"_class_name": kind, "text_encoder": ["transformers", "Qwen3Model"], "transformer": ["diffusers", "X"], **entries}
    for name in ("scheduler", "text_encoder", "transformer"):
        if name not in missing:
            (tmp_path / name).mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    return PolicyConfig(path=str(tmp_path), height=64, width=64)


DDIM = {"_class_name": "EulerDiscreteScheduler", "prediction_type": "epsilon"}
CASES = {
    "no flow": ({"scheduler": DDIM}, "EulerDiscreteScheduler with prediction_type=epsilon, is not for flow matching"),
    "text encoder left empty": ({"text_encoder": [None, None]}, "has no text_encoder"),
    "unknown class": ({"kind": "QwenImagPipeline"}, "has no policy here.*QwenImagePipeline"),
    "known, and refused": ({"kind": "HunyuanImagePipeline"}, "momentum"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_trained_is_refused_before_it_is_loaded(tmp_path, case):
    changes, message = CASES[case]
    with pytest.raises(UserError, match=message):
        components.load_pipeline(folder_of(tmp_path, **changes))


@pytest.mark.parametrize(
    "scheduler",
    [
        FLOW,
        {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True},
        {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True},
    ],
)
def test_solvers_of_flows_are_flows(tmp_path, scheduler):
    pipeline_check.check_files("x", folder_of(tmp_path, scheduler=scheduler).path)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_frames": 5}, "policy.num_frames: a QwenImagePipeline has no such option"),
        ({"pipeline": "WanPipeline"}, "this recipe is for a WanPipeline"),
    ],
)
def test_options_that_a_model_lacks_are_refused(tmp_path, option, message):
    with pytest.raises(UserError, match=message):
        components.load_pipeline(folder_of(tmp_path).model_copy(update=option))


@pytest.mark.parametrize(
    ("name", "index", "cautioned"),
    [
        ("black-forest-labs/FLUX.1-schnell", {}, True),
        ("black-forest-labs/FLUX.2-klein-base-4B", {}, False),
        ("klein", {"is_distilled": False}, False),
        ("mine", {"is_distilled": True}, True),
    ],
)
def test_distilled_models_get_one_caution(tmp_path, name, index, cautioned):
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    said = pipeline_check.caution(name, str(tmp_path))
    assert (said is not None) == cautioned
    assert said is None or (name in said and "base model" in said)


@pytest.mark.parametrize(
    ("kind", "images", "message"),
    [
        ("FluxKontextPipeline", [], "prompt 'make it red': has 0 input pictures, but this model takes one input picture"),
        ("QwenImageEditPlusPipeline", ["a.png"] * 4, "takes one to 3 input pictures"),
        ("QwenImagePipeline", ["a.png"], "takes no input picture"),
    ],
)
def test_prompts_without_the_pictures_that_a_model_needs_are_named(tmp_path, kind, images, message):
    with pytest.raises(UserError, match=message):
        components.check_prompts(folder_of(tmp_path, kind), [Prompt("make it red", images)])


WRONG = {
    "layers in a list": ("transformer", {"num_layers": [1, 2]}),
    "letters for channels": ("vae", {"latent_channels": "x"}),
    "a million layers": ("text_encoder_2", {"num_layers": 1_000_000}),
    "shift that is no number": ("scheduler", {"shift": float("nan")}),
    "an empty part": ("", {"transformer": [None, None]}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_of_config_files_are_one_message_of_plan_and_of_a_run(flux_directory, tmp_path, capsys, case):
    part, changes = WRONG[case]
    folder = shutil.copytree(flux_directory, tmp_path / "pipeline")
    (file,) = (folder / part).glob("*index.json" if not part else "*config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    config = write_tiny(tmp_path, folder)
    for command in (["plan", config, "--no-probe"], ["train", config, "--run-dir", tmp_path / "run"]):
        assert "policy.path" in refused(capsys, *command)
    assert not (tmp_path / "run").exists()


def test_a_plan_names_a_part_that_this_transformers_lacks():
    with pytest.raises(UserError, match="names NoSuchEncoder, which is no model of the transformers installed here"):
        blueprint.on_meta(("transformers:NoSuchEncoder", {}))
