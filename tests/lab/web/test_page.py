"""Whom the pages of the demo and of teaching answer, and what they give out."""

import json
import logging
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial

import pytest
from starlette.datastructures import Headers

from g2rpo.core.http import refusal
from g2rpo.lab.serving import Address
from tests.support.ports import free_port
from tests.support.tables import rows

GIVEN = {"host": "127.0.0.1:7860", "content-length": "100"}
WHERE = {
    "local": Address("127.0.0.1", 7860),
    "by token": Address("0.0.0.0", 7860, token="a secret of many letters"),
    "proxied": Address("127.0.0.1", 7860, public_host="demo.example"),
    "to all": Address("0.0.0.0", 7860, public_host="demo.example"),
}
REQUESTS = """
local -> host=[::1]:7860 origin=http://[::1]:7860 -> None
local -> host=localhost origin=http://localhost -> None
by token -> host=demo.example origin=https://demo.example -> None
proxied -> host=demo.example origin=https://demo.example -> None
proxied -> origin=https://demo.example -> None
to all -> host=10.0.0.7:7860 -> None
proxied -> host=other.example -> 421
proxied -> host=demo.example origin=http://evil.example -> 403
to all -> host=demo.example origin=http://evil.example -> 403
local -> content-length=65536 -> None
local -> host=evil.example:7860 -> 421
local -> host= -> 421
local -> host=127.0.0.1.evil.example -> 421
local -> host=192.168.1.2 -> 421
local -> host=[::1 -> 421
local -> origin=http://evil.example -> 403
local -> origin=null -> 403
local -> origin=http://localhost:7860 -> 403
by token -> host=demo.example origin=http://evil.example -> 403
local -> content-length=65537 -> 413
local -> content-length=MANY -> 413
local -> content-length=-1 -> 411
local -> content-length=² -> 411
local -> transfer-encoding=chunked -> 411
"""
"""Behind a proxy that asks by its own name; MANY are five thousand digits."""


@pytest.mark.parametrize(("where", "words", "status"), rows(REQUESTS))
def test_requests_of_other_sites_and_large_ones_are_refused(where, words, status):
    page, where = pytest.importorskip("g2rpo.lab.page"), WHERE[where]
    headers = dict(word.split("=") for word in words.replace("MANY", "9" * 5000).split())
    raw = [(name.encode(), value.encode("latin-1")) for name, value in {**GIVEN, **headers}.items()]
    why = refusal(Headers(raw=raw), page.MAX_BODY, local=where.local, public_host=where.public_host)
    assert str(why and why[0]) == status


SERVED = """
import os, sys
import httpx
from g2rpo.core.http import refusal
from g2rpo.lab.serving import Address
from g2rpo.lab.serving import needing_gradio
with needing_gradio("the demo"):
    from g2rpo.lab.page import page_of, serve
address = serve(page_of("Any", "demo", "", {}), Address("127.0.0.1", int(sys.argv[1])))
print(httpx.get(address, trust_env=False).status_code, os.environ.get("no_proxy"), os.environ.get("NO_PROXY"))
"""


