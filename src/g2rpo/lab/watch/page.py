"""The report of a run as a page that follows it, on this machine alone."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from markupsafe import Markup

from g2rpo.app.events import Emit, Serving
from g2rpo.app.serving import Address, refusal
from g2rpo.app.stopping import until_ctrl_c
from g2rpo.core.errors import UserError
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import render, report_style, templates_of
from g2rpo.lab.watch.folder import Watched, read
from g2rpo.lab.watch.told import Told, tell

HOST = "127.0.0.1"
SECONDS = 3
"""Between two questions of the browser."""
PART = 20
"""A page for new iterations alone is drawn after so many times the time that drawing took: training
needs the processor."""
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


@dataclass
class LivePage:
    """The report of a run, with a strip on top that is always new."""

    run: Path
    page: str = ""
    version: str = ""
    """Of `page`."""
    rows: int = 0
    """Of the log, that `page` shows."""
    next: float = 0.0
    """When new rows alone are worth a new page, by `time.monotonic`."""
    lock: Lock = field(default_factory=Lock)

    def strip(self) -> tuple[str, str]:
        """The strip as it is now, and the version of the page that there would be now."""
        with self.lock:
            told, version, _ = self._look()
        return _filled("strip.html", told=told), version

    def newest(self) -> str:
        """The page, drawn again if there is more to see."""
        with self.lock:
            told, version, seen = self._look()
            if version != self.version or not self.page:
                began = time.monotonic()
                self.version, self.page = version, self._drawn(told, version, seen)
                self.rows = len(seen.rows) if seen else 0
                self.next = time.monotonic() + PART * (time.monotonic() - began)
            return self.page

    def _look(self) -> tuple[Told, str, Watched | None]:
        try:
            seen = read(self.run)
        except UserError as error:  # damaged or removed meanwhile: said on the page
            return Told(str(self.run), str(error), "", ""), self.version, None
        told = tell(seen)
        rows = len(seen.rows) if time.monotonic() >= self.next else self.rows
        shown = (bool(seen.settings), len(seen.of_kind("eval")), len(told.alarms), seen.over, rows)
        return told, "-".join(map(str, shown)), seen

    def _drawn(self, told: Told, version: str, seen: Watched | None) -> str:
        strip = Markup(_filled("strip.html", told=told))
        live = Markup(_filled("live.html", strip=strip, version=version, every=1000 * SECONDS))
        trouble = ""
        if seen is not None and seen.settings is not None:
            try:
                return render(read_runs([self.run]), live)
            except UserError as error:  # a file that the strip does not read
                trouble = str(error)
        shown = {"name": told.name, "trouble": trouble, "style": Markup(report_style())}
        return _filled("loading.html", live=live, **shown)


def _filled(template: str, **values: Any) -> str:
    return templates_of("g2rpo.lab.watch").get_template(template).render(**values)


class Answers(BaseHTTPRequestHandler):
    """Answers a browser on this machine: the page, and its strip."""

    live: LivePage
    timeout = 10.0

    def handle(self) -> None:
        with suppress(ConnectionError):  # the browser has left
            super().handle()

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        why = refusal(headers, Address(HOST, 0), most=0)
        if why is not None:
            self._answer(why[0], why[1], "text/plain")
        elif self.path == "/":
            self._answer(200, self.live.newest())
        elif self.path == "/strip":
            strip, version = self.live.strip()
            self._answer(200, strip, version=version)
        else:
            self._answer(404, "there are / and /strip", "text/plain")

    def _answer(self, code: int, text: str, kind: str = "text/html", version: str = "") -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Version", version)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is logged."""


def server_of(run: Path, port: int) -> ThreadingHTTPServer:
    """A server of the page, not yet serving; OSError if the port is taken."""
    handler = type("AnswersOfRun", (Answers,), {"live": LivePage(run)})
    return ThreadingHTTPServer((HOST, port), handler)


def serve(run: Path, port: int, emit: Emit) -> None:
    """Serves the page until Ctrl-C. UserError for a folder of no run, and for a port that is
    taken."""
    with Address(HOST, port).refused():
        server = server_of(run, port)
    with server:
        there = f"ssh -L {port}:{HOST}:{port} {platform.node()}"
        emit(Serving(f"http://{HOST}:{port}/ (Ctrl-C ends it; elsewhere first `{there}`)"))
        with until_ctrl_c():
            server.serve_forever()
