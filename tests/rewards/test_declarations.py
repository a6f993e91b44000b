"""What the classes of rewards declare: docs and `g2rpo plan` agree with it, and a new reward is one
file."""

import inspect
import json
import re

import pytest
import torch

from g2rpo.config.read import load_config
from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.core.rewards import Reward
from g2rpo.lab.plan.answer import for_memory, overrides_of
from g2rpo.lab.plan.models import cost_of_reward
from g2rpo.rewards.catalogue import REWARDS, RewardConfig, build_rewards, check_rewards, find_reward
from g2rpo.train.build import Request, build
from g2rpo.train.checks import check
from g2rpo.train.contents import contents_of
from g2rpo.train.found import find
from tests.support.pages import ROOT
from tests.support.refusals import refusal
from tests.support.tables import rows

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
KINDS = {name: plugins.find_class("rewards", name, REWARDS) for name in REWARDS}
NEEDED = {"clip_score": {"path": "apple/DFN5B-CLIP-ViT-H-14"}}


@pytest.mark.parametrize("name", REWARDS)
def test_a_declaration_fits_its_constructor(name):
    kind, options = KINDS[name], find_reward("rewards.it", RewardConfig(kind=name)).defaults
    assert issubclass(kind, Reward) and inspect.getdoc(kind)
    assert {*kind.files, *filter(None, [kind.code_option])} <= options.keys()
    assert "endpoint" in options or not kind.asks
    # as configs hold them
    json.dumps([value for value in options.values() if value is not inspect.Parameter.empty])
    check_rewards({name: RewardConfig(kind=name)})


BOUNDS = """
jpeg_size -> quality -> 96
ocr -> width -> 0
ocr -> squeeze -> 0
dino_similarity -> share -> 0.0
geneval -> score -> "strict"
vlm_judge -> image_size -> 0
vlm_judge -> form -> "stars"
vlm_judge -> aspects -> []
hpsv2 -> batch_size -> "8"
hpsv2 -> dtype -> "float64"
"""


@pytest.mark.parametrize(("kind", "option", "value"), rows(BOUNDS))
def test_an_option_out_of_its_bounds_is_refused_before_anything_is_loaded(kind, option, value):
    value = json.loads(value)
    wrong = rf"rewards\.it\.options\.{option}: (Input|Value) should .*got {re.escape(repr(value))}"
    with pytest.raises(UserError, match=wrong):
        check_rewards({"it": RewardConfig(kind=kind, options={option: value})})


def cost_of(kind, **options):
    return cost_of_reward(RewardConfig(kind=kind, options=options), "cuda")


@pytest.mark.slow  # a model without weights for each
@pytest.mark.parametrize("name", REWARDS)
def test_the_table_of_the_docs_says_what_a_class_declares(name):
    *_, row = re.findall(rf"^\| `(?:[^|]*`)?{name}`.*", PAGE, re.MULTILINE)
    kind, cost = KINDS[name], cost_of(name, **NEEDED.get(name, {}))
    assert kind.upstream in row and kind.licence in row
    assert not kind.libraries or f"`pip install {' '.join(kind.libraries)}`" in row
    if cost and cost.bytes > 2**25:  # shown with one digit
        assert re.search(rf"{cost.bytes / 2**30:.1f}\b", row)
    (gradients,) = re.findall("`algorithm.name=refl` and `opsd` need them: (.*), and yours", PAGE)
    assert (f"`{name}`" in gradients) == kind.differentiable


SOURCE = """
import torch
from torch import nn
from g2rpo.rewards.pixels import PictureReward
from g2rpo.rewards.weights import fetch, read_state_dict
from g2rpo.core.types import RewardModel

class Warmth(PictureReward):
    '''How warm a picture is.'''

    files = {"path": ("warmth.pt",)}
    libraries = ("torch",)
    right = 0.0
    wants = "the word red"

    def __init__(self, path, *, device="cpu", dtype="float32", batch_size=2):
        self.net = nn.Linear(3, 1)
        self.net.load_state_dict(read_state_dict(fetch(path, "warmth.pt")))
        self.batch_size = batch_size

    @staticmethod
    def target(prompt):
        return "red" in prompt

    @classmethod
    def model_of(cls, options):
        net = nn.Linear(3, 1)
        return RewardModel([net], lambda: net(torch.empty(1, 3)), parameters=1000)

    @torch.no_grad()
    def score_pictures(self, images, prompts):
        return self.net(images.float().mean((2, 3)) / 255)[:, 0]
"""


