"""GenEval: upstream's scoring on recorded cases, transformers' detectors with tiny random weights,
malformed tasks."""

import json

import numpy as np
import pytest
import torch

from g2rpo.assembly.rewards import build_rewards, check_rewards
from g2rpo.config.schema import RewardConfig
from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.core.images import to_pil
from g2rpo.core.types import Prompt
from g2rpo.rewards.geneval import Colours, GenEval, TransformersDetector
from g2rpo.rewards.geneval_scoring import Detection, Task
from tests.rewards.geneval_cases import CASES, CLASSES, case, read, see
from tests.rewards.learned import oracle


class SmallCLIP:
    """The recorded cases' CLIP in the place of a `ClipEncoder`."""

    def crop_as_torchvision(self):
        pass

    def image_features(self, images):
        return unit([see(picture) for picture in to_pil(images)])

    def text_features(self, texts):
        return unit([read(text) for text in texts])


def unit(rows):
    return torch.nn.functional.normalize(torch.from_numpy(np.stack(rows)), dim=-1)


def detections(boxes, masks):
    return [
        Detection(
            name,
            float(row[4]),
            tuple(row[:4]),
            torch.from_numpy(masks[name][index]) if masks else None,
        )
        for name in CLASSES
        for index, row in enumerate(boxes[name])
    ]


def scored(score, cases=CASES):
    """The cases' scores by a GenEval with the small CLIP and a detector that finds what a case
    says."""
    reward, scores = GenEval.__new__(GenEval), []
    reward.mode, reward.batch_size = score, 8
    reward.colours, reward.labels = Colours(SmallCLIP()), set()
    for seed in range(cases):
        pixels, metadata, boxes, masks = case(seed)
        found = detections(boxes, masks)
        reward.detector = lambda images, found=found: [found]
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
        scores.append(reward(image, [Prompt("x", metadata=metadata)]).item())
    return scores


def test_scores_are_upstreams():
    """End to end: thresholds, order, masks, crops, colours, positions, and both scores."""
    recorded = oracle("geneval")
    assert scored("correct") == recorded["correct"]
    np.testing.assert_allclose(scored("partial"), recorded["partial"], atol=1e-6)
    assert 0.2 < sum(recorded["correct"]) / CASES < 0.8


# --- detectors ------------------------------------------------------------------------------------

LABELS = {0: "cat", 1: "mouse", 2: "diningtable"}


