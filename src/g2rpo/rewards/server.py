"""Serve any reward over HTTP (protocol: `g2rpo.rewards.remote`), with Starlette and uvicorn.

docs/security.md says what is assumed of clients, and what they are refused.
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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import uvicorn
from PIL import Image
from pydantic import AfterValidator, Base64Bytes, BaseModel, Field, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from g2rpo.core.errors import counted
from g2rpo.core.images import to_tensor
from g2rpo.core.input_pictures import as_rgb
from g2rpo.core.plain import is_text, parse_as
from g2rpo.core.types import Prompt, Reward, Scorer, as_reward
from g2rpo.core.web import host_of, is_loopback

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""How long the rest of a refused request is read: closing at once would reset the connection before
the client has read the answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request, and all requests together, may take."""

    body_bytes: int = 128 * 2**20
    values: int = 2**18  # in the JSON of a body: 16 MiB of `{},` take 600 MiB once they are parsed
    pixels: int = 2**25  # of all pictures of a request: 32 pictures of 1024 x 1024
    headers_s: float = 10.0  # for all headers
    gap_s: float = 5.0  # between two pieces of a body
    read_s: float = 60.0  # for the whole body
    # of all bodies that have come and are not scored; a client that is refused with 503 tries again
    held_bytes: int = 2**30
    decoding: int = 2  # requests that are decoded or scored at a time; others wait
    # requests that are refused or have not come whole; the one that is idle longest makes room
    incomplete: int = 128
    connections: int = 512


def _clean(text: str) -> str:
    if not is_text(text):
        raise ValueError("a character that no text may have (NUL or a lone surrogate)")
    return text


Pictures = Annotated[list[Base64Bytes], Field(max_length=256)]
Text = Annotated[str, Field(max_length=20_000), AfterValidator(_clean)]


class ScoreRequest(BaseModel):
    """The body of a request."""

    images: Annotated[Pictures, Field(min_length=1)]
    prompts: Annotated[list[Text], Field(max_length=256)]
    metadata: Annotated[list[dict[str, Any]], Field(max_length=256)] | None = None
    inputs: Pictures = []
    inputs_of: Annotated[list[list[Annotated[int, Field(ge=0)]]], Field(max_length=256)] | None = (
        None
    )

    @model_validator(mode="after")
    def _one_for_each(self) -> ScoreRequest:
        count = len(self.prompts)
        for name in ("images", "metadata", "inputs_of"):
            given = getattr(self, name)
            if given is not None and len(given) != count:
                raise ValueError(
                    f"{name}: {len(given)} for {counted(count, 'prompt')}; there must be one for each"
                )
        places = [place for own in self.inputs_of or () for place in own]
        if max(places, default=-1) >= len(self.inputs):
            raise ValueError(
                f"inputs_of must have indices of the {len(self.inputs)} inputs, got {max(places)}"
            )
        return self


