"""A run that says what it does, and the page that follows it."""

import json
import shutil
import socket
import urllib.error
import urllib.request
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from g2rpo.core.errors import Preempted
from g2rpo.lab.watch import page
from g2rpo.lab.watch.folder import read
from g2rpo.lab.watch.told import tell
from g2rpo.run.run import Run, entered
from g2rpo.run.status import Status
from tests.lab.report.pages import make_run, words
from tests.support.runs import config, trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, and the phases that it told."""
    phases, write = [], Run.write_status
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "write_status", lambda run, now: (phases.append(now), write(run, now)))
        folder = make_run(tmp_path_factory.mktemp("watched") / "run")
    return folder, phases


@contextmanager
def served(folder):
    with page.server_of(folder, 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def asked(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return answer.read().decode(), answer.headers["X-Version"]


def test_a_run_says_what_it_does_and_watching_it_ends_with_it(finished):
    folder, phases = finished
    names = list(dict.fromkeys(now.phase for now in phases))
    assert names[:2] == ["training", "evaluating the base"]
    assert names[-1] == "comparing base and tuned" and "evaluating the model after" in names[-3]
    assert next(now for now in phases if now.phase == "evaluating the base").of > 0
    seen = read(folder)
    assert seen.finished and tell(seen).state == f"finished: {seen.iterations} iterations"


def test_a_browser_that_leaves_is_no_error(finished, monkeypatch):
    left, over, errors = Event(), Event(), []
    monkeypatch.setattr(page.LivePage, "newest", lambda live: left.wait(5) and "x" * 2**22)
    server = page.ThreadingHTTPServer
    monkeypatch.setattr(server, "handle_error", lambda *request: errors.append(request))
    monkeypatch.setattr(server, "shutdown_request", lambda *request: over.set())
    with served(finished[0]) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as browser:
            browser.sendall(f"GET / HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
        left.set()
        assert over.wait(5) and not errors


def test_why_training_ended_early_is_kept(tmp_path):
    Run(tmp_path).claim(config())
    t = trainer(tmp_path)
    t.stopping = True
    with pytest.raises(Preempted):
        list(t.train())
    assert read(tmp_path).ended.startswith("stopped after iteration 0, as asked")


def test_a_run_that_python_drives_is_alive_while_its_loop_is(tmp_path):
    """It entered no folder, as a command does; and between two rows it writes nothing."""
    Run(tmp_path).claim(config())
    t = trainer(tmp_path)
    rows = t.train()
    next(rows), next(rows)
    seen = read(tmp_path)
    assert seen.alive and not seen.over and tell(seen).state.startswith("iteration 2 began")
    rows.close()
    assert "its program left the loop" in tell(read(tmp_path)).state
    list(t.train())
    assert "all iterations are done, but base and tuned are not" in tell(read(tmp_path)).state
    t.finish()
    assert read(tmp_path).finished


def test_the_page_is_the_report_below_what_is_told_now(finished):
    with served(finished[0]) as address:
        html, _ = asked(address)
        strip, version = asked(f"{address}/strip")
        assert words(strip) in words(html) and f'data-version="{version}"' in html
        assert "g2rpo report" in words(html) and "Pictures" in words(html)
        for wrong, code in (({"Host": "evil.example"}, 421), ({"Origin": "http://a.b"}, 403)):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                asked(address, **wrong)
            assert refusal.value.code == code
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(f"{address}/config.yaml")


def test_the_page_is_drawn_again_for_an_evaluation_and_later_for_iterations(tmp_path):
    folder = make_run(tmp_path / "run")
    log = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in log]
    second = kinds.index("eval", 1)
    (folder / "results.json").unlink()
    (folder / "metrics.jsonl").write_text("".join(log[:1]))
    live = page.LivePage(folder)
    first, version = live.newest(), live.version
    assert live.strip()[1] == version and live.newest() is first
    (folder / "metrics.jsonl").write_text("".join(log[: second - 1] if second > 2 else log[:2]))
    assert live.strip()[1] == version  # drawing is dear
    live.next = 0.0
    assert live.strip()[1] != version
    (folder / "metrics.jsonl").write_text("".join(log[: second + 1]))
    assert live.newest() is not first and live.version != version
    (folder / "metrics.jsonl").write_text("no\n{}\n")
    assert "metrics.jsonl, line 1: is no JSON" in words(live.strip()[0])


def test_a_resumed_run_says_that_it_loads_until_it_trains(finished, tmp_path):
    """Whatever an earlier process, which may have had the same number, said at its end."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    run = Run(folder)
    run.write_status(Status(phase="training", since=1.0, ended="stopped, as asked"))
    (folder / "results.json").unlink()
    assert read(folder).over
    with entered(run.read_config(), folder, resume=True):
        seen = read(folder)
        assert seen.loading and not seen.over and "loads models" in tell(seen).state
    assert read(folder).ended == "stopped, as asked"  # it was not resumed after all


def test_a_damaged_file_is_said_on_the_page(finished, tmp_path):
    """Of those that the report reads, beside what the strip does."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (folder / "starts.jsonl").write_text("no\n{}\n")
    live = page.LivePage(folder)
    assert "starts.jsonl, line 1: is no JSON" in words(live.newest())
    assert "finished" in words(live.strip()[0])


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_follows_the_run_in_a_browser(browser, tmp_path, monkeypatch, width):
    monkeypatch.setattr(page, "SECONDS", 0.2)
    folder = make_run(tmp_path / "run")
    log = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.json").rename(folder / "later")
    (folder / "metrics.jsonl").write_text(log[0])
    with served(folder) as address:
        screen = {"width": width, "height": 844}
        opened = browser.new_page(viewport=screen, reduced_motion="reduce")
        opened.goto(address)
        opened.get_by_role("link", name="Results").click()
        opened.wait_for_url("**#results")
        strip, heading = (opened.locator(it).bounding_box() for it in ("#live", "#h-results"))
        assert heading["y"] >= strip["y"] + strip["height"]
        before = opened.locator("#live").get_attribute("data-version")
        (folder / "metrics.jsonl").write_text("".join(log))
        (folder / "later").rename(folder / "results.json")
        opened.locator(f"#live:not([data-version='{before}'])").wait_for()
        assert "finished" in opened.locator("#live").inner_text()
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        gone = opened.locator("#live .gone")
        for unanswered in (lambda route: None, lambda route: route.fulfill(status=502, body="no")):
            opened.route("**/strip", unanswered)
            gone.wait_for()
            assert "finished" in opened.locator("#live").inner_text()
            opened.unroute("**/strip")
            gone.wait_for(state="detached")
        opened.close()
