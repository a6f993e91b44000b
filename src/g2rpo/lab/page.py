"""The page of the demo and of teaching, by Gradio: its views, its style, how it is served and to
whom (docs/demo.md).

Importing this module imports Gradio: no telemetry, no fonts or scripts from elsewhere.
"""

from __future__ import annotations

import functools
import hmac
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from html import escape
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio import queueing, route_utils, routes
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from g2rpo.core.errors import RewardFailed, UserError, cut
from g2rpo.core.events import Emit, Serving
from g2rpo.core.http import refusal
from g2rpo.core.plain import printable
from g2rpo.core.stopping import until_ctrl_c
from g2rpo.lab.serving import Address, without_proxies

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read at import


View = Callable[[gr.Tab], None]
"""Adds what a tab shows: beside and not in it, since Gradio (6.31) renders that when the tab is
opened, and one frame later sets every value in it back to the first. The same is true of what a
closed accordion holds."""
TO_VIEW = """() => document.querySelectorAll(".g2-view").forEach(view => {
  const open = view.id === "view-%d";
  view.toggleAttribute("data-open", open);
  view.toggleAttribute("data-closed", !open);
})"""
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
MOST_WAITING = 16
"""Questions in the queue; more are refused."""
SYSTEM_FONTS = [
    "system-ui",
    "-apple-system",
    "Segoe UI",
    "Roboto",
    "Helvetica Neue",
    "Arial",
    "sans-serif",
]
MAX_BODY, MAX_UPLOAD = 2**16, 2**25
"""Bytes of a question, a prompt and some numbers; and of an input picture, such as a photograph,
where the model takes one."""
UPLOAD = "/gradio_api/upload"


log = logging.getLogger(__name__)


def one_line(error: BaseException | None) -> str:
    """What is said of a question that cannot be answered, in place of a traceback: whoever reaches
    the page can ask as many as they like."""
    words = " ".join(str(error).split())
    return cut(f"a question was not answered: {type(error).__name__}: {printable(words)}", 300)


class _InOneLine(logging.Filter):
    """Of what the server logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            record.msg, record.args, record.exc_info = one_line(record.exc_info[1]), (), None
        return True


if not os.environ.get("G2RPO_TRACEBACK"):
    for _module in (
        queueing,
        route_utils,
        routes,
    ):  # they print tracebacks, and use nothing else of it
        _module.traceback = SimpleNamespace(
            print_exc=lambda: log.warning("%s", one_line(sys.exc_info()[1]))
        )
    logging.getLogger("uvicorn.error").addFilter(_InOneLine())


def page_of(title: str, kind: str, facts: str, views: Mapping[str, View]) -> gr.Blocks:
    """The page, not yet served, with a tab for each of several views, by its label; the first is
    open."""
    with gr.Blocks(
        title=f"{title} · {kind}", analytics_enabled=False, delete_cache=(3600, 3600)
    ) as page:
        told = f'<p class="g2-facts">{escape(facts)}</p>' if facts else ""
        gr.HTML(f'<div class="g2"><h1>{escape(title)}</h1>{told}</div>')
        with gr.Tabs(elem_id="views", visible=len(views) > 1):
            tabs = [gr.Tab(label) for label in views]
        for number, (tab, view) in enumerate(zip(tabs, views.values(), strict=True)):
            tab.select(None, js=TO_VIEW % number, api_visibility="private")
            with gr.Column(elem_id=f"view-{number}", elem_classes="g2-view"):
                view(tab)
    page.queue(max_size=MOST_WAITING, api_open=False)
    return page


def disclosed(button: gr.Button, content: gr.Column) -> None:
    """Makes `content` appear and disappear by `button`, which says which it is."""
    closed = f"""() => {{
      document.getElementById("{button.elem_id}").setAttribute("aria-expanded", "false");
    }}"""
    gr.on(None, None, js=closed, api_visibility="private")
    toggle = f"""() => {{
      const open = document.getElementById("{content.elem_id}").toggleAttribute("data-open");
      document.getElementById("{button.elem_id}").setAttribute("aria-expanded", open);
    }}"""
    button.click(None, js=toggle, api_visibility="private")


def with_messages(act: Callable[..., Any]) -> Callable[..., Any]:
    """`act` with `UserError` and failed rewards shown as messages in the page."""

    @functools.wraps(act)
    def guarded(*arguments: Any, **more: Any) -> Any:
        try:
            return act(*arguments, **more)
        except (UserError, RewardFailed) as error:
            raise gr.Error(escape(str(error)), print_exception=False) from error

    return guarded


def empty(words: str) -> str:
    """HTML in the place of what is not there yet."""
    return f'<div class="g2"><p class="g2-empty">{escape(words)}</p></div>'


def of_this_site(app: ASGIApp, where: Address, uploads: bool) -> ASGIApp:
    """Passes to `app` what `refusal` does not refuse; `uploads` lets pictures in at the route that
    takes them."""

    async def passing(scope: Scope, receive: Receive, send: Send) -> None:
        most = MAX_UPLOAD if uploads and scope.get("path") == UPLOAD else MAX_BODY
        why = None
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            why = refusal(headers, most, local=where.local, public_host=where.public_host)
        if why is not None:
            app_or_answer: ASGIApp = PlainTextResponse(why[1], why[0], {"connection": "close"})
            await app_or_answer(scope, receive, send)
        else:
            await app(scope, receive, send)

    return passing


def serve(page: gr.Blocks, where: Address, uploads: bool = False) -> str:
    """Serves the page from its own thread and returns its address. OSError if the port is taken.
    `uploads` lets pictures in."""
    host, token = where.host, where.token
    names = "page.css", "report/templates/compare.css"
    styles = [files("g2rpo.lab").joinpath(name).read_text(encoding="utf-8") for name in names]

    def allowed(name: str, word: str) -> bool:
        return hmac.compare_digest(word.encode(), str(token).encode())

    with without_proxies():
        _, address, _ = page.launch(
            server_name=f"[{host}]" if ":" in host else host,
            server_port=where.port,
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
            app_kwargs={"middleware": [Middleware(of_this_site, where=where, uploads=uploads)]},
            max_file_size=MAX_UPLOAD,
            theme=gr.themes.Default(
                primary_hue="blue",
                font=SYSTEM_FONTS,
                font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"],
            ),
            css="".join(styles),
        )
    return address


def serve_until(
    stop: threading.Event,
    page: gr.Blocks,
    where: Address,
    emit: Emit,
    ends: str,
    uploads: bool = False,
) -> None:
    """Serves the page until Ctrl-C, or until `stop` is set; `ends` tells people what ends it.
    UserError for an address that cannot be served on."""
    with where.refused():
        address = serve(page, where, uploads)
    emit(Serving(f"{address} ({ends})"))
    try:
        with until_ctrl_c():
            stop.wait()
    finally:
        page.close(verbose=False)
