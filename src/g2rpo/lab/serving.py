"""Commands that serve: the token and the address, which are checked before anything is loaded; what
pages need of Gradio; and `g2rpo serve-reward`, one reward behind HTTP, for a trainer in another
environment or on another GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from g2rpo.config.resolve import parse_options
from g2rpo.core import plugins
from g2rpo.core.devices import pick_device
from g2rpo.core.errors import UserError, placed
from g2rpo.core.events import Emit, Line, Serving, silent
from g2rpo.core.http import host_of, is_loopback, token_from
from g2rpo.core.stopping import until_ctrl_c
from g2rpo.rewards.catalogue import RewardConfig, build_rewards
from g2rpo.train.checks import check_rewards_alone

SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Address:
    """Where a page is served, and to whom: to this machine, to those who know a `token`, or to
    those whom a proxy lets in that is asked by the name `public_host`."""

    host: str
    port: int
    token: str | None = None
    public_host: str | None = None

    @classmethod
    def checked(
        cls, host: str, port: int, token_env: str | None, public_host: str | None = None
    ) -> Address:
        """UserError for a `host` that others reach if neither a token nor a name of a proxy is
        given, and for a name that is none."""
        if public_host is not None and (not host_of(public_host) or "/" in public_host):
            raise UserError(f"--public-host {public_host}: a name such as user-space.hf.space")
        token = token_for("localhost" if public_host else host, token_env)
        return cls(host, port, token, public_host)

    @property
    def local(self) -> bool:
        """Whether only this machine's own names may be asked for."""
        return self.token is None and is_loopback(self.host)

    def check(self) -> None:
        """UserError if no server can listen there now, for example because the port is taken."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with self.refused(), socket.create_server((self.host, self.port), family=family):
            pass

    @contextmanager
    def refused(self) -> Iterator[None]:
        """While entered, an address that cannot be served on is a UserError."""
        try:
            yield
        except (ValueError, OSError, OverflowError) as error:
            raise UserError(f"cannot serve on {self.host}:{self.port}: {error}") from error


def token_for(host: str, variable: str | None) -> str | None:
    """The token that requests need, from the environment `variable`; without one, only a loopback
    `host` is allowed."""
    with placed("--token-env "):
        token = token_from(variable)
    if token and len(token) < SHORTEST_TOKEN:
        own = "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
        raise UserError(
            f"--token-env {variable}: a token has at least {SHORTEST_TOKEN} characters, or it could be guessed; {own}"
        )
    if not token and not is_loopback(host):
        raise UserError(
            f"serving on {host} without a token would let anyone use this machine; name one with --token-env"
        )
    return token


def serve_reward(
    kind: str,
    options: Sequence[str],
    *,
    host: str,
    port: int,
    token_env: str | None,
    emit: Emit = silent,
) -> None:
    """Loads reward `kind` with key=value `options` and serves it until interrupted."""
    if any(importlib.util.find_spec(library) is None for library in ("uvicorn", "starlette")):
        raise UserError("serve-reward needs uvicorn and starlette: pip install uvicorn starlette")
    from g2rpo.rewards.server import RewardServer

    where = Address.checked(host, port, token_env)
    if plugins.is_code(kind):
        plugins.allow(kind)
    name = kind.rpartition(":")[2]  # a config's names have no dots, as the path of a file has
    own = parse_options(options)
    if "device" in own:
        pick_device(str(own["device"]), "device")
    table = {name: RewardConfig(kind=kind, options=own)}
    check_rewards_alone(table)
    where.check()
    reward = build_rewards(table)[name]
    with where.refused():
        server = RewardServer(reward, host, port, token=where.token)
    with server:
        emit(Line(f"{kind} at {server.address}; use it as"))
        given: dict[str, Any] = {"url": server.address}
        if token_env:
            given["endpoint"] = {"token_env": token_env}
        options = [f"rewards.{name}.kind=http", f"rewards.{name}.options={json.dumps(given)}"]
        emit(Serving(f"  {shlex.join(options)}"))
        with until_ctrl_c():
            server.serve_forever()
        emit(Line("stopped"))


@contextmanager
def needing_gradio(what: str) -> Iterator[None]:
    """Turns an import that lacks Gradio into a UserError."""
    try:
        with without_proxies():
            yield
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UserError(f"{what} needs Gradio: pip install gradio") from None


def without_proxies() -> AbstractContextManager[object]:
    """While entered, the environment's proxies are not used. Gradio needs it to be imported (some
    proxies, such as socks://, are an error there) and to start (it asks its own page, which a proxy
    does not reach)."""
    return patch.dict(os.environ, no_proxy="*", NO_PROXY="*")