@pytest.mark.slow  # a second Python
@pytest.mark.parametrize("proxy", ["socks", "socks5"])
def test_the_page_is_served_whatever_proxies_the_environment_has(proxy):
    """In a process of its own: socks:// is an error when Gradio is imported, a dead proxy when it
    starts."""
    clean = {name: word for name, word in os.environ.items() if not name.lower().endswith("_proxy")}
    proxies = {"ALL_PROXY": f"{proxy}://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", SERVED, str(free_port())]
    environment = {**clean, **proxies, "NO_PROXY": "example.org"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["200", "None", "example.org"], done.stderr


class Asked:
    """A browser with cookies at an address."""

    def __init__(self, address, token):
        self.address, self.token = address, token
        cookies = urllib.request.HTTPCookieProcessor()
        self.open = partial(urllib.request.build_opener(cookies).open, timeout=60)

    def login(self):
        if self.token:
            self.open(f"{self.address}login", f"username=a&password={self.token}".encode()).close()

    def __call__(self, path, body=None, **headers):
        """The status and the body of the answer."""
        headers = {"Content-Type": "application/json"} | headers
        try:
            with self.open(urllib.request.Request(self.address + path, body, headers)) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            return refused.code, b""

    def config(self):
        """What the page's own script reads, and the number of its question."""
        config = json.loads(self("config")[1])
        (index,) = [one["id"] for one in config["dependencies"] if one["inputs"]]
        return config, index


def question(number, data=("a",)):
    return json.dumps({"data": data, "fn_index": number, "session_hash": "x"}).encode()


@pytest.fixture(params=[None, "secret"], scope="module")
def served(request):
    """A page with one question, without a token and with one: a function that asks it."""
    gradio = pytest.importorskip("gradio")
    from g2rpo.lab.page import ONE_AT_A_TIME, page_of, serve

    def view(tab):
        box = gradio.Textbox()
        box.submit(lambda words: words, box, box, **ONE_AT_A_TIME)

    page = page_of("Any", "demo", "", {"Ask": view})
    address = serve(page, Address("127.0.0.1", free_port(), request.param))
    yield lambda: Asked(address, request.param)
    page.close(verbose=False)


API = "gradio_api"
JOIN, FILE = f"{API}/queue/join", f"{API}/file={__file__}"
WAYS = f"""
{FILE} {API}/file=/etc/passwd {API}/file=Makefile {API}/file/../../etc/passwd
static/..%2f..%2f..%2fetc/passwd assets/..%2f..%2f..%2fetc/passwd
{API}/proxy=http://127.0.0.1:1/x {API}/proxy=https://a.hf.space/x
monitoring {API}/runs {API}/vibe-code
"""


def test_nothing_is_given_out_but_the_page(served):
    """By Gradio's own means: no file, no proxy, no API to call around the page's queue, nothing
    without the login, no telemetry; also for who is let in."""
    asked = served()
    if asked.token:
        for path in ("config", f"{API}/info", JOIN, FILE):
            assert asked(path, b"{}" if path == JOIN else None)[0] == 401
    asked.login()
    for path in WAYS.split():
        assert asked(path)[0] in (400, 401, 403, 404), path
    config, index = asked.config()
    assert config["analytics_enabled"] is False
    info = json.loads(asked(f"{API}/info")[1])
    assert info == {"named_endpoints": {}, "unnamed_endpoints": {}}
    assert asked(JOIN, question(index))[0] == 200
    assert asked(f"{API}/run/predict", question(index))[0] == 404
    for path in (JOIN, f"{API}/upload"):
        assert asked(path, question(index), Origin="http://evil.example")[0] == 403
    assert asked(JOIN, b" " * 100_000)[0] == 413
    assert asked("config", Host="evil.example")[0] == (200 if asked.token else 421)


def test_a_malformed_question_is_one_line(served, caplog):
    """A traceback each: 220 of them wrote 1.6 MB."""
    asked, lines = served(), []
    asked.login()
    _, index = asked.config()
    logging.getLogger("uvicorn.error").addFilter(
        keep := lambda record: lines.append(record) or True
    )
    for number, data in ((index, []), (999, ["a"]), (index, [])):
        asked(JOIN, question(number, data))
    said, ends = "not answered: ValueError: An event handler", time.monotonic() + 20
    while caplog.text.count(said) < 2 and time.monotonic() < ends:
        time.sleep(0.05)
    logging.getLogger("uvicorn.error").removeFilter(keep)
    told = [record for record in caplog.records if record.name == "g2rpo.lab.page"]
    assert [said in record.getMessage() for record in told] == [True, True]
    assert ["KeyError: 999" in record.getMessage() for record in lines] == [True]
    for record in told + lines:
        message = record.getMessage()
        assert len(message) < 350 and "\n" not in message and not record.exc_info
