"""Servers in a thread of the test."""

import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.waiting import PATIENCE_S


@contextmanager
def serving(server):
    """`server` while it answers; its address is `http://HOST:PORT` of `server.server_address`."""
    options = {"poll_interval": 0.01} if isinstance(server, socketserver.BaseServer) else {}
    thread = threading.Thread(target=server.serve_forever, kwargs=options, daemon=True)
    with server:
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)


def replies(text, status=200, **headers):
    """The same answer to every request, for `endpoint_that`."""

    def answer(handler, count):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text if isinstance(text, bytes) else text.encode())

    return answer


@contextmanager
def endpoint_that(answer, port=0):
    """The address of a server, and the requests' bodies: it answers each by `answer(handler, number
    of the request)`; `handler.body` is the request's own."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            bodies.append(self.body)
            answer(self, len(bodies))

        def do_GET(self):
            answer(self, 0)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *arguments: None  # the client hung up on purpose
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}", bodies
