"""Requests through proxies, and servers that go and come back: sleeping is only noted, and names
lead to this machine."""

import gzip
import json
import os
import socket
import zlib
from signal import SIGINT
from threading import Event

import pytest
import torch

from g2rpo.core.errors import Interrupted, Stopped, UserError
from g2rpo.core.http import NoAnswer, Refused, Unreachable, request_json
from g2rpo.core.stopping import stoppable
from g2rpo.rewards import remote
from g2rpo.rewards.remote import RemoteReward
from g2rpo.train.run.checkpoint import newest_iteration
from tests.support.ports import free_port
from tests.support.runs import trainer
from tests.support.servers import endpoint_that, replies
from tests.support.tables import rows
from tests.support.waiting import PATIENCE_S

FAR = "http://10.1.2.3:8000"


@pytest.fixture
def proxy(monkeypatch):
    """HOST:PORT of a proxy that answers 503 itself; the environment has no proxy yet."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with endpoint_that(replies("no route", 503)) as (url, _):
        yield url.removeprefix("http://")


@pytest.fixture
def lan(monkeypatch):
    """A server that all addresses other than this machine's lead to."""
    connect = socket.create_connection
    with endpoint_that(replies('{"who": "server"}')) as (url, _):
        here = ("127.0.0.1", int(url.rpartition(":")[2]))

        def connected(address, *arguments, **more):
            return connect(address if address[0] == here[0] else here, *arguments, **more)

        monkeypatch.setattr(socket, "create_connection", connected)
        yield


@pytest.mark.parametrize(
    ("variable", "scheme"),
    [("http_proxy", "http://"), ("HTTP_PROXY", ""), ("all_proxy", "http://")],
)
def test_an_answer_through_a_proxy_names_it(proxy, lan, monkeypatch, variable, scheme):
    monkeypatch.setenv(variable, f"{scheme}user:hunter2@{proxy}")
    with pytest.raises(NoAnswer) as told:
        request_json(f"{FAR}/score", dict)
    assert str(told.value) == f"{FAR}/score (through the proxy {proxy}) answered 503: no route"


EXCLUDED = """
* -> http://10.1.2.3:8000
example.org, * -> http://10.1.2.3:8000
10.0.0.0/8 -> http://10.1.2.3:8000
192.168.0.0/16 ,10.1.2.0/24 -> http://10.1.2.3:8000
10.1.2.3 -> http://10.1.2.3:8000
10.1.2.3:8000 -> http://10.1.2.3:8000
fd00::/8 -> http://[fd00::7]:8000
fd00::7 -> http://[fd00::7]:8000
[fd00::7]:8000 -> http://[fd00::7]:8000
.lan.example -> http://judge.lan.example:8000
*.lan.example -> http://judge.lan.example:8000
LAN.example -> http://judge.Lan.Example:8000
judge:8000 -> http://judge:8000
"""


@pytest.mark.parametrize(("excluded", "url"), rows(EXCLUDED))
def test_what_no_proxy_excludes_is_asked_directly(proxy, lan, monkeypatch, excluded, url):
    monkeypatch.setenv("HTTP_PROXY", f"http://{proxy}")
    others = "10.0.0.0/16,10.1.2.4,fd01::/16,10.1.2.3:9000,3.2.1.10,10.1.2.3/nonsense,judge:80"
    monkeypatch.setenv("NO_PROXY", others)
    with pytest.raises(NoAnswer, match="through the proxy"):
        request_json(url, dict)
    monkeypatch.setenv("NO_PROXY", excluded)
    assert request_json(url, dict) == {"who": "server"}


def test_a_name_with_other_letters_is_no_proxy(proxy, lan):
    with pytest.raises(NoAnswer, match="^http://richter.bücher.example/ answered something else"):
        request_json("http://richter.bücher.example/", list)


@pytest.mark.parametrize("value", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "http://["])
def test_loopback_never_goes_through_a_proxy(proxy, monkeypatch, value):
    monkeypatch.setenv("http_proxy", value)
    monkeypatch.setenv("ALL_PROXY", value)
    with endpoint_that(replies('{"who": "me"}')) as (url, _):
        for host in ("127.0.0.1", "localhost", "LOCALHOST"):
            assert request_json(url.replace("127.0.0.1", host), dict) == {"who": "me"}