@pytest.fixture
def warmth(tmp_path):
    """A reward outside the package."""
    (file := tmp_path / "warmth.py").write_text(SOURCE)
    plugins.allow(str(file))
    return f"{file}:Warmth"


def advice(*overrides):
    return overrides_of(list(for_memory(load_config("scenes", overrides), 1)))


def test_a_reward_outside_the_package_is_planned_and_advised_by_its_declaration(warmth):
    cost, half = cost_of(warmth, path="x"), cost_of(warmth, path="x", dtype="float16", device="cpu")
    assert (cost.bytes, cost.flops, cost.device, cost.dtype) == (4 * 1004, 6, "cuda", "float32")
    assert (half.bytes, half.device) == (2 * 1004, "cpu")
    told = advice(f"rewards.warm.kind={warmth}", "rewards.warm.options.path=weights")
    assert {"rewards.warm.options.device=cpu", "rewards.warm.options.dtype=bfloat16"} <= {*told}


@pytest.mark.parametrize("name", ["hpsv3", "geneval"])
def test_advice_knows_every_reward_with_weights(name):
    told = advice(f"rewards.{name}=1")
    assert f"rewards.{name}.options.device=cpu" in told
    assert (f"rewards.{name}.options.dtype=bfloat16" in told) == (name == "geneval")


def save_warmth(folder):
    state = {"weight": torch.tensor([[1.0, -0.5, -0.5]]), "bias": torch.zeros(1)}
    torch.save(state, folder / "warmth.pt")
    return f"rewards.warm.options.path={folder}"


def test_a_reward_outside_the_package_is_checked_before_anything_is_loaded(
    warmth, tmp_path, monkeypatch
):
    kind, path = f"rewards.warm.kind={warmth}", f"rewards.warm.options.path={tmp_path}"
    assert "rewards.warm.options.path is missing" in refusal(kind)
    assert "path: " in (said := refusal(kind, path)) and "has no warmth.pt; it holds " in said
    save_warmth(tmp_path)
    check(load_config("scenes", [kind, path]))
    dtypes = "options.dtype: Input should be 'float32', 'float16' or 'bfloat16', got 'float64'"
    assert dtypes in refusal(kind, path, "rewards.warm.options.dtype=float64")
    (tmp_path / "p.txt").write_text("a blue circle\n")
    blue = refusal(kind, path, f"prompts.train={tmp_path}/p.txt")
    assert "none of 1 prompts has the word red" in blue
    monkeypatch.setattr(plugins.load(warmth), "libraries", ("no_such_library",))
    assert "pip install no_such_library" in refusal(kind, path)


def test_a_reward_outside_the_package_trains_and_judges(warmth, tmp_path):
    path = save_warmth(tmp_path)
    (tmp_path / "p.txt").write_text("a red circle\ntwo red squares\n")
    small = ["algorithm.group_size=2", "sampling.num_steps=6", "trainer.prompts_per_iteration=1"]
    small += [f"{key}={tmp_path}/p.txt" for key in ("prompts.train", "evaluation.prompts")]
    small += ["evaluation.num_prompts=2", f"rewards.warm.kind={warmth}", path]
    judge = path.replace("rewards.warm", "evaluation.rewards.judge")
    config = load_config("scenes", [*small, f"evaluation.rewards.judge.kind={warmth}", judge])
    trainer = build(Request(config=config, notify=lambda message: None))
    assert any("warm" in key for key in trainer.iterate())
    evaluation = trainer.score_heldout()
    assert torch.equal(evaluation.scores["warm"], evaluation.scores["judge"])
    assert evaluation.right is not None
    assert tmp_path.name in contents_of(find(config))["rewards.warm"]
    assert build_rewards(config.rewards)["warm"].name == "Warmth"
