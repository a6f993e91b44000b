"""JSON over HTTP with bounds on everything: time, size, redirects, retries."""

from __future__ import annotations

import json
import logging
import os
import random
import reprlib
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

from g2rpo.core.plain import parse_json

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
    """Raise ValueError for settings that would send no request or wait forever."""
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
    read: Callable[[Any], Any] = lambda answer: answer,
) -> Any:
    """`read` of the JSON that `url` returns for a GET, or for a POST of `body`.

    Raises `NoAnswer` if there is none within `timeout_s` (for the whole exchange) and `MAX_ANSWER` bytes, the status is 408,
    429, 3xx or 5xx, or `read` raises it; `Refused` for the other 4xx. No message repeats `token`.
    """
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    status, said, content = _exchange(url, headers, data, timeout_s, token)
    if status >= 300:
        explained = _printable(content[:300].decode(errors="replace").strip() or said)
        message = f"{url} answered {status}: {without_token(explained, token)}"
        raise (Refused if 400 <= status < 500 and status not in (408, 429) else NoAnswer)(message)
    try:
        return read(parse_json(content))
    except NoAnswer as error:
        raise NoAnswer(f"{url} {without_token(str(error), token)}") from None
    except ValueError as error:
        raise NoAnswer(f"{url}: {type(error).__name__}: {without_token(_printable(str(error)), token)}") from None


def _exchange(
    url: str, headers: Mapping[str, str], data: bytes | None, timeout_s: float, token: str | None
) -> tuple[int, str, bytes]:
    """Status, reason phrase and body. Raises `NoAnswer` as `request_json` does.

    A timeout of httpx bounds each read, so a peer that sends a byte at a time never reaches it. So a thread reads, and is
    abandoned at the time limit; it ends because its connection is closed, or with the timeout of its next read.
    """
    import httpx

    for name in ("httpx", "httpcore"):  # they log what servers answer, which may repeat a token
        logging.getLogger(name).setLevel(logging.WARNING)
    local = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")  # which no proxy can see
    client = httpx.Client(verify=_tls(), timeout=timeout_s, trust_env=not local)
    method, answer = "GET" if data is None else "POST", Future[tuple[int, str, bytes]]()

    def exchange() -> None:
        try:
            with client, client.stream(method, url, headers=headers, content=data) as response:
                content = bytearray()
                for piece in response.iter_raw():
                    content += piece
                    if len(content) > MAX_ANSWER:
                        raise NoAnswer(f"{url} answered more than {MAX_ANSWER} bytes")
                answer.set_result((response.status_code, response.reason_phrase, bytes(content)))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=exchange, daemon=True).start()
    try:
        return answer.result(timeout_s)
    except (TimeoutError, httpx.TimeoutException):
        client.close()
        raise TooSlow(f"{url} did not finish its answer in time") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        kind = Unreachable if isinstance(error, httpx.ConnectError) else NoAnswer
        raise kind(f"{url}: {type(error).__name__}: {without_token(_printable(str(error)), token)}") from None


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads the certificates: a tenth of a second


def _printable(text: str) -> str:
    """Text of a server for terminals and logs: one line, without control characters."""
    return "".join(character if character.isprintable() else " " for character in text[:300])


def brief(answer: Any) -> str:
    """The beginning of an answer, for messages; printable, also if deeply nested."""
    return reprlib.repr(answer)


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
