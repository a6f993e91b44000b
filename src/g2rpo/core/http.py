"""JSON over HTTP with bounds on everything: time, size, redirects, retries; and which requests a
server of this machine refuses."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import ssl
import urllib.parse
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from threading import Thread
from typing import Any, TypeVar

from g2rpo.core.errors import UserError, shown, without_secrets
from g2rpo.core.plain import parse_as, printable

T = TypeVar("T")

MAX_ANSWER = 16 * 2**20
_SPENT = re.compile(
    r"insufficient[_ ](quota|balance|credit|fund)|current[_ ]quota|billing|credit balance|out of credit|arrear|overdue|余额不足",
    re.IGNORECASE,
)
"""What servers say where nothing is left to pay with; also of limits per minute, where they say when
to ask `_AGAIN`."""
_AGAIN = re.compile(r"try (again )?in \d|retryDelay")


class NoAnswer(ConnectionError):
    """The endpoint gave no usable answer this time (unreachable, slow, overloaded, garbage): worth
    a retry, after `after_s` at the earliest."""

    after_s = 0.0


class Unreachable(NoAnswer):
    """Nothing answers at the endpoint's address."""


class TooSlow(NoAnswer):
    """The endpoint did not finish its answer in time."""


class Refused(OSError):
    """The endpoint refused the request permanently (a 4xx status)."""


class RefusedContent(Refused):
    """It refused what this request holds (400, 413, 422), as content filters do; it may answer
    others."""


def address(url: str) -> str:
    """`url` without a slash at its end; ValueError unless it is an http(s) address without a query,
    a user or a password.

    The message repeats nothing of `url`: a password may stand anywhere in an address that is
    mistyped.
    """
    import httpx2

    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL()
    plain = url.isprintable() and not set(url) & set(" @?#")
    reachable = parsed.host and "%" not in parsed.host and parsed.port in (None, *range(1, 2**16))
    secret = without_secrets(url) != url
    if not plain or not reachable or parsed.scheme not in ("http", "https") or secret:
        raise ValueError(
            "an endpoint is an address such as http://127.0.0.1:8000 or https://HOST/v1, without a query; a password in it "
            "would end in configs and logs, so name the environment variable that holds a token"
        )
    return url.rstrip("/")


def token_from(variable: str | None) -> str | None:
    """The secret in the environment variable `variable`, without white space around it.

    ValueError if it is named but not set, or could not stand in a header. It repeats neither the
    secret nor `variable`, which may be the secret itself, given by mistake.
    """
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError(
            "names an environment variable that is not set, or blank; give the variable's name, not the token"
        )
    if not (value.isascii() and value.isprintable()):
        raise ValueError(
            "names an environment variable with more than printable ASCII; a token has nothing else"
        )
    return value


def without_token(text: str, token: str | None) -> str:
    """`text`, unless it repeats `token` or a part of it: endpoints answer errors with the headers
    that they were sent.

    Letters and digits alone are compared, eight in a row, so that neither escapes nor a cut-off end
    hide a token.
    """
    if not token:
        return text
    said, secret = ("".join(filter(str.isalnum, each)) for each in (text, token))
    if not any(secret[start : start + 8] in said for start in range(max(1, len(secret) - 7))):
        return text
    return "(what it says repeats the token, and is not shown)"


def request_json(
    url: str,
    kind: type[T],
    *,
    body: Mapping[str, Any] | None = None,
    token: str | None = None,
    timeout_s: float = 60.0,
) -> T:
    """The JSON that `url` returns for a GET, or for a POST of `body`, as `kind` (a pydantic model
    or another type).

    Raises `NoAnswer` if there is none within `timeout_s` (for the whole exchange) and `MAX_ANSWER`
    bytes, the status is 408, 429, 3xx or 5xx, or the answer is no `kind`; `Refused` for the other
    4xx. No message repeats `token`.
    """
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    exchange = _Exchange(url, headers, data, timeout_s, token)
    response, content = exchange.result()
    said, status = f"{url}{exchange.through} answered", response.status_code
    text = printable(content[:4000].decode(errors="replace").strip())
    begins = text[:300]
    if status >= 300:
        message = f"{said} {status}: {without_token(begins or response.reason_phrase, token)}"
        after = response.headers.get("retry-after", "")
        spent = _SPENT.search(text) and not (after or _AGAIN.search(text))
        if spent and status in (400, 402, 403, 429):
            raise Refused(
                f"{message}\nNothing is left to pay for answers, so it is not asked again."
            )
        if 400 <= status < 500 and status not in (408, 429):
            raise (RefusedContent if status in (400, 413, 422) else Refused)(message)
        busy = NoAnswer(message)
        busy.after_s = seconds_until(after)
        raise busy
    try:
        encoding = json.detect_encoding(content)  # also by a byte order mark
        return parse_as(kind, content if encoding == "utf-8" else content.decode(encoding))
    except ValueError as error:
        came = f"{response.headers.get('content-type', 'no content type')}, {shown(begins)}"
        wrong = without_token(printable(f"{str(error)[:200]}; it is {came}"), token)
        raise NoAnswer(f"{said} something else than expected: {wrong}") from None


