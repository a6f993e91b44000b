"""Record what the upstream reward models answer, for tests/rewards (run by hand; the tests only
read the result).

Upstream's own classes and preprocessing run on tiny configurations with the fixed weights of
tests/rewards/oracle_inputs.py; their scores, features, pixels and token ids go to
tests/rewards/fixtures/*.json, with the versions. Names and shapes of the full-size published state
dicts are recorded from upstream's classes as well.

torchvision's CPU wheels do not work beside a CPU-only torch wheel, so the environment is Debian
12's torch 1.13 and torchvision 0.14.1, outside this repository:

    apt-get update && apt-get install --no-install-recommends python3-torchvision python3-venv
    /usr/bin/python3 -m venv --system-site-packages /tmp/oracle /tmp/oracle/bin/pip install
    --no-deps open_clip_torch==2.24.0 timm==0.9.16 hpsv2==1.2.0 image-reward==1.5 \\
        openai-clip==1.0.1 fairscale==0.4.13 transformers==4.40.2 tokenizers==0.19.1
        huggingface_hub==0.23.5 \\ clint args ftfy regex sentencepiece safetensors tqdm wcwidth
        fsspec filelock packaging
    cd /tmp/oracle/lib/python3.11/site-packages && cp open_clip/bpe_simple_vocab_16e6.txt.gz
    hpsv2/src/open_clip/ /tmp/oracle/bin/python tools/record_reward_oracles.py

(The copied vocabulary is missing from the hpsv2 wheel, which cannot be imported without it.)
"""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import json
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "rewards" / "fixtures"
sys.path.insert(0, str(ROOT / "tests" / "rewards"))

# hpsv2 imports a name it never uses from `turtle` (which needs tkinter); ImageReward's package
# imports its diffusion trainer. Neither takes part in a score.
sys.modules["turtle"] = types.ModuleType("turtle")
sys.modules["turtle"].forward = None  # type: ignore[attr-defined]
sys.modules["ImageReward.ReFL"] = types.ModuleType("ImageReward.ReFL")

import clip  # noqa: E402
import hpsv2.src.open_clip as hps_open_clip  # noqa: E402
import ImageReward.models.BLIP.blip_pretrain as blip_pretrain  # noqa: E402
import open_clip  # noqa: E402
import transformers  # noqa: E402
from hpsv2.src.open_clip import transform as hps_transform  # noqa: E402
from ImageReward.models.AestheticScore import MLP as AestheticMLP  # noqa: E402
from ImageReward.models.BLIP.vit import VisionTransformer as BlipViT  # noqa: E402
from oracle_inputs import (  # noqa: E402
    PROMPTS,
    SIZES,
    TOKEN_PROMPTS,
    fixed_image,
    fixed_state,
)

# the module; the package binds its class to the same name
image_reward = sys.modules["ImageReward.ImageReward"]
BPE = Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"

TINY_OPEN_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": 32,
        "layers": 2,
        "width": 32,
        "head_width": 16,
        "mlp_ratio": 2.0,
        "patch_size": 8,
    },
    "text_cfg": {"context_length": 24, "vocab_size": 0, "width": 24, "heads": 3, "layers": 2},
}

TINY_MED = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 24,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 40,
    "model_type": "bert",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "add_type_embeddings": False,
    "vocab_size": 0,
    "encoder_width": 32,
    "add_cross_attention": True,
}
TINY_BLIP_VIT = {"img_size": 224, "patch_size": 56, "embed_dim": 32, "depth": 2, "num_heads": 2}


def shapes_of(module: torch.nn.Module) -> dict[str, list[int]]:
    """Names and shapes of a state dict, in its order."""
    return {name: list(value.shape) for name, value in module.state_dict().items()}


