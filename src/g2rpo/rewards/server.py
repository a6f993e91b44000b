"""Serve any reward over HTTP (protocol: `g2rpo.rewards.remote`). Standard library and Pillow only.

What comes over the network is not trusted: bodies, numbers of pictures and their pixels are bounded before anything is
decoded, only PNG is read, nothing is unpickled, slow clients are cut off, and only the loopback interface is served
without a token.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import io
import ipaddress
import json
import logging
import math
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from g2rpo.plain import is_text, parse_json
from g2rpo.types import Prompt, Reward

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on one request, and on requests at a time."""

    body_bytes: int = 128 * 2**20
    images: int = 256
    pixels: int = 2**26  # of all pictures that are decoded or scored at a time: 64 pictures of 1024 x 1024
    prompt_chars: int = 20_000
    headers_s: float = 10.0  # for all headers and the first byte of the body
    read_s: float = 60.0  # for the whole body
    gap_s: float = 5.0  # between two pieces of what a client sends
    connections: int = 64  # at a time whose headers or body have not begun to come, or that are refused; the oldest makes room
    clients: int = 64  # at a time that may ask, and have begun to; more are answered 503, which clients retry
    requests: int = 8  # of theirs being read or scored at a time
    wait_s: float = 30.0  # for one of those places, before the answer is 503


