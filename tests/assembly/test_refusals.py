"""Every pipeline class of the installed diffusers has a policy, or is refused with a reason that is true of it."""

import inspect

import diffusers
import pytest
from diffusers.guiders import AdaptiveProjectedMixGuidance, ClassifierFreeGuidance

from g2rpo.assembly import components, refusals
from g2rpo.core.errors import UserError
from g2rpo.policies.catalogue import SPECS

EVERY = sorted(
    {
        kind.__name__
        for name in dir(diffusers)
        if name.endswith("Pipeline") and issubclass(kind := getattr(diffusers, name), diffusers.DiffusionPipeline)
    }
)
TRUE = {
    refusals._sound: lambda source: "audio" in source.lower(),
    refusals._scheduler: lambda source: "scheduler: FlowMatchEulerDiscreteScheduler" not in source,
    refusals._few_steps: lambda source: "SCM" in source,
    refusals._layers: lambda source: "text_encoder_layers=prompt_layers" in source,
    refusals._encoder: lambda source: "text_encoder_4=text_encoder_4" in source,
    refusals._predicted: lambda source: "c_skip * latents + c_out * noise_pred" in source,
    refusals._cached: lambda source: "reuse cached ref K/V" in source,
    refusals._reversed: lambda source: "1000 - t" in source,
    refusals._sizes: lambda source: "width, height = self.resolutions[" in source,
    refusals._tokens: lambda source: "prior_token_id=" in source,
    refusals._first_frame: lambda source: "image" in source and "video" in source,
}
"""What else the source of a class must say where a kind of reason is given."""


def said_of(name):
    """The kinds of reason that hold for a class."""
    pipeline = refusals.look(name)
    return [kind for kind in refusals.KINDS if kind(pipeline)]


def test_every_class_is_supported_or_refused_for_a_reason():
    """No kind of reason fits a class that has a policy, so each kind tells something."""
    assert len(EVERY) > 200
    for name in EVERY:
        kinds, source = said_of(name), refusals.look(name).source
        if name in SPECS:
            assert not kinds, (name, kinds)
        for kind in kinds[:1]:
            assert TRUE.get(kind, bool)(source), (name, kind)


def test_no_class_is_refused_for_what_another_one_does():
    """HunyuanVideo-1.5 was, for HunyuanImage's momentum: classes whose guider has one, and no others."""
    momentum = "adaptive_projected_guidance_momentum"
    assert inspect.signature(AdaptiveProjectedMixGuidance).parameters[momentum].default is not None
    assert momentum not in inspect.signature(ClassifierFreeGuidance).parameters
    remembers = [name for name in EVERY if refusals._momentum in said_of(name)]
    assert remembers == ["HunyuanImagePipeline", "HunyuanImageRefinerPipeline"]


DESCRIBABLE = (
    *("BriaPipeline", "PRXPipeline", "AuraFlowPipeline", "NucleusMoEImagePipeline", "SkyReelsV2Pipeline"),
    *("SanaVideoPipeline",),
)
"""Classes that `DiffusersPolicy` runs by a description, or would by their source."""
NOT = {
    "LTX2Pipeline": refusals._sound,
    "ErnieImagePipeline": refusals._interface,
    "BriaFiboPipeline": refusals._layers,
    "HiDreamImagePipeline": refusals._encoder,
    "StableDiffusionXLPipeline": refusals._network,
    "WanImageToVideoPipeline": refusals._first_frame,
    "FluxFillPipeline": refusals._further,
}


@pytest.mark.parametrize("name", [*DESCRIBABLE, *NOT])
def test_what_could_be_described_is_told_from_what_could_not(name):
    with pytest.raises(UserError) as refused:
        components.check_pipeline("x", name, None)
    message = str(refused.value)
    assert (refusals.OPEN in message) == (name in DESCRIBABLE)
    assert "Did you mean" not in message
    assert said_of(name)[:1] == ([NOT[name]] if name in NOT else [])
