"""`g2rpo serve-reward`: one reward behind HTTP, for a trainer in another environment or on another GPU."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Sequence

from g2rpo.app.events import Emit, Line, Serving, silent
from g2rpo.app.serving import check_address, refused, token_for
from g2rpo.app.stopping import until_ctrl_c
from g2rpo.assembly.rewards import build_rewards
from g2rpo.config.resolve import parse_options
from g2rpo.config.schema import RewardConfig
from g2rpo.core import plugins
from g2rpo.core.errors import UserError


def serve_reward(
    kind: str, options: Sequence[str], *, host: str, port: int, token_env: str | None, emit: Emit = silent
) -> None:
    """Loads reward `kind` with key=value `options` and serves it until interrupted."""
    if any(importlib.util.find_spec(library) is None for library in ("uvicorn", "starlette")):
        raise UserError("serve-reward needs uvicorn and starlette: pip install uvicorn starlette")
    from g2rpo.rewards.server import RewardServer

    token = token_for(host, token_env)
    check_address(host, port)
    if plugins.is_code(kind):
        plugins.allow(kind)
    name = kind.rpartition(":")[2]  # a config's names have no dots, as the path of a file has
    reward = build_rewards({name: RewardConfig(kind=kind, options=parse_options(options))})[name]
    with refused(host, port):
        server = RewardServer(reward, host, port, token=token)
    with server:
        emit(Line(f"{kind} at {server.address}; use it as"))
        given = {"url": server.address, **({"endpoint": {"token_env": token_env}} if token_env else {})}
        overrides = shlex.join([f"rewards.{name}.kind=http", f"rewards.{name}.options={json.dumps(given)}"])
        emit(Serving(f"  {overrides}"))
        with until_ctrl_c():
            server.serve_forever()
        emit(Line("stopped"))
