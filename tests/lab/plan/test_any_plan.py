"""Plans of every class of the catalogue, traced without weights, against the model at work."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from g2rpo.assembly.blueprint import build_on_meta, read_blueprint, shapes_of
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError
from g2rpo.lab.plan import trace
from g2rpo.lab.plan.counting import count
from g2rpo.lab.plan.known import KnownValues
from g2rpo.lab.plan.trace import trace_calls
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.catalogue import SPECS
from tests.support.policies import make
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.variants import few

FIXED = ("LongCatImagePipeline", "QwenImage21Pipeline", "HunyuanVideo15Pipeline")
"""Those without a choice of max_sequence_length."""
KINDS = [kind for kind in CLASSES if not SPECS[kind].pictured]
"""Those that edit take a megapixel of input, which is too much for a real call here."""


SMALL = [
    "algorithm.group_size=4",
    "algorithm.branch_steps=[0]",
    "algorithm.granularities=[1]",
    "trainer.prompts_per_iteration=1",
    "trainer.micro_batch_size=2",
    "sampling.batch_size=4",
    "sampling.decode_batch_size=1",
]


SIZE = {"StableDiffusion3Pipeline": 48}
"""Of tiny models that cannot draw 64 pixels."""


def planned(kind, folder, *more):
    """A tiny model's folder, without the processor that transformers lacks, and the config of a run
    of it."""
    pipeline = tiny_pipeline(kind)
    if hasattr(pipeline, "processor"):
        pipeline.processor = None
    pipeline.save_pretrained(folder, safe_serialization=True)
    size = SIZE.get(kind, 64)
    options = [
        f"height={size}",
        f"width={size}",
        "max_sequence_length=",
        "pipeline=",
        f"path={folder}",
        "guidance_scale=4",
    ]
    options += ["max_sequence_length=24"] * (kind not in FIXED)
    options += ["num_frames=5"] if SPECS[kind].video else []
    return load_config("scenes", [*SMALL, *(f"policy.{option}" for option in options), *more])


@pytest.mark.parametrize(
    "kind", few(KINDS, ("ZImagePipeline", "WanPipeline", "QwenImage21Pipeline").__contains__)
)
def test_a_plan_counts_the_operations_that_there_are(kind, tmp_path):
    """Those of a shallow model without weights, whose blocks stand for all, are those of the whole;
    guidance doubles rows."""
    c = planned(kind, tmp_path, "sampling.batch_size=1")
    blueprint = read_blueprint(c.policy)
    shapes = shapes_of(build_on_meta(blueprint, c.policy), blueprint)
    options = {
        "height": SIZE.get(kind, 64),
        "width": SIZE.get(kind, 64),
        "tuning": "full",
        "guidance_scale": 4.0,
    }
    options |= {} if kind in FIXED else {"max_sequence_length": 24}
    policy = make(
        CLASSES[kind],
        tiny_pipeline(kind),
        **options,
        **({"num_frames": 5} if SPECS[kind].video else {}),
    )
    assert shapes == policy.shapes(12) and shapes.rows == (2 if policy.guided else 1)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        policy.velocity(*trace.inputs(policy, shapes, 1))
    traced = trace_calls(blueprint, c, count(c, 1), like_cuda=False)
    assert traced.velocity.roofline.flops == counted.get_total_flops()


@pytest.mark.parametrize(
    "kind",
    few(
        ["ZImagePipeline", "WanPipeline", "QwenImageEditPipeline", "QwenImage21Pipeline"],
        "WanPipeline".__eq__,
    ),
)
def test_memory_is_traced_with_gradients_and_decoding(kind, tmp_path):
    c = planned(kind, tmp_path)
    sets = trace_calls(read_blueprint(c.policy), c, count(c, 1), like_cuda=True)
    assert sets.training.peak > 0 and sets.velocity.peak > 0 and sets.decode.peak > 0


@pytest.mark.parametrize(
    "kind", few(CLASSES, ("ZImagePipeline", "FluxKontextPipeline", "WanPipeline").__contains__)
)
def test_the_grid_of_a_model_without_weights_is_its_own(kind, tmp_path):
    c = planned(kind, tmp_path)
    policy = build_on_meta(read_blueprint(c.policy), c.policy)
    options = c.policy.model_dump(
        include={"height", "width", "max_sequence_length", "guidance_scale", "num_frames"}
    )
    whole = make(
        CLASSES[kind],
        tiny_pipeline(kind),
        **{name: value for name, value in options.items() if value is not None},
    )
    assert torch.equal(policy.grid(5), whole.grid(5))


def test_known_values_are_those_of_real_tensors_and_no_others():
    def read(tokens, weight):
        mask = torch.zeros(4, 6, dtype=torch.bool)
        mask[:, :tokens] = True
        ids = torch.arange(6).repeat(4, 1)
        ids[mask] = torch.tensor([7, 8] * 4)
        rows = weight[mask]  # as many as are true
        listed = torch.tensor([[weight.sum(), 1.0], (tokens, 2)])  # of which some are known
        halves = torch.repeat_interleave(torch.ones(3), mask.sum(0)[:3])
        return (
            mask.sum(1).tolist(),
            ids.tolist(),
            tuple(rows.shape),
            listed.shape,
            len(halves),
            ids.t()[1].max().item(),
        )

    expected = read(2, torch.rand(4, 6, 5))
    with FakeTensorMode():
        weight = torch.rand(4, 6, 5)
        with KnownValues():
            assert read(2, weight) == expected
            written = torch.zeros(3)
            part = written[1:]
            part += weight[0, 0, :2]
            for unknown in (written, part, torch.rand(3)):  # a view's content is its base's
                with pytest.raises(DataDependentOutputException):
                    unknown.sum().item()


def test_a_model_that_cannot_be_planned_is_one_message(tmp_path, monkeypatch):
    c = planned("ZImagePipeline", tmp_path)
    monkeypatch.setattr(
        DiffusersPolicy,
        "velocity",
        lambda self, *inputs: next(self.transformer.parameters()).sum().item(),
    )
    with pytest.raises(UserError, match="reads values of tensors"):
        trace_calls(read_blueprint(c.policy), c, count(c, 1), like_cuda=True)
