"""Record what upstream's HPSv3, HPSv3++ and VideoAlign answer on tiny random models, for
tests/rewards/test_hpsv3.py and test_video_align.py (run by hand).

Upstream's classes, preprocessing and processors run as published, on the transformers that upstream
pins; the weights are those of tests/rewards/oracle_inputs.py, and the instruction is a short one of
this project's. Scores are recorded in bfloat16, as upstream runs, and in float32 after its cast to
bfloat16.

    python3 -m venv --system-site-packages /tmp/qwen     # on a Python that has torch, torchvision, accelerate and Pillow
    /tmp/qwen/bin/pip install --no-deps transformers==4.45.2 tokenizers==0.20.3 huggingface_hub==0.25.2 peft==0.10.0
    /tmp/qwen/bin/pip install --no-deps --target /tmp/qwen/hpsv3 hpsv3==1.0.0
    git clone https://github.com/KwaiVGI/VideoAlign /tmp/qwen/video_align    # at 219ab9d
    /tmp/qwen/bin/python tools/record_qwen_oracles.py hpsv3 --upstream /tmp/qwen/hpsv3 --chat-template FILE
    /tmp/qwen/bin/python tools/record_qwen_oracles.py video_align --upstream /tmp/qwen/video_align --chat-template FILE

FILE has the `chat_template` of Qwen/Qwen2-VL-7B-Instruct. `hpsv3pp` is recorded alike in an
environment with transformers 4.57.0, tokenizers 0.22.1 and huggingface_hub 0.35.3, from a clone of
https://github.com/PlantPotatoOnMoon/HPSv3-PlusPlus at 7bdbebc, with the template of
Qwen/Qwen3-VL-8B-Instruct. What upstream imports for training alone becomes empty modules.
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
from oracle_inputs import CLIPS, PROMPTS, SIZES, fixed_clip, fixed_image, fixed_state  # noqa: E402

INSTRUCTION = "\nRate the picture of this text: {text_prompt}\n"
QUESTION = "\nIts mark is <|Reward|>\n"
CLIP_INSTRUCTION = (
    "\nIts look: <|VQ_reward|>\nIts motion: <|MQ_reward|>\nFor {text_prompt} it has <|TA_reward|>\n"
)
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
TEXT_3 = TEXT | {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "rope_scaling": TEXT["rope_scaling"] | {"mrope_interleaved": True},
}
TEXT_3["rope_scaling"]["rope_type"] = TEXT_3["rope_scaling"].pop("type") and "default"
VISION_3 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 16,
    "out_hidden_size": 32,
}
VISION_3 |= {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36}
LORA = {
    "lora_enable": True,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "use_rslora": False,
}
LORA |= {
    "lora_namespan_exclude": ["lm_head", "rm_head", "embed_tokens", "visual"],
    "num_lora_modules": -1,
}
NORM = {
    "VQ_mean": 0.25,
    "VQ_std": 1.5,
    "MQ_mean": -0.5,
    "MQ_std": 0.75,
    "TA_mean": 0.125,
    "TA_std": 2.0,
}
DATA = {"max_frame_pixels": 200704, "num_frames": None, "fps": 2.0, "eval_dim": ["VQ", "MQ", "TA"]}
DATA |= {"prompt_template_type": "detailed_special", "sample_type": "uniform"}


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


def looked_at(batch: Any, kind: str = "image") -> dict[str, Any]:
    """The grid of a batch's first picture or clip, and some of its patches."""
    grid, pixels = batch[f"{kind}_grid_thw"], batch["pixel_values" + "_videos" * (kind == "video")]
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


