"""JSON over HTTP with bounds on everything: time, size, redirects, retries. Standard library only."""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ANSWER = 16 * 2**20


class NoAnswer(ConnectionError):
    """The endpoint gave no usable answer this time (unreachable, slow, overloaded, garbage): worth a retry."""


class Refused(OSError):
    """The endpoint refused the request for good (a 4xx status): a retry would be refused too."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token, and the pictures, to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def endpoint(url: str, path: str) -> str:
    """`url` + `path`; ValueError unless `url` is an http(s) address without a query."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"an endpoint is an address like http://127.0.0.1:8000, got {url!r}")
    return url.rstrip("/") + path


def token_from(variable: str | None) -> str | None:
    """The secret in the environment variable `variable`; ValueError if it is named but not set."""
    if variable is None:
        return None
    value = os.environ.get(variable, "")
    if not value:
        raise ValueError(f"the environment variable {variable} should hold the endpoint's token, but it is not set")
    return value


def request_json(
    url: str,
    *,
    body: Mapping[str, Any] | None = None,
    token: str | None = None,
    timeout_s: float = 60.0,
    max_bytes: int = MAX_ANSWER,
) -> Any:
    """The JSON that `url` answers to a GET, or to a POST of `body`.

    Raises `NoAnswer` if there is none within `timeout_s` (for the whole exchange) and `max_bytes`, or the status is 408,
    429, 3xx or 5xx; `Refused` for the other 4xx.
    """
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(url, data=data, headers=headers)
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        handlers.append(urllib.request.ProxyHandler({}))  # a proxy cannot see this machine's loopback
    deadline = time.monotonic() + timeout_s
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            return json.loads(_read(response, deadline, max_bytes))
    except urllib.error.HTTPError as error:
        message = f"{url} answered {error.code}: {_explanation(error)}"
        if 400 <= error.code < 500 and error.code not in (408, 429):
            raise Refused(message) from error
        raise NoAnswer(message) from error
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        if isinstance(error, NoAnswer):
            raise
        raise NoAnswer(f"{url}: {type(error).__name__}: {error}") from error


def _explanation(error: urllib.error.HTTPError) -> str:
    """The first words of an error's body, or its status in words."""
    try:
        with error:
            return error.read(300).decode(errors="replace").strip() or error.reason
    except (OSError, http.client.HTTPException):  # the status is known; a body that does not come is no news
        return error.reason


def _read(response: Any, deadline: float, max_bytes: int) -> bytes:
    """The body, as long as it is neither too slow nor too long; the socket's own timeout only bounds each piece."""
    pieces, size = [], 0
    while piece := response.read1(65536):
        size += len(piece)
        if size > max_bytes:
            raise NoAnswer(f"{response.url} answered more than {max_bytes} bytes")
        if time.monotonic() > deadline:
            raise NoAnswer(f"{response.url} did not finish its answer in time")
        pieces.append(piece)
    return b"".join(pieces)


def with_retries(call: Callable[[], T], *, retries: int, backoff_s: float, what: str) -> T | None:
    """`call()`, tried again up to `retries` times after `NoAnswer`; None, and a warning, if it never answers.

    The waits double from `backoff_s`, up to 30 s, each shortened by a random part so that clients do not march in step.
    `Refused` is not caught: it is a mistake in the settings, which no waiting mends.
    """
    for attempt in range(retries + 1):
        try:
            return call()
        except NoAnswer as error:
            last = error
            if attempt < retries:
                time.sleep(min(30.0, backoff_s * 2**attempt) * random.uniform(0.5, 1.0))
    log.warning("%s: no score after %d attempts: %s", what, retries + 1, last)
    return None
