"""JSON over HTTP with bounds on everything: time, size, redirects, retries. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import random
import reprlib
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from g2rpo.plain import parse_json

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ANSWER = 16 * 2**20


class NoAnswer(ConnectionError):
    """The endpoint gave no usable answer this time (unreachable, slow, overloaded, garbage): worth a retry."""


class Unreachable(NoAnswer):
    """Nothing answers at the endpoint's address."""


class TooSlow(NoAnswer):
    """The endpoint did not finish its answer in time."""


class Refused(OSError):
    """The endpoint refused the request permanently (a 4xx status)."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token, and the pictures, to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def endpoint(url: str, path: str) -> str:
    """`url` + `path`; ValueError unless `url` is an http(s) address without a query, a user or a password.

    The message repeats nothing of `url`: a password may stand anywhere in an address that is mistyped.
    """
    if fault := _fault(url):
        raise ValueError(f"an endpoint is an address like http://127.0.0.1:8000; {fault}")
    return url.rstrip("/") + path


def _fault(url: Any) -> str | None:
    """Why `url` is not a valid endpoint address; None if it is."""
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        return "this one has spaces or control characters"
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return "this one cannot be read"
    try:
        port = parts.port
    except ValueError:
        port = 0
    for wrong, fault in (
        (parts.scheme not in ("http", "https"), "this one does not begin with http:// or https://"),
        ("@" in url, "a password in an address would end in configs and logs; name the variable that holds a token"),
        (not parts.hostname, "this one names no host"),
        (port == 0, "the port of this one is no number from 1 to 65535"),
        ("?" in url or "#" in url, "this one has a query or a fragment"),
    ):
        if wrong:
            return fault
    return None


def token_from(variable: str | None) -> str | None:
    """The secret in the environment variable `variable`, without white space around it.

    ValueError if it is named but not set, or could not stand in a header. It repeats neither the secret nor `variable`, which
    may be the secret itself, given by mistake.
    """
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError("names an environment variable that is not set, or blank; give the variable's name, not the token")
    if not (value.isascii() and value.isprintable()):
        raise ValueError("names an environment variable with more than printable ASCII; a token has nothing else")
    return value


def check_patience(*, timeout_s: float, retries: int, backoff_s: float, concurrency: int) -> None:
    """Raise ValueError for settings with which nothing would be asked, or waiting would not end."""
    for name, value, low, high in (
        ("timeout_s", timeout_s, 1e-3, 86_400),
        ("retries", retries, 0, 1000),
        ("backoff_s", backoff_s, 0, 3600),
        ("concurrency", concurrency, 1, 1000),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}, got {value}")


def without_token(text: str, token: str | None) -> str:
    """`text`, unless it repeats `token` or a part of it: endpoints answer errors with the headers that they were sent.

    Letters and digits alone are compared, eight in a row, so that neither escapes nor a cut-off end hide a token.
    """
    if not token:
        return text
    said, secret = ("".join(filter(str.isalnum, each)) for each in (text, token))
    if not any(secret[start : start + 8] in said for start in range(max(1, len(secret) - 7))):
        return text
    return "(what it says repeats the token, and is not shown)"


def request_json(
    url: str,
    *,
    body: Mapping[str, Any] | None = None,
    token: str | None = None,
    timeout_s: float = 60.0,
    max_bytes: int = MAX_ANSWER,
    read: Callable[[Any], Any] = lambda answer: answer,
) -> Any:
    """`read` of the JSON that `url` returns for a GET, or for a POST of `body`.

    Raises `NoAnswer` if there is none within `timeout_s` (for the whole exchange) and `max_bytes`, the status is 408, 429, 3xx
    or 5xx, or `read` raises it; `Refused` for the other 4xx. No message repeats `token`.
    """
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(url, data=data, headers=headers)
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        handlers.append(urllib.request.ProxyHandler({}))  # a proxy cannot see this machine's loopback
    deadline, sockets = time.monotonic() + timeout_s, list[socket.socket]()
    handlers += [_HTTP(sockets), _HTTPS(sockets)]
    # A socket's own timeout bounds one read; a peer that sends a byte at a time never reaches it. So sockets are closed then.
    shut = threading.Timer(timeout_s, _shut, [sockets])
    shut.daemon = True
    shut.start()
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            return read(parse_json(_read(response, deadline, max_bytes)))
    except urllib.error.HTTPError as error:  # not chained: its own text has the server's words too
        message = f"{url} answered {error.code}: {without_token(_explanation(error), token)}"
        if 400 <= error.code < 500 and error.code not in (408, 429):
            raise Refused(message) from None
        raise NoAnswer(message) from None
    except NoAnswer as error:
        raise type(error)(f"{url} {without_token(str(error), token)}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if time.monotonic() >= deadline:  # any exception after the socket was shut down
            raise TooSlow(f"{url} did not finish its answer in time") from None
        reason = getattr(error, "reason", None)
        kind = Unreachable if isinstance(reason, OSError) and not isinstance(reason, TimeoutError) else NoAnswer
        raise kind(f"{url}: {type(error).__name__}: {without_token(_printable(str(error)), token)}") from None
    finally:
        shut.cancel()


def _explanation(error: urllib.error.HTTPError) -> str:
    """The first words of an error's body, or its status in words."""
    try:
        with error:
            return _printable(error.read1(300).decode(errors="replace").strip() or error.reason)
    except (OSError, http.client.HTTPException, ValueError):  # the status is enough
        return _printable(error.reason)