def fill(module: torch.nn.Module, gain: float = 1.0) -> dict[str, list[int]]:
    """Give `module` the fixed weights and return the names and shapes that were filled; integer
    buffers stay."""
    shapes = {n: list(v.shape) for n, v in module.state_dict().items() if v.is_floating_point()}
    state = {n: torch.from_numpy(np.array(v)) for n, v in fixed_state(shapes, gain).items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("position_ids" in name for name in missing), missing
    module.eval()
    return shapes


def picture(name: str) -> Image.Image:
    return Image.fromarray(fixed_image(name))


def numbers(tensor: torch.Tensor) -> list:
    """A nested list of floats with 8 significant digits: float32 has 7."""
    return json.loads(
        json.dumps(tensor.double().tolist()), parse_float=lambda text: float(f"{float(text):.8g}")
    )


def write(name: str, content: dict, packages: list[str]) -> None:
    content = {
        "versions": {
            p: importlib.metadata.version(p) for p in [*packages, "torch", "torchvision", "Pillow"]
        },
        **content,
    }
    path = FIXTURES / f"{name}.json"
    path.write_text(json.dumps(content, separators=(",", ":"), ensure_ascii=True) + "\n")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


# --- tokenizers -----------------------------------------------------------------------------------


def small_bpe(folder: Path) -> Path:
    """The part of CLIP's vocabulary that the prompts use, as upstream's file; and as vocab.json +
    merges.txt.

    BPE applies the best-ranked merge that is possible. Keeping just the merges that the full
    vocabulary applies to these prompts, in rank order, therefore cuts them into the same pieces;
    that is asserted below.
    """
    full = open_clip.tokenizer.SimpleTokenizer(bpe_path=str(BPE))
    header, *lines = gzip.decompress(BPE.read_bytes()).decode("utf-8").split("\n")
    vocab = {
        token
        for prompt in TOKEN_PROMPTS
        for token in (full.decoder[i] for i in full.encode(prompt))
    }
    used: set[str] = set()
    produced = {a + b: (a, b) for a, b in full.bpe_ranks}

    def keep(token: str) -> None:
        if token in produced and f"{produced[token][0]} {produced[token][1]}" not in used:
            used.add(" ".join(produced[token]))
            for part in produced[token]:
                keep(part)

    for token in vocab:
        keep(token)
    merges = [line for line in lines[: 49152 - 256 - 2] if line in used]
    path = folder / "bpe_small.txt.gz"
    with gzip.open(path, "wb") as file:
        file.write("\n".join([header, *merges]).encode("utf-8"))
    small = open_clip.tokenizer.SimpleTokenizer(bpe_path=str(path))
    for prompt in TOKEN_PROMPTS:
        pieces = [small.decoder[i] for i in small.encode(prompt)]
        assert pieces == [full.decoder[i] for i in full.encode(prompt)], prompt
    target = FIXTURES / "clip_tokenizer"
    target.mkdir(parents=True, exist_ok=True)
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    ids = {names.get(token, token): index for token, index in small.encoder.items()}
    (target / "vocab.json").write_text(json.dumps(ids, separators=(",", ":")) + "\n")
    (target / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return path


def bert_vocabulary() -> Path:
    """A WordPiece vocabulary of letters, a few words and suffixes; the last two ids are left for
    [DEC] and [ENC]."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,'!-/&;\"\u00e9"
    words = [
        "a",
        "an",
        "and",
        "are",
        "at",
        "dog",
        "blue",
        "circle",
        "red",
        "star",
        "photo",
        "of",
        "riding",
        "horse",
    ]
    words += ["castle", "river", "birds", "light", "long", "two", "small", "left"]
    pieces = ["##s", "##ing", "##er", "##y", "##ed"]
    vocab = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{c}" for c in letters),
        *words,
        *pieces,
    ]
    target = FIXTURES / "bert_tokenizer"
    target.mkdir(parents=True, exist_ok=True)
    (target / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    return target


# --- rewards --------------------------------------------------------------------------------------


def record_open_clip(bpe: Path) -> None:
    """CLIP score by open_clip: gelu and quick_gelu, resize modes shortest and squash."""
    tokenizer = open_clip.tokenizer.SimpleTokenizer(
        bpe_path=str(bpe), context_length=TINY_OPEN_CLIP["text_cfg"]["context_length"]
    )
    config = json.loads(json.dumps(TINY_OPEN_CLIP))
    config["text_cfg"]["vocab_size"] = tokenizer.vocab_size
    ids = tokenizer(list(PROMPTS))
    cases = []
    with torch.no_grad():
        for quick_gelu in (False, True):
            model = open_clip.CLIP(**config, quick_gelu=quick_gelu)
            shapes = fill(model)
            text = model.encode_text(ids, normalize=True)
            for mode in ("shortest", "squash"):
                transform = open_clip.image_transform(32, is_train=False, resize_mode=mode)
                for size in SIZES:
                    pixels = transform(picture(size))[None]
                    features = model.encode_image(pixels, normalize=True)
                    cases.append(
                        {
                            "quick_gelu": quick_gelu,
                            "resize_mode": mode,
                            "image": size,
                            "pixel_rows": numbers(pixels[0, :, ::8, ::8]),
                            "image_features": numbers(features[0]),
                            "scores": numbers((features @ text.T)[0]),
                        }
                    )
    custom = open_clip.CustomTextCLIP(**config)
    content = {
        "model_cfg": config,
        "state_dict": shapes,
        "custom_text_keys": list(custom.state_dict()),
        "token_ids": tokenizer(list(TOKEN_PROMPTS)).tolist(),
        "cases": cases,
    }
    write("open_clip", content, ["open_clip_torch", "timm", "ftfy"])


def record_hpsv2(bpe: Path) -> None:
    """HPSv2's own fork of open_clip, its padding preprocessing, and torchvision's antialias off
    (0.14's default) and on."""
    tokenizer = hps_open_clip.tokenizer.SimpleTokenizer(bpe_path=str(bpe))
    hps_open_clip.tokenizer._tokenizer = tokenizer
    config = json.loads(json.dumps(TINY_OPEN_CLIP))
    config["text_cfg"]["vocab_size"] = tokenizer.vocab_size
    model = hps_open_clip.CLIP(**config, output_dict=True)
    shapes = fill(model)
    ids = hps_open_clip.tokenizer.tokenize(
        list(PROMPTS), context_length=config["text_cfg"]["context_length"]
    )
    plain = hps_transform.F.resize
    cases = []
    for antialias in (False, True):
        hps_transform.F.resize = functools.partial(plain, antialias=antialias)
        transform = hps_transform.image_transform(32, is_train=False, resize_longest_max=True)
        for size in SIZES:
            pixels = transform(picture(size))[None]
            with torch.no_grad():
                out = model(pixels, ids)
            cases.append(
                {
                    "antialias": antialias,
                    "image": size,
                    "pixel_rows": numbers(pixels[0, :, ::8, ::8]),
                    "scores": numbers((out["image_features"] @ out["text_features"].T)[0]),
                }
            )
    hps_transform.F.resize = plain
    content = {
        "model_cfg": config,
        "state_dict": shapes,
        "token_ids": ids.tolist(),
        "published_model_cfg": json.loads(
            (Path(hps_open_clip.__file__).parent / "model_configs/ViT-H-14.json").read_text()
        ),
        "published_state_dict": shapes_of(hps_full_size()),
        "cases": cases,
    }
    write("hpsv2", content, ["hpsv2"])


def hps_full_size() -> torch.nn.Module:
    config = json.loads(
        (Path(hps_open_clip.__file__).parent / "model_configs/ViT-H-14.json").read_text()
    )
    return hps_open_clip.CLIP(**config)


def record_pickscore() -> None:
    """PickScore as on its model card: transformers' AutoModel and CLIP processor, exp(logit_scale)
    * cosine."""
    folder = FIXTURES / "clip_tokenizer"
    tokenizer = transformers.CLIPTokenizerFast.from_pretrained(folder)
    tiny_text = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    tiny_vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 1,
    }
    config = transformers.CLIPConfig(
        text_config={
            **tiny_text,
            **special,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 24,
            "hidden_act": "gelu",
        },
        vision_config={**tiny_vision, "image_size": 32, "patch_size": 8, "hidden_act": "gelu"},
        projection_dim=16,
    )
    with tempfile.TemporaryDirectory() as directory:
        transformers.CLIPModel(config).save_pretrained(directory)
        model = transformers.AutoModel.from_pretrained(directory)
        config_json = json.loads((Path(directory) / "config.json").read_text())
    shapes = fill(model)
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    tokens = tokenizer(
        list(PROMPTS), padding=True, truncation=True, max_length=24, return_tensors="pt"
    )
    cases = []
    with torch.no_grad():
        text = model.get_text_features(**tokens)
        text = text / torch.norm(text, dim=-1, keepdim=True)
        for size in SIZES:
            pixels = processor(images=[picture(size)], return_tensors="pt")["pixel_values"]
            image = model.get_image_features(pixel_values=pixels)
            image = image / torch.norm(image, dim=-1, keepdim=True)
            scores = model.logit_scale.exp() * (text @ image.T)[:, 0]
            cases.append(
                {
                    "image": size,
                    "pixel_rows": numbers(pixels[0, :, ::8, ::8]),
                    "scores": numbers(scores),
                }
            )
    content = {
        "config": config_json,
        "preprocessor_config": processor.to_dict(),
        "state_dict": shapes,
        "token_ids": tokens["input_ids"].tolist(),
        "cases": cases,
    }
    write("pickscore", content, ["transformers", "tokenizers"])


def tiny_image_reward(folder: Path, vocabulary: Path) -> torch.nn.Module:
    """Upstream's ImageReward with a small BLIP: only what it hard-codes (ViT-L, 768, a tokenizer's
    name) is replaced."""
    tokenizer = transformers.BertTokenizer(vocabulary / "vocab.txt")
    config = folder / "med_config.json"
    config.write_text(json.dumps({**TINY_MED, "vocab_size": len(tokenizer) + 2}))
    mlp = image_reward.MLP
    blip_pretrain.create_vit = lambda *args: (BlipViT(**TINY_BLIP_VIT), TINY_BLIP_VIT["embed_dim"])
    transformers.BertTokenizer.from_pretrained = lambda *args, **kwargs: tokenizer  # type: ignore[assignment]
    image_reward.MLP = lambda width: mlp(TINY_MED["hidden_size"])
    model = image_reward.ImageReward(str(config))
    image_reward.MLP = mlp
    return model


def record_image_reward(folder: Path, vocabulary: Path) -> None:
    """ImageReward.score, image by image, prompt by prompt, as upstream does it."""
    create_vit = blip_pretrain.create_vit
    model = tiny_image_reward(folder, vocabulary)
    shapes = fill(model)
    cases = []
    with torch.no_grad():
        for size in SIZES:
            image = picture(size)
            pixels = model.preprocess(image)
            scores = [model.score(prompt, image) for prompt in PROMPTS]
            cases.append(
                {"image": size, "pixel_rows": numbers(pixels[:, ::56, ::56]), "scores": scores}
            )
    tokens = model.blip.tokenizer(
        list(PROMPTS), padding="max_length", truncation=True, max_length=35
    )
    content = {
        "med_config": json.loads((folder / "med_config.json").read_text()),
        "vision": TINY_BLIP_VIT,
        "state_dict": shapes,
        "token_ids": tokens["input_ids"],
        "cases": cases,
    }
    blip_pretrain.create_vit = create_vit
    med = {
        **TINY_MED,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
    }
    med.update(
        {
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "vocab_size": 30524,
            "encoder_width": 1024,
        }
    )
    (folder / "med_full.json").write_text(json.dumps(med))
    blip_pretrain.init_tokenizer = lambda: None
    content["published_state_dict"] = shapes_of(
        image_reward.ImageReward(str(folder / "med_full.json"))
    )
    write("image_reward", content, ["image-reward", "transformers", "timm"])


def record_aesthetic() -> None:
    """LAION's aesthetic predictor: OpenAI CLIP's image encoder (quick_gelu), unit-length features,
    a linear MLP."""
    sizes = {
        "embed_dim": 16,
        "image_resolution": 32,
        "vision_layers": 2,
        "vision_width": 64,
        "vision_patch_size": 8,
    }
    text = {
        "context_length": 8,
        "vocab_size": 50,
        "transformer_width": 16,
        "transformer_heads": 2,
        "transformer_layers": 1,
    }
    model = clip.model.CLIP(**sizes, **text)
    shapes = fill(model)
    mlp = AestheticMLP(16)
    mlp_shapes = fill(mlp, gain=1.7)
    transform = clip.clip._transform(32)
    cases = []
    with torch.no_grad():
        for size in SIZES:
            pixels = transform(picture(size))[None]
            features = torch.nn.functional.normalize(model.encode_image(pixels)).float()
            cases.append(
                {
                    "image": size,
                    "pixel_rows": numbers(pixels[0, :, ::8, ::8]),
                    "score": mlp(features).item(),
                }
            )
    content = {
        "clip": {**sizes, **text},
        "clip_state_dict": shapes,
        "state_dict": mlp_shapes,
        "published_state_dict": shapes_of(AestheticMLP(768)),
        "cases": cases,
    }
    write("aesthetic", content, ["image-reward", "openai-clip"])


def main() -> None:
    torch.set_num_threads(1)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        bpe = small_bpe(folder)
        record_open_clip(bpe)
        record_hpsv2(bpe)
        record_pickscore()
        record_aesthetic()
        record_image_reward(folder, bert_vocabulary())


if __name__ == "__main__":
    main()
