"""The reward server and its client over a real loopback connection; and the client against
endpoints that misbehave."""

import base64
import http.client
import json
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.exceptions import HTTPException

from g2rpo.core.images import to_pil, to_uint8
from g2rpo.core.input_pictures import images_of, read_inputs
from g2rpo.rewards.analytic import JPEGSize
from g2rpo.rewards.remote import RemoteReward, encode_png
from g2rpo.rewards.server import Limits, RewardServer, parse_request
from g2rpo.rewards.transport import NoAnswer, Refused, request_json
from g2rpo.rewards.vlm import VLMJudge
from tests.rewards.chat_server import running
from tests.support.edits import edits
from tests.support.ports import free_port
from tests.support.servers import endpoint_that

SMALL = Limits(body_bytes=200_000, values=1000, pixels=10_000, read_s=1.0)
QUICK = {"timeout_s": 5.0, "retries": 1}


def pictures(count, size=24):
    return torch.rand(count, 3, size, size + 8, generator=torch.Generator().manual_seed(count))


def post(url, body, **headers):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    connection.request("POST", "/score", body, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def png(size, height=None):
    return encode_png(to_pil(to_uint8(torch.rand(1, 3, height or size, size)))[0])


def score_body(images, prompts, **more):
    return json.dumps({"images": images, "prompts": prompts, **more}).encode()


class Prompted:
    """Scores that need the right picture beside the right prompt; the prompt "none" gets no
    score."""

    def __call__(self, images, prompts):
        scores = images.mean(dim=(1, 2, 3)) + torch.tensor([float(len(p)) for p in prompts])
        return torch.where(torch.tensor([p == "none" for p in prompts]), torch.nan, scores)


@pytest.fixture(scope="module")
def url():
    """The address of a server that all tests share."""
    with running(RewardServer(Prompted(), port=0, limits=SMALL)) as address:
        yield address


def test_a_round_trip_gives_the_local_scores():
    images, prompts = pictures(7), ["a", "bb", "none", "dddd", "e", "f" * 50, "g"]
    local = Prompted()(to_uint8(images).float() / 255, prompts)
    with running(RewardServer(Prompted(), port=0)) as url:
        assert request_json(f"{url}/health", dict) == {"status": "ok", "reward": "Prompted"}
        for options in (
            {},
            {"batch_size": 2},
            {"batch_size": 2, "endpoint": {**QUICK, "concurrency": 3}},
        ):
            remote = RemoteReward(url, **options)(images, prompts)
            torch.testing.assert_close(remote, local, rtol=0, atol=0, equal_nan=True)
        assert RemoteReward(url, endpoint=QUICK)(images[:0], []).shape == (0,)
    with running(RewardServer(JPEGSize(), port=0)) as url:  # not a bit is lost on the way
        assert torch.equal(
            RemoteReward(url, endpoint=QUICK)(images, prompts), JPEGSize()(images, prompts)
        )


def test_input_pictures_travel_with_their_prompts(tmp_path):
    """Each once, at the size that they have, and none is left on the server's disk."""
    seen = []

    def of_inputs(images, prompts):
        read = [read_inputs(prompt) for prompt in prompts]
        seen.extend(path for prompt in prompts for path in images_of(prompt))
        return torch.tensor(
            [sum(np.asarray(one).mean() / 255 for one in own) + own[0].width for own in read]
        ).float()

    prompts = edits(tmp_path, red=(0.25,), blue=(0.75, 0.5))
    prompts = [*prompts, prompts[0]]
    with running(RewardServer(of_inputs, port=0)) as url:
        assert torch.equal(
            RemoteReward(url, endpoint=QUICK)(pictures(3), prompts), of_inputs(pictures(3), prompts)
        )
        assert torch.equal(
            RemoteReward(f"{url}/", batch_size=1, endpoint={**QUICK, "check": False})(
                pictures(3), prompts
            ),
            of_inputs(None, prompts),
        )
    remote = [Path(path) for path in seen if path not in prompts[0].images + prompts[1].images]
    assert len(set(remote[:4])) == 3 and not any(path.exists() for path in remote)


def test_the_token_is_needed_and_is_never_a_setting(monkeypatch):
    with running(RewardServer(Prompted(), port=0, token="s3cret")) as url:
        assert (
            post(url, score_body([], []))[0]
            == post(url, score_body([], []), Authorization="Bearer wrong")[0]
            == 401
        )
        with pytest.raises(Refused, match="401"):
            RemoteReward(url, endpoint=QUICK)
        with pytest.raises(Refused, match="401"):
            RemoteReward(url, endpoint={**QUICK, "check": False})(pictures(1), ["a"])
        with pytest.raises(ValueError, match="environment variable"):
            RemoteReward(url, endpoint={**QUICK, "token_env": "G2RPO_TEST_TOKEN"})
        monkeypatch.setenv("G2RPO_TEST_TOKEN", "s3cret")
        assert torch.isfinite(
            RemoteReward(url, endpoint={**QUICK, "token_env": "G2RPO_TEST_TOKEN"})(
                pictures(1), ["a"]
            )
        ).all()


def png_header(width, height):
    """A PNG of a few bytes that claims any size: what a decompression bomb looks like before it is
    decoded."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    data = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return base64.b64encode(
        b"\x89PNG\r\n\x1a\n" + data + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    ).decode()


PNG, WIDE = png(32, 24), png(90)
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0 not a picture").decode()


@pytest.mark.parametrize(
    ("body", "status", "fact"),
    [
        (b"{not json", 400, "is no JSON"),
        (b"[" * 900, 400, "is no JSON"),
        (b"[" + b"{}," * 500 + b"{}]", 413, "too many values"),
        (score_body([], []), 400, "images: "),
        (b'{"prompts": ["a"]}', 400, "images: Field required"),
        (b"[]", 400, "Input should be an object"),
        (score_body([PNG], ["a"], inputs="x"), 400, "inputs: Input should be a valid array"),
        (score_body([PNG], [1]), 400, "prompts.0: Input should be a valid string, got 1"),
        (score_body([PNG], ["a\0"]), 400, "prompts.0: "),
        (score_body([PNG], ["\ud800"]), 400, "is no JSON"),
        (score_body([PNG], ["a", "b"]), 400, "images: 1 for 2 prompts"),
        (
            score_body(["AA=="] * 257, ["a"] * 257),
            400,
            "images: List should have at most 256 items",
        ),
        (
            score_body([PNG], ["a"], inputs=["AA=="] * 257),
            400,
            "inputs: List should have at most 256 items",
        ),
        (
            score_body([PNG], ["a" * 20_001]),
            400,
            "prompts.0: String should have at most 20000 characters",
        ),
        (score_body(["@@@"], ["a"]), 400, "no whole PNG"),
        (score_body(["a"], ["a"]), 400, "images.0: Base64 decoding error"),
        (score_body([JPEG], ["a"]), 400, "no whole PNG"),
        (score_body([PNG[: len(PNG) // 8 * 4]], ["a"]), 400, "no whole PNG"),
        (score_body([png_header(50_000, 50_000)], ["a"]), 413, "too many pixels"),
        (score_body([WIDE, WIDE], ["a", "b"]), 413, "more than 10000"),
        (score_body([PNG, png(30)], ["a", "b"]), 400, "one size"),
        (b" " * 300_000, 413, "200000"),
        (score_body([PNG], ["a"], inputs=[png_header(9_000, 9_000)]), 413, "too many pixels"),
        (score_body([PNG], ["a"], inputs=["/etc/passwd"], inputs_of=[[0]]), 400, "inputs.0: "),
        (score_body([PNG], ["a"], inputs=[PNG], inputs_of=[[1]]), 400, "indices of the 1 inputs"),
        (score_body([PNG], ["a"], inputs_of=[["/etc/passwd"]]), 400, "inputs_of.0.0: "),
        (score_body([PNG], ["a"], inputs_of=[[-1]]), 400, "inputs_of.0.0: "),
        (score_body([PNG], ["a"], metadata=[{}, {}]), 400, "metadata: 2 for 1 prompts"),
        (score_body([PNG], ["a"], metadata=["x"]), 400, "metadata.0: "),
        (score_body([PNG], ["a"], inputs=[PNG], inputs_of=[[0], [0]]), 400, "one for each"),
    ],
)
def test_the_server_refuses_what_it_should(url, body, status, fact):
    answered, content = post(url, body)
    assert answered == status and fact in content["error"]
    assert post(url, score_body([PNG], ["a"]))[0] == 200


def test_the_server_refuses_other_paths_types_and_lengths(url):
    assert post(url, score_body([PNG], ["a"]), **{"Content-Type": "text/plain"})[0] == 415
    assert post(url, b"0\r\n\r\n", **{"Transfer-Encoding": "chunked"})[0] == 411
    for path, body in (("", None), ("else", {})):
        with pytest.raises(Refused, match="404"):
            request_json(f"{url}/{path}", dict, body=body)


def test_a_reward_that_fails_is_an_error_500_and_then_no_score(caplog, naps):
    def broken(images, prompts):
        raise RuntimeError("secret details")

    with running(RewardServer(broken, port=0)) as url:
        status, content = post(url, score_body([PNG], ["a"]))
        assert status == 500
        assert "RuntimeError" in content["error"] and "secret details" not in content["error"]
        assert torch.isnan(RemoteReward(url, endpoint=QUICK)(pictures(3), ["a"] * 3)).all()
        assert "no score after 2 attempts" in caplog.text


def test_pictures_that_compress_well_are_bounded_by_their_pixels_before_they_are_decoded(
    monkeypatch,
):
    """2^26 black pixels are 64 KiB; at 12 bytes as float32, and as much again while they are
    decoded, they were 3 GiB. Their headers are enough."""
    decoded = []
    monkeypatch.setattr("g2rpo.rewards.server.as_rgb", lambda picture: decoded.append(picture))
    limits, small = Limits(), png_header(512, 512)
    bodies = (
        score_body([png_header(8192, 8192)], ["a"]),
        score_body([png_header(8192, 2048), png_header(8192, 2049)], ["a", "b"]),
        score_body([small] * 64, ["a"] * 64, inputs=[small] * 65),
    )
    for body in bodies:
        with pytest.raises(HTTPException, match="too many pixels"):
            parse_request(body, limits, Path())
    assert not decoded


def test_only_so_many_requests_are_decoded_or_scored_at_a_time_and_who_has_left_is_not():
    inside, go, sizes, answers = threading.Event(), threading.Event(), [], {}

    def held(images, prompts):
        sizes.append(len(images))
        inside.set()
        go.wait(10)
        return torch.zeros(len(images))

    with running(server := RewardServer(held, port=0, limits=Limits(decoding=1))) as url:

        def ask(count):
            answers[count] = post(url, score_body([PNG] * count, ["a"] * count))[0]

        threads = [threading.Thread(target=ask, args=[count]) for count in (1, 2)]
        threads[0].start()
        assert inside.wait(10)
        with pytest.raises(NoAnswer, match="in time"):
            request_json(
                f"{url}/score",
                dict,
                body={"images": [PNG] * 3, "prompts": ["a"] * 3},
                timeout_s=0.3,
            )
        ends = time.monotonic() + 10
        while len(server.server.server_state.connections) > 1 and time.monotonic() < ends:
            time.sleep(0.01)  # until the server has noticed who left
        threads[1].start()
        go.set()
        for thread in threads:
            thread.join()
    assert answers == {1: 200, 2: 200} and sizes == [1, 2]


# --- endpoints that misbehave ---------------------------------------------------------------------


def reply(text, status=200, **headers):
    def answer(handler, count):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


def endless(handler, count):
    """A gigabyte, of which nobody reads more than 16 MiB."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1024):
        handler.wfile.write(b" " * 2**20)


def cut_off(handler, count):
    """Closes the connection in the middle of its answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [0.5, ')


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (reply("<html>hello</html>"), "is no JSON"),
        (reply("[" * 100_000), "is no JSON"),
        (reply('{"scores": ' + "[" * 100_000), "is no JSON"),
        (reply("[1.0, 2.0]"), "answered something else"),
        (reply('{"scores": null}'), "scores: Input should be a valid array"),
        (reply('{"scores": {"0": 1}}'), "scores: Input should be a valid array"),
        (reply('{"score": [1.0, 2.0]}'), "scores: Field required"),
        (reply('{"scores": [1.0, "2.0"]}'), "scores.1: Input should be a valid number, got '2.0'"),
        (reply('{"scores": [1.0, true]}'), "scores.1: Input should be a valid number, got True"),
        (reply('{"scores": [1.0, [2.0]]}'), "scores.1: Input should be a valid number"),
        (reply('{"scores": [1.0]}'), "answered 1 scores for 2 pictures"),
        (reply('{"scores": [1.0, 2.0, 3.0]}'), "answered 3 scores for 2 pictures"),
        (reply("oops", 500), "answered 500: oops"),
        (reply("", 302, Location="http://127.0.0.1:9/"), "answered 302"),
        (endless, "more than 16777216 bytes"),
        (cut_off, "RemoteProtocolError"),
    ],
)
def test_a_useless_answer_is_asked_for_again_and_then_is_no_score(answer, fact, caplog, naps):
    with endpoint_that(answer) as (url, bodies):
        scores = RemoteReward(url, endpoint={**QUICK, "check": False})(pictures(2), ["a", "b"])
        assert torch.isnan(scores).all()
        assert len(bodies) == 2 and len(naps) == 1
    (said,) = [
        record.getMessage() for record in caplog.records if "attempts" in record.getMessage()
    ]
    assert fact in said and len(said) < 500 and said.isprintable()


@pytest.mark.parametrize(
    "score", ["null", "NaN", "Infinity", "-Infinity", "1e39", "1e999", "1" + "0" * 400]
)
def test_a_score_that_is_no_number_of_a_picture_is_missing(score):
    with endpoint_that(reply(f'{{"scores": [0.5, {score}]}}')) as (url, bodies):
        scores = RemoteReward(url, endpoint={**QUICK, "check": False})(pictures(2), ["a", "b"])
    assert scores[0] == 0.5 and scores[1].isnan() and len(bodies) == 1


def test_a_wrong_address_fails_at_once():
    with pytest.raises(NoAnswer, match="refused"):
        RemoteReward(f"http://127.0.0.1:{free_port()}", endpoint=QUICK)
    odd = (
        "http://[1.2.3]",
        "http://[::g]:80",
        "http://\u2488com",
        "http://host:0",
        "http://host:99999",
        "http://a b",
    )
    for bad in (
        "127.0.0.1:8000",
        "file:///etc/passwd",
        "ftp://host/x",
        "http://",
        "http://host/?q=1",
        *odd,
    ):
        with pytest.raises(ValueError, match="an endpoint is an address"):
            RemoteReward(bad, endpoint=QUICK)


# --- the judge ------------------------------------------------------------------------------------


def test_the_judge_sends_picture_and_prompt_and_reads_the_score():
    def by_prompt(handler, count):
        text = "Final Score: 5" if "{braces} in it" in bodies[-1] else "no idea"
        reply(json.dumps({"choices": [{"message": {"content": text}}]}))(handler, count)

    with endpoint_that(by_prompt) as (url, bodies):
        judge = VLMJudge(
            f"{url}/v1",
            "judge",
            image_size=16,
            endpoint={**QUICK, "concurrency": 1, "check": False},
        )
        scores = judge(pictures(2), ["a prompt with {braces} in it", "b"])
    assert scores[0] == 5 and torch.isnan(scores[1])
    assert len(bodies) == 2  # an answer without a score is not asked for again
    request = json.loads(bodies[0])
    assert (request["model"], request["temperature"]) == ("judge", 0.0)
    picture, text = request["messages"][0]["content"]
    assert "a prompt with {braces} in it" in text["text"]
    head, data = picture["image_url"]["url"].split(",")
    assert head == "data:image/png;base64"
    assert struct.unpack(">II", base64.b64decode(data)[16:24]) == (16, 12)


def test_the_judge_refuses_bad_settings():
    with pytest.raises(ValueError, match="{prompt}"):
        VLMJudge("http://127.0.0.1:1", "m", template="how good is it?")
    with endpoint_that(reply("no such model", 404)) as (url, bodies):
        with pytest.raises(Refused, match="404: no such model"):
            VLMJudge(url, "m", endpoint={**QUICK, "check": False})(pictures(1), ["a"])
        assert len(bodies) == 1


class Half(Prompted):
    right = 0.5


def test_the_least_score_of_a_right_picture_comes_with_the_health(url):
    assert RemoteReward(url, endpoint=QUICK).right is None
    with running(RewardServer(Half(), port=0)) as url:
        assert request_json(f"{url}/health", dict)["right"] == 0.5
        assert RemoteReward(url, endpoint=QUICK).right == 0.5
        assert RemoteReward(url, endpoint={**QUICK, "check": False}).right is None
    with (
        endpoint_that(reply('{"status": "ok", "right": "half"}')) as (url, _),
        pytest.raises(NoAnswer, match="right: "),
    ):
        RemoteReward(url, endpoint=QUICK)


@pytest.mark.parametrize("name", ["video", "latent", "state"])
def test_a_reward_that_needs_more_than_pictures_is_not_served(name):
    reward = Prompted()
    setattr(reward, name, {"bar": 0.0} if name == "state" else True)
    with pytest.raises(ValueError, match=f"`{name}`"):
        RewardServer(reward, port=0)
