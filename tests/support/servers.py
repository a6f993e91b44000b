"""Servers in a thread of the test."""

import socketserver
import threading
from contextlib import contextmanager


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
            thread.join(timeout=5)