def seconds_until(retry_after: str) -> float:
    """The seconds that a Retry-After header asks for, by a number or a date; 0 if it says
    neither."""
    if re.fullmatch(r"\d+(\.\d*)?", retry_after, re.ASCII):
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
        return max(
            0.0, (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        )
    except (ValueError, TypeError, OverflowError):  # no date
        return 0.0


def _unpacked(content: bytes, encoding: str) -> bytes:
    """`content` without the compression that some servers use unasked; ValueError if it is not
    whole, or too large."""
    if not (encoding in ("gzip", "x-gzip", "deflate") or content.startswith(b"\x1f\x8b")):
        return content
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 32)  # both, by their first bytes
    try:
        plain = unpacking.decompress(content, MAX_ANSWER)
    except zlib.error as error:
        raise ValueError(f"its compressed answer cannot be read ({error})") from None
    if not unpacking.eof:
        raise ValueError(f"its compressed answer is cut off, or of more than {MAX_ANSWER} bytes")
    return plain


class _Exchange:
    """One request. `result` raises `NoAnswer` as `request_json` does. `through` is " (through the
    proxy HOST:PORT)" if one is in between, which may answer itself.

    A timeout of httpx2 bounds each read, so a peer that sends a byte at a time never reaches it. So
    a thread reads, and is abandoned at the time limit; it ends because its connection is closed, or
    with the timeout of its next read.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        data: bytes | None,
        timeout_s: float,
        token: str | None,
    ) -> None:
        import httpx2

        # they log what servers answer, which may repeat a token
        for name in ("httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self.url, self.headers, self.data = url, headers, data
        self.timeout_s, self.token = timeout_s, token
        self.asked, self.through = httpx2.URL(url), ""
        try:  # a loopback address means another machine to a proxy
            self.client = httpx2.Client(
                verify=_tls(), timeout=timeout_s, trust_env=not is_loopback(self.asked.host)
            )
        # whose message may repeat a proxy's password
        except (ValueError, httpx2.InvalidURL, ImportError):
            raise UserError(
                "a proxy variable of the environment (http_proxy, https_proxy, all_proxy) holds no address that can be used: "
                "it is http://, https://, socks5:// or socks5h://, and HOST:PORT"
            ) from None
        self.answer: Future[tuple[Any, bytes]] = Future()

    def result(self) -> tuple[Any, bytes]:
        """The response, and its content."""
        import httpx2

        Thread(target=self._run, daemon=True).start()
        try:
            return self.answer.result(self.timeout_s)
        except (TimeoutError, httpx2.TimeoutException):
            self.client.close()
            raise TooSlow(f"{self.url}{self.through} did not finish its answer in time") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            kind = Unreachable if isinstance(error, httpx2.ConnectError) else NoAnswer
            why = (
                f"{type(error).__name__}: {without_token(printable(str(error)[:300]), self.token)}"
            )
            raise kind(f"{self.url}{self.through}: {why}") from None

    def _run(self) -> None:
        try:
            self.answer.set_result(self._exchange())
        except Exception as error:
            self.answer.set_exception(error)

    def _exchange(self) -> tuple[Any, bytes]:
        method, content = "GET" if self.data is None else "POST", bytearray()
        extensions = {"trace": self._note_proxy}
        with (
            self.client,
            self.client.stream(
                method, self.url, headers=self.headers, content=self.data, extensions=extensions
            ) as response,
        ):
            for piece in response.iter_raw():
                content += piece
                if len(content) > MAX_ANSWER:
                    raise NoAnswer(
                        f"{self.url}{self.through} answered more than {MAX_ANSWER} bytes"
                    )
            return response, _unpacked(bytes(content), response.headers.get("content-encoding", ""))

    def _note_proxy(self, event: str, details: Mapping[str, Any]) -> None:
        """httpx2 calls this at every step: whom it connects to, if not the address that is asked,
        is a proxy."""
        if not event.endswith("connect_tcp.started"):
            return
        port = self.asked.port or {"http": 80, "https": 443}[self.asked.scheme]
        if (details["host"], details["port"]) != (self.asked.raw_host.decode(), port):
            self.through = f" (through the proxy {details['host']}:{details['port']})"


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads the certificates: a tenth of a second


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
