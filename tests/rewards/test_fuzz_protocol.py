"""The reward protocol with all that can come over a wire, both ways: a sound answer or a named
refusal."""

import contextlib
import json
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from g2rpo.core.http import Refused
from g2rpo.core.images import to_pil, to_uint8
from g2rpo.rewards.asking import Said, Unread, scores_in
from g2rpo.rewards.remote import RemoteReward, encode_png
from g2rpo.rewards.server import MAX_PIXELS, parse_request
from tests.support.fuzzing import mutated
from tests.support.pictures import noise
from tests.support.servers import endpoint_that
from tests.support.waiting import PATIENCE_S

PNG = encode_png(to_pil(to_uint8(noise(1, 8, 8)))[0])
BODY = json.dumps(
    {"images": [PNG, PNG], "prompts": ["a", "b"], "inputs": [PNG], "inputs_of": [[], [0]]}
)
ANSWER = b'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{"scores": [0.5, null]}'
SNIPPETS = (
    b"[" * 2000,
    b"9" * 5000,
    b'"\\ud800"',
    b"NaN",
    b"1e999",
    b"-Infinity",
    b"null",
    b"\0",
    b"\r\n",
    b"\n\n",
    b": ",
    b"\x1b[2J",
    b"%s",
    b"\xff\xfe",
    b"HTTP/1.1 302 x\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 999999999999\r\n",
    b"Host: [\r\n",
    b"Content-Length: -1\r\n",
    b"Location: file:///etc/passwd\r\n",
)
PIECES = st.sampled_from(SNIPPETS) | st.binary(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["scores", "images", "choices", "x"]), inner)
    ),
    max_leaves=9,
)


class Mean:
    """It scores what is sound, and fails otherwise."""

    def __call__(self, images, prompts):
        assert images.dtype == torch.float32 and len(images) == len(prompts)
        assert 0 <= images.min() <= images.max() <= 1
        return images.mean(dim=(1, 2, 3))


@given(mutated(BODY.encode(), PIECES) | JSON.map(lambda data: json.dumps(data).encode()))
def test_a_body_is_pictures_and_prompts_or_a_bad_request(body):
    try:
        images, prompts = parse_request(body, Path(gettempdir()))
    except HTTPException as error:
        assert 400 <= error.status_code < 500 and error.detail
    else:
        assert images.dtype == torch.uint8 and images.shape[1:2] == (3,)
        assert len(images) == len(prompts)
        assert images[:, 0].numel() <= MAX_PIXELS
        "".join(prompts).encode()


@pytest.fixture(scope="module")
def garbage():
    """A server that answers every request with the bytes `answers[0]`; a client sees it at the
    address beside."""
    answers = [b""]
    with endpoint_that(lambda handler, count: handler.wfile.write(answers[0])) as (url, _):
        yield url, answers


@given(
    mutated(ANSWER, PIECES)
    | JSON.map(lambda data: ANSWER.partition(b"{")[0] + json.dumps(data).encode())
)
@example(ANSWER.replace(b"0.5", b"1e39"))
def test_an_answer_is_scores_or_none_or_refused(garbage, answer):
    url, answers = garbage
    answers[0] = answer
    reward = RemoteReward(url, endpoint={"check": False, "timeout_s": PATIENCE_S, "retries": 0})
    try:
        scores = reward(torch.zeros(2, 3, 4, 4), ["a", "b"])
    except Refused as error:
        assert str(error).isprintable() and "answered 4" in str(error)
    else:
        assert scores.shape == (2,) and not torch.isinf(scores).any()
        if answer == ANSWER:
            assert scores[0] == 0.5 and scores[1].isnan()


@given(
    st.text()
    | mutated(
        "Alignment Score (1-5): 4\n**Final Score:** 3.5",
        st.sampled_from(["Final Score:", " " * 50, "1-5", "9" * 50]),
    )
)
@example("Final Score" + " " * 200_000 + "x")
@example("Final Score:" + "1" * 200_000 + "-5")
@example("\\boxed{" * 30_000)
def test_any_text_of_a_judge_is_a_score_or_none_at_once(text):
    """The examples took minutes and more with repetitions that nothing bounded: a hang is how this
    test fails."""
    with contextlib.suppress(Unread):
        assert 1 <= scores_in(Said(text, "stop"), ["Final Score"], 1, 5)[0] <= 5
