"""What every reward promises: shapes, types, NaN for "no score", the same score whatever stands
beside it, clear errors."""

import io
from functools import partial

import pytest
import torch
from PIL import Image

from g2rpo.core.images import to_uint8
from g2rpo.core.types import Reward
from g2rpo.rewards import clip_encoder, pixels, weights
from g2rpo.rewards.analytic import Brightness, FunctionReward, JPEGSize, Saturation
from g2rpo.rewards.clip import HPSv2
from g2rpo.rewards.open_clip import clip_config
from tests.rewards.learned import LEARNED, TOKENIZER, TinyHPSv2, oracle, state_of
from tests.rewards.oracle_inputs import PROMPTS

ANALYTIC = {"jpeg": JPEGSize, "bright": Brightness, "saturation": Saturation}


@pytest.fixture(scope="module")
def built(learned):
    """Every learned reward on its tiny weights, as functions of further arguments."""
    return {name: partial(kind, **learned[name]) for name, kind in LEARNED.items()}


@pytest.mark.parametrize("name", LEARNED)
def test_a_model_says_where_it_computes(built, name):
    assert built[name]().device == torch.device("cpu")


def pictures(count, height=40, width=52):
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", [*LEARNED, *ANALYTIC])
def test_scores_are_float32_on_cpu_and_nan_only_where_a_pixel_is(built, name):
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
def test_a_score_does_not_depend_on_the_batch(built, name):
    images, prompts = pictures(7), [PROMPTS[i] for i in (0, 1, 0, 2, 4, 4, 3)]
    together = built[name](batch_size=32)(images, prompts)
    alone = built[name](batch_size=1)
    single = torch.cat([alone(images[i : i + 1], [prompts[i]]) for i in range(7)])
    order = [3, 6, 0, 5, 1, 4, 2]
    shuffled = built[name](batch_size=3)(images[order], [prompts[i] for i in order])
    torch.testing.assert_close(single, together, atol=2e-5, rtol=0)
    torch.testing.assert_close(shuffled, together[order], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", LEARNED)
def test_bfloat16_is_close_and_nothing_is_trainable(built, name):
    images, half = pictures(5), built[name](dtype="bfloat16")
    exact, rounded = built[name]()(images, PROMPTS), half(images, PROMPTS)
    # bfloat16 keeps 8 bits: 0.4 % per operation; these networks have a few dozen in a row
    torch.testing.assert_close(
        rounded, exact, atol=0.1 * max(exact.abs().max().item(), 1.0), rtol=0
    )
    assert not torch.equal(rounded, exact)
    modules = [value for value in vars(half).values() if isinstance(value, torch.nn.Module)]
    modules += [half.encoder.model] if hasattr(half, "encoder") else []
    assert modules
    assert not any(p.requires_grad for module in modules for p in module.parameters())
    assert not any(part.training for module in modules for part in module.modules())
    with pytest.raises(ValueError, match="float8"):
        built[name](dtype="float8")


@pytest.mark.parametrize("name", ["hpsv2", "clip_score"])
def test_float16_scores_are_float16_as_the_published_code_has_them(built, name):
    """It multiplies features under float16 autocast: operands and the product are float16, so that
    scores from .25 to .5 are multiples of 2^-12. In bfloat16 the product stays float32."""
    half, images = built[name](dtype="float16"), pictures(5)
    scores = half(images, PROMPTS)
    assert torch.equal(scores, scores.half().float()) and not torch.equal(
        scores, built[name]()(images, PROMPTS)
    )
    image, text = half.encoder.image_features(to_uint8(images)), half.encoder.text_features(PROMPTS)
    assert torch.equal(scores, torch.diagonal(image.half() @ text.half().T).float())
    coarse = built[name](dtype="bfloat16")(images, PROMPTS)
    assert not torch.equal(coarse, coarse.bfloat16().float())


@pytest.mark.parametrize(
    ("images", "prompts"),
    [
        (torch.zeros(2, 3, 8, 8), ["one"]),
        (torch.zeros(2, 3, 8, 8), "no"),
        (torch.zeros(3, 8, 8), ["a"]),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), ["a"]),
        (torch.full((1, 3, 8, 8), -1.0), ["a"]),
        (torch.full((1, 3, 8, 8), 255.0), ["a"]),
    ],
)
def test_a_wrong_batch_is_refused(images, prompts):
    with pytest.raises(ValueError, match=r"one prompt per image|\[B, 3, H, W\]|float|\[0, 1\]"):
        Brightness()(images, prompts)


