"""Shared by the package's two servers, which run on uvicorn: checks of the Host header, and a bound on idle connections."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Callable
from typing import Any, ClassVar


def host_of(header: str) -> str:
    """The name in a Host header; "" if there is none."""
    try:
        return urllib.parse.urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bounded_connections(protocol: Any, known: Callable[[Any], bool], most: int, *, headers_s: float | None = None) -> Any:
    """uvicorn's connection class with at most `most` open connections for which `known(connection)` is not true (after the
    first request has begun). One more closes the one that has sent nothing for the longest time, so idle connections block no
    others. `strangers` lists them.

    A connection is closed if its first headers take longer than `headers_s`.
    """

    class Connection(protocol):
        strangers: ClassVar[dict[Any, None]] = {}  # the idlest first

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.strangers) >= most:
                idlest = next(iter(self.strangers))
                del self.strangers[idlest]
                idlest.transport.abort()
            self.strangers[self] = None
            self.late = self.loop.call_later(headers_s, self.close_without_request) if headers_s else None

        def close_without_request(self) -> None:
            if self.cycle is None:
                self.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self not in self.strangers:
                return
            del self.strangers[self]
            if self.cycle is None or not known(self):
                self.strangers[self] = None  # at the end

        def connection_lost(self, error: Exception | None) -> None:
            self.strangers.pop(self, None)
            if self.late is not None:
                self.late.cancel()
            super().connection_lost(error)

    return Connection