def save_detr(folder):
    """A tiny random DETR as transformers saves one."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    sizes = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 1), ("ffn_dim", 32))
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, backbone=None, use_pretrained_backbone=False, d_model=16,
        num_queries=6,
        id2label=LABELS, label2id={name: i for i, name in LABELS.items()}, **sizes, **heads,
    )  # fmt: skip
    torch.manual_seed(0)
    DetrForObjectDetection(config).save_pretrained(folder)
    size = {"shortest_edge": 48, "longest_edge": 80}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "DetrImageProcessor", "size": size})
    )
    return str(folder)


def save_mask2former(folder):
    """A tiny random Mask2Former as transformers saves one."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    features = ["stage1", "stage2", "stage3", "stage4"]
    backbone = SwinConfig(
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=features,
    )
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=32, num_queries=6,
        id2label=LABELS, label2id={name: i for i, name in LABELS.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    content = {
        "image_processor_type": "Mask2FormerImageProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 96},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps({**content, "ignore_index": 255}))
    return str(folder)


@pytest.fixture(scope="module")
def saved(learned, tmp_path_factory):
    root = tmp_path_factory.mktemp("geneval")
    detectors = {
        "detr": save_detr(root / "detr"),
        "mask2former": save_mask2former(root / "mask2former"),
    }
    return {**detectors, "clip": learned["pickscore"]["path"]}


def pictures(count):
    return torch.rand(count, 3, 40, 56, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", ["detr", "mask2former"])
def test_a_detector_finds_boxes_inside_the_picture(saved, name):
    detector = TransformersDetector(saved[name], least=0.0)
    assert detector.labels == set(LABELS.values())
    images = (pictures(3) * 255).to(torch.uint8)
    found = detector(images)
    assert len(found) == 3 and sum(map(len, found)) > 0
    for detection in (each for row in found for each in row):
        assert detection.label in detector.labels and 0 <= detection.score <= 1
        if name == "mask2former":
            left, top, right, bottom = map(int, detection.box)
            assert detection.mask is not None and detection.mask.shape == (40, 56)
            assert detection.mask[top:bottom, left:right].sum() == detection.mask.sum() > 0
            assert detection.mask[top].any() and detection.mask[bottom - 1].any()
            assert detection.mask[:, left].any() and detection.mask[:, right - 1].any()
    alone = [detector(images[i : i + 1])[0] for i in range(3)]
    assert [[each.label for each in row] for row in alone] == [
        [each.label for each in row] for row in found
    ]
    np.testing.assert_allclose(boxes_of(alone), boxes_of(found), atol=1e-3)


class Unsure(GenEval):
    threshold = counting_threshold = 0.0


def boxes_of(rows):
    return [(*each.box, each.score) for row in rows for each in row]


@pytest.mark.parametrize("name", ["detr", "mask2former"])
def test_the_reward_runs_on_saved_models(saved, name, caplog):
    reward = Unsure(detector=saved[name], clip=saved["clip"])
    asked = {
        "include": [
            {"class": "dining table", "count": 1, "color": "red"},
            {"class": "computer mouse", "count": 1},
        ]
    }
    tasks = [
        Prompt("a", metadata=asked),
        Prompt("b"),
        one_of("unicorn"),
        Prompt("d", metadata=asked),
    ]
    scores = reward(pictures(4), tasks)
    assert torch.isnan(scores).tolist() == [False, True, True, False]
    assert (scores[[0, 3]] <= 1).all()
    (record,) = [each for each in caplog.records if each.name.startswith("g2rpo")]
    assert "2 of 4 prompts, the first: 'b'" in record.getMessage()


def one_of(label):
    return Prompt(f"a {label}", metadata={"include": [{"class": label, "count": 1}]})


def test_what_is_no_detector_is_refused(saved):
    with pytest.raises(ValueError, match="is a clip"):
        TransformersDetector(saved["clip"])
    with pytest.raises(UserError, match=r"rewards\.g\.options\.score: .*'partial' or 'correct'"):
        check_rewards({"g": RewardConfig(kind="geneval", options={"score": "strict"})})


def test_a_detector_of_ones_own_needs_to_be_allowed(saved, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from g2rpo.rewards.geneval_scoring import Detection\n"
        "class Cats:\n"
        "    labels = ['cat']\n"
        "    def __call__(self, images):\n"
        "        return [[Detection('cat', 1.0, (0, 0, 9, 9))] for _ in images]\n"
    )
    entry = RewardConfig(
        kind="geneval", options={"detector": f"{file}:Cats", "clip": saved["clip"]}
    )
    with pytest.raises(UserError, match="code"):
        check_rewards({"it": entry})
    plugins.allow(str(file))
    scores = build_rewards({"it": entry})["it"](pictures(2), [one_of("cat"), one_of("dog")])
    assert scores[0] == 1 and scores[1].isnan()


CAT = {"class": "cat", "count": 1}


@pytest.mark.parametrize(
    ("include", "fact"),
    [
        ("cat", "include: Input should be a valid array"),
        ([{"count": 1}], "include.0.class: Field required"),
        ([{**CAT, "count": 0}], "include.0.count: .*greater than or equal to 1, got 0"),
        ([{**CAT, "count": "2"}], "include.0.count: .*valid integer"),
        ([{**CAT, "color": "teal"}], "include.0.color: .*'red', 'orange'.*got 'teal'"),
        (
            [{**CAT, "position": ["left of", 0]}],
            "include.0.position: 0 is not the number of an earlier clause",
        ),
        (
            [CAT, {"class": "dog", "count": 1, "position": ["near", 0]}],
            "include.1.position.0: .*'left of'",
        ),
    ],
)
def test_malformed_metadata_are_named(include, fact):
    with pytest.raises(ValueError, match=fact):
        Task.of({"include": include})
    assert Task.of({}) is None