def test_a_model_that_answers_infinity_gives_no_score():
    class Infinite(pixels.PictureReward):
        def score_pictures(self, images, prompts):
            return torch.tensor([1.0, torch.inf])

    scores = Infinite()(pictures(2), ["a", "b"])
    assert scores[0] == 1.0
    assert torch.isnan(scores[1])


def test_images_are_quantised_as_they_would_be_saved():
    x = (
        torch.tensor([-0.001, 0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.001])
        .view(1, 1, 1, 6)
        .expand(1, 3, 1, 6)
    )
    assert pixels.to_uint8(x)[0, 0, 0].tolist() == [0, 0, 0, 1, 255, 255]


# --- files that are not what was asked for --------------------------------------------------------


class Code:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_what_is_not_hpsv2_is_named_and_not_run(tmp_path, capsys):
    hps = oracle("hpsv2")
    state = state_of(hps["state_dict"])
    renamed = {k: v for k, v in state.items() if k != "visual.proj"} | {
        "head.weight": torch.zeros(1)
    }
    for content, kind, fact in (
        ({"state_dict": state}, HPSv2, "another shape.*a CLIP in open_clip format, of width 32"),
        (state, TinyHPSv2, "under 'state_dict'.*positional_embedding"),
        ({"state_dict": renamed}, TinyHPSv2, "visual_projection.weight.*head.weight"),
        (
            {"state_dict": state_of(oracle("image_reward")["state_dict"])},
            TinyHPSv2,
            "seems to be an ImageReward",
        ),
        ({"state_dict": Code()}, TinyHPSv2, "more than tensors"),
    ):
        torch.save(content, tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=fact):
            kind(str(tmp_path / "weights.pt"), tokenizer=TOKENIZER)
    assert "must not run" not in capsys.readouterr().out


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="HPS_v2.1_compressed.pt"):
        HPSv2(str(tmp_path), tokenizer=TOKENIZER)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        weights.fetch(str(tmp_path / "nowhere"), "x.pt")
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        clip_encoder.load_clip_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("vision_cfg", "pool_type", "avg"),
        ("text_cfg", "hf_model_name", "roberta-base"),
        ("vision_cfg", "layers", [3, 4, 6, 3]),
    ],
)
def test_other_architectures_of_open_clip_are_refused(part, key, value):
    config = oracle("open_clip")["model_cfg"]
    (config[part] if part else config)[key] = value
    with pytest.raises(ValueError, match="ResNets" if key == "layers" else key):
        clip_config(config)


# --- formulas and functions -----------------------------------------------------------------------


def test_analytic_rewards_are_their_formulas():
    flat = torch.zeros(3, 3, 32, 32)
    flat[1] = 1.0
    flat[2, 0] = 0.8  # pure red
    assert Brightness()(flat, ["", "", ""]).tolist() == pytest.approx([0, 1, 0.8 / 3], abs=1e-6)
    assert Saturation()(flat, ["", "", ""]).tolist() == [0, 0, 1]
    noise = pictures(1, 64, 64)
    buffer = io.BytesIO()
    Image.fromarray(pixels.to_uint8(noise)[0].permute(1, 2, 0).numpy()).save(
        buffer, format="JPEG", quality=95
    )
    assert JPEGSize()(noise, [""]).item() == pytest.approx(buffer.tell() / 1000)
    assert JPEGSize(negative=True)(noise, [""]).item() == -JPEGSize()(noise, [""]).item()
    assert JPEGSize()(noise, [""]) > JPEGSize()(pictures(1, 64, 64) * 0, [""])


SOURCE = """
import torch
def red(images, prompts, gain=1.0):
    return gain * images[:, 0].mean(dim=(1, 2))
def listed(images, prompts):
    return [len(p) if p else None for p in prompts]
class Counter:
    def __init__(self, start):
        self.count = start
    def __call__(self, images, prompts):
        self.count += 1
        return [float(self.count)] * len(prompts)
number = 3
"""


def test_any_function_is_a_reward(tmp_path):
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
    for answer in ([1.0], None):
        with pytest.raises(ValueError, match="should return 2 scores"):
            FunctionReward(lambda images, prompts, answer=answer: answer).scores(images, ["a", "b"])
    for bad in (
        "mine.py",
        "mine:red",
        f"{file}:",
        f"{file}:a-b",
        f"{file}:rde",
        f"{file}:number",
        f"{tmp_path}/other.py:red",
    ):
        with pytest.raises(ValueError):
            FunctionReward(bad)
