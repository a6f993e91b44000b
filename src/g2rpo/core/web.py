"""Which requests a server of this machine refuses, by their headers."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Mapping


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


def refusal(
    headers: Mapping[str, str], most: int, *, local: bool, public_host: str | None = None
) -> tuple[int, str] | None:
    """Why a request may not pass, if it may not: it is from another site, has more than `most`
    bytes, or, where the server is `local`, is addressed to another host than this machine (DNS
    rebinding) or `public_host`."""
    host, origin, length = (
        headers.get("host", ""),
        headers.get("origin"),
        headers.get("content-length", "0"),
    )
    if local and host != public_host and not is_loopback(host_of(host)):
        return (
            421,
            "without a token, only this machine's own names (localhost, 127.0.0.1) are served",
        )
    if origin is not None and origin.partition("://")[2] not in (host, public_host):
        return 403, "other sites may not ask"
    if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
        return 411, "a Content-Length is needed"
    if len(length) > 18 or int(length) > most:
        return 413, f"at most {most} bytes"
    return None
