"""The adapter that a config names, before anything else is loaded."""

from __future__ import annotations

from torch import nn

from g2rpo.core.files import FileDigests
from g2rpo.models import catalogue
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.adapters import Adapter, check_fit
from g2rpo.models.blueprint import on_meta, read_blueprint
from g2rpo.models.hub import find_adapter
from g2rpo.models.options import PolicyConfig


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
