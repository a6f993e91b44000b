"""The reward server and its client over a real loopback connection; and the client against
endpoints that misbehave."""

import base64
import http.client
import json
import re
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.exceptions import HTTPException

from g2rpo.core.data import Prompt
from g2rpo.core.http import NoAnswer, Refused, request_json
from g2rpo.core.images import images_of, read_inputs, to_pil, to_uint8
from g2rpo.rewards.analytic import JPEGSize
from g2rpo.rewards.remote import RemoteReward, encode_png
from g2rpo.rewards.server import RewardServer, parse_request
from tests.support.edits import edits
from tests.support.pictures import noise
from tests.support.ports import free_port
from tests.support.servers import endpoint_that, replies, serving
from tests.support.tables import rows
from tests.support.waiting import PATIENCE_S, until

QUICK = {"timeout_s": PATIENCE_S, "retries": 1}
UNCHECKED = {**QUICK, "check": False}


def post(url, body, **headers):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request("POST", "/score", body, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def png(side):
    return encode_png(to_pil(to_uint8(noise(1, side, side)))[0])


PNG = png(32)


def asking(images=None, prompts=("a",), **more):
    """The body of a request, about one picture unless told."""
    return json.dumps({"images": images or [PNG], "prompts": prompts, **more})


class Prompted:
    """Scores that need the right picture beside the right prompt; the prompt "none" gets no
    score."""

    def __call__(self, images, prompts):
        scores = images.mean(dim=(1, 2, 3)) + torch.tensor([float(len(p)) for p in prompts])
        return torch.where(torch.tensor([p == "none" for p in prompts]), torch.nan, scores)


@pytest.fixture(scope="module")
def url():
    """The address of a server that all tests share."""
    with serving(RewardServer(Prompted(), port=0)) as server:
        yield server.address


def test_a_round_trip_gives_the_local_scores(url):
    images, prompts = noise(7, 24, 32), ["a", "bb", "none", "dddd", "e", "f" * 50, "g"]
    local = Prompted()(to_uint8(images).float() / 255, prompts)
    for options in ({}, {"batch_size": 2}, {"batch_size": 2, "endpoint": {"concurrency": 3}}):
        remote = RemoteReward(url, **options)(images, prompts)
        torch.testing.assert_close(remote, local, rtol=0, atol=0, equal_nan=True)
    assert RemoteReward(url)(images[:0], []).shape == (0,)
    with serving(RewardServer(JPEGSize(), port=0)) as server:  # not a bit is lost on the way
        assert torch.equal(
            RemoteReward(server.address)(images, prompts), JPEGSize()(images, prompts)
        )


def test_input_pictures_and_metadata_travel_with_their_prompts(tmp_path):
    """Pictures each once, at the size that they have, and none is left on the server's disk."""
    seen = []

    def of_prompt(images, prompts):
        seen.extend(path for prompt in prompts for path in images_of(prompt))
        read = [read_inputs(prompt) for prompt in prompts]
        means = [sum(np.asarray(one).mean() for one in own) + own[0].width for own in read]
        more = [prompt.metadata.get("more", 0) for prompt in prompts]
        return torch.tensor(means).float() + torch.tensor(more)

    one, two = edits(tmp_path, red=(0.25,), blue=(0.75, 0.5))
    prompts = [one, two, Prompt("again", images=one.images, metadata={"more": 100})]
    with serving(RewardServer(of_prompt, port=0)) as server:
        for options in ({}, {"batch_size": 1, "endpoint": UNCHECKED}):
            remote = RemoteReward(f"{server.address}/", **options)(noise(3), prompts)
            assert torch.equal(remote, of_prompt(None, prompts))
    remote = [Path(path) for path in seen if path not in one.images + two.images]
    assert len(set(remote[:4])) == 3 and not any(path.exists() for path in remote)


def test_the_token_is_needed_and_is_never_a_setting(monkeypatch):
    with serving(RewardServer(Prompted(), port=0, token="s3cret")) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert post(server.address, asking(), **headers)[0] == 401
        with pytest.raises(Refused, match="401"):
            RemoteReward(server.address, endpoint=QUICK)
        with pytest.raises(Refused, match="401"):
            RemoteReward(server.address, endpoint=UNCHECKED)(noise(1), ["a"])
        endpoint = {**QUICK, "token_env": "G2RPO_TEST_TOKEN"}
        with pytest.raises(ValueError, match="environment variable"):
            RemoteReward(server.address, endpoint=endpoint)
        monkeypatch.setenv("G2RPO_TEST_TOKEN", "s3cret")
        assert RemoteReward(server.address, endpoint=endpoint)(noise(1), ["a"]).isfinite()


JPEG = base64.b64encode(b"\xff\xd8\xff\xe0 not a picture").decode()


def claiming(width, height):
    """A small PNG that claims any size: what a decompression bomb looks like before it is
    decoded."""
    data = bytearray(base64.b64decode(PNG))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return base64.b64encode(data).decode()


WRONG = r"""
{not json -> is no JSON
{"images": [PNG], "prompts": ["a\u0000"]} -> prompts.0:
{"images": [PNG], "prompts": ["\ud800"]} -> is no JSON
{"images": [PNG], "prompts": ["a", "b"]} -> images: 1 for 2 prompts
{"images": ["a"], "prompts": ["a"]} -> images.0: Base64 decoding error
{"images": [JPEG], "prompts": ["a"]} -> no whole PNG
{"images": [CUT], "prompts": ["a"]} -> no whole PNG
{"images": [PNG, SMALL], "prompts": ["a", "b"]} -> one size
{"images": [PNG], "prompts": ["a"], "inputs": ["/etc/passwd"], "inputs_of": [[0]]} -> inputs.0:
{"images": [PNG], "prompts": ["a"], "inputs": [PNG], "inputs_of": [[1]]} -> indices of the 1 inputs
{"images": [PNG], "prompts": ["a"], "inputs": [PNG], "inputs_of": [[0], [0]]} -> one for each
{"images": [PNG], "prompts": ["a"], "inputs_of": [[-1]]} -> inputs_of.0.0:
{"images": [PNG], "prompts": ["a"], "metadata": [{}, {}]} -> metadata: 2 for 1 prompt
"""
LARGE = [
    ("[" * 900, "is no JSON"),
    (asking(prompts=["a" * 20_001]), "prompts.0: String should have at most 20000"),
    (asking(["AA=="] * 257), "images: List should have at most 256 items"),
]
PICTURES = {"PNG": PNG, "JPEG": JPEG, "CUT": PNG[: len(PNG) // 8 * 4], "SMALL": png(30)}


@pytest.mark.parametrize(("body", "fact"), [*rows(WRONG), *LARGE])
def test_the_server_refuses_what_it_should(url, body, fact):
    body = re.sub(r"\b[A-Z]{3,}\b(?=[\],])", lambda name: f'"{PICTURES[name[0]]}"', body)
    answered, content = post(url, body)
    assert answered == 400 and fact in content["error"]
    assert post(url, asking())[0] == 200


FOREIGN = """
Host -> evil.example -> 421
Origin -> http://evil.example -> 403
Origin -> null -> 403
Transfer-Encoding -> chunked -> 411
"""


@pytest.mark.parametrize(("name", "value", "status"), rows(FOREIGN))
def test_the_server_refuses_other_hosts_and_sites_and_bodies_of_any_length(
    url, name, value, status
):
    assert post(url, b"0\r\n\r\n", **{name: value})[0] == int(status)


def test_a_body_is_refused_by_its_length_and_read_to_its_end_before_the_answer(url, monkeypatch):
    """A connection that is closed while a client still sends is reset, and the client never reads
    why."""
    monkeypatch.setattr("g2rpo.rewards.server.MAX_BODY", 10)
    assert post(url, b" " * 2**24) == (413, {"error": "at most 10 bytes"})


def test_a_reward_that_fails_is_an_error_500_and_then_no_score(caplog, naps):
    def broken(images, prompts):
        raise RuntimeError("secret details")

    with serving(RewardServer(broken, port=0)) as server:
        status, content = post(server.address, asking())
        assert status == 500
        assert "RuntimeError" in content["error"] and "secret details" not in content["error"]
        assert RemoteReward(server.address, endpoint=QUICK)(noise(3), ["a"] * 3).isnan().all()
        assert "no score after 2 attempts" in caplog.text


def test_pictures_are_bounded_by_their_pixels_before_they_are_decoded(monkeypatch):
    """2^26 black pixels are 64 KiB; at 12 bytes as float32, and as much again while they are
    decoded, they were 3 GiB. Their headers are enough."""
    decoded = []
    monkeypatch.setattr("g2rpo.rewards.server.as_rgb", decoded.append)
    small = claiming(512, 512)
    for body in (
        asking([claiming(8192, 8192)]),
        asking([claiming(8192, 2048), claiming(8192, 2049)], ["a", "b"]),
        asking([small] * 64, ["a"] * 64, inputs=[small] * 65),
    ):
        with pytest.raises(HTTPException, match="too many pixels"):
            parse_request(body, Path())
    assert not decoded


def test_one_request_is_scored_at_a_time_and_who_has_left_is_not():
    inside, go, sizes = threading.Event(), threading.Event(), []

    def held(images, prompts):
        sizes.append(len(images))
        inside.set()
        go.wait(PATIENCE_S)
        return torch.zeros(len(images))

    with serving(RewardServer(held, port=0)) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(post, server.address, asking())
        assert inside.wait(PATIENCE_S)
        body = {"images": [PNG] * 3, "prompts": ["a"] * 3}
        with pytest.raises(NoAnswer, match="in time"):
            request_json(f"{server.address}/score", dict, body=body, timeout_s=0.3)
        # until the server has noticed who left
        until(lambda: len(server.server.server_state.connections) == 1)
        second = pool.submit(post, server.address, asking([PNG] * 2, ["a"] * 2))
        go.set()
        assert first.result()[0] == second.result()[0] == 200
    assert sizes == [1, 2]


def endless(handler, count):
    """A gigabyte, of which nobody reads more than 16 MiB."""
    replies("")(handler, count)
    for _ in range(1024):
        handler.wfile.write(b" " * 2**20)


USELESS = """
<html>hello</html> -> is no JSON
[1.0, 2.0] -> answered something else
{"scores": null} -> scores: Input should be a valid array
{"scores": [1.0, "2.0"]} -> scores.1: Input should be a valid number
{"scores": [1.0]} -> answered 1 score for 2 pictures
"""
ANSWERS = [
    ('{"scores": ' + "[" * 100_000, "is no JSON"),
    (replies("oops", 500), "answered 500: oops"),
    (replies("", 302, Location="http://127.0.0.1:9/"), "answered 302"),
    (endless, "more than 16777216 bytes"),
    (replies('{"scores": [0.5, ', **{"Content-Length": "100"}), "RemoteProtocolError"),
]


@pytest.mark.parametrize(("answer", "fact"), [*rows(USELESS), *ANSWERS])
def test_a_useless_answer_is_asked_for_again_and_then_is_no_score(answer, fact, caplog, naps):
    with endpoint_that(replies(answer) if isinstance(answer, str) else answer) as (url, bodies):
        assert RemoteReward(url, endpoint=UNCHECKED)(noise(2), ["a", "b"]).isnan().all()
    assert len(bodies) == 2 and len(naps) == 1
    (said,) = [one.getMessage() for one in caplog.records if "attempts" in one.getMessage()]
    assert fact in said and len(said) < 500 and said.isprintable()


@pytest.mark.parametrize("score", ["NaN", "-Infinity", "1" + "0" * 400])
def test_a_score_that_is_no_number_of_a_picture_is_missing(score):
    with endpoint_that(replies(f'{{"scores": [0.5, {score}]}}')) as (url, bodies):
        scores = RemoteReward(url, endpoint=UNCHECKED)(noise(2), ["a", "b"])
    assert scores[0] == 0.5 and scores[1].isnan() and len(bodies) == 1


def test_a_wrong_address_fails_at_once():
    with pytest.raises(NoAnswer, match="refused"):
        RemoteReward(f"http://127.0.0.1:{free_port()}", endpoint=QUICK)
    wrong = "127.0.0.1:8000 file:///etc/passwd http:// http://host/?q=1 http://[::g]:80"
    wrong += " http://\u2488com http://host:0 http://host:99999"
    for bad in (*wrong.split(), "http://a b"):
        with pytest.raises(ValueError, match="an endpoint is an address"):
            RemoteReward(bad, endpoint=QUICK)


def test_the_least_score_of_a_right_picture_comes_with_the_health(url):
    assert RemoteReward(url, endpoint=QUICK).right is None
    half = Prompted()
    half.right = 0.5
    with serving(RewardServer(half, port=0)) as server:
        health = {"status": "ok", "reward": "Prompted", "right": 0.5}
        assert request_json(f"{server.address}/health", dict) == health
        assert RemoteReward(server.address, endpoint=QUICK).right == 0.5
        assert RemoteReward(server.address, endpoint=UNCHECKED).right is None
    with (
        endpoint_that(replies('{"right": "half"}')) as (other, _),
        pytest.raises(NoAnswer, match="right: "),
    ):
        RemoteReward(other, endpoint=QUICK)


@pytest.mark.parametrize("need", ["video", "latent", "state"])
def test_a_reward_that_needs_more_than_pictures_is_not_served(need):
    reward = Prompted()
    setattr(reward, need, {"bar": 0.0} if need == "state" else True)
    with pytest.raises(ValueError, match=f"`{need}`"):
        RewardServer(reward, port=0)
