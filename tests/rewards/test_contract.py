"""What every reward promises: shapes, types, NaN for "no score", the same score whatever stands
beside it, clear errors."""

import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo.core.errors import UserError
from g2rpo.core.images import to_uint8
from g2rpo.core.rewards import Reward, as_reward
from g2rpo.data.testbed import assets_dir
from g2rpo.data.testbed.rewards import SceneCLIP
from g2rpo.rewards import clip_encoder, pixels, weights
from g2rpo.rewards.analytic import Brightness, FunctionReward, JPEGSize, Saturation
from g2rpo.rewards.clip import HPSv2
from g2rpo.rewards.open_clip import clip_config
from tests.rewards.learned import LEARNED, TOKENIZER, TinyHPSv2, oracle, state_of
from tests.rewards.oracle_inputs import PROMPTS
from tests.support.pictures import noise
from tests.support.tables import rows
from tests.support.tolerances import network, reordered

ANALYTIC = {"jpeg": JPEGSize(), "bright": Brightness(), "saturation": Saturation()}


def of_scores(scores):
    """The tolerance of a tiny network's scores, which its last layer adds of states of size 1."""
    return network(max(1.0, scores.abs().max()))


@pytest.mark.parametrize("name", [*LEARNED, *ANALYTIC])
def test_scores_are_float32_on_cpu_and_nan_only_where_a_pixel_is(rewards, name):
    """Beside other pictures only the order of float32 sums differs."""
    reward, images = {**rewards, **ANALYTIC}[name], noise(5)
    clean = reward(images, PROMPTS)
    assert (isinstance(reward, Reward) and name in ANALYTIC) or reward.device == torch.device("cpu")
    assert (clean.dtype, clean.device.type, tuple(clean.shape)) == (torch.float32, "cpu", (5,))
    assert torch.isfinite(clean).all() and not clean.requires_grad
    images[1, 0, 3, 4], images[4, 2, 0, 0] = torch.nan, -torch.inf
    broken = reward(images, PROMPTS)
    assert torch.isnan(broken).tolist() == [False, True, False, False, True]
    torch.testing.assert_close(broken[[0, 2, 3]], clean[[0, 2, 3]], **of_scores(clean))
    assert reward(noise(0), []).shape == (0,)


@pytest.mark.parametrize("name", LEARNED)
def test_a_score_does_not_depend_on_the_batch(rewards, name, monkeypatch):
    reward, images, prompts = rewards[name], noise(7), [PROMPTS[i] for i in (0, 1, 0, 2, 4, 4, 3)]
    together, order = reward(images, prompts), [3, 6, 0, 5, 1, 4, 2]
    for size in (1, 3):
        monkeypatch.setattr(reward, "batch_size", size)
        shuffled = reward(images[order], [prompts[i] for i in order])
        torch.testing.assert_close(shuffled, together[order], **of_scores(together))


@pytest.mark.parametrize("name", LEARNED)
def test_a_folder_may_be_named_from_home(learned, name, monkeypatch):
    """No shell expands the ~ of `rewards.NAME.options.path=~/FOLDER`."""
    monkeypatch.setenv("HOME", "/")
    LEARNED[name](**{option: f"~{path}" for option, path in learned[name].items()})
    monkeypatch.setenv("HOME", str(assets_dir()))
    assert SceneCLIP("~/clip").model is SceneCLIP().model


def test_features_of_a_prompt_do_not_depend_on_which_others_are_new(learned):
    """A run that is resumed has forgotten the prompts of the run before."""
    first, resumed = (LEARNED["hpsv2"](**learned["hpsv2"]).encoder for _ in range(2))
    first.text_features(PROMPTS[:1])
    assert torch.equal(first.text_features(PROMPTS), resumed.text_features(PROMPTS))


@pytest.mark.parametrize("name", LEARNED)
def test_bfloat16_is_close_and_nothing_is_trainable(rewards, learned, name):
    images, half = noise(5), LEARNED[name](**learned[name], dtype="bfloat16")
    exact, rounded = rewards[name](images, PROMPTS), half(images, PROMPTS)
    # bfloat16 keeps 8 bits, .4 % an operation; what scores tell of these pictures is left
    assert 0 < (rounded - exact).std() < exact.std() / 4
    parts = [*vars(half).values(), getattr(getattr(half, "encoder", None), "model", None)]
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    assert modules and not any(p.requires_grad for one in modules for p in one.parameters())
    assert not any(part.training for one in modules for part in one.modules())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_published_scale_of_pickscore_is_not_rounded(rewards, learned, dtype):
    """A logit scale of 4.6 rounded to bfloat16 is one of 98.9 instead of 100."""
    coarse = LEARNED["pickscore"](**learned["pickscore"], dtype=dtype)
    assert coarse.scale == rewards["pickscore"].scale


