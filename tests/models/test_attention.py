"""`policy.attention`: the same numbers from another kernel, and an answer where it cannot be
had."""

import contextlib
from typing import ClassVar

import pytest
import torch

from g2rpo.core.errors import UserError
from g2rpo.models import pipelines
from g2rpo.models.pipelines import BACKENDS, attention_kinds, choose_attention
from tests.support import policies
from tests.support.tolerances import network


def velocity(directory, **options):
    return policies.velocity(policies.load(directory, "frozen", **options), 0.9, 0.5)


def test_every_kernel_of_this_machine_gives_the_same_velocity(flux_directory, monkeypatch):
    """float32 sums in another order; and the kernel that was asked for is the one that runs."""
    from diffusers.models import attention_dispatch

    exact, ran = velocity(flux_directory), []
    inner = attention_dispatch._AttentionBackendRegistry._backends
    for kind in set(attention_kinds("cpu")) - {"auto"}:
        name = attention_dispatch.AttentionBackendName(BACKENDS[kind])
        monkeypatch.setitem(
            inner,
            name,
            lambda *a, _run=inner[name], _kind=kind, **k: ran.append(_kind) or _run(*a, **k),
        )
        found = velocity(flux_directory, attention=kind)
        torch.testing.assert_close(found, exact, **network(exact.abs().max()))
        assert ran and set(ran) == {kind}
        ran.clear()


def test_diffusers_has_every_kernel_that_can_be_named():
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert set(BACKENDS.values()) <= {name.value for name in AttentionBackendName}


def test_a_model_without_the_choice_says_so(sd3_directory):
    from diffusers import SD3Transformer2DModel

    with pytest.raises(UserError, match=r"SD3Transformer2DModel has no choice of attention"):
        choose_attention(
            SD3Transformer2DModel.from_pretrained(sd3_directory / "transformer"), "math"
        )


class StaleLayout(torch.autograd.Function):
    """Attention whose backward pass reads every output gradient with the strides of the first one,
    as torch 2.11 with cuDNN."""

    strides: ClassVar[list[tuple[int, ...]]] = []

    @staticmethod
    def forward(ctx, *given):
        ctx.save_for_backward(*given)
        return attend(*given)

    @staticmethod
    def backward(ctx, out):
        StaleLayout.strides.append(out.stride())
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            return torch.autograd.grad(
                attend(*given), given, out.as_strided(out.shape, StaleLayout.strides[0])
            )


attend = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize(("kernel", "wrong"), [(attend, False), (StaleLayout.apply, True)])
def test_cudnn_is_refused_where_it_takes_one_gradient_layout_for_another(
    monkeypatch, kernel, wrong
):
    """Measured with torch 2.11.0: benchmarks/results/gpu_nvidia-h200_2026-11-26.json."""
    StaleLayout.strides.clear()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(pipelines, "sdpa_kernel", lambda _backend: contextlib.nullcontext())
    assert pipelines.mixes_layouts(torch.device("cpu")) is wrong
    monkeypatch.setattr(pipelines, "attention_kinds", lambda _device: ["auto", "cudnn"])
    faults = list(pipelines.faults_of_attention("cudnn", "cpu"))
    assert len(faults) == wrong
    assert all("gradients are wrong; take auto or flash" in fault for fault in faults)


def test_no_policy_lets_torch_choose_cudnn(flux_directory):
    """torch 2.11 chooses it on Hopper, before flash attention."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    velocity(flux_directory)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
