"""GenEval: upstream's scoring on recorded cases, transformers' detectors with tiny random weights,
malformed tasks."""

import itertools
import json

import numpy as np
import pytest
import torch
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    ResNetConfig,
    SwinConfig,
)

from g2rpo.core import plugins
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.images import to_pil, to_uint8
from g2rpo.rewards.catalogue import RewardConfig, build_rewards, check_rewards
from g2rpo.rewards.geneval import Colours, GenEval, TransformersDetector
from g2rpo.rewards.geneval_scoring import Detection, Task
from tests.rewards.geneval_cases import CASES, CLASSES, case, read, see
from tests.rewards.learned import oracle
from tests.support.pictures import noise
from tests.support.tables import rows
from tests.support.tolerances import near, network, rounding


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


def found_in(boxes, masks):
    return [
        Detection(name, float(row[4]), tuple(row[:4]), torch.from_numpy(mask) if masks else None)
        for name in CLASSES
        for row, mask in zip(boxes[name], masks[name] if masks else boxes[name], strict=True)
    ]


def test_scores_are_upstreams():
    """End to end: thresholds, order, masks, crops, colours, positions, and both scores. The
    likeliest colour is so by .003 or more: no rounding makes another."""
    reward, recorded = GenEval.__new__(GenEval), oracle("geneval")
    reward.batch_size, reward.colours, reward.labels = 8, Colours(SmallCLIP()), set()
    scores = {"correct": [], "partial": []}
    for seed in range(CASES):
        pixels, metadata, boxes, masks = case(seed)
        found = found_in(boxes, masks)
        reward.detector = lambda images, found=found: [found]
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
        for reward.mode, own in scores.items():
            own.append(reward(image, [Prompt("x", metadata=metadata)]).item())
    assert scores["correct"] == recorded["correct"]
    np.testing.assert_allclose(scores["partial"], recorded["partial"], **rounding(1))
    assert 0.2 < sum(recorded["correct"]) / CASES < 0.8


# --- detectors ------------------------------------------------------------------------------------

LABELS = {0: "cat", 1: "mouse", 2: "diningtable"}
NAMES = {"id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}, "num_queries": 6}


def detr():
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"],
    )  # fmt: skip
    config = DetrConfig(
        **NAMES, backbone_config=backbone, use_timm_backbone=False, backbone=None, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    return DetrForObjectDetection(config)


def mask2former():
    stages = [f"stage{i}" for i in (1, 2, 3, 4)]
    backbone = SwinConfig(
        embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=2, out_features=stages,
    )  # fmt: skip
    config = Mask2FormerConfig(
        **NAMES, backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=32, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
        dim_feedforward=32,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config)


@pytest.fixture(scope="module", params=[detr, mask2former])
def detector(request, tmp_path_factory):
    """The folder of a tiny random detector, as transformers saves one."""
    folder = tmp_path_factory.mktemp("detector")
    torch.manual_seed(0)
    request.param().save_pretrained(folder)
    kind = "DetrImageProcessor" if request.param is detr else "Mask2FormerImageProcessor"
    size = {"shortest_edge": 48, "longest_edge": 80}
    content = {"image_processor_type": kind, "size": size, "ignore_index": 255}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return str(folder)


def test_a_detector_finds_boxes_inside_the_picture(detector):
    found_by = TransformersDetector(detector, least=0.0)
    assert found_by.labels == set(LABELS.values())
    images = to_uint8(noise(3, 40, 56))
    rows = found_by(images)
    found = [*itertools.chain(*rows)]
    assert len(rows) == 3 and found
    for one in found:
        assert one.label in found_by.labels and 0 <= one.score <= 1
        if one.mask is not None:
            down, across = torch.nonzero(one.mask).T
            edges = (across.min(), down.min(), across.max() + 1, down.max() + 1)
            assert one.box == edges and one.mask.shape == (40, 56)
    alone = itertools.chain(*(found_by(image[None])[0] for image in images))
    for one, other in zip(alone, found, strict=True):
        assert one.label == other.label
        # in pixels, of which there are 56
        assert (*one.box, one.score) == near((*other.box, other.score), network(56))


def one_of(*labels, **more):
    clauses = [{"class": label, "count": 1, **more} for label in labels]
    return Prompt("it", metadata={"include": clauses})


def test_the_reward_runs_on_saved_models(detector, learned, caplog, monkeypatch):
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(GenEval, "threshold", 0.0)
    reward = GenEval(detector=f"~{detector}", clip=learned["pickscore"]["path"])
    asked = one_of("dining table", "computer mouse", color="red")
    scores = reward(noise(4, 40, 56), [asked, Prompt("b"), one_of("unicorn"), asked])
    assert torch.isnan(scores).tolist() == [False, True, True, False]
    assert (scores[[0, 3]] <= 1).all()
    (record,) = [each for each in caplog.records if each.name.startswith("g2rpo")]
    assert "2 of 4 prompts, the first: 'b'" in record.getMessage()


def test_what_is_no_detector_is_refused(learned):
    with pytest.raises(ValueError, match="is a clip"):
        TransformersDetector(learned["pickscore"]["path"])


SOURCE = """
from g2rpo.rewards.geneval_scoring import Detection
class Cats:
    labels = ['cat']
    def __call__(self, images):
        return [[Detection('cat', 1.0, (0, 0, 9, 9))] for _ in images]
"""


def test_a_detector_of_ones_own_needs_to_be_allowed(learned, tmp_path):
    (file := tmp_path / "mine.py").write_text(SOURCE)
    options = {"detector": f"{file}:Cats", "clip": learned["pickscore"]["path"]}
    entry = RewardConfig(kind="geneval", options=options)
    with pytest.raises(UserError, match="code"):
        check_rewards({"it": entry})
    plugins.allow(str(file))
    scores = build_rewards({"it": entry})["it"](noise(2), [one_of("cat"), one_of("dog")])
    assert scores[0] == 1 and scores[1].isnan()


MALFORMED = """
"cat" -> include: Input should be a valid array
[{"count": 1}] -> include.0.class: Field required
[{"class": "cat", "count": 0}] -> include.0.count: .*greater than or equal to 1, got 0
[{"class": "cat", "count": "2"}] -> include.0.count: .*valid integer
[{"class": "cat", "count": 1, "color": "teal"}] -> include.0.color: .*'red', 'orange'.*got 'teal'
[{"class": "cat", "count": 1, "position": ["left of", 0]}] -> include.0.position: 0 is not the number of an
[{"class": "cat", "count": 1}, {"class": "cat", "count": 1, "position": ["near", 0]}] -> include.1.position.0: .*'left of'
"""


@pytest.mark.parametrize(("include", "fact"), rows(MALFORMED))
def test_malformed_metadata_are_named(include, fact):
    with pytest.raises(ValueError, match=fact):
        Task.of({"include": json.loads(include)})
    assert Task.of({}) is None