@pytest.mark.parametrize("scheme", ["http", "https", "socks5", "socks5h"])
@pytest.mark.parametrize("url", [FAR, "https://10.1.2.3:8000"])
def test_a_proxy_that_is_dead_or_does_not_connect_is_named(proxy, monkeypatch, scheme, url):
    dead = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("ALL_PROXY", f"{scheme}://{dead}")
    with pytest.raises(Unreachable, match=rf"{url} \(through the proxy {dead}\): ConnectError"):
        request_json(url, dict)
    monkeypatch.setenv("https_proxy", f"http://{proxy}")
    with pytest.raises(NoAnswer, match=rf"\(through the proxy {proxy}\): ProxyError: 501"):
        request_json("https://10.1.2.3:8000", dict)


@pytest.mark.parametrize("value", ["socks4://h:1", "ftp://h:1", "http://u:hunter2"])
def test_a_proxy_variable_that_cannot_be_used_is_refused_unrepeated(proxy, monkeypatch, value):
    monkeypatch.setenv("http_proxy", value)
    with pytest.raises(UserError, match="proxy variable of the environment") as told:
        request_json(FAR, dict)
    assert "hunter2" not in str(told.value)


# --- servers that go and come back

ONE = torch.zeros(1, 3, 4, 4), ["a"]


def scores(reward, count=1):
    """Answers `count` pictures, as the reward of that name."""
    return replies(json.dumps({"scores": [0.1 * i for i in range(count)], "reward": reward}))


def hang_up(handler, count):
    handler.connection.shutdown(socket.SHUT_RDWR)


WAITS = """
503 7 -> 7
429 20 -> 20
429 7.25 -> 7.25
429 Fri Dec 31 23:59:59 2999 -> 60
429 Fri, 31 Dec 2999 23:59:59 GMT -> 60
429 99999999999999999999999999999999999999999999999999 -> 60
429 soon -> 0.5
429 Mon, 1 Jan 2001 00:00:00 GMT -> 0.5
429 Mon, 1 Jan 100000000000000000000 00:00:00 GMT -> 0.5
"""
FAULTS = [hang_up, replies("{", **{"Content-Length": "20"}), replies("busy", 503)]


@pytest.mark.parametrize(("fault", "least"), [*rows(WAITS), *((each, 0.5) for each in FAULTS)])
def test_a_server_is_waited_for_as_long_as_it_asks_and_not_over_a_minute(naps, fault, least):
    """A status and what `Retry-After` says."""
    if isinstance(fault, str):
        status, after = fault.split(" ", 1)
        fault = replies("slow down", int(status), **{"Retry-After": after})

    def answer(handler, count):
        (fault if count <= 2 else scores("a"))(handler, count)

    with endpoint_that(answer) as (url, bodies):
        reward = RemoteReward(url, endpoint={"check": False, "timeout_s": PATIENCE_S})
        assert reward(*ONE).isfinite() and len(bodies) == 3 and len(naps) == 2
    assert float(least) <= naps[0] <= max(float(least), 1.0) and max(naps) <= 60


QUOTAS = """
429 -> {"error": {"message": "...", "type": "insufficient_quota"}} -> 1
429 -> You exceeded your current quota, please check your plan and billing details. -> 1
400 -> Your credit balance is too low to access the API -> 1
402 -> Insufficient Balance -> 1
429 -> You exceeded your current quota, "retryDelay": "34s" -> 3
429 1 -> You exceeded your current quota -> 3
429 -> Rate limit reached for requests. Please try again in 20s -> 3
"""


@pytest.mark.parametrize(("status", "text", "asked"), rows(QUOTAS))
def test_a_spent_quota_is_not_waited_for(naps, status, text, asked):
    """A server that has answered before: nobody pays within a minute, and what else has this status
    is left out as the fault of its picture. A number beside a status is `Retry-After`."""
    (status, *after), asked = status.split(), int(asked)
    refusal = replies(text, int(status), **dict(zip(["Retry-After"], after, strict=False)))

    def answer(handler, count):
        (scores("a") if count == 1 else refusal)(handler, count)

    with endpoint_that(answer) as (url, bodies):
        reward = RemoteReward(url, endpoint={"check": False, "timeout_s": 5, "retries": 2})
        assert reward(*ONE).isfinite()
        if asked == 1:
            with pytest.raises(Refused, match=f"answered {status}.*\n.*Nothing is left to pay"):
                reward(*ONE)
        else:
            assert reward(*ONE).isnan()
        assert len(bodies) == 1 + asked


