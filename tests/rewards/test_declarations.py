"""What the classes of rewards declare: docs and `g2rpo plan` agree with it, and a new reward is one
file."""

import inspect
import json
import re

import pytest
import torch

from g2rpo.app.build import Request, build
from g2rpo.app.contents import contents_of
from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.assembly.rewards import REWARDS, build_rewards, check_rewards, defaults_of
from g2rpo.config.schema import RewardConfig
from g2rpo.core import plugins
from g2rpo.core.capabilities import AsksServer
from g2rpo.core.errors import UserError
from g2rpo.core.types import Reward
from g2rpo.lab.plan.fit import for_memory, overrides_of
from g2rpo.lab.plan.rewards import cost_of_reward
from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
KINDS = {name: plugins.find("rewards", name, REWARDS) for name in REWARDS}
ROWS = {
    name: row
    for row in PAGE.splitlines()
    if row.startswith("| `")
    for name in re.findall(r"`(\w+)`", row.split("|")[1])
}
NEEDED = {"clip_score": {"path": "apple/DFN5B-CLIP-ViT-H-14"}}


@pytest.mark.parametrize("name", REWARDS)
def test_a_declaration_fits_its_constructor(name):
    kind, options = KINDS[name], defaults_of(KINDS[name])
    assert issubclass(kind, Reward) and inspect.getdoc(kind)
    assert {*kind.files, *filter(None, [kind.code_option])} <= options.keys()
    assert "endpoint" in options or not isinstance(kind, AsksServer) or not kind.asks
    # as configs hold them
    json.dumps([value for value in options.values() if value is not inspect.Parameter.empty])
    check_rewards({name: RewardConfig(kind=name)})


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("jpeg_size", "quality", 96),
        ("ocr", "width", 0),
        ("style", "every", 0),
        ("dino_similarity", "share", 0.0),
        ("dino_similarity", "share", 1.5),
        ("vlm_judge", "image_size", 0),
        ("vlm_judge", "max_tokens", 0),
        ("vlm_judge", "form", "stars"),
        ("local_vlm_judge", "form", "choice"),
        ("pairwise_vlm", "form", "edit"),
        ("pairwise_vlm", "pairs", 0),
        ("hpsv2", "batch_size", 0),
        ("hpsv2", "batch_size", "8"),
        ("hpsv2", "dtype", "float64"),
    ],
)
def test_an_option_out_of_its_bounds_is_refused_before_anything_is_loaded(kind, option, value):
    with pytest.raises(
        UserError, match=rf"rewards\.it\.options\.{option}: Input should be .*got {value!r}"
    ):
        check_rewards({"it": RewardConfig(kind=kind, options={option: value})})


@pytest.mark.parametrize("name", REWARDS)
def test_the_table_of_the_docs_says_what_a_class_declares(name):
    kind, row = KINDS[name], ROWS[name]
    assert kind.upstream in row and kind.licence in row
    for option, value in defaults_of(kind).items():
        if option == "path" and (option in kind.files and value is not None):
            assert (value if isinstance(value, str) else "`path=`") in row, option
    assert not kind.libraries or f"`pip install {' '.join(kind.libraries)}`" in row
    cost = cost_of_reward(RewardConfig(kind=name, options=NEEDED.get(name, {})), "cuda")
    if cost is not None and cost.bytes > 2**25:  # shown with one digit
        assert re.search(rf"{cost.bytes / 2**30:.1f}\b", row)
    assert ("bfloat16" in row) == (cost is not None and cost.dtype == "bfloat16")


def test_the_page_lists_the_rewards_that_have_a_gradient_and_no_others():
    (listed,) = re.findall(r"`algorithm.name=refl` needs them: (.*), and yours", PAGE)
    assert set(re.findall(r"`(\w+)`", listed)) == {
        name for name, kind in KINDS.items() if kind.differentiable
    }


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
    file = tmp_path / "warmth.py"
    file.write_text(SOURCE)
    plugins.allow(str(file))
    return f"{file}:Warmth"