@pytest.mark.parametrize("name", ["hpsv2", "clip_score"])
def test_float16_scores_are_float16_as_the_published_code_has_them(rewards, learned, name):
    """It multiplies features under float16 autocast: operands and the product are float16, so that
    scores from .25 to .5 are multiples of 2^-12. In bfloat16 the product stays float32."""
    half, coarse = (LEARNED[name](**learned[name], dtype=of) for of in ("float16", "bfloat16"))
    scores, exact = half(noise(5), PROMPTS), rewards[name](noise(5), PROMPTS)
    assert torch.equal(scores, scores.half().float()) and not torch.equal(scores, exact)
    image = half.encoder.image_features(to_uint8(noise(5))).half()
    text = half.encoder.text_features(PROMPTS).half()
    assert torch.equal(scores, torch.diagonal(image @ text.T).float())
    scores = coarse(noise(5), PROMPTS)
    assert not torch.equal(scores, scores.bfloat16().float())


@pytest.mark.parametrize(
    ("images", "prompts"),
    [
        (noise(2), ["one"]),
        (noise(2), "no"),
        *((each, ["a"]) for each in (noise(1)[0], to_uint8(noise(1)), -noise(1), 255 * noise(1))),
    ],
)
def test_a_wrong_batch_is_refused(images, prompts):
    with pytest.raises(ValueError, match=r"one prompt per image|\[B, 3, H, W\]|float|\[0, 1\]"):
        Brightness()(images, prompts)


def test_a_model_that_answers_infinity_gives_no_score():
    reward = pixels.PictureReward()
    reward.score_pictures = lambda images, prompts: torch.tensor([1.0, torch.inf])
    scores = reward(noise(2), ["a", "b"])
    assert scores[0] == 1.0 and scores[1].isnan()


def test_images_are_quantised_as_they_would_be_saved():
    x = torch.tensor([-0.001, 0.4999 / 255, 0.5001 / 255, 1.001, torch.nan, -torch.inf, torch.inf])
    assert to_uint8(x).tolist() == [0, 0, 1, 255, 0, 0, 255]


# --- files that are not what was asked for --------------------------------------------------------


class Code:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_what_is_not_hpsv2_is_named_and_not_run(tmp_path, capsys):
    state = state_of(oracle("hpsv2")["state_dict"])
    renamed = {**state, "head.weight": state["visual.proj"]}
    del renamed["visual.proj"]
    other = state_of(oracle("image_reward")["state_dict"])
    for content, kind, fact in (
        ({"state_dict": state}, HPSv2, "another shape.*a CLIP in open_clip format, of width 32"),
        (state, TinyHPSv2, "under 'state_dict'.*positional_embedding"),
        ({"state_dict": renamed}, TinyHPSv2, "visual_projection.weight.*head.weight"),
        ({"state_dict": other}, TinyHPSv2, "seems to be an ImageReward"),
        ({"state_dict": Code()}, TinyHPSv2, r"more than tensors.*\(.*print"),
    ):
        torch.save(content, tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=fact):
            kind(str(tmp_path / "weights.pt"), tokenizer=TOKENIZER)
    assert "must not run" not in capsys.readouterr().out


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"


@pytest.mark.parametrize("name", [*LEARNED])
def test_a_clone_without_git_lfs_is_named(learned, tmp_path, name):
    options = {**learned[name], "path": str(tmp_path)}
    shutil.copytree(learned[name]["path"], tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("*.*"):
        if file.suffix in (".pt", ".pth", ".safetensors"):
            file.write_bytes(POINTER)
    with pytest.raises(UserError, match=r"is a pointer of git-lfs.*`git lfs pull`"):
        LEARNED[name](**options)


@pytest.mark.parametrize("end", [10, -100])
@pytest.mark.parametrize("name", [*LEARNED])
def test_weights_that_are_cut_short_are_named(learned, tmp_path, name, end):
    shutil.copytree(learned[name]["path"], tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("*.*"):
        if file.suffix in (".pt", ".pth", ".safetensors"):
            file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ValueError, match=f"{tmp_path}.* is damaged, or no "):
        LEARNED[name](**{**learned[name], "path": str(tmp_path)})


def test_a_page_that_was_saved_for_weights_is_not_called_code(tmp_path):
    (file := tmp_path / "ImageReward.pt").write_text("<!DOCTYPE html><html>Not found</html>")
    with pytest.raises(
        ValueError, match=r"is damaged, or no torch file \(UnpicklingError: Unsupported"
    ):
        weights.read_state_dict(file)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="HPS_v2.1_compressed.pt"):
        HPSv2(str(tmp_path), tokenizer=TOKENIZER)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        weights.fetch(str(tmp_path / "nowhere"), "x.pt")
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        clip_encoder.load_clip_tokenizer(tmp_path)


