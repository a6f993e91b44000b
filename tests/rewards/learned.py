"""Every learned reward on tiny weights of its own format, saved as upstream saves them: the options
that find them."""

import json
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
)

from g2rpo.rewards.clip import Aesthetic, CLIPScore, HPSv2, PickScore
from g2rpo.rewards.image_reward import ImageReward
from tests.rewards.oracle_inputs import fixed_image, fixed_state

FIXTURES = Path(__file__).parent / "fixtures"
TOKENIZER = str(FIXTURES / "clip_tokenizer")


def oracle(name):
    """What was recorded of an upstream package (studies/reward_parity.md)."""
    return json.loads((FIXTURES / f"{name}.json").read_text())


def state_of(shapes, gain=1.0):
    return {k: torch.from_numpy(np.array(v)) for k, v in fixed_state(shapes, gain).items()}


def picture_of(name):
    """A uint8 picture [1, 3, H, W] that upstream packages have scored."""
    return torch.from_numpy(fixed_image(name)).permute(2, 0, 1)[None]


def save_pickscore(folder):
    """The recorded PickScore as transformers saves a CLIP and its processor."""
    recorded = oracle("pickscore")
    folder.mkdir(exist_ok=True)
    save_file(
        state_of(recorded["state_dict"]), folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    (folder / "preprocessor_config.json").write_text(json.dumps(recorded["preprocessor_config"]))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((FIXTURES / "clip_tokenizer" / name).read_bytes())
    return str(folder)


def save_dino(folder, registers=0):
    """A tiny random DINOv2 as transformers saves it, perhaps with registers."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"image_size": 12, "patch_size": 4}
    torch.manual_seed(0)
    if registers:
        config = Dinov2WithRegistersConfig(**sizes, num_register_tokens=registers)
        Dinov2WithRegistersModel(config).save_pretrained(folder)
    else:
        Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder)
    return str(folder)


def save_processor(folder, config):
    """The folder of a Qwen-VL's tokenizer and config."""
    shutil.copytree(FIXTURES / "qwen2_tokenizer", folder)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def openai_clip_dir(folder):
    """The recorded OpenAI CLIP as a folder in open_clip's format: same names, quick_gelu, one head
    per 64 channels."""
    recorded = oracle("aesthetic")
    sizes = recorded["clip"]
    save_file(state_of(recorded["clip_state_dict"]), folder / "open_clip_model.safetensors")
    vision = {
        "width": sizes["vision_width"],
        "layers": sizes["vision_layers"],
        "patch_size": sizes["vision_patch_size"],
    }
    text = {"width": sizes["transformer_width"], "layers": sizes["transformer_layers"]}
    text |= {"heads": sizes["transformer_heads"], "context_length": sizes["context_length"]}
    model_cfg = {
        "embed_dim": sizes["embed_dim"],
        "quick_gelu": True,
        "vision_cfg": {**vision, "image_size": sizes["image_resolution"]},
        "text_cfg": {**text, "vocab_size": sizes["vocab_size"]},
    }
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_cfg}))
    return str(folder)


class TinyHPSv2(HPSv2):
    architecture: ClassVar = oracle("hpsv2")["model_cfg"]


class TinyImageReward(ImageReward):
    picture: ClassVar = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 224, "patch_size": 56,
    }  # fmt: skip
    words: ClassVar = {
        "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
        "vocab_size": 123, "encoder_hidden_size": 32, "max_position_embeddings": 40, "bos_token_id": 121,
    }  # fmt: skip


LEARNED = {
    "hpsv2": TinyHPSv2,
    "pickscore": PickScore,
    "clip_score": CLIPScore,
    "aesthetic": Aesthetic,
    "image_reward": TinyImageReward,
}
"""Their classes, with the architecture of the tiny weights."""


def save_learned(folder):
    """Saves the weights of all of them below `folder`; returns each one's options, by its name in a
    config."""
    hps, reward = oracle("hpsv2"), oracle("image_reward")
    torch.save({"state_dict": state_of(hps["state_dict"])}, folder / "HPS_v2.1_compressed.pt")
    torch.save(state_of(reward["state_dict"]), folder / "ImageReward.pt")
    torch.save(
        state_of(oracle("aesthetic")["state_dict"], gain=1.7),
        folder / "sac+logos+ava1-l14-linearMSE.pth",
    )
    pick, where = save_pickscore(folder / "pickscore"), str(folder)
    return {
        "hpsv2": {"path": where, "tokenizer": TOKENIZER},
        "pickscore": {"path": pick, "tokenizer": pick},
        "clip_score": {"path": pick},
        "aesthetic": {"path": where, "clip": openai_clip_dir(folder)},
        "image_reward": {"path": where, "tokenizer": str(FIXTURES / "bert_tokenizer")},
    }
