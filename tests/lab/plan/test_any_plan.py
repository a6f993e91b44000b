"""Plans of every class of the catalogue, traced without weights, against the model at work."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.lab.plan import trace
from g2rpo.lab.plan.counting import count
from g2rpo.lab.plan.fake_tensors import KnownValues
from g2rpo.lab.plan.trace import trace_calls
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import read_blueprint, shapes_of
from g2rpo.models.catalogue import SPECS
from tests.support.policies import build_on_meta, make
from tests.support.tiny_pipelines import CLASSES, tiny_pipeline
from tests.support.variants import few

FIXED = ("LongCatImagePipeline", "QwenImage21Pipeline", "HunyuanVideo15Pipeline")
"""Those without a choice of max_sequence_length."""
KINDS = [kind for kind in CLASSES if not SPECS[kind].pictured]
"""Those that edit take a megapixel of input, which is too much for a real call here."""
SMALL = [
    *("algorithm.group_size=4", "algorithm.branch_steps=[0]", "algorithm.granularities=[1]"),
    *("trainer.prompts_per_iteration=1", "trainer.micro_batch_size=2", "sampling.batch_size=4"),
    *("sampling.decode_batch_size=1", "policy.max_sequence_length=", "policy.pipeline="),
]


def options(kind):
    side = 48 if kind == "StableDiffusion3Pipeline" else 64  # which is too large for it
    tokens = {} if kind in FIXED else {"max_sequence_length": 24}
    frames = {"num_frames": 5} if SPECS[kind].video else {}
    return {"height": side, "width": side, "guidance_scale": 4.0, **tokens, **frames}


def planned(kind, folder, *more):
    """The config of a run of a tiny model in `folder`, without the processor that transformers
    lacks."""
    pipeline = tiny_pipeline(kind)
    if hasattr(pipeline, "processor"):
        pipeline.processor = None
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    own = [f"policy.{name}={value}" for name, value in options(kind).items()]
    return load_config("scenes", [*SMALL, f"policy.path={folder}", *own, *more])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_the_operations_that_there_are(kind, tmp_path):
    """Those of a shallow model without weights, whose blocks stand for all, are those of the whole;
    guidance doubles rows."""
    c = planned(kind, tmp_path, "sampling.batch_size=1")
    blueprint = read_blueprint(c.policy)
    shapes = shapes_of(build_on_meta(blueprint, c.policy), blueprint)
    policy = make(CLASSES[kind], tiny_pipeline(kind), tuning="full", **options(kind))
    assert shapes == policy.shapes(12) and shapes.rows == (2 if policy.guided else 1)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        policy.velocity(*trace.inputs(policy, shapes, 1))
    traced = trace_calls(blueprint, c, count(c, 1), like_cuda=False)
    assert traced.velocity.roofline.flops == counted.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["ZImagePipeline", "WanPipeline", "QwenImageEditPipeline", "QwenImage21Pipeline"]
)
def test_memory_is_traced_with_gradients_and_decoding(kind, tmp_path):
    c = planned(kind, tmp_path)
    sets = trace_calls(read_blueprint(c.policy), c, count(c, 1), like_cuda=True)
    assert min(sets.training.peak, sets.velocity.peak, sets.decode.peak) > 0


@pytest.mark.parametrize(
    "kind", few(CLASSES, ("ZImagePipeline", "FluxKontextPipeline", "WanPipeline").__contains__)
)
def test_the_grid_of_a_model_without_weights_is_its_own(kind, tmp_path):
    c = planned(kind, tmp_path)
    policy = build_on_meta(read_blueprint(c.policy), c.policy)
    whole = make(CLASSES[kind], tiny_pipeline(kind), **options(kind))
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
        known = mask.sum(1).tolist(), ids.tolist(), ids.t()[1].max().item()
        return known, rows.shape, listed.shape, len(halves)

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
    reads = lambda self, *inputs: next(self.transformer.parameters()).sum().item()  # noqa: E731
    monkeypatch.setattr(DiffusersPolicy, "velocity", reads)
    with pytest.raises(UserError, match="reads values of tensors"):
        trace_calls(read_blueprint(c.policy), c, count(c, 1), like_cuda=True)