def test_a_reward_outside_the_package_is_planned_and_advised_by_its_declaration(warmth):
    entry = RewardConfig(kind=warmth, options={"path": "weights"})
    cost = cost_of_reward(entry, "cuda")
    assert (cost.bytes, cost.flops, cost.device, cost.dtype) == (4 * 1004, 6, "cuda", "float32")
    half = cost_of_reward(
        RewardConfig(
            kind=warmth, options={"path": "weights", "dtype": "bfloat16", "device": "cpu"}
        ),
        "cuda",
    )
    assert (half.bytes, half.device) == (2 * 1004, "cpu")
    config = load_config(
        "scenes", [f"rewards.warm.kind={warmth}", "rewards.warm.options.path=weights"]
    )
    advice = overrides_of(list(for_memory(config, 1)))
    assert {"rewards.warm.options.device=cpu", "rewards.warm.options.dtype=bfloat16"} <= set(advice)


@pytest.mark.parametrize("name", ["hpsv3", "geneval"])
def test_advice_knows_every_reward_with_weights(name):
    config = load_config("scenes", [f"rewards.{name}=1"])
    advice = overrides_of(list(for_memory(config, 1)))
    assert f"rewards.{name}.options.device=cpu" in advice
    assert (f"rewards.{name}.options.dtype=bfloat16" in advice) == (name == "geneval")


def test_a_reward_outside_the_package_is_checked_before_anything_is_loaded(
    warmth, tmp_path, monkeypatch
):
    (tmp_path / "p.txt").write_text("a blue circle\n")
    path, prompts = f"rewards.warm.options.path={tmp_path}", f"prompts.train={tmp_path}/p.txt"

    def refused(fact, *more):
        with pytest.raises(UserError, match=rf"rewards\.warm.*{fact}"):
            check(load_config("scenes", [f"rewards.warm.kind={warmth}", *more]))

    refused("options.path is missing")
    refused(r"options\.path: .* has no warmth\.pt; it holds .*warmth\.py", path)
    torch.save({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, tmp_path / "warmth.pt")
    check(load_config("scenes", [f"rewards.warm.kind={warmth}", path]))
    refused(
        r"options\.dtype: .*'float32', 'float16' or 'bfloat16', got 'float64'",
        path,
        "rewards.warm.options.dtype=float64",
    )
    refused("none of 1 prompts has the word red", path, prompts)
    monkeypatch.setattr(plugins.load(warmth), "libraries", ("no_such_library",))
    refused("pip install no_such_library", path)


def test_a_reward_outside_the_package_trains_and_judges(warmth, tmp_path):
    torch.save(
        {"weight": torch.tensor([[1.0, -0.5, -0.5]]), "bias": torch.zeros(1)},
        tmp_path / "warmth.pt",
    )
    (tmp_path / "p.txt").write_text("a red circle\ntwo red squares\n")
    small = [
        "algorithm.group_size=2",
        "sampling.num_steps=6",
        "trainer.prompts_per_iteration=1",
        "evaluation.num_prompts=2",
    ]
    small += [f"{key}={tmp_path}/p.txt" for key in ("prompts.train", "evaluation.prompts")]
    for name in ("rewards.warm", "evaluation.rewards.judge"):
        small += [f"{name}.kind={warmth}", f"{name}.options.path={tmp_path}"]
    config = load_config("scenes", small)
    trainer = build(Request(config=config, notify=lambda message: None))
    assert any("warm" in key for key in trainer.iterate())
    evaluation = trainer.score_heldout()
    assert (
        torch.equal(evaluation.scores["warm"], evaluation.scores["judge"])
        and evaluation.right is not None
    )
    assert tmp_path.name in contents_of(config, ["a"], ["b"], {})["rewards.warm"]
    assert build_rewards(config.rewards)["warm"].name == "Warmth"
