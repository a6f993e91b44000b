"""Serve any reward over HTTP (protocol: `g2rpo.rewards.remote`), with uvicorn.

What comes over the network is not trusted: bodies, numbers of pictures and their pixels are bounded before anything is
decoded, only PNG is read, nothing is unpickled, slow clients are cut off, and only the loopback interface is served
without a token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import io
import json
import logging
import math
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import torch
from PIL import Image
from pydantic import BaseModel, Field, NonNegativeInt
from torch import Tensor

from g2rpo.core.images import to_pil, to_tensor
from g2rpo.core.input_pictures import as_rgb
from g2rpo.core.plain import is_text, parse_as
from g2rpo.core.types import Prompt, Scorer, as_reward
from g2rpo.core.web import bounded, host_of, is_loopback

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on one request, and on requests at a time."""

    body_bytes: int = 128 * 2**20
    images: int = 256
    pixels: int = 2**26  # of all pictures that are decoded or scored at a time: 64 pictures of 1024 x 1024
    prompt_chars: int = 20_000
    headers_s: float = 10.0  # for all headers, and again for the first byte of the body
    read_s: float = 60.0  # for the whole body
    gap_s: float = 5.0  # between two pieces of what a client sends
    connections: int = 64  # at a time whose headers or body have not begun to come, or that are refused; the oldest makes room
    clients: int = 64  # at a time whose bodies have begun to come; more are answered 503, which clients retry
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
            return to_tensor([as_rgb(picture)])[0]
    except Exception as error:  # Pillow does not document which for damaged files
        raise BadRequest(400, f"an image is a broken PNG: {type(error).__name__}") from error


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


class _Asked(BaseModel):
    """The body of a request: pictures in base64 PNG, their prompts, and what belongs to these."""

    images: Annotated[list[str], Field(min_length=1)]
    prompts: list[str]
    metadata: list[dict[str, Any]] | None = None
    inputs: list[str] = []
    inputs_of: list[list[NonNegativeInt]] | None = None


def parse_request(
    body: bytes, limits: Limits, folder: Path, announce: Callable[[int], object] = lambda pixels: None
) -> tuple[Tensor, list[Prompt]]:
    """uint8 pictures [B, 3, H, W] and prompts of a request's JSON; `BadRequest` if it is not as agreed. Input pictures of
    prompts are written to `folder`. `announce` is called with the number of all pixels before the first is decoded."""
    _check_size_of_json(body, 16 * (limits.images + 16))
    try:
        asked = parse_as(_Asked, body)
    except ValueError as error:
        raise BadRequest(400, f"the body: {error}") from error
    images, prompts, inputs = asked.images, asked.prompts, asked.inputs
    extra = asked.metadata or [{} for _ in prompts]
    owned = asked.inputs_of or [[] for _ in prompts]
    if not len(images) == len(prompts) == len(extra) == len(owned):
        raise BadRequest(400, "images, prompts and, where given, metadata and inputs_of must be equally many")
    if len(images) + len(inputs) > limits.images:
        raise BadRequest(413, f"{len(images) + len(inputs)} images in one request; at most {limits.images}")
    if max(map(len, prompts)) > limits.prompt_chars:
        raise BadRequest(413, f"a prompt has more than {limits.prompt_chars} characters")
    if not all(map(is_text, prompts)):
        raise BadRequest(400, "a prompt has a character that no text may have (NUL or a lone surrogate)")
    if not all(place < len(inputs) for own in owned for place in own):
        raise BadRequest(400, f"inputs_of must have indices of the {len(inputs)} inputs")
    decoded: list[Tensor] = []
    left = 0
    for width, height in map(_size, [*images, *inputs]):
        _check_size(width, height, limits.pixels - left)
        left += width * height
    announce(left)
    for text in [*images, *inputs]:
        decoded.append(decode_png(text, left))
        left -= decoded[-1].shape[1] * decoded[-1].shape[2]
    decoded, before = decoded[: len(images)], decoded[len(images) :]
    if len({picture.shape for picture in decoded}) > 1:
        raise BadRequest(400, "the images of one request must have one size")
    files = [str(folder / f"{place}.png") for place in range(len(inputs))]
    for file, picture in zip(files, before, strict=True):
        to_pil(picture[None])[0].save(file, compress_level=1)
    rows = zip(prompts, owned, extra, strict=True)
    return torch.stack(decoded), [Prompt(text, [files[place] for place in own], each) for text, own, each in rows]