def parse_request(
    body: bytes | bytearray, limits: Limits, folder: Path
) -> tuple[Tensor, list[Prompt]]:
    """uint8 pictures [B, 3, H, W] and prompts of a request's JSON; HTTPException if it is not as
    agreed. Input pictures of prompts are written to `folder`."""
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > limits.values:
        raise HTTPException(413, "the body has too many values")
    try:
        request = parse_as(ScoreRequest, body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not as agreed: {error}") from None
    images = decode_png([*request.images, *request.inputs], limits.pixels)[: len(request.images)]
    if len({image.shape for image in images}) > 1:
        raise HTTPException(400, "the images of one request must have one size")
    paths = [folder / f"{number}.png" for number in range(len(request.inputs))]
    for path, data in zip(paths, request.inputs, strict=True):
        path.write_bytes(data)
    owned = request.inputs_of or [[]] * len(images)
    extra = request.metadata or [{}] * len(images)
    rows = zip(request.prompts, owned, extra, strict=True)
    prompts = [Prompt(text, [str(paths[place]) for place in own], more) for text, own, more in rows]
    return torch.cat(images).contiguous(), prompts  # in the order in which sums were taken locally


def decode_png(files: list[bytes], most: int) -> list[Tensor]:
    """uint8 pictures [1, 3, H, W] of PNG files; HTTPException if one is broken, or if all have more
    than `most` pixels together, which their headers say before one is decoded."""
    try:
        pixels = sum(math.prod(open_png(data).size) for data in files)
        if pixels <= most:
            return [to_tensor([as_rgb(open_png(data))]) for data in files]
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise HTTPException(413, f"too many pixels: {error}") from None
    except Exception as error:  # Pillow does not document which for damaged files
        raise HTTPException(400, f"an image is no whole PNG: {type(error).__name__}") from error
    raise HTTPException(413, f"too many pixels: {pixels}, more than {most} in one request")


def open_png(data: bytes) -> Image.Image:
    """A PNG of which the header is read."""
    return Image.open(io.BytesIO(data), formats=["PNG"])


def check_served(reward: Reward) -> None:
    """ValueError if `reward` needs more than pictures and prompts."""
    needs = {
        "clips (`video`)": reward.video,
        "latents (`latent`)": reward.latent,
        "a state that checkpoints keep (`state`)": reward.state is not None,
    }
    for what, needed in needs.items():
        if needed:
            raise ValueError(f"this reward needs {what}, and a server gets pictures and prompts")


class RewardServer:
    """An HTTP server of one reward; requests are read in parallel and scored one at a time.

    `port` 0 takes a free port: `address` says which. Call `serve_forever()`, and `shutdown()` from
    another thread. Raises ValueError if `host` is not a loopback address and there is no `token`,
    or if the reward needs more than pictures and prompts; OSError if the address is taken.
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
        self.token = (token or "").strip() or None
        if self.token is None and not is_loopback(host):
            raise ValueError(
                f"serving on {host} without a token would let anyone use this machine; give a token"
            )
        self.limits, self.reward = limits or Limits(), as_reward(reward)
        check_served(self.reward)
        self.held_bytes, self.scoring = 0, threading.Lock()
        self.strangers: dict[_Connection, None] = {}
        """Connections that have not sent a whole request which is allowed; the one that is idle
        longest is first."""
        self.turns = asyncio.Semaphore(self.limits.decoding)
        app = Starlette(
            routes=[Route("/health", self._health), Route("/score", self._score, methods=["POST"])],
            exception_handlers={HTTPException: _refuse},
        )
        app.router.redirect_slashes = False
        config = uvicorn.Config(
            app, http=partial(_Connection, owner=self), ws="none", lifespan="off", headers=[("Connection", "close")],
            proxy_headers=False, server_header=False, log_config=None, timeout_graceful_shutdown=1,
            limit_concurrency=self.limits.connections,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # a hundred ranks may connect at once
        self.socket = socket.create_server((host, port), family=family, backlog=128)
        self.server_address = self.socket.getsockname()[:2]

    @property
    def address(self) -> str:
        host, port = self.server_address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve_forever(self) -> None:
        """Answers until `shutdown`, or a signal that is raised again."""
        self.server.run(sockets=[self.socket])

    def shutdown(self) -> None:
        """Ends `serve_forever` in another thread, soon."""
        self.server.should_exit = True

    def __enter__(self) -> RewardServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def _check_allowed(self, headers: Mapping[str, str]) -> None:
        if self.token is None:
            if not is_loopback(host_of(headers.get("host", "localhost"))):
                # against DNS rebinding, by which a web page could read the answers
                raise HTTPException(
                    403, "without a token this server answers to loopback addresses only"
                )
        elif not hmac.compare_digest(
            headers.get("authorization", "").encode(), f"Bearer {self.token}".encode()
        ):
            raise HTTPException(401, "a valid token is needed: Authorization: Bearer ...")

    async def _health(self, request: Request) -> Response:
        self._check_allowed(request.headers)
        right = {} if self.reward.right is None else {"right": float(self.reward.right)}
        return JSONResponse({"status": "ok", "reward": self.reward.name, **right})

    async def _score(self, request: Request) -> Response:
        self._check_headers(request.headers)
        body = bytearray()
        try:
            await self._read(request, body)
            async with self.turns:
                if await request.is_disconnected():  # while it waited
                    return Response()
                scores = await asyncio.to_thread(self._scores, body)
        except ClientDisconnect:
            return Response()
        finally:
            self.held_bytes -= len(body)
        found = [score if math.isfinite(score) else None for score in scores.tolist()]
        return JSONResponse({"scores": found, "reward": self.reward.name})

    def _check_headers(self, headers: Mapping[str, str]) -> None:
        self._check_allowed(headers)
        # A web page can post to a loopback server, but not with this content type unless the server
        # agrees beforehand.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the content type must be application/json")
        if "content-length" not in headers:
            raise HTTPException(411, "a Content-Length is needed")
        # a number: uvicorn refuses anything else
        if int(headers["content-length"]) > self.limits.body_bytes:
            raise HTTPException(413, f"the body is larger than {self.limits.body_bytes} bytes")

    async def _read(self, request: Request, body: bytearray) -> None:
        """Appends the body, as it comes, which counts among those that are held."""
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
                # in float32 they are four times as large, so only those of one request
                with self.scoring:
                    return self.reward.scores(images.float().div_(255), prompts)
        except HTTPException:
            raise
        except Exception as error:  # the server continues, the client may retry
            log.exception("the reward failed")
            text = f"the reward failed with {type(error).__name__}; the server's log says more"
            raise HTTPException(500, text) from None


class _Connection(H11Protocol):
    """uvicorn's connection, with two bounds that uvicorn lacks: on the time for its first headers,
    and on how many are among the `strangers` of its owner. One more closes the idlest, so idle
    connections keep nobody out."""

    def __init__(self, *arguments: Any, owner: RewardServer, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.owner = owner

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        strangers = self.owner.strangers
        if len(strangers) >= self.owner.limits.incomplete:
            next(iter(strangers)).leave()
        strangers[self] = None
        self.late = self.loop.call_later(self.owner.limits.headers_s, self.leave_unless_asked)

    def leave_unless_asked(self) -> None:
        if self.cycle is None:
            self.leave()

    def leave(self) -> None:
        self.owner.strangers.pop(self, None)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self not in self.owner.strangers:
            return
        del self.owner.strangers[self]
        if not self._has_asked():
            self.owner.strangers[self] = None  # at the end

    def _has_asked(self) -> bool:
        """Whether a whole request has come that is allowed."""
        if self.cycle is None or self.cycle.more_body:
            return False
        with contextlib.suppress(HTTPException):
            self.owner._check_allowed(Request(self.scope).headers)
            return True
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.owner.strangers.pop(self, None)
        self.late.cancel()
        super().connection_lost(error)


async def _refuse(request: Request, error: HTTPException) -> Response:
    """The answer to a request that is refused, after the rest of its body."""
    if error.status_code != 408:
        # the last: nothing is left
        with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
            async with asyncio.timeout(LINGER_S):
                async for _ in request.stream():
                    pass
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
