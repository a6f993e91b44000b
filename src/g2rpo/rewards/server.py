"""Serve any reward over HTTP (protocol: `g2rpo.rewards.remote`), with Starlette and uvicorn.

What comes over the network is not trusted: bodies, numbers of pictures and their pixels are bounded before anything is
decoded, only PNG is read, nothing is unpickled, slow clients are cut off, and only the loopback interface is served
without a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import logging
import math
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import uvicorn
from PIL import Image
from pydantic import AfterValidator, Base64Bytes, BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from g2rpo.core.images import to_tensor
from g2rpo.core.input_pictures import as_rgb
from g2rpo.core.plain import is_text, parse_as
from g2rpo.core.types import Prompt, Reward, Scorer, as_reward
from g2rpo.core.web import bounded_connections, host_of, is_loopback

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""How long the rest of a refused request is read: closing at once would reset the connection before the client has read the
answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on one request, and on requests at a time."""

    body_bytes: int = 128 * 2**20
    values: int = 2**18  # in the JSON of a body: `{},` is three bytes, and takes 30 times that when it is parsed
    images: int = 256
    pixels: int = 2**25  # of all pictures of a request: 32 pictures of 1024 x 1024
    prompt_chars: int = 20_000
    headers_s: float = 10.0  # for all headers
    gap_s: float = 5.0  # between two pieces of a body
    read_s: float = 60.0  # for the whole body
    held_bytes: int = 2**30  # of all bodies that have come and are not scored; a client that is refused with 503 tries again
    decoding: int = 2  # requests that are decoded or scored at a time; others wait
    incomplete: int = 128  # requests that are refused or have not come whole; the one that is idle longest makes room
    connections: int = 512


def _clean(text: str) -> str:
    if not is_text(text):
        raise ValueError("a character that no text may have (NUL or a lone surrogate)")
    return text


class ScoreRequest(BaseModel):
    """The body of a request."""

    images: Annotated[list[Base64Bytes], Field(min_length=1)]
    prompts: list[Annotated[str, AfterValidator(_clean)]]
    metadata: list[dict[str, Any]] | None = None
    inputs: list[Base64Bytes] = []
    inputs_of: list[list[Annotated[int, Field(ge=0)]]] | None = None


