"""Clips and input pictures in a real Chromium: the report's move or stand still, the demo takes one
in."""

import http.client
import re
import urllib.error
import urllib.request
from functools import partial
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.lab.demo.drawing import draw, trace_group
from g2rpo.lab.demo.model import DemoModel
from g2rpo.lab.demo.views import drawing_html, trace_html
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import render
from g2rpo.rollout.memory import BatchSizes
from g2rpo.train.evaluation.controls import Control
from g2rpo.train.evaluation.sampler import Sampler
from g2rpo.train.monitor.pictures import seconds_of
from tests.lab.demo.test_demo_browser import PATIENCE_MS
from tests.lab.report.pages import make_run
from tests.support.ports import free_port
from tests.support.runs import Clips, Editing, brightness, config, picture
from tests.support.waiting import PATIENCE_S


def session(policy, heldout):
    policy.guidance_scale, policy.guidable = 1.0, False
    base = config("sampling.num_steps=4", "sampling.shift=1.0")
    algorithm = GranularGRPO(group_size=3, branch_steps=(1,), granularities=(1, 2))
    return DemoModel(
        sampler=Sampler(policy=policy, shift=1.0, num_steps=4, seed=42),
        config=base.model_copy(update={"algorithm": algorithm}),
        sizes=BatchSizes(rollout=8, decode=2, micro=8),
        rewards={"bright": brightness},
        judges={},
        heldout=heldout,
    )


SETTINGS = {"seed": 1, "control": Control(steps=2, guidance=1.0)}


def test_the_demo_draws_edits_with_the_pictures_that_it_is_given(tmp_path):
    """Held-out prompts have their own picture, others need one."""
    white, black = (picture(tmp_path / f"{colour}.png", colour) for colour in ("white", "black"))
    demo = session(Editing(), [Prompt("brighter", [white])])
    own = draw(demo, "brighter", **SETTINGS)
    given = draw(demo, "brighter", images=[black], **SETTINGS)
    assert own.settings.startswith("held-out prompt 1") and "held-out" not in given.settings
    assert own.base.scores["bright"] > 0.7 and given.base.scores["bright"] < 0.3
    assert drawing_html(own).count('alt="Input picture"') == 1
    group = trace_group(demo, "darker", images=[black], seed=1, plan=0, tuned=False)
    assert trace_html(group).count('alt="Input picture"') == 1 and group.rewards.mean() < 0.3
    for images in ([], [white, black]):
        said = f"prompt 'darker': has {len(images)} input pictures, but this model takes 1$"
        with pytest.raises(UserError, match=said):
            draw(demo, "darker", images=images, **SETTINGS)


def test_the_demo_shows_clips(tmp_path):
    demo = session(Clips(frames=4), ["0"])
    drawing = draw(demo, "0", **SETTINGS)
    assert drawing.base.picture.shape == (4, 3, 4, 4) and seconds_of(demo.policy, 4) == 1.5
    group = trace_group(demo, "0", seed=1, plan=0, tuned=False)
    assert group.finals.shape == (2, 3, 4, 3, 4, 4) and group.rewards.shape == (1, 2, 3)
    for page, pictures in ((drawing_html(drawing), 1), (trace_html(group), 4 + 3 * 3)):
        assert len(re.findall(r'src="data:image/webp;base64,', page)) == pictures


@pytest.mark.slow
def test_a_picture_is_uploaded_in_the_browser(tmp_path, browser):
    from g2rpo.lab.demo import app
    from g2rpo.lab.page import MAX_BODY, MAX_UPLOAD, UPLOAD, page_of, serve
    from g2rpo.lab.serving import Address

    noise = np.random.default_rng(0).integers(256, size=(400, 400, 3), dtype=np.uint8)
    photograph = tmp_path / "photograph.png"
    Image.fromarray(noise).save(photograph)
    assert photograph.stat().st_size > 4 * MAX_BODY
    view = partial(app.draw_view, session(Editing(), []), [], "")
    page = page_of("Edits", "demo", "Of a picture.", {"Draw": view})
    address = serve(page, Address("127.0.0.1", free_port()), uploads=True)
    try:
        with pytest.raises(urllib.error.HTTPError, match="403"):  # only what it has taken in
            urllib.request.urlopen(f"{address}gradio_api/file=/etc/passwd")
        for route, size in ((UPLOAD, MAX_UPLOAD), ("/gradio_api/queue/join", MAX_BODY)):
            large = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE_S)
            large.putrequest("POST", route)
            large.putheader("Content-Length", str(size + 1))
            large.endheaders()  # it is refused before any of it is sent
            assert large.getresponse().status == 413
        tab = browser.new_page()
        tab.set_default_timeout(PATIENCE_MS)
        tab.goto(address)
        tab.get_by_label("Prompt").first.fill("darker")
        tab.locator("input[type=file]").set_input_files(photograph)
        tab.wait_for_selector("img[src*='file=']")
        tab.click("#draw")
        tab.wait_for_selector(".g2-inputs img")
        assert "darker" in tab.inner_text("#drawing")
        tab.close()
    finally:
        page.close(verbose=False)


@pytest.mark.slow
def test_the_reports_clips_move_unless_the_reader_asked_for_none(tmp_path, browser):
    run, page = (
        make_run(tmp_path / "run", "trainer.iterations=2", policy=Clips()),
        tmp_path / "p.html",
    )
    page.write_text(render(read_runs([run])))
    for motion in ("no-preference", "reduce"):
        tab = browser.new_page(reduced_motion=motion)
        tab.goto(f"file://{page}")
        tab.locator(".pair img").first.scroll_into_view_if_needed()
        tab.wait_for_function("document.querySelector('.pair img').naturalWidth > 0")
        # a frame of an animated WebP
        moves = "img => atob(img.currentSrc.split(',')[1]).includes('ANMF')"
        assert tab.locator(".pair img").first.evaluate(moves) is (motion == "no-preference")
        tab.close()
