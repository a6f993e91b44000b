"""Pages in the browser, for the demo and for teaching: who may ask what, and how they are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from g2rpo.core.errors import UserError


@contextmanager
def needing_gradio(what: str) -> Iterator[None]:
    """Turns an import that lacks Gradio into a UserError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise UserError(f"{what} needs Gradio: pip install gradio") from None
