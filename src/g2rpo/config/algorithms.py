"""Algorithms in a config: any class by name, with its fields validated.

A name is a built-in's, an installed package's or the user's own code (`plugins`). A config that is
only displayed, in a report for example, does not need that code: its algorithm is then a
`Mentioned` one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import (
    BeforeValidator,
    Discriminator,
    PlainSerializer,
    Tag,
    TypeAdapter,
    ValidationInfo,
    create_model,
)
from pydantic_core import PydanticCustomError

from g2rpo.algorithms.epg import EPG
from g2rpo.algorithms.flow_grpo import (
    DanceGRPO,
    FlowCPS,
    FlowDPPO,
    FlowGRPO,
    FlowGRPOFast,
    GRPOGuard,
    MixGRPO,
    MixGRPOFlash,
    TempFlowGRPO,
)
from g2rpo.algorithms.forward_process import AWM, DGPO, DiffusionNFT
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.algorithms.g2rpo_variants import EGRPO, PaveGRPO
from g2rpo.algorithms.reward_gradient import FDFO, OPSD, ReFL
from g2rpo.algorithms.self_opd import SelfOPD
from g2rpo.core import plugins
from g2rpo.core.contracts import name_of
from g2rpo.core.errors import UserError
from g2rpo.core.plugins import PYTHON, Mentioned, recorded
from g2rpo.core.rewards import Reward
from g2rpo.core.types import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {  # to add one: a file in algorithms/ and its name here
    kind.name: kind
    for kind in (
        GranularGRPO, FlowGRPO, FlowGRPOFast, FlowCPS, GRPOGuard, DanceGRPO, MixGRPO, MixGRPOFlash, TempFlowGRPO,
        FlowDPPO, PaveGRPO, EGRPO, DiffusionNFT, AWM, DGPO, EPG, FDFO, ReFL, OPSD,
        SelfOPD,
    )
}  # fmt: skip
BUILTIN = {name: f"{kind.__module__}:{kind.__qualname__}" for name, kind in ALGORITHMS.items()}
OTHER = "other"
METHODS = ("plans", "advantages", "examples", "loss")
_names: dict[type, str] = {}  # the name by which a class from outside was found


def algorithm_class(name: str) -> type[Algorithm]:
    """The class called `name`. UserError for an unknown name, code that was not allowed, and a
    class that is no algorithm."""
    kind = plugins.find_class("algorithms", name, BUILTIN)
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise UserError(
            f"algorithm.name={name}: should be a dataclass, whose fields are the hyper-parameters"
        )
    known = {each.name for each in dataclasses.fields(kind)}
    if "__dataclass_params__" not in vars(kind) and (bare := _annotated(kind)):
        raise UserError(
            f"algorithm.name={name}: {', '.join(bare)} would be no setting; write @dataclass(frozen=True) above the class"
        )
    if missing := [each for each in METHODS if not callable(getattr(kind, each, None))] + [
        "group_size"
    ] * ("group_size" not in known):
        raise UserError(
            f"algorithm.name={name}: is no algorithm, it lacks {', '.join(missing)}; inherit from "
            "g2rpo.core.types.Algorithm or from g2rpo.algorithms.policy_gradient.PolicyGradient"
        )
    if name not in ALGORITHMS:
        _names[kind] = name
    return kind  # type: ignore[return-value]


def _annotated(kind: type) -> list[str]:
    """What a class itself annotates as `dataclass` reads it: class variables are no fields."""
    own = inspect.get_annotations(kind)
    return [name for name, annotation in own.items() if "ClassVar" not in str(annotation)]


def config_name(algorithm: Any) -> str:
    """The name of an algorithm in configs."""
    if isinstance(algorithm, Mentioned):
        return algorithm.name
    kind = type(algorithm)
    built_in = str(getattr(kind, "name", ""))
    if ALGORITHMS.get(built_in) is kind:  # a subclass inherits the name but is another algorithm
        return built_in
    return _names.get(kind, PYTHON)


def title_of(algorithm: Any) -> tuple[str, str]:
    """The title of an algorithm and its arXiv id (may be empty)."""
    kind = type(algorithm)
    own = algorithm.name.rpartition(":")[2] if kind is Mentioned else kind.__name__
    return vars(kind).get("title") or own, vars(kind).get("paper", "")


def with_name(value: Any) -> Any:
    """A mapping with the algorithm's name added if it has none: G2RPO's."""
    return {"name": GranularGRPO.name, **value} if isinstance(value, Mapping) else value


def tag(value: Any) -> str:
    """The built-in algorithm that a mapping names; OTHER for code, and for objects."""
    name = with_name(value)["name"] if isinstance(value, Mapping) else OTHER
    return name if isinstance(name, str) and name in ALGORITHMS else OTHER


def other(value: Any, info: ValidationInfo) -> Any:
    """The algorithm of a mapping that names code; objects are passed through. The context
    {"mention": True} takes code that may not be imported for a `Mentioned` algorithm."""
    if value is None or isinstance(value, str | int | float | list):
        raise PydanticCustomError("dict_type", "should be a group of settings")
    if not isinstance(value, Mapping):
        return value
    name, fields = str(value["name"]), {key: entry for key, entry in value.items() if key != "name"}
    if name == PYTHON:
        return Mentioned(name, fields)
    try:
        kind = algorithm_class(name)
    except UserError:
        if (info.context or {}).get("mention") and plugins.is_code(name):
            return Mentioned(name, fields)
        raise
    return _adapter(kind).validate_python({"it": fields}).it


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    """Validates the fields of a dataclass as strictly as the rest of a config."""
    from g2rpo.core.plain import Section

    return TypeAdapter(create_model("Fields", __base__=Section, it=(kind, ...)))


def dump(algorithm: Any) -> dict[str, Any]:
    """An algorithm as plain data, with its name."""
    return {"name": config_name(algorithm), **recorded(algorithm)}


def faults_of_gradients(
    algorithm: Algorithm,
    rewards: Mapping[str, Reward | type[Reward]],
    weights: Mapping[str, float],
    scored_by_frames: frozenset[str] = frozenset(),
) -> Iterator[str]:
    """Of an algorithm that learns from the gradient of `rewards` (or their classes), of which some
    have none. One of weight 0 needs none; that of chosen frames of a clip has none, nor have those
    that are named in `scored_by_frames`.

    It is asked of the rewards' classes before anything is loaded, and of the rewards when a trainer
    is built: only then is it known of some of the user's own.
    """
    if not algorithm.uses_rewards:
        return
    having = {
        name: reward.differentiable and reward.frames is None and name not in scored_by_frames
        for name, reward in rewards.items()
        if weights[name]
    }
    without = [name for name, has_one in having.items() if not has_one]
    if not without:
        return
    others = [name for name, has_one in having.items() if has_one]
    beside = f" (but {', '.join(others)})" if others else ""
    needing = " and ".join(name for name, kind in ALGORITHMS.items() if kind.uses_rewards)
    yield (
        f"algorithm {name_of(algorithm)} learns from the gradient of rewards, and these have none: {', '.join(without)}"
        f"{beside}; take them out, or another algorithm: all but {needing} need no gradient. docs/rewards.md lists the "
        "rewards that have one, of pictures"
    )


if TYPE_CHECKING:
    AnyAlgorithm = Algorithm
else:
    AnyAlgorithm = Annotated[
        Union[  # of a tuple
            (
                *(Annotated[kind, Tag(name)] for name, kind in ALGORITHMS.items()),
                Annotated[Any, BeforeValidator(other), Tag(OTHER)],
            )
        ],
        Discriminator(tag),
        PlainSerializer(dump),
    ]
"""An instance of any algorithm's class; in YAML its name and fields."""
