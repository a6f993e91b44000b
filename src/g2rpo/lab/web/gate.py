"""A request filter (ASGI): only the page's own requests, from this page, with small bodies.

Gradio answers far more than a page with three buttons needs: uploads, proxies, files by name, bodies of any size, other
sites' scripts.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from g2rpo.core.web import host_of, is_loopback

log = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY = 2**16
"""Bytes of a question: a prompt and some numbers."""

MAX_UPLOAD = 2**24
"""Bytes of an input picture, where the model takes one."""

READ = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|logout)|/(assets|static)/.+"
    r"|/gradio_api/(queue/data|startup-events|heartbeat/[^/]+)"
)
WRITE = re.compile(r"/login|/gradio_api/queue/join")
UPLOAD = re.compile(r"POST /gradio_api/upload|GET /gradio_api/(file=.+|upload_progress)")
"""What an input picture needs; Gradio gives out only files that it has taken in."""


CLAIMED = (b"x-forwarded-host", b"x-gradio-server")
"""Headers by which a client could choose the address in the page's links; a proxy passes Host on."""
STRANGERS = 256
"""Connections at a time that have not asked anything with a login (without a token: anything)."""


LONGEST_PAUSE_S = 2.0
"""After a wrong login, before the next one; the first pause is a tenth of a second, and each wrong one in a row doubles it."""
WAITING_LOGINS = 4
"""At a time; more are refused."""


class Logins:
    """Slows down whoever guesses the token: one login at a time, with a pause after a wrong one."""

    def __init__(self) -> None:
        self.turn, self.waiting, self.wrong = asyncio.Lock(), 0, 0

    async def in_turn(self, login: Callable[[], Awaitable[int]]) -> bool:
        """Whether `login`, which returns its status, had a turn."""
        if self.waiting >= WAITING_LOGINS:
            return False
        self.waiting += 1
        try:
            async with self.turn:
                self.wrong = self.wrong + 1 if await login() >= 400 else 0
                if self.wrong:
                    await asyncio.sleep(min(LONGEST_PAUSE_S, 0.05 * 2 ** min(self.wrong, 10)))
        finally:
            self.waiting -= 1
        return True


@dataclass(frozen=True)
class Gate:
    """Passes to `app` what the page requests, and refuses the rest with a status and a message.

    With `uploads` it lets pictures in. `local` serves this machine only: a request must then be addressed to it by a loopback
    name, to prevent DNS rebinding.
    """

    app: Callable[[Scope, Receive, Send], Awaitable[None]]
    local: bool
    uploads: bool = False
    logins: Logins = field(default_factory=Logins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].rstrip("/") != "/login":
            await self._pass(scope, receive, send)
        elif not await self.logins.in_turn(lambda: self._pass(scope, receive, send)):
            await _refuse(send, 429, "too many logins at a time; try again in some seconds")

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> int:
        """The status of the answer."""
        refused = self.refusal(scope) if scope["type"] == "http" else None
        begun = 0

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = begun or message.get("status", 0)
            await send(message)

        if refused is None:
            if scope["type"] == "http":  # what a client says of other hosts would stand in the page's links
                scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0].lower() not in CLAIMED]}
            try:
                await self.app(scope, receive, answer)
            except Exception as error:  # without a traceback in the log for every request that means nothing
                log.warning("%s %s: %s", scope.get("method"), ascii(scope.get("path")), type(error).__name__)
                if not begun:
                    refused = 400, "this cannot be answered"
        if refused is None:
            return begun
        await _refuse(send, *refused)
        return refused[0]

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Why a request may not pass, if it may not."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin, length = headers.get("host", ""), headers.get("origin"), headers.get("content-length", "0")
        allowed = {"GET": READ, "HEAD": READ, "POST": WRITE}.get(scope["method"])
        if self.local and not is_loopback(host_of(host)):
            return 421, "without a token, only this machine's own names (localhost, 127.0.0.1) are served"
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "other sites may not ask"
        path = scope["path"].rstrip("/") or "/"
        upload = self.uploads and UPLOAD.fullmatch(f"{scope['method']} {path}") is not None
        if not upload and (allowed is None or not allowed.fullmatch(path)):
            return 404, "there is nothing but the page"
        if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
            return 411, "a Content-Length is needed"
        most = MAX_UPLOAD if upload else MAX_BODY
        if len(length) > 18 or int(length) > most:
            return 413, f"at most {most} bytes"
        return None


async def _refuse(send: Send, status: int, words: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words.encode()})
