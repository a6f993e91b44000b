"""What commands that serve check before they load anything: the token and the address."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from g2rpo.core.errors import UserError
from g2rpo.core.web import is_loopback
from g2rpo.rewards.transport import token_from

SHORTEST_TOKEN = 16


def token_for(host: str, variable: str | None) -> str | None:
    """The token that requests need, from the environment `variable`; without one, only a loopback `host` is allowed."""
    try:
        token = token_from(variable)
    except ValueError as error:
        raise UserError(f"--token-env {error}") from None
    if token and len(token) < SHORTEST_TOKEN:
        own = "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
        raise UserError(
            f"--token-env {variable}: a token has at least {SHORTEST_TOKEN} characters, or it could be guessed; {own}"
        )
    if not token and not is_loopback(host):
        raise UserError(f"serving on {host} without a token would let anyone use this machine; name one with --token-env")
    return token


def check_address(host: str, port: int) -> None:
    """UserError if no server can listen there now, for example because the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with refused(host, port), socket.create_server((host, port), family=family):
        pass


@contextmanager
def refused(host: str, port: int) -> Iterator[None]:
    """While entered, an address that cannot be served on is a UserError."""
    try:
        yield
    except (ValueError, OSError, OverflowError) as error:
        raise UserError(f"cannot serve on {host}:{port}: {error}") from error
