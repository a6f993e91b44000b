"""Why a pipeline class of the installed diffusers has no policy, by its constructor and its call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from g2rpo.core.errors import did_you_mean

FLOW = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler")
"""Schedulers of flows; the latter two are for other models as well."""
FURTHER = re.compile(
    "control(net|_image|_video)|mask(_image)?|pose_video|strength|video|conditions|cond_image|reference_images"
)
"""Inputs of pipelines besides a prompt and input pictures."""
OPEN = "it is not declared yet; docs/extending.md shows how to declare one in a file of your own"


@dataclass(frozen=True)
class Pipeline:
    """A pipeline class: its parts and the arguments of its call by name, with their annotations."""

    kind: type
    parts: Mapping[str, str]
    call: Mapping[str, str]

    @property
    def source(self) -> str:
        module = inspect.getmodule(self.kind)
        return inspect.getsource(module) if module else ""


def _sound(p: Pipeline) -> str | None:
    names = (p.kind.__module__.removeprefix("diffusers.pipelines."), *p.parts, *p.call)
    return "it makes sound, for which nothing here is made" if re.search("audio|sound|vocoder", " ".join(names)) else None


def _network(p: Pipeline) -> str | None:
    return None if "transformer" in p.parts else "it has no part `transformer`, and no other is trained here"


def _networks(p: Pipeline) -> str | None:
    optional = getattr(p.kind, "_optional_components", ())
    others = [name for name in p.parts if "transformer" in name and name != "transformer" and name not in optional]
    return f"it needs {' and '.join(others)} beside its transformer, which alone could be trained" if others else None


def _scheduler(p: Pipeline) -> str | None:
    named = re.findall(r"\w+Schedulers?\b", p.parts.get("scheduler", ""))
    other = named and not {*FLOW} & {*named}
    return f"it is made for {' or '.join(named)}, and policies walk flows as {', '.join(FLOW)} do" if other else None


def _noise(p: Pipeline) -> str | None:
    return "it predicts noise, and is no flow model" if p.kind.__name__.startswith("PixArtAlpha") else None


def _few_steps(p: Pipeline) -> str | None:
    return "it is a consistency model, made for one to four steps" if "intermediate_timesteps" in p.call else None


def _layers(p: Pipeline) -> str | None:
    return "its embeddings are lists by layer instead of by prompt" if "prompt_layers" in p.source else None


def _encoder(p: Pipeline) -> str | None:
    unknown = "text_encoder_4" in p.parts
    without = "and diffusers computes the experts in its blocks without gradient"
    return f"its fourth text encoder is not in its folder, {without}" if unknown else None


def _further(p: Pipeline) -> str | None:
    names = [name for name in (*p.parts, *p.call) if FURTHER.fullmatch(name)]
    return f"it is made for more than prompts and input pictures: it takes {', '.join(names)}" if names else None


def _first_frame(p: Pipeline) -> str | None:
    continues = "image" in p.call and {"num_frames", "frames"} & {*p.call}
    return "it makes videos of input pictures, and policies make videos of prompts alone" if continues else None


def _interface(p: Pipeline) -> str | None:
    lacks = [f"method {name}" for name in ("encode_prompt", "prepare_latents") if not hasattr(p.kind, name)]
    lacks += [f"argument {name}" for name in ("prompt", "height") if name not in p.call]
    lacks += [f"part {name}" for name in ("vae",) if name not in p.parts]
    return f"it has no {' and no '.join(lacks)}, by which policies run pipelines" if lacks else None


def _perturbed(p: Pipeline) -> str | None:
    return (
        "it perturbs attention for guidance; the class without PAG is the same model"
        if "pag_applied_layers" in p.parts
        else None
    )


def _momentum(p: Pipeline) -> str | None:
    memory = "AdaptiveProjectedMix" in p.parts.get("guider", "")
    return "its guidance has a momentum from step to step, so its velocity depends on the steps before" if memory else None


def _predicted(p: Pipeline) -> str | None:
    return "its guidance is of predicted pictures instead of velocities" if "c_skip" in p.source else None


def _cached(p: Pipeline) -> str | None:
    kept = p.kind.__name__.endswith("KVPipeline")
    return "it keeps keys and values of its first step, so its velocity depends on the steps before" if kept else None


def _frames(p: Pipeline) -> str | None:
    return "its frames have times of their own" if "ar_step" in p.call else None


def _reversed(p: Pipeline) -> str | None:
    return "its sigmas run from 0 to 1, against the flow" if "reversed timesteps" in p.source else None


def _sizes(p: Pipeline) -> str | None:
    own = "self.resolutions[" in p.source
    return "it draws in sizes of a list of its own, whatever height and width are" if own else None


def _tokens(p: Pipeline) -> str | None:
    drawn = hasattr(p.kind, "generate_prior_tokens")
    return "another model draws tokens for each prompt, which are an input beside its embeddings" if drawn else None


KINDS: tuple[Callable[[Pipeline], str | None], ...] = (
    *(_sound, _network, _networks, _scheduler, _noise, _few_steps, _layers, _encoder, _further, _first_frame, _interface),
    *(_perturbed, _momentum, _predicted, _cached, _frames),
    *(_reversed, _sizes, _tokens),
)


def why(name: str, known: Iterable[str]) -> str:
    """Why the pipeline class `name` is not among the `known` ones, which have a policy."""
    if (pipeline := look(name)) is None:
        return f"the installed diffusers has no such class.{did_you_mean(name, known)}"
    said = next((said for kind in KINDS if (said := kind(pipeline))), OPEN)
    return f"{said}. docs/models.md lists the classes that have one."


def look(name: str) -> Pipeline | None:
    """A pipeline class of diffusers; None if there is none of this name."""
    import diffusers

    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        return None
    call = inspect.signature(kind.__call__).parameters if callable(getattr(kind, "__call__", None)) else {}  # noqa: B004
    init = inspect.signature(kind).parameters
    parts, arguments = ({each.name: str(each.annotation) for each in table.values()} for table in (init, call))
    return Pipeline(kind, parts, arguments)
