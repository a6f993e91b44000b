"""Serves a page of Gradio's. Importing this module imports Gradio: no telemetry, no fonts or scripts from elsewhere."""

from __future__ import annotations

import functools
import hmac
import os
from collections.abc import Callable
from html import escape
from importlib.resources import files
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read at import

import gradio as gr
from starlette.datastructures import Headers
from starlette.middleware import Middleware

from g2rpo.core.errors import RewardFailed, UserError
from g2rpo.core.web import bounded
from g2rpo.lab.report.page import compare_style
from g2rpo.lab.web import without_proxies
from g2rpo.lab.web.gate import MAX_UPLOAD, STRANGERS, Gate, Scope

ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
SYSTEM = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]


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


def serve(page: gr.Blocks, host: str, port: int, token: str | None, uploads: bool = False) -> str:
    """Serves the page from its own thread and returns its address. OSError if the port is taken.

    Without a `token`, `host` must be a loopback address.
    """

    def allowed(name: str, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (token or "").encode())

    def logged_in(scope: Scope) -> bool:
        cookies = Headers(scope=scope).get("cookie", "")
        return not token or any(given in cookies for given in app.tokens)

    with without_proxies():
        app, address, _ = page.launch(
            server_name=f"[{host}]" if ":" in host else host,
            server_port=port,
            auth=allowed if token else None,
            auth_message="Any name, and the token as the password.",
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            run_history=False,  # it would keep prompts in the browser
            footer_links=[],
            app_kwargs={"middleware": [Middleware(Gate, local=token is None, uploads=uploads)]},
            max_file_size=MAX_UPLOAD,
            theme=gr.themes.Default(
                primary_hue="blue", font=SYSTEM, font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"]
            ),
            css=style(),
        )
    config = page.server.config
    config.http_protocol_class = bounded(config.http_protocol_class, lambda connection: logged_in(connection.scope), STRANGERS)
    return address
