"""`g2rpo teach`: a session in the browser, or its answers from a file."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from g2rpo.app.events import Emit, Line, Results, Serving, silent
from g2rpo.app.serving import check_address, refused, token_for
from g2rpo.app.stopping import until_ctrl_c
from g2rpo.lab.teach.background import Lesson
from g2rpo.lab.teach.opening import opened
from g2rpo.lab.web import needing_gradio


def teach(
    recipe: str,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    *,
    stored: Path | None = None,
    prompt: str | None = None,
    ahead: int | None = None,
    host: str = "127.0.0.1",
    port: int = 7861,
    token_env: str | None = None,
    stop: threading.Event | None = None,
    emit: Emit = silent,
) -> Path:
    """Serves a session until interrupted, or until `stop` is set, and then finishes the run; with `stored` answers it only
    repeats them. Returns the run directory."""
    opening = partial(opened, recipe, overrides, run_dir, ahead=ahead, stored=stored, emit=emit)
    if int(os.environ.get("RANK", 0)):  # under torchrun rank 0 serves the page
        with opening() as session:
            session.follow(prompt or session.wrong_prompt)
            session.finish()
        return session.trainer.files.run.path
    token = token_for(host, token_env)
    lesson = Lesson(opening, prompt)
    if stored is None:
        check_address(host, port)
        with needing_gradio("teach"):
            from g2rpo.lab.teach import page
            from g2rpo.lab.web.page import serve
    with closing(lesson):
        trainer = lesson.begin().session.trainer
        if stored is None:
            ended = stop or threading.Event()
            built = page.build(lesson, f"Teach {trainer.config.recipe or 'a model'}", ended.set)
            with refused(host, port):
                address = serve(built, host, port, token)
            emit(Serving(f'{address} ("Finish", or Ctrl-C, ends the session and keeps what was learnt)'))
            with until_ctrl_c():
                ended.wait()
            built.close(verbose=False)
            emit(Line("comparing base and taught ..."))
        _, table = lesson.finish() or (None, {})
    rewards = list(trainer.rewards)
    emit(Results(trainer.files.run.path, table, trainer.heldout, rewards, trainer.config.policy.kind is not None))
    return trainer.files.run.path