def record_hpsv3pp(folder: Path, template: str) -> dict[str, Any]:
    """Scores of one picture a call at a progress of 0 and of .65: upstream reads the capability
    from a call's pictures."""
    import transformers

    sys.path.append(str(folder))
    empty("hpsv3.trainer", "hpsv3.trainer.common", "hpsv3.utils.parser", "pandas")
    import hpsv3.inference as inference
    from hpsv3.model.qwen3vl_rm import Qwen3VLRewardModelFiLMHybrid

    inference.INSTRUCTION, inference.prompt_with_special_token = INSTRUCTION, QUESTION
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        FIXTURES / "qwen2_tokenizer", padding_side="right"
    )
    size = {
        "shortest_edge": 65536,
        "longest_edge": 16777216,
    }  # this and the next: Qwen3-VL-8B-Instruct's preprocessor_config.json
    pictures = transformers.Qwen2VLImageProcessorFast(
        size=size, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    judge = inference.HPSv3RewardInferencer.__new__(inference.HPSv3RewardInferencer)
    judge.processor = transformers.Qwen3VLProcessor(
        pictures, tokenizer, transformers.Qwen3VLVideoProcessor(), chat_template=template
    )
    judge.device, judge.use_special_tokens = "cpu", True
    reward, ids = tokens_of(judge.processor.tokenizer, "<|Reward|>")
    config = transformers.Qwen3VLConfig(
        text_config=TEXT_3 | {"vocab_size": 300}, vision_config=VISION_3, **ids
    )
    content: dict[str, Any] = {
        "config": written(config),
        "instruction": INSTRUCTION,
        "question": QUESTION,
    }
    options = {
        "output_dim": 2,
        "reward_token": "special",
        "special_token_ids": reward,
        "rm_head_type": "ranknet",
    }
    judge.model = Qwen3VLRewardModelFiLMHybrid(config, **options, cond_dim=256)
    judge.model.resize_token_embeddings(len(judge.processor.tokenizer))
    judge.model.to(torch.bfloat16)
    for part in (judge.model.rm_head, judge.model.film_gen, judge.model.cond_encoder):
        part.to(torch.float32)
    fill(judge.model).config.pad_token_id = judge.processor.tokenizer.pad_token_id
    content["state_dict"] = shapes_of(judge.model)
    images = {name: Image.fromarray(fixed_image(name)) for name in SIZES}
    batches = {
        name: judge.prepare_batch([image] * len(PROMPTS), PROMPTS) for name, image in images.items()
    }
    content["token_ids"] = batches["square"]["input_ids"].tolist()
    content["cases"] = [{"image": name, **looked_at(batch)} for name, batch in batches.items()]
    for name in ("bfloat16", "float32"):
        for part in (judge.model.model, judge.model.cap_encoder):
            part.to(getattr(torch, name))
        for case in content["cases"]:
            for progress in (0.0, 0.65):
                scores = [
                    judge.reward([text], [images[case["image"]]], iter_step=progress)[0, 0]
                    for text in PROMPTS
                ]
                case[f"{name}_{progress}"] = numbers(torch.stack(scores))
    content["versions"] = {"HPSv3-PlusPlus": "7bdbebc"}
    return content


def record_video_align(folder: Path, template: str) -> dict[str, Any]:
    import peft
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLImageProcessor, Qwen2VLProcessor

    sys.path.insert(0, str(folder))
    empty("trl", "datasets", "pandas")
    import inference
    import prompt_template
    import train_reward
    import vision_process

    prompt_template.DETAILED_PROMPT_WITH_SPECIAL_TOKEN = CLIP_INSTRUCTION
    clips = {
        name: (torch.from_numpy(fixed_clip(name)).permute(0, 3, 1, 2), fps)
        for name, (_, _, fps) in CLIPS.items()
    }

    def read_video(path: str, **options: Any) -> tuple[Any, None, dict[str, Any]]:
        frames, fps = clips[path.removeprefix("file://")]
        return frames, None, {"video_fps": fps}

    vision_process.io = types.SimpleNamespace(read_video=read_video)  # instead of a file's decoder
    vision_process.get_video_reader_backend = lambda: "torchvision"
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "qwen2_tokenizer", padding_side="right")
    judge = inference.VideoVLMRewardInference.__new__(inference.VideoVLMRewardInference)
    judge.processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, chat_template=template)
    judge.device, judge.inference_config = "cpu", NORM
    judge.data_config = inference.DataConfig(**DATA)
    reward, ids = tokens_of(
        judge.processor.tokenizer, "<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"
    )
    config = Qwen2VLConfig(**TEXT, vision_config=VISION, vocab_size=300, **ids)
    content: dict[str, Any] = {"config": written(config), "instruction": CLIP_INSTRUCTION}
    content["settings"] = {"data_config": DATA, "peft_lora_config": LORA, "inference_config": NORM}
    model = train_reward.Qwen2VLRewardModelBT(
        config, output_dim=1, reward_token="special", special_token_ids=reward
    )
    model.resize_token_embeddings(len(judge.processor.tokenizer))
    targets = train_reward.find_target_linear_names(model, -1, LORA["lora_namespan_exclude"])
    lora = {
        "r": LORA["lora_r"],
        "lora_alpha": LORA["lora_alpha"],
        "lora_dropout": LORA["lora_dropout"],
    }
    judge.model = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **lora)
    )
    fill(judge.model.to(torch.bfloat16))
    judge.model.config.pad_token_id = judge.processor.tokenizer.pad_token_id
    content["state_dict"] = shapes_of(judge.model)
    content["cases"] = []
    for name in CLIPS:
        batch = judge.prepare_batch([name] * len(PROMPTS), PROMPTS)
        content["cases"].append({"clip": name, **looked_at(batch, "video")})
    content["frames"] = {}
    for fps in (8, 16, 24.0, 30):
        counts = [
            vision_process.smart_nframes({"fps": 2.0}, length, fps) for length in range(2, 130)
        ]
        content["frames"][str(fps)] = counts
    for name in ("bfloat16", "float32"):
        judge.model.to(getattr(torch, name))
        for case in content["cases"]:
            with torch.no_grad():
                rows = judge.reward([case["clip"]] * len(PROMPTS), PROMPTS)
            case[name] = {key: numbers(torch.tensor([row[key] for row in rows])) for key in rows[0]}
    content["versions"] = {"VideoAlign": "219ab9d", "peft": importlib.metadata.version("peft")}
    return content


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("judge", choices=["hpsv3", "hpsv3pp", "video_align"])
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--chat-template", type=Path, required=True)
    arguments = parser.parse_args()
    save_tokenizer(FIXTURES / "qwen2_tokenizer")
    record = {"hpsv3": record_hpsv3, "hpsv3pp": record_hpsv3pp, "video_align": record_video_align}[
        arguments.judge
    ]
    content = record(arguments.upstream, arguments.chat_template.read_text())
    installed = {
        name: importlib.metadata.version(name) for name in ("transformers", "torch", "Pillow")
    }
    content["versions"] = installed | content["versions"]
    path = FIXTURES / f"{arguments.judge}.json"
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
