"""The adapter that a config names, before anything else is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from g2rpo.assembly.blueprint import on_meta, read_blueprint
from g2rpo.assembly.hub import find_adapter
from g2rpo.config.schema import Config, PolicyConfig
from g2rpo.core.errors import UserError, counted
from g2rpo.core.files import FileDigests
from g2rpo.models import catalogue
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.adapters import Adapter, check_fit, endings


def completed(config: Config, notify: Callable[[str], None] = lambda message: None) -> Config:
    """The config with the rank, alpha and targets of the adapter that it continues, which `notify`
    is told. UserError for an adapter that does not fit the model, or that differs from what is set
    in the config."""
    policy = config.policy
    start = adapter_of(policy)
    if policy.tuning == "full" or start is None:
        return config
    names = [name for name, _ in _transformer(policy).named_modules()]
    own = {
        "lora_rank": start.rank,
        "lora_alpha": start.scale * start.rank,
        "lora_targets": endings(start.layers, names),
    }
    for name, value in own.items():
        if name in policy.model_fields_set and not _agrees(getattr(policy, name), value, names):
            asked = f"policy.{name}={getattr(policy, name)}"
            raise UserError(f"{asked}: the adapter {policy.adapter} has {value}; take it out")
    has = (
        f"rank {start.rank}, alpha {own['lora_alpha']:g} and {counted(len(start.layers), 'module')}"
    )
    notify(f"policy.adapter={policy.adapter}: {has}")
    return config.model_copy(update={"policy": policy.model_copy(update=own)})


def _agrees(mine: object, value: object, names: Collection[str]) -> bool:
    """Whether values are equal, endings of names by what they fit."""
    if not isinstance(mine, list) or not isinstance(value, list):
        return mine == value
    fits = [
        {name for name in names if f".{name}".endswith(tuple(f".{end}" for end in ends))}
        for ends in (mine, value)
    ]
    return fits[0] == fits[1]


def adapter_of(policy: PolicyConfig) -> Adapter | None:
    """The adapter of a config, which fits its model; None if it has none."""
    if (name := policy.adapter) is None:
        return None
    import diffusers

    transformer = _transformer(policy)
    pipeline = getattr(diffusers, read_blueprint(policy).kind, None)
    file, names = find_adapter(name), catalogue.names_of(policy.kind)
    adapter = read_adapter(file, pipeline, transformer, names)
    check_fit(f"policy.adapter={name}", adapter, transformer)
    return adapter


def _transformer(policy: PolicyConfig) -> nn.Module:
    return on_meta(read_blueprint(policy).parts["transformer"])


def digests_of(policy: PolicyConfig) -> dict[str, str]:
    """The digest of a config's adapter, by its key."""
    if policy.adapter is None:
        return {}
    return {"policy.adapter": f"sha256 {FileDigests(None).of(find_adapter(policy.adapter))[:16]}"}