def parse_request(body: bytes | bytearray, limits: Limits, folder: Path) -> tuple[Tensor, list[Prompt]]:
    """uint8 pictures [B, 3, H, W] and prompts of a request's JSON; HTTPException if it is not as agreed. Input pictures of
    prompts are written to `folder`."""
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > limits.values:
        raise HTTPException(413, "the body has too many values")
    try:
        request = parse_as(ScoreRequest, body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not as agreed: {error}") from None
    _check_counts(request, limits)
    check_pixels([*request.images, *request.inputs], limits.pixels)
    paths = [folder / f"{number}.png" for number in range(len(request.inputs))]
    for path, data in zip(paths, request.inputs, strict=True):
        decode_png([data])
        path.write_bytes(data)
    owned = request.inputs_of or [[]] * len(request.prompts)
    extra = request.metadata or [{}] * len(request.prompts)
    rows = zip(request.prompts, owned, extra, strict=True)
    prompts = [Prompt(text, [str(paths[place]) for place in own], more) for text, own, more in rows]
    return decode_png(request.images), prompts


def _check_counts(request: ScoreRequest, limits: Limits) -> None:
    count, pictures = len(request.prompts), len(request.images) + len(request.inputs)
    if pictures > limits.images:
        raise HTTPException(413, f"{pictures} images in one request; at most {limits.images}")
    if any(len(prompt) > limits.prompt_chars for prompt in request.prompts):
        raise HTTPException(413, f"a prompt has more than {limits.prompt_chars} characters")
    for name in ("images", "metadata", "inputs_of"):
        given = getattr(request, name)
        if given is not None and len(given) != count:
            raise HTTPException(400, f"{name}: {len(given)} for {count} prompts; there must be one for each")
    for place in (place for own in request.inputs_of or () for place in own):
        if place >= len(request.inputs):
            raise HTTPException(400, f"inputs_of must have indices of the {len(request.inputs)} inputs, got {place}")


def check_pixels(pictures: Sequence[bytes], most: int) -> None:
    """HTTPException unless these are PNG files with at most `most` pixels together; nothing is decoded."""
    pixels = 0
    for data in pictures:
        try:
            with open_png(data) as picture:
                pixels += picture.width * picture.height
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise HTTPException(413, f"too many pixels: {error}") from None
        except Exception as error:  # Pillow does not document which for damaged files
            raise HTTPException(400, f"an image is not a PNG: {type(error).__name__}") from error
        if pixels > most:
            raise HTTPException(413, f"too many pixels: more than {most} in one request")


def decode_png(pictures: Sequence[bytes]) -> Tensor:
    """uint8 pictures [B, 3, H, W] of PNG files of one size; HTTPException if one is broken."""
    batch: Tensor | None = None
    for number, data in enumerate(pictures):  # one at a time: Pillow takes more memory than the result
        try:
            with open_png(data) as picture:
                (decoded,) = to_tensor([as_rgb(picture)])
        except Exception as error:
            raise HTTPException(400, f"an image is a broken PNG: {type(error).__name__}") from error
        if batch is None:
            batch = torch.empty(len(pictures), *decoded.shape, dtype=torch.uint8)
        if decoded.shape != batch.shape[1:]:
            raise HTTPException(400, "the images of one request must have one size")
        batch[number] = decoded
    assert batch is not None
    return batch


def open_png(data: bytes) -> Image.Image:
    """A PNG of which the header is read."""
    return Image.open(io.BytesIO(data), formats=["PNG"])


def check_served(reward: Reward) -> None:
    """ValueError if `reward` needs more than pictures and prompts."""
    for unserved, what in (
        (reward.video, "clips (`video`)"),
        (reward.group, "whole groups (`group`)"),
        (reward.latent, "latents (`latent`)"),
        (reward.state is not None, "a state that checkpoints keep (`state`)"),
    ):
        if unserved:
            raise ValueError(f"this reward needs {what}, and a server gets pictures and prompts")


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
        token = (token or "").strip() or None
        if token is None and not is_loopback(host):
            raise ValueError(f"serving on {host} without a token would let anyone use this machine; give a token")
        self.limits = limits = limits or Limits()
        self.reward, self.token = as_reward(reward), token
        check_served(self.reward)
        self.held_bytes, self.scoring = 0, threading.Lock()
        self.turns, self.threads = asyncio.Semaphore(limits.decoding), ThreadPoolExecutor(limits.decoding)
        self.connection = bounded_connections(H11Protocol, self._has_asked, limits.incomplete, headers_s=limits.headers_s)
        app = Starlette(
            routes=[Route("/health", self._health), Route("/score", self._score, methods=["POST"])],
            exception_handlers={HTTPException: _refuse, ClientDisconnect: _say_nothing},
        )
        app.router.redirect_slashes = False
        config = uvicorn.Config(
            app, http=self.connection, ws="none", lifespan="off", proxy_headers=False, server_header=False,
            log_config=None, timeout_graceful_shutdown=1, limit_concurrency=limits.connections,
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
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _has_asked(self, connection: Any) -> bool:
        """Whether a connection is authorised and its request has come whole."""
        return not connection.cycle.more_body and self._refusal(Request(connection.scope).headers) is None

    def _refusal(self, headers: Mapping[str, str]) -> HTTPException | None:
        """Why a request with these headers is refused; None if it is allowed."""
        if self.token is None and not is_loopback(host_of(headers.get("host", "localhost"))):
            # against DNS rebinding, by which a web page could read the answers
            return HTTPException(403, "without a token this server answers to loopback addresses only")
        wanted = f"Bearer {self.token}".encode()
        if self.token is not None and not hmac.compare_digest(headers.get("authorization", "").encode(), wanted):
            return HTTPException(401, "a valid token is needed: Authorization: Bearer ...")
        return None

    async def _health(self, request: Request) -> Response:
        if (refused := self._refusal(request.headers)) is not None:
            raise refused
        right = {} if self.reward.right is None else {"right": float(self.reward.right)}
        return _answer({"status": "ok", "reward": self.reward.name, **right})

    async def _score(self, request: Request) -> Response:
        self._check_headers(request)
        with self._holding() as body:
            await self._read(request, body)
            async with self.turns:
                if await request.is_disconnected():  # while it waited
                    raise ClientDisconnect
                scores = await asyncio.get_running_loop().run_in_executor(self.threads, self._scores, body)
        found = [score if math.isfinite(score) else None for score in scores.tolist()]
        return _answer({"scores": found, "reward": self.reward.name})

    def _check_headers(self, request: Request) -> None:
        headers = request.headers
        if (refused := self._refusal(headers)) is not None:
            raise refused
        # A web page can post to a loopback server, but not with this content type unless the server agrees beforehand.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the content type must be application/json")
        if "content-length" not in headers:
            raise HTTPException(411, "a Content-Length is needed")
        if int(headers["content-length"]) > self.limits.body_bytes:  # a number: uvicorn refuses anything else
            raise HTTPException(413, f"the body is larger than {self.limits.body_bytes} bytes")

    @contextlib.contextmanager
    def _holding(self) -> Iterator[bytearray]:
        """A body that counts among those that are held, while entered."""
        body = bytearray()
        try:
            yield body
        finally:
            self.held_bytes -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Appends the body, as it comes."""
        now = asyncio.get_running_loop().time
        end = now() + self.limits.read_s
        try:
            async with asyncio.timeout(self.limits.gap_s) as limit:
                async for piece in request.stream():
                    if self.held_bytes + len(piece) > self.limits.held_bytes:
                        raise HTTPException(503, "busy", {"Retry-After": "1"})
                    self.held_bytes += len(piece)
                    body += piece
                    limit.reschedule(min(now() + self.limits.gap_s, end))
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time") from None

    def _scores(self, body: bytearray) -> Tensor:
        """The scores of a request, in a thread."""
        try:
            with TemporaryDirectory(prefix="g2rpo-") as folder:
                images, prompts = parse_request(body, self.limits, Path(folder))
                with self.scoring:  # in float32 they are four times as large, so only those of one request
                    return self.reward.scores(images.float().div_(255), prompts)
        except HTTPException:
            raise
        except Exception as error:  # the server continues, the client may retry
            log.exception("the reward failed")
            text = f"the reward failed with {type(error).__name__}; the server's log says more"
            raise HTTPException(500, text) from None


def _answer(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(content, status, {"Connection": "close", **(headers or {})})


async def _refuse(request: Request, error: HTTPException) -> Response:
    """The answer to a request that is refused, after the rest of its body."""
    if error.status_code != 408:
        with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):  # the last: nothing is left
            async with asyncio.timeout(LINGER_S):
                async for _ in request.stream():
                    pass
    return _answer({"error": error.detail}, error.status_code, error.headers)


async def _say_nothing(request: Request, error: ClientDisconnect) -> Response:
    return Response()
