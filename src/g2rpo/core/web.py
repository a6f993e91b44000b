"""Whether a server is asked from this machine: hosts, and the Host header."""

from __future__ import annotations

import ipaddress
import urllib.parse


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
