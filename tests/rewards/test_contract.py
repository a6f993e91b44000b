"""What every reward promises: shapes, types, NaN for "no score", the same score whatever stands beside it, clear errors."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from g2rpo.core.types import Reward
from g2rpo.rewards import clip_encoder, pixels, weights
from g2rpo.rewards.aesthetic import Aesthetic
from g2rpo.rewards.analytic import Brightness, JPEGSize, Saturation
from g2rpo.rewards.clip import CLIPScore
from g2rpo.rewards.function import FunctionReward
from g2rpo.rewards.hpsv2 import HPSv2, pad_to_square
from g2rpo.rewards.image_reward import ImageReward
from g2rpo.rewards.pickscore import PickScore
from g2rpo.rewards.pixels import to_uint8
from tests.rewards.learned import TOKENIZER, openai_clip_dir, oracle, save_learned, state_of
from tests.rewards.oracle_inputs import PROMPTS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., Reward]]:
    """Every learned reward on its tiny weights, as functions of further arguments."""
    options = save_learned(tmp_path_factory.mktemp("models"))
    return {name: partial(kind, **options[name]) for name, kind in LEARNED.items()}


LEARNED = {"hpsv2": HPSv2, "pickscore": PickScore, "clip_score": CLIPScore, "aesthetic": Aesthetic, "image_reward": ImageReward}
ANALYTIC: dict[str, Callable[..., Reward]] = {"jpeg": JPEGSize, "bright": Brightness, "saturation": Saturation}


def pictures(count: int, height: int = 40, width: int = 52) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", [*LEARNED, *ANALYTIC])
def test_scores_are_float32_on_cpu_and_nan_only_where_a_pixel_is(built: dict[str, Callable[..., Reward]], name: str) -> None:
    reward = {**built, **ANALYTIC}[name]()
    assert isinstance(reward, Reward)
    images = pictures(5)
    clean = reward(images, PROMPTS)
    assert (clean.dtype, clean.device.type, tuple(clean.shape)) == (torch.float32, "cpu", (5,))
    assert torch.isfinite(clean).all()
    assert not clean.requires_grad
    images[1, 0, 3, 4], images[4, 2, 0, 0] = torch.nan, -torch.inf
    broken = reward(images, PROMPTS)
    assert torch.isnan(broken).tolist() == [False, True, False, False, True]
    torch.testing.assert_close(broken[[0, 2, 3]], clean[[0, 2, 3]], atol=2e-5, rtol=0)
    assert reward(pictures(0), []).shape == (0,)


@pytest.mark.parametrize("name", LEARNED)
def test_a_score_does_not_depend_on_the_batch(built: dict[str, Callable[..., Reward]], name: str) -> None:
    images, prompts = pictures(7), [PROMPTS[i] for i in (0, 1, 0, 2, 4, 4, 3)]
    together = built[name](batch_size=32)(images, prompts)
    alone = built[name](batch_size=1)
    single = torch.cat([alone(images[i : i + 1], [prompts[i]]) for i in range(7)])
    order = [3, 6, 0, 5, 1, 4, 2]
    shuffled = built[name](batch_size=3)(images[order], [prompts[i] for i in order])
    torch.testing.assert_close(single, together, atol=2e-5, rtol=0)
    torch.testing.assert_close(shuffled, together[order], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", LEARNED)
def test_bfloat16_is_close_and_nothing_is_trainable(built: dict[str, Callable[..., Reward]], name: str) -> None:
    full, half = built[name](), built[name](dtype="bfloat16")
    images = pictures(5)
    # bfloat16 keeps 8 bits: 0.4 % per operation; these networks have a few dozen in a row
    scale = full(images, PROMPTS).abs().max().item()
    torch.testing.assert_close(half(images, PROMPTS), full(images, PROMPTS), atol=0.1 * max(scale, 1.0), rtol=0)
    assert not torch.equal(half(images, PROMPTS), full(images, PROMPTS))
    modules = [value for value in vars(half).values() if isinstance(value, torch.nn.Module)]
    modules += [half.encoder.model] if hasattr(half, "encoder") else []
    assert modules
    assert not any(p.requires_grad for m in modules for p in m.parameters())
    assert not any(m.training for module in modules for m in module.modules())
    with pytest.raises(ValueError, match="bfloat16, got 'float8'"):
        built[name](dtype="float8")


@pytest.mark.parametrize("name", ["hpsv2", "clip_score"])
def test_float16_scores_are_float16_as_the_published_code_has_them(built: dict[str, Callable[..., Reward]], name: str) -> None:
    """It multiplies features under float16 autocast: operands and the product are float16, so that scores from .25 to .5 are
    multiples of 2^-12. In bfloat16 the product stays float32."""
    half, images = built[name](dtype="float16"), pictures(5)
    scores = half(images, PROMPTS)
    assert torch.equal(scores, scores.half().float()) and not torch.equal(scores, built[name]()(images, PROMPTS))
    image, text = half.encoder.image_features(to_uint8(images)), half.encoder.text_features(PROMPTS)
    assert torch.equal(scores, torch.diagonal(image.half() @ text.half().T).float())
    coarse = built[name](dtype="bfloat16")(images, PROMPTS)
    assert not torch.equal(coarse, coarse.bfloat16().float())


def test_a_prompt_is_encoded_once_and_the_memory_is_bounded(
    built: dict[str, Callable[..., Reward]], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = built["clip_score"]().encoder  # type: ignore[attr-defined]
    asked: list[list[str]] = []
    real = encoder.token_ids
    encoder.token_ids = lambda prompts: asked.append(list(prompts)) or real(prompts)
    first = encoder.text_features(["a", "b", "a"])
    again = encoder.text_features(["b", "a", "c"])
    assert asked == [["a", "b"], ["c"]]
    assert torch.equal(first[0], again[1])
    monkeypatch.setattr(clip_encoder, "TEXT_CACHE_SIZE", 2)
    encoder.text_features(["d", "e", "f", "a"])
    assert asked[-1] == ["d", "e", "f"]
    encoder.text_features(["f", "a"])
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("images", "prompts", "says"),
    [
        (torch.zeros(2, 3, 8, 8), ["one"], "one prompt per image: got 2"),
        (torch.zeros(2, 3, 8, 8), "no", "one prompt per image"),
        (torch.zeros(3, 8, 8), ["a"], r"\[B, 3, H, W\]"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), ["a"], "float"),
        (torch.full((1, 3, 8, 8), -1.0), ["a"], r"\[0, 1\], got values from -1"),
        (torch.full((1, 3, 8, 8), 255.0), ["a"], "to 255"),
    ],
)
def test_a_wrong_batch_is_refused(images: Tensor, prompts: Sequence[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Brightness()(images, prompts)


def test_a_model_that_answers_infinity_gives_no_score() -> None:
    class Infinite(pixels.PictureReward):
        def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
            return torch.tensor([1.0, torch.inf])

    scores = Infinite()(pictures(2), ["a", "b"])
    assert scores[0] == 1.0
    assert torch.isnan(scores[1])


def test_images_are_quantised_as_they_would_be_saved() -> None:
    x = torch.tensor([-0.001, 0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.001]).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    assert pixels.to_uint8(x)[0, 0, 0].tolist() == [0, 0, 0, 1, 255, 255]


@pytest.mark.parametrize(("height", "width"), [(32, 20), (20, 32), (33, 64), (200, 7), (31, 32)])
def test_hps_padding_always_fills_the_square(height: int, width: int) -> None:
    padded = pad_to_square(torch.full((1, 3, height, width), 255, dtype=torch.uint8), 32)
    assert padded.shape == (1, 3, 32, 32)
    filled = padded[0, 0] > 0.5
    longest = max(height, width)
    assert filled.any(dim=1).sum() == round(height * 32 / longest)
    assert filled.any(dim=0).sum() == round(width * 32 / longest)


# --- files that are not what was asked for -------------------------------------------------------------------------


def test_a_wrong_state_dict_is_named(tmp_path: Path) -> None:
    hps = oracle("hpsv2")
    state = state_of(hps["state_dict"])
    file = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"state_dict": state}, file)
    with pytest.raises(ValueError, match=r"does not fit HPSv2.1.*of another shape.*width 32, 2 layers"):
        HPSv2(str(file), tokenizer=TOKENIZER)
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"under 'state_dict'; it holds .*positional_embedding"):
        HPSv2(str(file), tokenizer=TOKENIZER, model_cfg=hps["model_cfg"])
    gone = {k: v for k, v in state.items() if k != "visual.proj"} | {"head.weight": torch.zeros(1)}
    torch.save({"state_dict": gone}, file)
    with pytest.raises(ValueError, match=r"1 missing \(visual_projection.weight\); 1 unexpected \(head.weight\)"):
        HPSv2(str(file), tokenizer=TOKENIZER, model_cfg=hps["model_cfg"])
    torch.save({"state_dict": state_of(oracle("image_reward")["state_dict"])}, file)
    with pytest.raises(ValueError, match="It seems to be an ImageReward"):
        HPSv2(str(file), tokenizer=TOKENIZER, model_cfg=hps["model_cfg"])
    torch.save(state, tmp_path / "ImageReward.pt")
    with pytest.raises(ValueError, match=r"not ImageReward v1.0. It seems to be a CLIP in open_clip format"):
        ImageReward(str(tmp_path))
    torch.save(state_of(oracle("aesthetic")["published_state_dict"]), tmp_path / "sac+logos+ava1-l14-linearMSE.pth")
    with pytest.raises(ValueError, match="MLP for features of width 768"):
        Aesthetic(str(tmp_path), clip=openai_clip_dir(tmp_path))


def test_files_of_torch_before_1_6_are_read(tmp_path: Path) -> None:
    state = state_of(oracle("aesthetic")["state_dict"])
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(state, tmp_path / "new.pth")
    old, new = (weights.read_state_dict(tmp_path / name) for name in ("old.pth", "new.pth"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[k], new[k]) for k in old)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


def test_nothing_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": Evil()}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ValueError, match="holds more than tensors"):
        HPSv2(str(tmp_path), tokenizer=TOKENIZER)
    assert "must not run" not in capsys.readouterr().out


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no HPS_v2.1_compressed.pt; it holds nothing"):
        HPSv2(str(tmp_path), tokenizer=TOKENIZER)
    with pytest.raises(FileNotFoundError, match="neither a file, a folder, nor"):
        weights.fetch(str(tmp_path / "nowhere"), "x.pt")
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        clip_encoder.load_clip_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="format must be"):
        CLIPScore(str(tmp_path), format="onnx")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vision_cfg": {"timm_model_name": "vit_base"}}, "vision_cfg.timm_model_name"),
        ({"vision_cfg": {"pool_type": "avg"}}, "vision_cfg.pool_type"),
        ({"text_cfg": {"hf_model_name": "roberta-base"}}, "text_cfg.hf_model_name"),
        ({"text_cfg": {"no_causal_mask": True}}, "text_cfg.no_causal_mask"),
        ({"init_logit_bias": -10}, "init_logit_bias"),
        ({"vision_cfg": {"layers": [3, 4, 6, 3]}}, "not ResNets"),
    ],
)
def test_other_architectures_of_open_clip_are_refused(change: dict[str, Any], says: str) -> None:
    from g2rpo.rewards.open_clip import clip_config

    base = oracle("open_clip")["model_cfg"]
    config = {k: {**v, **change.get(k, {})} if isinstance(v, dict) else v for k, v in base.items()}
    config |= {k: v for k, v in change.items() if k not in base}
    with pytest.raises(ValueError, match=says):
        clip_config(config)


# --- formulas and functions ----------------------------------------------------------------------------------------


def test_analytic_rewards_are_their_formulas() -> None:
    flat = torch.zeros(3, 3, 32, 32)
    flat[1] = 1.0
    flat[2, 0] = 0.8  # pure red
    assert Brightness()(flat, ["", "", ""]).tolist() == pytest.approx([0, 1, 0.8 / 3], abs=1e-6)
    assert Saturation()(flat, ["", "", ""]).tolist() == [0, 0, 1]
    noise = pictures(1, 64, 64)
    buffer = io.BytesIO()
    Image.fromarray(pixels.to_uint8(noise)[0].permute(1, 2, 0).numpy()).save(buffer, format="JPEG", quality=95)
    assert JPEGSize()(noise, [""]).item() == pytest.approx(buffer.tell() / 1000)
    assert JPEGSize(negative=True)(noise, [""]).item() == -JPEGSize()(noise, [""]).item()
    assert JPEGSize()(noise, [""]) > JPEGSize()(pictures(1, 64, 64) * 0, [""])
    with pytest.raises(ValueError, match="quality"):
        JPEGSize(quality=0)


SOURCE = """
import torch
def red(images, prompts, gain=1.0):
    return gain * images[:, 0].mean(dim=(1, 2))