class BadRequest(Exception):
    """A wrong request: its status code and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def decode_png(text: str, pixels_left: int) -> Tensor:
    """A uint8 picture [3, H, W] of a base64 PNG with at most `pixels_left` pixels; `BadRequest` for anything else."""
    _check_size(*_size(text), pixels_left)  # before Pillow sees it
    data = _bytes(text)
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
            _check_size(*picture.size, pixels_left)  # a second header could have changed it; nothing is decoded yet
            array = np.asarray(picture.convert("RGB"))
    except Exception as error:  # Pillow does not document which for damaged files
        raise BadRequest(400, f"an image is a broken PNG: {type(error).__name__}") from error
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(400, "an image is not base64") from error


def _size(text: str) -> tuple[int, int]:
    """Width and height of a base64 PNG by its first chunk; `BadRequest` if it is none."""
    head = _bytes(text[:32])
    if head[:8] != b"\x89PNG\r\n\x1a\n" or head[12:16] != b"IHDR" or len(head) < 24:
        raise BadRequest(400, "an image is not a PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def _check_size(width: int, height: int, pixels_left: int) -> None:
    if width * height > pixels_left:
        raise BadRequest(413, f"too many pixels: a picture is {width} x {height}")


_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)  # one without an end goes to the body's: nothing is tried twice


def _check_size_of_json(body: bytes, most: int) -> None:
    """Refuses JSON with more than about `most` values before it is parsed: `{},` is three bytes, and takes 30 times that."""
    values = end = 0
    for string in chain(_STRING.finditer(body), (None,)):
        start = string.start() if string else len(body)
        values += (string is not None) + sum(body.count(mark, end, start) for mark in (b",", b"[", b"{"))
        end = string.end() if string else start
        if values > most:
            raise BadRequest(413, "the body has too many values")


def parse_request(
    body: bytes, limits: Limits, announce: Callable[[int], object] = lambda pixels: None
) -> tuple[Tensor, list[str] | list[Prompt]]:
    """uint8 pictures [B, 3, H, W] and prompts of a request's JSON; `BadRequest` if it is not as agreed. `announce` is called
    with the number of their pixels before the first is decoded."""
    _check_size_of_json(body, 16 * (limits.images + 16))
    try:
        content = parse_json(body)
    except ValueError as error:
        raise BadRequest(400, "the body is not JSON") from error
    fields = content if isinstance(content, dict) else {}
    images, prompts = _strings(fields.get("images")), _strings(fields.get("prompts"))
    if not images or len(images) != len(prompts):
        raise BadRequest(400, "the body must be {'images': [base64 PNG, ...], 'prompts': [text, ...]}, equally many")
    if len(images) > limits.images:
        raise BadRequest(413, f"{len(images)} images in one request; at most {limits.images}")
    if max(map(len, prompts)) > limits.prompt_chars:
        raise BadRequest(413, f"a prompt has more than {limits.prompt_chars} characters")
    if not all(map(is_text, prompts)):
        raise BadRequest(400, "a prompt has a character that no text may have (NUL, or half of a pair)")
    decoded: list[Tensor] = []
    left = 0
    for width, height in map(_size, images):
        _check_size(width, height, limits.pixels - left)
        left += width * height
    announce(left)
    for text in images:
        decoded.append(decode_png(text, left))
        left -= decoded[-1].shape[1] * decoded[-1].shape[2]
    if len({picture.shape for picture in decoded}) > 1:
        raise BadRequest(400, "the images of one request must have one size")
    extra = fields.get("metadata")
    if extra is None:
        return torch.stack(decoded), prompts
    if not isinstance(extra, list) or len(extra) != len(prompts) or not all(isinstance(each, dict) for each in extra):
        raise BadRequest(400, "metadata must be a list of objects, one for each prompt")
    return torch.stack(decoded), [Prompt(text, metadata=each) for text, each in zip(prompts, extra, strict=True)]


def _strings(value: Any) -> list[str]:
    """`value` if it is a list of strings, else an empty list."""
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else []


_ROUTES = "there are GET /health and POST /score"
_LINGER_S, _WRITE_S = 5.0, 30.0


class _Input(io.RawIOBase):
    """Reads of a connection until `deadline`, then TimeoutError, also for a client that sends a byte at a time; and after
    `gap_s` without any."""

    def __init__(self, connection: socket.socket, seconds: float, gap_s: float) -> None:
        self.connection, self.gap_s = connection, gap_s
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        """From now."""
        self.deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.connection.settimeout(max(1e-3, min(self.gap_s, self.deadline - time.monotonic())))
        try:
            return self.connection.recv_into(buffer)
        finally:
            self.connection.settimeout(_WRITE_S)


class _Handler(BaseHTTPRequestHandler):
    """One connection, one request."""

    server: RewardServer

    def setup(self) -> None:
        super().setup()
        self.input = _Input(self.connection, self.server.limits.headers_s, self.server.limits.gap_s)
        self.rfile = io.BufferedReader(self.input)
        self.connection.settimeout(_WRITE_S)

    def do_GET(self) -> None:
        try:
            self._authorize()
            if self.path != "/health":
                raise BadRequest(404, _ROUTES)
            self._answer(200, {"status": "ok", "reward": self.server.name, **self.server.more})
        except BadRequest as error:
            self._answer(error.status, {"error": str(error)})

    def do_POST(self) -> None:
        try:
            self._authorize()
            if self.path != "/score":
                raise BadRequest(404, _ROUTES)
            self._answer(200, {"scores": self._scores()})
        except BadRequest as error:
            self._refuse(error)
        except OSError:  # the connection broke: no answer can be sent
            raise
        except Exception as error:  # the reward failed: the server continues, the client may retry
            log.exception("the reward failed")
            self._answer(500, {"error": f"the reward failed with {type(error).__name__}; the server's log says more"})

    def _scores(self) -> list[float | None]:
        length = self._length()
        with contextlib.suppress(TimeoutError):  # which `_body` says
            self.rfile.peek(1)  # type: ignore[attr-defined]  # a BufferedReader (socketserver, rbufsize)
        self.server.admit(self.connection)
        if not self.server.slots.acquire(timeout=self.server.limits.wait_s):
            raise BadRequest(503, "busy")
        with contextlib.ExitStack() as stack:
            stack.callback(self.server.slots.release)
            images, prompts = parse_request(
                self._body(length), self.server.limits, lambda pixels: stack.enter_context(self.server.decoding(pixels))
            )
            with self.server.one_at_a_time:  # in float32 they are four times as large, so only those of one request
                scores = self.server.reward(images.float().div_(255), prompts)
        return [float(s) if math.isfinite(s) else None for s in scores.tolist()]

    def _authorize(self) -> None:
        token = self.server.token
        given = self.headers.get("Authorization", "")
        if token is None and not is_loopback(host_of(self.headers.get("Host", "localhost"))):
            # against DNS rebinding, by which a web page could read the answers
            raise BadRequest(403, "without a token this server answers to loopback addresses only")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise BadRequest(401, "a valid token is needed: Authorization: Bearer ...")

    def _length(self) -> int:
        """The announced length of the body; `BadRequest` for one that is not read."""
        # A web page can post to a loopback server, but not with this content type unless the server agrees beforehand.
        if self.headers.get_content_type() != "application/json":
            raise BadRequest(415, "the content type must be application/json")
        length = content_length(self.headers.get("Content-Length", ""))
        if length is None:
            raise BadRequest(411, "a Content-Length is needed")
        if length > self.server.limits.body_bytes:
            raise BadRequest(413, f"the body is larger than {self.server.limits.body_bytes} bytes")
        return length

    def _body(self, length: int) -> bytes:
        self.input.allow(self.server.limits.read_s)
        try:
            body = self.rfile.read(length)
        except TimeoutError as error:
            raise BadRequest(408, "the body did not come in time") from error
        if len(body) < length:
            raise BadRequest(400, "the body is shorter than its Content-Length")
        return body

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, error: BadRequest) -> None:
        """Answers an error, then discards what the client still sends: closing at once would reset the connection before the
        client has read the answer."""
        self._answer(error.status, {"error": str(error)})
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        self.input.allow(_LINGER_S)
        with contextlib.suppress(OSError):
            while self.rfile.read1(65536):
                pass

    def log_message(self, format: str, *args: Any) -> None:
        log.info("%s %s", self.address_string(), ascii(format % args))  # no control characters in a log


class RewardServer(ThreadingHTTPServer):
    """An HTTP server of one reward; requests are read in parallel and scored one at a time.

    `port` 0 takes a free port: `address` says which. Call `serve_forever()`, and `shutdown()` from another thread.
    Raises ValueError if `host` is not a loopback address and there is no `token`, or if the reward needs more than pictures and
    prompts.
    """

    daemon_threads = True
    request_queue_size = 128  # socketserver's 5 make some of a hundred ranks that connect at once wait a second

    def __init__(
        self,
        reward: Reward,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        token = (token or "").strip() or None
        if token is None and not is_loopback(host):
            raise ValueError(f"serving on {host} without a token would let anyone use this machine; give a token")
        for name, what in (("video", "clips"), ("latent", "latents"), ("state", "a state that checkpoints keep")):
            if getattr(reward, name, False):
                raise ValueError(f"this reward needs {what} (`{name}`), and a server gets pictures and prompts")
        self.reward, self.token, self.limits = reward, token, limits or Limits()
        self.more = {"right": float(right)} if (right := getattr(reward, "right", None)) is not None else {}
        self.name = type(reward).__name__
        self.one_at_a_time = threading.Lock()
        self.slots = threading.BoundedSemaphore(self.limits.requests)
        self.pixels_left, self.room = self.limits.pixels, threading.Condition()
        self.strangers: dict[socket.socket, None] = {}  # connections that have not been admitted, the oldest first
        self.clients: set[socket.socket] = set()
        self.counting = threading.Lock()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Closes the connection that has been idle longest, so that idle clients cannot block others."""
        with self.counting:
            if len(self.strangers) >= self.limits.connections:
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                with contextlib.suppress(OSError):  # it is closed already
                    oldest.shutdown(socket.SHUT_RDWR)
            self.strangers[request] = None
        super().process_request(request, client_address)

    @contextlib.contextmanager
    def decoding(self, pixels: int) -> Iterator[None]:
        """While entered, so many pixels of all that may be decoded at a time are taken; `BadRequest` if none become free."""
        with self.room:
            if not self.room.wait_for(lambda: self.pixels_left >= pixels, self.limits.wait_s):
                raise BadRequest(503, "busy")
            self.pixels_left -= pixels
        try:
            yield
        finally:
            with self.room:
                self.pixels_left += pixels
                self.room.notify_all()

    def admit(self, connection: socket.socket) -> None:
        """Marks a connection as admitted, so that it is no longer closed for others; `BadRequest` if there are too many."""
        with self.counting:
            if len(self.clients) >= self.limits.clients:
                raise BadRequest(503, "busy")
            self.strangers.pop(connection, None)
            self.clients.add(connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.counting:
                self.strangers.pop(request, None)
                self.clients.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("a connection from %s broke", client_address, exc_info=True)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"


def content_length(header: str) -> int | None:
    """The number in a Content-Length header, None if there is none. One of more than 18 digits is as large as 19."""
    if not (header.isascii() and header.isdecimal()):
        return None
    return int(header) if len(header) <= 18 else 10**18


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


def serve(
    reward: Reward,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    token: str | None = None,
    limits: Limits | None = None,
) -> None:
    """Serve `reward` until interrupted; see `RewardServer` for the arguments."""
    with RewardServer(reward, host, port, token=token, limits=limits) as server:
        log.info("%s at %s", server.name, server.address)
        server.serve_forever()