_ROUTES = "there are GET /health and POST /score"
_LINGER_S = 5.0


class RewardServer:
    """An HTTP server of one reward; requests are read in parallel and scored one at a time.

    `port` 0 takes a free port: `address` says which. Call `serve_forever()`, and `shutdown()` from another thread.
    Raises ValueError if `host` is not a loopback address and there is no `token`, or if the reward needs more than pictures and
    prompts; OSError if the address is taken.
    """

    def __init__(
        self,
        reward: Scorer,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol

        token = (token or "").strip() or None
        if token is None and not is_loopback(host):
            raise ValueError(f"serving on {host} without a token would let anyone use this machine; give a token")
        reward = as_reward(reward)
        for unserved, what in (
            (reward.video, "clips (`video`)"),
            (reward.group, "whole groups (`group`)"),
            (reward.latent, "latents (`latent`)"),
            (reward.state is not None, "a state that checkpoints keep (`state`)"),
        ):
            if unserved:
                raise ValueError(f"this reward needs {what}, and a server gets pictures and prompts")
        self.reward, self.token, self.limits = reward, token, limits or Limits()
        self.more = {} if reward.right is None else {"right": float(reward.right)}
        self.name = reward.name
        self.one_at_a_time = threading.Lock()
        self.pixels_left, self.room = self.limits.pixels, threading.Condition()
        self.slots = asyncio.Semaphore(self.limits.requests)
        self.scoring = ThreadPoolExecutor(self.limits.requests)
        self.clients = 0
        most = self.limits.connections
        self.connection = bounded(H11Protocol, self._has_asked, most, headers_s=self.limits.headers_s, half_open=True)
        self.strangers = self.connection.strangers
        config = uvicorn.Config(
            self._answer_request, http=self.connection, interface="asgi3", ws="none", lifespan="off", proxy_headers=False,
            server_header=False, log_config=None, access_log=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server, self.ended = uvicorn.Server(config), threading.Event()
        self.ended.set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, port), family=family, backlog=128)  # a hundred ranks may connect at once
        self.server_address = self.socket.getsockname()[:2]

    @property
    def address(self) -> str:
        host, port = self.server_address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve_forever(self) -> None:
        """Answers until `shutdown`, or a signal that is raised again."""
        self.ended.clear()
        try:
            self.server.run(sockets=[self.socket])
        finally:
            self.ended.set()

    def shutdown(self) -> None:
        """Ends `serve_forever` in another thread, and waits for its end."""
        self.server.should_exit = True
        self.ended.wait()

    def __enter__(self) -> RewardServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()
        self.scoring.shutdown(wait=False, cancel_futures=True)

    def _has_asked(self, connection: Any) -> bool:
        """Whether a connection is authorised and its body has begun to arrive."""
        begun = connection.cycle.body or not connection.cycle.more_body
        return bool(begun) and self._refusal(_headers(connection.scope)) is None

    async def _answer_request(self, scope: Mapping[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """The ASGI application."""
        status, rest, body = 200, False, _Body(receive)
        try:
            content = await self._answer(scope, body)
        except _Gone:
            return
        except BadRequest as error:
            status, content, rest = error.status, {"error": str(error)}, body.more
        except Exception as error:  # the reward failed: the server continues, the client may retry
            log.exception("the reward failed")
            status, content = 500, {"error": f"the reward failed with {type(error).__name__}; the server's log says more"}
        log.info("%s %s: %d", scope["method"], ascii(scope["path"]), status)  # no control characters in a log
        data = json.dumps(content, allow_nan=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data)), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": rest})
        if rest:  # drain the request: closing at once would reset the connection before the client has read the answer
            with contextlib.suppress(TimeoutError, _Gone):
                async with asyncio.timeout(_LINGER_S):
                    while await body.piece():
                        pass
            await send({"type": "http.response.body", "body": b""})

    async def _answer(self, scope: Mapping[str, Any], body: _Body) -> dict[str, Any]:
        headers = _headers(scope)
        if (refused := self._refusal(headers)) is not None:
            raise refused
        if (scope["method"], scope["path"]) == ("GET", "/health"):
            return {"status": "ok", "reward": self.name, **self.more}
        if (scope["method"], scope["path"]) != ("POST", "/score"):
            raise BadRequest(404, _ROUTES)
        # A web page can post to a loopback server, but not with this content type unless the server agrees beforehand.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise BadRequest(415, "the content type must be application/json")
        if "content-length" not in headers:
            raise BadRequest(411, "a Content-Length is needed")
        if int(headers["content-length"]) > self.limits.body_bytes:  # a number: uvicorn refuses anything else
            raise BadRequest(413, f"the body is larger than {self.limits.body_bytes} bytes")
        first = await _in_time(self.limits.headers_s, body.piece())
        async with self._place():
            content = first + await _in_time(self.limits.read_s, self._rest(body))
            scores = await asyncio.get_running_loop().run_in_executor(self.scoring, self._scores, content)
        return {"scores": [float(score) if math.isfinite(score) else None for score in scores.tolist()]}

    def _refusal(self, headers: Mapping[str, str]) -> BadRequest | None:
        """Why a request with these headers is refused; None if it is allowed."""
        if self.token is None and not is_loopback(host_of(headers.get("host", "localhost"))):
            # against DNS rebinding, by which a web page could read the answers
            return BadRequest(403, "without a token this server answers to loopback addresses only")
        wanted = f"Bearer {self.token}".encode()
        if self.token is not None and not hmac.compare_digest(headers.get("authorization", "").encode(), wanted):
            return BadRequest(401, "a valid token is needed: Authorization: Bearer ...")
        return None

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places for clients, and then for requests that are read or scored; `BadRequest` if none becomes free."""
        if self.clients >= self.limits.clients:
            raise BadRequest(503, "busy")
        self.clients += 1
        try:
            await _in_time(self.limits.wait_s, self.slots.acquire(), BadRequest(503, "busy"))
            try:
                yield
            finally:
                self.slots.release()
        finally:
            self.clients -= 1

    async def _rest(self, body: _Body) -> bytes:
        """The rest of a body after its first piece."""
        pieces = []
        while piece := await _in_time(self.limits.gap_s, body.piece()):
            pieces.append(piece)
        return b"".join(pieces)

    def _scores(self, body: bytes) -> Tensor:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="g2rpo-")))
            images, prompts = parse_request(body, self.limits, folder, lambda n: stack.enter_context(self._decoding(n)))
            with self.one_at_a_time:  # in float32 they are four times as large, so only those of one request
                return self.reward.scores(images.float().div_(255), prompts)

    @contextlib.contextmanager
    def _decoding(self, pixels: int) -> Iterator[None]:
        """While entered, reserves this many of the pixels that may be decoded at a time; `BadRequest` if too few become
        free."""
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


class _Gone(Exception):
    """The client closed the connection."""


def _headers(scope: Mapping[str, Any]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


LATE = BadRequest(408, "the body did not come in time")


async def _in_time(seconds: float, coming: Awaitable[T], late: BadRequest = LATE) -> T:
    """The result of `coming`; raises `late` after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await coming
    except TimeoutError:
        raise late from None


class _Body:
    """The body of a request, piece by piece."""

    def __init__(self, receive: Callable[[], Any]) -> None:
        self.receive, self.more = receive, True

    async def piece(self) -> bytes:
        """The next bytes; none at the end."""
        while self.more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            self.more = message.get("more_body", False)
            if message.get("body"):
                return bytes(message["body"])
        return b""