def listed(images, prompts):
    return [len(p) if p else None for p in prompts]
def short(images, prompts):
    return [1.0]
class Counter:
    def __init__(self, start):
        self.count = start
    def __call__(self, images, prompts):
        self.count += 1
        return [float(self.count)] * len(prompts)
not_a_function = 3
"""


def test_any_function_is_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    images = pictures(2)
    red = FunctionReward(f"{file}:red", options={"gain": 2}).scores(images, ["a", "b"])
    torch.testing.assert_close(red, 2 * images[:, 0].mean(dim=(1, 2)))
    listed = FunctionReward(f"{file}:listed").scores(images, ["abc", ""])
    assert listed[0] == 3
    assert torch.isnan(listed[1])
    counter = FunctionReward(f"{file}:Counter", options={"start": 5})
    assert [counter.scores(images, ["a", "b"]).tolist() for _ in range(2)] == [[6, 6], [7, 7]]
    with pytest.raises(ValueError, match=r"should return 2 scores, one per image, but returned the shape \[1\]"):
        FunctionReward(f"{file}:short").scores(images, ["a", "b"])
    with pytest.raises(ValueError, match="should return 2 scores, one per image, but returned None"):
        FunctionReward(lambda images, prompts: None).scores(images, ["a", "b"])


def test_a_function_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    with pytest.raises(ValueError, match="is a int, not a function or class"):
        FunctionReward(f"{file}:not_a_function")
    for bad in ("mine.py", "mine:red", f"{file}:", f"{file}:a-b", f"{file}:rde", f"{tmp_path}/other.py:red"):
        with pytest.raises(ValueError):
            FunctionReward(bad)
