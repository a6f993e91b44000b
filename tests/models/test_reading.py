"""Prompts of which text encoders read only the beginning are told of, whatever the encoders."""

import pytest
import torch
from PIL import Image

from g2rpo.core.data import Prompt
from g2rpo.models import load
from g2rpo.models.catalogue import SPECS
from g2rpo.models.modular import pipeline_class
from g2rpo.models.options import PolicyConfig
from g2rpo.models.spec import parameters_of
from g2rpo.models.text import TextEncoders, tokens_read, warn_of_long
from tests.models.test_any_pipeline import small_pictures  # noqa: F401 (for every test here)
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.variants import few

QUICK = ("FluxPipeline", "StableDiffusion3Pipeline", "QwenImagePipeline", "Krea2Pipeline")
ENDLESS = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImage21Pipeline")
SHORT_TEMPLATE = "OvisImagePipeline"
"""The tiny one has three tokens less than the pipeline drops: the prompt's, which others saw."""
TEMPLATE_ALONE = "Lumina2Pipeline"
"""The tiny tokenizer's template is longer than 24 tokens."""


@pytest.mark.parametrize("kind", few(CLASSES, QUICK.__contains__))
def test_what_is_said_to_be_left_out_changes_nothing(kind, tmp_path):
    """Of an encoder whose template, special tokens or cut behind it are not counted: the next word
    after the last one that is read changes the embeddings, or the last one does not."""
    size = {"height": 64, "width": 64, "dtype": "float32"}
    if "max_sequence_length" in parameters_of(pipeline_class(kind)):
        size["max_sequence_length"] = 24
    text = TextEncoders(tiny_pipeline(kind), SPECS[kind], PolicyConfig(path="", **size), "cpu")
    Image.new("RGB", (64, 64)).save(tmp_path / "in.png")
    pictures = [str(tmp_path / "in.png")] if SPECS[kind].pictured else []
    read = tokens_read(text, Prompt("a", pictures))
    assert read and "text_encoder" in read
    if kind in ENDLESS:
        assert read["text_encoder"] > 4096
        return
    most = max(read.values())

    def differs(words):
        prompts = [Prompt("a " * words + end, pictures) for end in ("red", "blue")]
        one, other = (text.encode([prompt], guided=False) for prompt in prompts)
        rows = [
            (*each.tensors.values(), *(v for own in each.ragged.values() for v in own))
            for each in (one, other)
        ]
        return not all(map(torch.equal, *rows))

    assert differs(most - 1) or kind == TEMPLATE_ALONE
    assert not differs(most + 3 * (kind == SHORT_TEMPLATE))


LONG = "a red circle left of a blue square left of two blue square left of a circle"


def told(directory, prompts, **options):
    config = PolicyConfig(path=str(directory), height=32, width=32, **options)
    said = []
    warn_of_long(load.load_pipeline(config, tuning="frozen").text, prompts, said.append)
    return said


def test_how_many_are_too_long_and_one_of_them(flux_directory, sd3_directory):
    """The negative prompt is among them."""
    first, second = told(flux_directory, ["a circle", LONG, LONG], max_sequence_length=12)
    assert first.startswith("1 of 2 prompts is longer than text_encoder reads (11 tokens)")
    assert "text_encoder_2 reads (11 tokens): of 'a red circle left of a" in second
    assert "it leaves out 'blue square left of a circle'" in second
    (one,) = told(flux_directory, ["a circle", LONG], max_sequence_length=24)
    assert "is longer than text_encoder reads (11 tokens, text_encoder_2 23)" in one
    assert told(flux_directory, ["a circle"], max_sequence_length=12) == []
    guided = {"max_sequence_length": 24, "guidance_scale": 4.0, "negative_prompt": LONG * 2}
    of_t5 = "1 of 2 prompts is longer than text_encoder_3 reads"
    assert any(of_t5 in line for line in told(sd3_directory, ["a"], **guided))


def test_every_command_tells_of_them_also_with_stored_embeddings(tiny_config, tmp_path, says):
    """Only those who encode would hear of it."""
    (tmp_path / "prompts.txt").write_text(f"a red circle\n{LONG}\n")
    for command in (
        f"encode {tiny_config}",
        f"train {tiny_config} --run-dir first",
        f"train {tiny_config} --run-dir second prompts.cache=off",
        "resume first trainer.iterations=3",
        "evaluate first --out judged --steps 2",
        "sample first --prompts prompts.txt --out pictures --steps 2",
    ):
        out = says(command)
        assert "1 of 2 prompts is longer than text_encoder" in " ".join(out.split()), command


UNKNOWN = [
    ("words", ["'tiger' in red", "fabric", "a cat", ""], "2 of 3 prompts are nothing that"),
    ("testbed", ["a red circle", "'tiger' in red"], "1 of 2 prompts is nothing that the model"),
    ("testbed", ["a red circle"], ""),
]


def test_prompts_that_an_embedded_model_has_not_learnt_are_told_of():
    """It draws blobs for them."""
    for path, prompts, message in UNKNOWN:
        config, said = PolicyConfig(path=path, height=64, width=64), []
        load.load_pipeline(config, tuning="frozen").warn_of(prompts, said.append)
        assert len(said) == bool(message)
        assert all(line.startswith(message) and "it knows " in line for line in said)
