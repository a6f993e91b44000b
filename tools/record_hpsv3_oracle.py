"""Record what upstream's HPSv3 answers on a tiny random Qwen2-VL, for tests/rewards/test_hpsv3.py (run by hand).

Upstream's class, its preprocessing and its processor run as published, on transformers 4.45.2, which upstream pins; the weights
are those of tests/rewards/oracle_inputs.py, and the instruction is a short one of this project's. Scores are recorded in
bfloat16, as upstream runs, and in float32 after its cast to bfloat16.

    python3 -m venv --system-site-packages /tmp/hpsv3     # on a Python that has torch and Pillow
    /tmp/hpsv3/bin/pip install --no-deps transformers==4.45.2 tokenizers==0.20.3 huggingface_hub==0.25.2
    /tmp/hpsv3/bin/pip install --no-deps --target /tmp/hpsv3/upstream hpsv3==1.0.0
    /tmp/hpsv3/bin/python tools/record_hpsv3_oracle.py --upstream /tmp/hpsv3/upstream --chat-template FILE

FILE has the `chat_template` of Qwen/Qwen2-VL-7B-Instruct. What upstream imports for training alone becomes empty modules.
"""

from __future__ import annotations

import argparse
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
VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14}


class Anything(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init_subclass__": classmethod(lambda cls, **options: None)})


def upstream(folder: Path) -> tuple[Any, Any]:
    """Upstream's inference module and model class, without what it imports for training."""
    import requests  # noqa: F401
    from transformers import Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor  # noqa: F401 (before empty modules)

    sys.path.append(str(folder))
    unused = ["trl", "peft", "datasets", "pandas", "torchvision", "torchvision.transforms", "fire", "hpsv3.train"]
    unused += ["hpsv3.utils.parser", "hpsv3.utils.training_utils", "matplotlib.pyplot", "matplotlib.patches", "matplotlib"]
    unused += ["torch.utils.tensorboard", "torchvision.transforms.functional"]
    unused += [f"transformers.{name}" for name in ("trainer", "trainer_callback", "trainer_pt_utils", "training_args")]
    for name in unused:
        sys.modules[name] = Anything(name)
    for name in unused:
        parent, _, child = name.rpartition(".")
        if parent in unused:
            setattr(sys.modules[parent], child, sys.modules[name])
    import hpsv3.inference as inference
    from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT

    inference.INSTRUCTION, inference.prompt_with_special_token = INSTRUCTION, QUESTION
    return inference, Qwen2VLRewardModelBT


def save_tokenizer(folder: Path) -> None:
    """Qwen2's tokenizer with a token a byte."""
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    vocabulary = {symbol: number for number, symbol in enumerate(bytes_to_unicode().values())}
    added = {str(len(vocabulary) + i): {"content": token, "special": True} for i, token in enumerate(SPECIAL)}
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


def processor(folder: Path, template: str) -> Any:
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    made = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, chat_template=template)
    made.tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})  # as create_model_and_processor does
    return made


def model(kind: Any, made: Any) -> tuple[Any, dict[str, Any]]:
    """Upstream's model with the fixed weights, as `create_model_and_processor` makes it, and its config.json."""
    from transformers import Qwen2VLConfig

    ids = {name: made.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {name: made.tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    config = Qwen2VLConfig(**TEXT, vision_config=VISION, vocab_size=300, **{f"{k}_token_id": v for k, v in ids.items()})
    config._attn_implementation = "sdpa"
    with tempfile.TemporaryDirectory() as place:
        config.save_pretrained(place)
        written = json.loads((Path(place) / "config.json").read_text())
    reward = made.tokenizer.convert_tokens_to_ids(["<|Reward|>"])
    built = kind(config, output_dim=2, reward_token="special", special_token_ids=reward, rm_head_type="ranknet")
    built.resize_token_embeddings(len(made.tokenizer))
    built.to(torch.bfloat16).rm_head.to(torch.float32)
    state = fixed_state({name: list(value.shape) for name, value in built.state_dict().items()})
    built.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    built.rm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))  # as upstream's autocast does on CUDA
    built.config.pad_token_id = made.tokenizer.pad_token_id
    return built.eval(), written


def numbers(values: torch.Tensor) -> list[float]:
    """With 8 significant digits: float32 has 7."""
    return [float(f"{value:.8g}") for value in values.flatten().tolist()]


def looked_at(batch: Any) -> dict[str, Any]:
    """The grid of a batch's first picture, and some of its patches."""
    rows = int(batch["image_grid_thw"][0].prod())
    return {"grid": batch["image_grid_thw"][0].tolist(), "patches": numbers(batch["pixel_values"][:rows:97, ::131])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--chat-template", type=Path, required=True)
    arguments = parser.parse_args()
    inference, kind = upstream(arguments.upstream)
    folder = FIXTURES / "qwen2_tokenizer"
    save_tokenizer(folder)
    judge = inference.HPSv3RewardInferencer.__new__(inference.HPSv3RewardInferencer)
    judge.processor, judge.device, judge.use_special_tokens = (
        processor(folder, arguments.chat_template.read_text()),
        "cpu",
        True,
    )
    judge.model, config = model(kind, judge.processor)
    content: dict[str, Any] = {"config": config, "instruction": INSTRUCTION, "question": QUESTION, "cases": []}
    content["state_dict"] = {name: list(value.shape) for name, value in judge.model.state_dict().items()}
    batches = {size: judge.prepare_batch([Image.fromarray(fixed_image(size))] * len(PROMPTS), PROMPTS) for size in SIZES}
    content["token_ids"] = batches["square"]["input_ids"].tolist()
    content["cases"] = [{"image": size, **looked_at(batch)} for size, batch in batches.items()]
    for name in ("bfloat16", "float32"):
        for part in (judge.model.model, judge.model.visual):
            part.to(getattr(torch, name))
        for case in content["cases"]:
            with torch.no_grad():
                case[name] = numbers(judge.model(return_dict=True, **batches[case["image"]])["logits"][:, 0])
    resize = sys.modules["hpsv3.dataset.utils"].smart_resize
    sides = (28, 100, 333, 448, 480, 512, 640, 768, 832, 1000, 1024, 1216, 1344, 2048)
    content["sizes"] = [[h, w, *resize(h, w, min_pixels=200704, max_pixels=200704)] for h in sides for w in sides]
    content["versions"] = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "Pillow")} | {
        "hpsv3": "1.0.0"
    }
    path = FIXTURES / "hpsv3.json"
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
