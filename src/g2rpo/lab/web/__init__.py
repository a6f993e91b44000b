"""Pages in the browser, for the demo and for teaching: who may ask what, and how they are
served."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from g2rpo.core.errors import UserError


@contextmanager
def needing_gradio(what: str) -> Iterator[None]:
    """Turns an import that lacks Gradio into a UserError."""
    try:
        with without_proxies():
            yield
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UserError(f"{what} needs Gradio: pip install gradio") from None


def without_proxies() -> AbstractContextManager[object]:
    """While entered, the environment's proxies are not used. Gradio needs it to be imported (some
    proxies, such as socks://, are an error there) and to start (it asks its own page, which a proxy
    does not reach)."""
    return patch.dict(os.environ, no_proxy="*", NO_PROXY="*")
