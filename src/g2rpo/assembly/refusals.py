"""Why a pipeline class of the installed diffusers has no policy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping

from g2rpo.core.errors import did_you_mean

NAMED: Mapping[str, tuple[str, ...]] = {
    "it predicts noise, and is no flow model": ("PixArtAlphaPipeline",),
    "it is a consistency model, made for one to four steps": (
        "SanaSprintPipeline",
        "SanaSprintImg2ImgPipeline",
    ),
    "its embeddings are lists by layer instead of by prompt": (
        "BriaFiboPipeline",
        "BriaFiboEditPipeline",
    ),
    "its fourth text encoder is not in its folder, and diffusers computes the experts in its blocks without gradient": (
        "HiDreamImagePipeline",
    ),
    "it perturbs attention for guidance; the class without PAG is the same model": (
        "SanaPAGPipeline",
        "StableDiffusion3PAGPipeline",
    ),
    "its guidance has a momentum from step to step, so its velocity depends on the steps before": (
        "HunyuanImagePipeline",
        "HunyuanImageRefinerPipeline",
    ),
    "its guidance is of predicted pictures instead of velocities": ("Cosmos2TextToImagePipeline",),
    "it keeps keys and values of its first step, so its velocity depends on the steps before": (
        "Flux2KleinKVPipeline",
    ),
    "its frames have times of their own": ("SkyReelsV2DiffusionForcingPipeline",),
    "its sigmas run from 0 to 1, against the flow": ("MochiPipeline",),
    "it draws in sizes of a list of its own, whatever height and width are": (
        "Kandinsky5T2IPipeline",
        "Kandinsky5I2IPipeline",
    ),
    "another model draws tokens for each prompt, which are an input beside its embeddings": (
        "GlmImagePipeline",
    ),
}
"""Reasons that a class's signature does not say, with the classes."""
FLOW = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler")
"""Schedulers of flows; the latter two are for other models as well."""
FURTHER = re.compile(
    "control(net|_image|_video)|mask(_image)?|pose_video|strength|video|conditions|cond_image|reference_images"
)
"""Inputs of pipelines besides a prompt and input pictures."""
OPEN = "it is not declared yet; docs/extending.md shows how to declare one in a file of your own"


def why(name: str, known: Iterable[str]) -> str:
    """Why the pipeline class `name` is not among the `known` ones, which have a policy."""
    import diffusers

    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        return f"the installed diffusers has no such class.{did_you_mean(name, known)}"
    return f"{next(reasons(kind), OPEN)}. docs/models.md lists the classes that have one."


def reasons(kind: type) -> Iterator[str]:
    """All reasons against a pipeline class: those listed with its name, and those by its parts and
    its call."""
    yield from (reason for reason, classes in NAMED.items() if kind.__name__ in classes)
    parts, call = inspect.signature(kind).parameters, inspect.signature(kind.__call__).parameters
    module = kind.__module__.removeprefix("diffusers.pipelines.")
    if re.search("audio|sound|vocoder", " ".join([module, *parts, *call])):
        yield "it makes sound, for which nothing here is made"
    if "transformer" not in parts:
        yield "it has no part `transformer`, and no other is trained here"
    needed = {name for name in parts if "transformer" in name} - {
        "transformer",
        *getattr(kind, "_optional_components", ()),
    }
    if needed:
        yield f"it needs {' and '.join(sorted(needed))} beside its transformer, which alone could be trained"
    schedulers = (
        re.findall(r"\w+Schedulers?\b", str(parts["scheduler"].annotation))
        if "scheduler" in parts
        else []
    )
    if schedulers and not {*FLOW} & {*schedulers}:
        yield f"it is made for {' or '.join(schedulers)}, and policies walk flows as {', '.join(FLOW)} do"
    if further := [name for name in (*parts, *call) if FURTHER.fullmatch(name)]:
        yield f"it is made for more than prompts and input pictures: it takes {', '.join(further)}"
    if "image" in call and {"num_frames", "frames"} & call.keys():
        yield "it makes videos of input pictures, and policies make videos of prompts alone"
    lacks = [
        f"method {name}" for name in ("encode_prompt", "prepare_latents") if not hasattr(kind, name)
    ]
    lacks += [f"argument {name}" for name in ("prompt", "height") if name not in call]
    lacks += ["part vae"] if "vae" not in parts else []
    if lacks:
        yield f"it has no {' and no '.join(lacks)}, by which policies run pipelines"
