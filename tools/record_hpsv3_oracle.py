"""Record what upstream's HPSv3 answers on a tiny random model, for tests/rewards/test_hpsv3.py (run by
hand).

Upstream's classes, preprocessing and processor run as published, on the transformers that upstream
pins; the weights are those of tests/rewards/oracle_inputs.py, and the instruction is a short one of
this project's. Scores are recorded in bfloat16, as upstream runs, and in float32 after its cast to
bfloat16.

    python3 -m venv --system-site-packages /tmp/qwen     # on a Python that has torch, torchvision, accelerate and Pillow
    /tmp/qwen/bin/pip install --no-deps transformers==4.45.2 tokenizers==0.20.3 huggingface_hub==0.25.2 peft==0.10.0
    /tmp/qwen/bin/pip install --no-deps --target /tmp/qwen/hpsv3 hpsv3==1.0.0
    /tmp/qwen/bin/python tools/record_hpsv3_oracle.py --upstream /tmp/qwen/hpsv3 --chat-template FILE

FILE has the `chat_template` of Qwen/Qwen2-VL-7B-Instruct. What upstream imports for training alone
becomes empty modules.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "rewards" / "fixtures"
sys.path.insert(0, str(ROOT / "tests" / "rewards"))
from oracle_inputs import PROMPTS, SIZES, fixed_image, fixed_state  # noqa: E402

INSTRUCTION = "\nRate the picture of this text: {text_prompt}\n"
QUESTION = "\nIts mark is <|Reward|>\n"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}
VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "mlp_ratio": 2,
    "num_heads": 2,
    "patch_size": 14,
}


class Anything(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init_subclass__": classmethod(lambda cls, **options: None)})


def empty(*names: str) -> None:
    """Makes modules that have every name, for what upstream imports for training alone."""
    for name in names:
        sys.modules[name] = Anything(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    for name in names:
        parent, _, child = name.rpartition(".")
        if parent in names:
            setattr(sys.modules[parent], child, sys.modules[name])


def upstream(folder: Path) -> tuple[Any, Any]:
    """HPSv3's inference module and model class, without what it imports for training."""
    import requests  # noqa: F401
    from transformers import Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor  # noqa: F401 (before empty modules)

    sys.path.append(str(folder))
    empty(
        "trl",
        "peft",
        "datasets",
        "pandas",
        "torchvision",
        "torchvision.transforms",
        "fire",
        "hpsv3.train",
    )
    empty(
        "hpsv3.utils.parser",
        "hpsv3.utils.training_utils",
        "matplotlib",
        "matplotlib.pyplot",
        "matplotlib.patches",
    )
    empty(
        "torch.utils.tensorboard",
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    )
    empty(
        *(
            f"transformers.{name}"
            for name in ("trainer", "trainer_callback", "trainer_pt_utils", "training_args")
        )
    )
    import hpsv3.inference as inference
    from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT

    inference.INSTRUCTION, inference.prompt_with_special_token = INSTRUCTION, QUESTION
    return inference, Qwen2VLRewardModelBT


def save_tokenizer(folder: Path) -> None:
    """Qwen2's tokenizer with a token a byte."""
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    vocabulary = {symbol: number for number, symbol in enumerate(bytes_to_unicode().values())}
    added = {
        str(len(vocabulary) + i): {"content": token, "special": True}
        for i, token in enumerate(SPECIAL)
    }
    for each in added.values():
        each |= {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "added_tokens_decoder": added,
    }
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, separators=(",", ":")) + "\n")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, separators=(",", ":")) + "\n")


