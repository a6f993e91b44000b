"""Serve any reward over HTTP (protocol: `g2rpo.rewards.remote`), with Starlette and uvicorn.

It answers this machine, or whoever has the token. Slow clients and many connections are left to a
proxy (docs/security.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import logging
import math
import socket
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

from g2rpo.core.data import Prompt
from g2rpo.core.errors import counted
from g2rpo.core.http import is_loopback, refusal
from g2rpo.core.images import as_rgb, to_tensor
from g2rpo.core.plain import is_text, parse_as
from g2rpo.core.rewards import Reward, Scorer, as_reward

log = logging.getLogger(__name__)

MAX_BODY = 128 * 2**20
"""Bytes of a request."""
MAX_PIXELS = 2**25
"""Of all pictures of a request: 32 pictures of 1024 x 1024."""


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


def parse_request(body: bytes, folder: Path) -> tuple[Tensor, list[Prompt]]:
    """uint8 pictures [B, 3, H, W] and prompts of a request's JSON; HTTPException if it is not as
    agreed. Input pictures of prompts are written to `folder`."""
    try:
        request = parse_as(ScoreRequest, body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not as agreed: {error}") from None
    images = decode_png([*request.images, *request.inputs])[: len(request.images)]
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


def decode_png(files: list[bytes]) -> list[Tensor]:
    """uint8 pictures [1, 3, H, W] of PNG files; HTTPException if one is broken, or if all have more
    than `MAX_PIXELS` together, which their headers say before one is decoded."""
    try:
        pixels = sum(math.prod(open_png(data).size) for data in files)
        if pixels <= MAX_PIXELS:
            return [to_tensor([as_rgb(open_png(data))]) for data in files]
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise HTTPException(413, f"too many pixels: {error}") from None
    except Exception as error:  # Pillow does not document which for damaged files
        raise HTTPException(400, f"an image is no whole PNG: {type(error).__name__}") from error
    raise HTTPException(413, f"too many pixels: {pixels}, more than {MAX_PIXELS} in one request")


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
    """An HTTP server of one reward; requests are scored one at a time.

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
    ) -> None:
        self.token = (token or "").strip() or None
        if self.token is None and not is_loopback(host):
            raise ValueError(
                f"serving on {host} without a token would let anyone use this machine; give a token"
            )
        self.reward, self.turn = as_reward(reward), asyncio.Lock()
        check_served(self.reward)
        app = Starlette(
            routes=[Route("/health", self._health), Route("/score", self._score, methods=["POST"])],
            exception_handlers={HTTPException: _refuse},
        )
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
        )
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

    def _check_allowed(self, request: Request) -> None:
        why = refusal(request.headers, MAX_BODY, local=self.token is None)
        if why is not None:
            raise HTTPException(*why)
        given = request.headers.get("authorization", "").encode()
        if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise HTTPException(401, "a valid token is needed: Authorization: Bearer ...")

    async def _health(self, request: Request) -> Response:
        self._check_allowed(request)
        right = {} if self.reward.right is None else {"right": float(self.reward.right)}
        return JSONResponse({"status": "ok", "reward": self.reward.name, **right})

    async def _score(self, request: Request) -> Response:
        self._check_allowed(request)
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response()
        async with self.turn:
            if await request.is_disconnected():  # while it waited
                return Response()
            scores = await asyncio.to_thread(self._scores, body)
        found = [score if math.isfinite(score) else None for score in scores.tolist()]
        return JSONResponse({"scores": found, "reward": self.reward.name})

    def _scores(self, body: bytes) -> Tensor:
        """The scores of a request, in a thread."""
        try:
            with TemporaryDirectory(prefix="g2rpo-") as folder:
                images, prompts = parse_request(body, Path(folder))
                return self.reward.scores(images.float().div_(255), prompts)
        except HTTPException:
            raise
        except Exception as error:  # the server continues, the client may retry
            log.exception("the reward failed")
            text = f"the reward failed with {type(error).__name__}; the server's log says more"
            raise HTTPException(500, text) from None


async def _refuse(request: Request, error: HTTPException) -> Response:
    """The answer to a request that is refused, after the rest of its body: closing at once would
    reset the connection before the client has read the answer."""
    with contextlib.suppress(ClientDisconnect, RuntimeError):  # the last: nothing is left
        async for _ in request.stream():
            pass
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