WHO, PAGE = '{"who": "é"}', "<!DOCTYPE html><title>Sign in</title>"
GZIP, HTML = {"Content-Encoding": "gzip"}, {"Content-Type": "text/html; charset=utf-8"}


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (gzip.compress(WHO.encode(), mtime=0), GZIP),
        (gzip.compress(WHO.encode("utf-8-sig"), mtime=0), {}),
        (zlib.compress(WHO.encode()), {"Content-Encoding": "deflate"}),
        (WHO.encode("utf-8-sig"), {}),
        (WHO.encode("utf-16"), {}),
    ],
)
def test_compression_that_was_not_asked_for_and_byte_order_marks_are_read(content, headers):
    with endpoint_that(replies(content, **headers)) as (url, _):
        assert request_json(url, dict) == {"who": "é"}


@pytest.mark.parametrize(
    ("content", "headers", "said"),
    [
        (f"{PAGE:500}", HTML, f"it is text/html; charset=utf-8, '{PAGE}'"),
        ('{"error": {"code": 502}}', {}, 'it is no content type, \'{"error": {"code": 502}}\''),
        (gzip.compress(b"{}", mtime=0)[:-9], GZIP, "compressed answer is cut off"),
        (gzip.compress(b" " * 2**25, mtime=0), {}, "cut off, or of more than 16777216 bytes"),
        (b"\x1f\x8b12345", {}, "compressed answer cannot be read"),
    ],
)
def test_what_came_in_place_of_an_answer_is_named(content, headers, said):
    with endpoint_that(replies(content, **headers)) as (url, _):
        with pytest.raises(NoAnswer) as told:
            request_json(url, list)
        assert said in str(told.value) and len(str(told.value)) < 500


def test_a_restart_of_half_a_minute_is_waited_for_and_a_dead_server_only_once(naps):
    """Nothing listens in between: the waits of the default settings last 30 s at the least."""
    port = free_port()
    reward = RemoteReward(
        f"http://127.0.0.1:{port}", endpoint={"check": False, "timeout_s": PATIENCE_S}
    )
    assert reward(*ONE).isnan() and sum(naps) >= 30
    before = len(naps)
    assert reward(*ONE).isnan() and len(naps) == before  # asked once, without a wait

    def answer(handler, count):
        (hang_up if count == 2 else scores("a"))(handler, count)

    with endpoint_that(answer, port) as (_, bodies):
        assert reward(*ONE).isfinite()
        assert reward(*ONE).isfinite()  # once back, it is waited for again
        assert len(bodies) == 3 and len(naps) == before + 1


def test_ctrl_c_does_not_wait_for_retries(monkeypatch):
    """The first wait is asked to last for ever, and ends."""
    reward = RemoteReward(f"http://127.0.0.1:{free_port()}", endpoint={"check": False})
    waits = []

    class Pressed(Event):
        def wait(self, seconds):
            waits.append(seconds)
            os.kill(os.getpid(), SIGINT)
            return super().wait()

    monkeypatch.setattr(remote, "Event", Pressed)
    with pytest.raises(Interrupted), stoppable(""):
        reward(*ONE)
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("later", "message"),
    [
        pytest.param(
            hang_up,
            "'bright' gave no score at all in 5 iterations in a row",
            marks=pytest.mark.slow,
        ),
        (scores("b", 4), "had the reward 'a' and now has 'b'"),
    ],
)
def test_a_run_ends_with_a_message_and_a_checkpoint_if_its_server(naps, tmp_path, later, message):
    """Dies or changes in the second iteration, and for good; the checkpoint of the first is
    there."""
    changed = []

    def answer(handler, count):
        good = scores("a", len(json.loads(handler.body)["prompts"]))
        (later if changed else good)(handler, count)

    options = ("trainer.iterations=9", "trainer.checkpoint_every=1")
    with endpoint_that(answer) as (url, _):
        reward = RemoteReward(url, endpoint={"check": False, "timeout_s": PATIENCE_S})
        run = trainer(tmp_path, *options, rewards={"bright": reward})
        with pytest.raises(Stopped, match=message):
            changed.extend(row for row in run.train() if row["kind"] == "train")
    assert newest_iteration(tmp_path / "checkpoints")
    assert len(naps) <= reward.client.endpoint.retries