def tokens_of(tokenizer: Any, *added: str) -> tuple[list[int], dict[str, int]]:
    """The ids of tokens that are added, and those that a config names."""
    # as create_model_and_processor does
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "vision_end")
    }
    ids |= {name: tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    return tokenizer.convert_tokens_to_ids(list(added)), {
        f"{name}_token_id": value for name, value in ids.items()
    }


def written(config: Any) -> dict[str, Any]:
    """A config as config.json has it."""
    config._attn_implementation = "sdpa"
    with tempfile.TemporaryDirectory() as place:
        config.save_pretrained(place)
        return json.loads((Path(place) / "config.json").read_text())


def fill(model: Any) -> Any:
    """Upstream's model with the fixed weights."""
    state = fixed_state({name: list(value.shape) for name, value in model.state_dict().items()})
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return model.eval()


def shapes_of(model: Any) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in model.state_dict().items()}


def numbers(values: torch.Tensor) -> list[float]:
    """With 8 significant digits: float32 has 7."""
    return [float(f"{value:.8g}") for value in values.flatten().tolist()]


def looked_at(batch: Any) -> dict[str, Any]:
    """The grid of a batch's first picture, and some of its patches."""
    grid, pixels = batch["image_grid_thw"], batch["pixel_values"]
    return {"grid": grid[0].tolist(), "patches": numbers(pixels[: int(grid[0].prod()) : 97, ::131])}


def record_hpsv3(folder: Path, template: str) -> dict[str, Any]:
    inference, kind = upstream(folder)
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLImageProcessor, Qwen2VLProcessor

    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "qwen2_tokenizer", padding_side="right")
    judge = inference.HPSv3RewardInferencer.__new__(inference.HPSv3RewardInferencer)
    judge.processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, chat_template=template)
    judge.device, judge.use_special_tokens = "cpu", True
    reward, ids = tokens_of(judge.processor.tokenizer, "<|Reward|>")
    config = Qwen2VLConfig(**TEXT, vision_config=VISION, vocab_size=300, **ids)
    content: dict[str, Any] = {
        "config": written(config),
        "instruction": INSTRUCTION,
        "question": QUESTION,
    }
    judge.model = kind(
        config,
        output_dim=2,
        reward_token="special",
        special_token_ids=reward,
        rm_head_type="ranknet",
    )
    judge.model.resize_token_embeddings(len(judge.processor.tokenizer))
    judge.model.to(torch.bfloat16).rm_head.to(torch.float32)
    # as autocast on CUDA
    fill(judge.model).rm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    judge.model.config.pad_token_id = judge.processor.tokenizer.pad_token_id
    content["state_dict"] = shapes_of(judge.model)
    batches = {
        size: judge.prepare_batch([Image.fromarray(fixed_image(size))] * len(PROMPTS), PROMPTS)
        for size in SIZES
    }
    content["token_ids"] = batches["square"]["input_ids"].tolist()
    content["cases"] = [{"image": size, **looked_at(batch)} for size, batch in batches.items()]
    for name in ("bfloat16", "float32"):
        for part in (judge.model.model, judge.model.visual):
            part.to(getattr(torch, name))
        for case in content["cases"]:
            with torch.no_grad():
                case[name] = numbers(
                    judge.model(return_dict=True, **batches[case["image"]])["logits"][:, 0]
                )
    resize = sys.modules["hpsv3.dataset.utils"].smart_resize
    sides = (28, 100, 333, 448, 480, 512, 640, 768, 832, 1000, 1024, 1216, 1344, 2048)
    content["sizes"] = [
        [h, w, *resize(h, w, min_pixels=200704, max_pixels=200704)] for h in sides for w in sides
    ]
    content["versions"] = {"hpsv3": "1.0.0"}
    return content


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--chat-template", type=Path, required=True)
    arguments = parser.parse_args()
    save_tokenizer(FIXTURES / "qwen2_tokenizer")
    content = record_hpsv3(arguments.upstream, arguments.chat_template.read_text())
    installed = {
        name: importlib.metadata.version(name) for name in ("transformers", "torch", "Pillow")
    }
    content["versions"] = installed | content["versions"]
    path = FIXTURES / "hpsv3.json"
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