OTHERS = """
vision_cfg -> {"pool_type": "avg"} -> pool_type
text_cfg -> {"hf_model_name": "roberta-base"} -> hf_model_name
vision_cfg -> {"layers": [3, 4, 6, 3]} -> ResNets
"""


@pytest.mark.parametrize(("part", "change", "fact"), rows(OTHERS))
def test_other_architectures_of_open_clip_are_refused(part, change, fact):
    config = oracle("open_clip")["model_cfg"]
    config[part].update(json.loads(change))
    with pytest.raises(ValueError, match=fact):
        clip_config(config)


WITHOUT = """
{} -> open_clip_config.json: model_cfg: Field required
{"model_cfg": {"vision_cfg": {}, "text_cfg": {}}} -> model_cfg.embed_dim: Field required
[] -> open_clip_config.json: Input should be
"""


@pytest.mark.parametrize(("config", "fact"), rows(WITHOUT))
def test_an_open_clip_config_without_its_keys_is_named(tmp_path, config, fact):
    (tmp_path / "open_clip_config.json").write_text(config)
    for read in (clip_encoder.load_clip, clip_encoder.clip_model):
        with pytest.raises(ValueError, match=fact):
            read(tmp_path)


# --- formulas and functions -----------------------------------------------------------------------


def test_analytic_rewards_are_their_formulas():
    flat = torch.zeros(3, 3, 32, 32)
    flat[1] = 1.0
    flat[2, 0] = 0.8  # pure red
    bright = Brightness()(flat, [""] * 3)
    torch.testing.assert_close(bright, torch.tensor([0, 1, 0.8 / 3]), **reordered(3 * 32 * 32, 1))
    assert Saturation()(flat, [""] * 3).tolist() == [0, 0, 1]
    (picture,), buffer = to_uint8(noise(1)), io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(buffer, format="JPEG", quality=95)
    kilobytes = torch.tensor([buffer.tell() / 1000])
    assert torch.equal(JPEGSize()(noise(1), [""]), kilobytes)
    assert torch.equal(-JPEGSize(negative=True)(noise(1), [""]), kilobytes)


SOURCE = """
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
    (file := tmp_path / "mine.py").write_text(SOURCE)
    images, prompts = noise(2), ["abc", ""]
    red = FunctionReward(f"{file}:red", options={"gain": 2}).scores(images, prompts)
    assert torch.equal(red, 2 * images[:, 0].mean(dim=(1, 2)))
    listed = FunctionReward(f"{file}:listed").scores(images, prompts)
    assert listed[0] == 3 and listed[1].isnan()
    counter = FunctionReward(f"{file}:Counter", options={"start": 5})
    assert (counter.scores(images, prompts) == 6).all() and counter.scores(images, prompts)[0] == 7
    wrong = [f"{file}:{name}" for name in ("", "a-b", "rde", "number")]
    for target in ("mine.py", "mine:red", *wrong, f"{tmp_path}/other.py:red"):
        with pytest.raises(ValueError):
            FunctionReward(target)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((torch.tensor([1.0, 2.0]), {"why": "..."}), None),
        (([1, 2], {}), None),
        ([np.float32(1), np.array(2.0)], None),
        ([torch.tensor([1.0]), torch.tensor(2)], None),
        (np.array([1, 2]), None),
        (np.array([2.0, 1.0])[::-1], None),
        (np.array([1.0, 2.0], dtype=">f8"), None),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True), None),
        (None, "None"),
        ({"a": [1.0, 2.0], "b": [3.0, 4.0]}, r"a mapping of \['a', 'b'\]: return one of these"),
        (["1", "2"], r"a list of str, \['1', '2'\]"),
        ("12", "a str, '12'"),
        (np.array(["a", "b"]), "a ndarray, array"),
        ([{"score": 1.0}, {"score": 2.0}], "a list of dict"),
        ([[1.0], [2.0]], "a list of list"),
        ((score for score in (1.0, 2.0)), "a generator"),
        ([1.0], r"the shape \[1\]"),
        (torch.ones(2, 1), r"the shape \[2, 1\]"),
    ],
)
def test_what_rewards_of_other_trainers_return_is_read_or_named(answer, said):
    reward = as_reward(lambda images, prompts: answer)
    if said is None:
        assert reward.scores(noise(2), ["a", "b"]).tolist() == [1, 2]
    else:
        with pytest.raises(ValueError, match=f"should return 2 scores.* but returned {said}"):
            reward.scores(noise(2), ["a", "b"])


def test_a_masked_score_is_none():
    reward = as_reward(lambda images, prompts: np.ma.masked_array([1.0, 2.0], [False, True]))
    one, none = reward.scores(noise(2), ["a", "b"])
    assert one == 1 and none.isnan()


def test_an_async_reward_is_waited_for():
    async def later(images, prompts):
        return [1.0, 2.0]

    assert as_reward(later).scores(noise(2), ["a", "b"]).tolist() == [1, 2]
