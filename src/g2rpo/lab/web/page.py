"""Serves a page of Gradio's, to whom it is meant for. Importing this module imports Gradio: no telemetry, no fonts or scripts
from elsewhere.

Gradio itself keeps files, uploads, its monitoring and other sites' scripts behind its login and its settings; what it lacks is
here: whom a request was addressed to, from which site, how large it is, and how often a password may be tried.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read at import

import gradio as gr
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from g2rpo.app.events import Emit, Serving
from g2rpo.app.serving import refused
from g2rpo.app.stopping import until_ctrl_c
from g2rpo.core.errors import RewardFailed, UserError
from g2rpo.core.web import bounded_connections, host_of, is_loopback
from g2rpo.lab.report.page import compare_style
from g2rpo.lab.web import without_proxies

log = logging.getLogger(__name__)
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
MAX_BODY, MAX_UPLOAD = 2**16, 2**24
"""Bytes of a question, a prompt and some numbers; and of any request where the model takes an input picture."""
CLAIMED = (b"x-forwarded-host", b"x-gradio-server")
"""Headers by which a client could choose the address in the page's links; a proxy passes Host on."""
STRANGERS = 256
"""Connections at a time that have not asked anything with a login (without a token: anything)."""
LONGEST_PAUSE_S = 2.0
"""After a wrong login, before the next one; the first pause is a tenth of a second, and each wrong one in a row doubles it."""
WAITING_LOGINS = 4
"""At a time; more are refused."""


def with_messages(act: Callable[..., Any]) -> Callable[..., Any]:
    """`act` with `UserError` and failed rewards shown as messages in the page."""

    @functools.wraps(act)
    def guarded(*arguments: Any, **more: Any) -> Any:
        try:
            return act(*arguments, **more)
        except (UserError, RewardFailed) as error:
            raise gr.Error(escape(str(error)), print_exception=False) from error

    return guarded


def style() -> str:
    """The style sheet of all pages, and the report's of compared pictures."""
    return files("g2rpo.lab.web").joinpath("style.css").read_text(encoding="utf-8") + compare_style()


@dataclass
class Logins:
    """Slows down whoever guesses the token: one login at a time, with a pause after a wrong one."""

    token: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    wrong: int = 0
    """In a row."""

    async def allowed(self, name: str, given: str) -> bool:
        """Whether a person of any name may enter."""
        if self.waiting >= WAITING_LOGINS:
            raise HTTPException(429, "too many logins at a time; try again in some seconds")
        self.waiting += 1
        try:
            async with self.turn:
                right = hmac.compare_digest(given.encode(), self.token.encode())
                self.wrong = 0 if right else self.wrong + 1
                if not right:
                    await asyncio.sleep(min(LONGEST_PAUSE_S, 0.05 * 2 ** min(self.wrong, 10)))
                return right
        finally:
            self.waiting -= 1


@dataclass(frozen=True)
class Gate:
    """Passes to `app` requests of this site's own pages with bodies of at most `most` bytes.

    `local` serves this machine only: a request must then be addressed to it by a loopback name, to prevent DNS rebinding.
    """

    app: ASGIApp
    local: bool
    most: int = MAX_BODY

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self.refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refused is None:
            if scope["type"] == "http":  # what a client says of other hosts would stand in the page's links
                scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0].lower() not in CLAIMED]}
            try:
                await self.app(scope, receive, send)
                return
            except Exception as error:  # without a traceback in the log for every request that means nothing
                log.warning("%s %s: %s", scope.get("method"), ascii(scope.get("path")), type(error).__name__)
                refused = 400, "this cannot be answered"
        status, words = refused
        await PlainTextResponse(words, status, {"connection": "close"})(scope, receive, send)

    def refusal(self, headers: Headers) -> tuple[int, str] | None:
        """Why a request may not pass, if it may not."""
        host, origin, length = headers.get("host", ""), headers.get("origin"), headers.get("content-length", "0")
        if self.local and not is_loopback(host_of(host)):
            return 421, "without a token, only this machine's own names (localhost, 127.0.0.1) are served"
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "other sites may not ask"
        if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
            return 411, "a Content-Length is needed"
        if len(length) > 18 or int(length) > self.most:
            return 413, f"at most {self.most} bytes"
        return None


def serve(page: gr.Blocks, host: str, port: int, token: str | None, uploads: bool = False) -> str:
    """Serves the page from its own thread and returns its address. OSError if the port is taken.

    Without a `token`, `host` must be a loopback address. `uploads` lets pictures in.
    """
    most = MAX_UPLOAD if uploads else MAX_BODY

    def logged_in(scope: Scope) -> bool:
        cookies = Headers(scope=scope).get("cookie", "")
        return not token or any(given in cookies for given in app.tokens)

    with without_proxies():
        app, address, _ = page.launch(
            server_name=f"[{host}]" if ":" in host else host,
            server_port=port,
            auth=Logins(token).allowed if token else None,
            auth_message="Any name, and the token as the password.",
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            run_history=False,  # it would keep prompts in the browser
            footer_links=[],
            app_kwargs={"middleware": [Middleware(Gate, local=token is None, most=most)]},
            max_file_size=most,
            theme=gr.themes.Default(
                primary_hue="blue", font=SYSTEM_FONTS, font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"]
            ),
            css=style(),
        )
    config = page.server.config
    config.http_protocol_class = bounded_connections(
        config.http_protocol_class, lambda connection: logged_in(connection.scope), STRANGERS
    )
    return address


def serve_until(
    stop: threading.Event,
    page: gr.Blocks,
    host: str,
    port: int,
    token: str | None,
    emit: Emit,
    ends: str,
    uploads: bool = False,
) -> None:
    """Serves the page until Ctrl-C, or until `stop` is set; `ends` tells people what ends it. UserError for an address that
    cannot be served on."""
    with refused(host, port):
        address = serve(page, host, port, token, uploads)
    emit(Serving(f"{address} ({ends})"))
    try:
        with until_ctrl_c():
            stop.wait()
    finally:
        page.close(verbose=False)
