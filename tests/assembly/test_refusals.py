"""Every pipeline class of the installed diffusers has a policy, or is refused with a reason that is
true of it."""

import inspect

import diffusers
import pytest

from g2rpo.assembly import components, refusals
from g2rpo.core.errors import UserError
from g2rpo.policies.catalogue import SPECS

EVERY = sorted(
    {
        kind.__name__
        for name in dir(diffusers)
        if name.endswith("Pipeline")
        and issubclass(kind := getattr(diffusers, name), diffusers.DiffusionPipeline)
    }
)
TRUE = {
    "it predicts noise": "# learned sigma",
    "it is a consistency model": "SCM",
    "its embeddings are lists by layer": "text_encoder_layers=prompt_layers",
    "its fourth text encoder": "text_encoder_4=text_encoder_4",
    "it perturbs attention": "pag_applied_layers",
    "its guidance has a momentum": "AdaptiveProjectedMixGuidance",
    "its guidance is of predicted pictures": "c_skip * latents + c_out * noise_pred",
    "it keeps keys and values": "reuse cached ref K/V",
    "its frames have times of their own": "ar_step",
    "its sigmas run from 0 to 1": "1000 - t",
    "it draws in sizes of a list": "width, height = self.resolutions[",
    "another model draws tokens": "prior_token_id=",
    "it makes sound": "audio",
    "it makes videos of input pictures": "video",
}
"""What the source of a class must say where a reason begins so; other reasons are read from its
signature."""


def reasons_for(name):
    return list(refusals.reasons(getattr(diffusers, name)))


def test_every_class_is_supported_or_refused_for_a_reason():
    """No reason fits a class that has a policy, so each tells something; and each listed class is
    there."""
    assert len(EVERY) > 200
    assert {name for names in refusals.NAMED.values() for name in names} <= {*EVERY}
    for name in EVERY:
        found, source = (
            reasons_for(name),
            inspect.getsource(inspect.getmodule(getattr(diffusers, name))),
        )
        if name in SPECS:
            assert not found, (name, found)
        for reason in found[:1]:
            assert all(
                text in source for start, text in TRUE.items() if reason.startswith(start)
            ), (name, reason)


DESCRIBABLE = (
    *(
        "BriaPipeline",
        "PRXPipeline",
        "AuraFlowPipeline",
        "NucleusMoEImagePipeline",
        "SkyReelsV2Pipeline",
    ),
    *("SanaVideoPipeline",),
)
"""Classes that `DiffusersPolicy` runs by a description, or would by their source."""
NOT = {
    "LTX2Pipeline": "it makes sound",
    "ErnieImagePipeline": "it has no method prepare_latents,",
    "BriaFiboPipeline": "lists by layer",
    "HiDreamImagePipeline": "its fourth text encoder",
    "HunyuanImagePipeline": "a momentum from step to step",
    "StableDiffusionXLPipeline": "it has no part `transformer`",
    "Ideogram4Pipeline": "it needs unconditional_transformer beside",
    "HunyuanDiTPipeline": "it is made for DDPMScheduler",
    "WanImageToVideoPipeline": "it makes videos of input pictures",
    "FluxFillPipeline": "it takes mask_image, strength",
}


@pytest.mark.parametrize("name", [*DESCRIBABLE, *NOT])
def test_what_could_be_described_is_told_from_what_could_not(name):
    with pytest.raises(UserError) as refused:
        components.check_pipeline("x", name, None)
    message = str(refused.value)
    assert (refusals.OPEN in message) == (name in DESCRIBABLE)
    assert "Did you mean" not in message
    assert NOT.get(name, "") in message