def _printable(text: str) -> str:
    """Text of a server for terminals and logs: one line, without control characters."""
    return "".join(character if character.isprintable() else " " for character in text[:300])


def brief(answer: Any) -> str:
    """The beginning of an answer, for messages; printable, however deep it is."""
    return reprlib.repr(answer)


def _shut(sockets: list[socket.socket]) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):  # already closed
            socket.socket.shutdown(each, socket.SHUT_RDWR)  # TLS's own shutdown would wait


class _HTTP(urllib.request.HTTPHandler):
    """Records its open sockets in a list."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        super().__init__()
        self.sockets = sockets

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_noting(http.client.HTTPConnection, self.sockets), request)


class _HTTPS(urllib.request.HTTPSHandler):
    """The same with TLS."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        super().__init__()
        self.sockets = sockets

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_noting(http.client.HTTPSConnection, self.sockets), request)


def _noting(kind: Any, sockets: list[socket.socket]) -> Any:
    """The connection class `kind`, which adds its socket to `sockets`."""

    class Connection(kind):
        def connect(self) -> None:
            super().connect()
            sockets.append(self.sock)

    return Connection


def _read(response: Any, deadline: float, max_bytes: int) -> bytes:
    """The body, as long as it is neither too slow nor too long."""
    pieces, size = [], 0
    while piece := response.read1(65536):
        size += len(piece)
        if size > max_bytes:
            raise NoAnswer(f"answered more than {max_bytes} bytes")
        pieces.append(piece)
    if time.monotonic() >= deadline:  # the end was not the end: the socket was shut
        raise TooSlow("did not finish its answer in time")
    return b"".join(pieces)


def with_retries(call: Callable[[], T], *, retries: int, backoff_s: float, what: str) -> T | None:
    """`call()`, tried again up to `retries` times after `NoAnswer`; None, and a warning, if it never answers.

    The waits double from `backoff_s`, up to 30 s, each with random jitter. `Refused` is not caught, because retries would not
    help.
    """
    for attempt in range(retries + 1):
        try:
            return call()
        except NoAnswer as error:
            last = error
            if attempt < retries:
                time.sleep(min(30.0, backoff_s * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0))
    log.warning("%s: no score after %d attempts: %s", what, retries + 1, last)
    return None
