"""A wrong token or address is refused before anything is loaded."""

import shlex
import socket

import pytest

from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.lab import serving
from g2rpo.lab.serving import Address, token_for
from g2rpo.rewards.server import RewardServer
from tests.support.commands import done, refused
from tests.support.ports import free_port
from tests.support.runs import darkness
from tests.support.tables import rows


def test_only_this_machine_needs_no_token(monkeypatch):
    """What is given as a name may be the token itself, and is not repeated."""
    monkeypatch.setenv("SECRET", " s3cret-of-16-char\n")
    monkeypatch.setenv("SHORT", "s3cret")
    assert [token_for(host, None) for host in ("127.0.0.1", "localhost", "::1")] == [None] * 3
    assert token_for("0.0.0.0", "SECRET") == "s3cret-of-16-char"
    assert Address.checked("0.0.0.0", 7860, None, "user-space.hf.space").token is None
    for words, said in rows(REFUSED):
        host, name, *public = words.replace("none", "").split(" ")
        with pytest.raises(UserError, match=said) as refused:
            Address.checked(host, 7860, name or None, *public)
        assert "s3cret" not in str(refused.value) and "hf_pasted" not in str(refused.value)


REFUSED = """
127.0.0.1 SHORT -> --token-env SHORT: a token has at least 16 characters
0.0.0.0 none -> serving on 0.0.0.0 without a token
127.0.0.1 hf_pasted -> --token-env names an environment variable that is not set
127.0.0.1 none https://user-space.hf.space -> --public-host
127.0.0.1 none user-space.hf.space/demo -> --public-host
"""


def test_an_address_can_be_listened_on_or_is_refused():
    port = free_port()
    Address("127.0.0.1", port).check()
    Address("127.0.0.1", port).check()  # it is free again
    for host in ("no such host", "192.0.2.1"):  # the second is kept for documentation (RFC 5737)
        with pytest.raises(UserError, match=f"cannot serve on {host}:{port}: "):
            Address(host, port).check()


@pytest.mark.parametrize("kind", ["{}/own.py:redness", "hpsv2"])
def test_the_overrides_that_it_prints_are_taken(capsys, monkeypatch, tmp_path, kind):
    (tmp_path / "own.py").write_text("def redness(images, prompts): ...\n")
    monkeypatch.setattr(serving, "check_rewards_alone", lambda table: None)
    monkeypatch.setattr(serving, "build_rewards", lambda table: dict.fromkeys(table, darkness))
    monkeypatch.setattr(RewardServer, "serve_forever", lambda server: None)
    monkeypatch.setenv("SCORES", "secret" * 3)
    words = [kind.format(tmp_path), "--port", free_port(), "--token-env", "SCORES"]
    out = done(capsys, "serve-reward", *words)
    (line,) = [line for line in out.splitlines() if line.startswith("  rewards.")]
    reward = load_config("flux1-dev-lora", shlex.split(line)).rewards[kind.rpartition(":")[2]]
    assert reward.kind == "http" and reward.options.keys() == {"url", "endpoint"}


def test_the_option_of_a_device_is_named_as_it_was_given(capsys):
    err = refused(capsys, "serve-reward", "hpsv2", "device=cuda:99")
    assert "device=cuda:99: torch sees" in err and "; device=cpu needs none" in err


TAKEN = """
serve-reward brightness -> cannot serve on 127.0.0.1:
serve-reward brightnes -> brightness
teach words -> cannot serve on 127.0.0.1:
teach words algorithm.branch_steps=[99] -> branch_steps must lie in 0..8
"""


@pytest.mark.parametrize(("words", "message"), rows(TAKEN))
def test_a_port_that_is_taken_hides_no_mistake_and_nothing_is_loaded_for_it(
    refuses, monkeypatch, words, message
):
    for place in ("g2rpo.lab.serving.build_rewards", "g2rpo.lab.teach.command.build"):
        monkeypatch.setattr(place, lambda *asked: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        err = refuses(f"{words} --port {taken.getsockname()[1]}")
    assert message in err and ("cannot serve" in err) == ("cannot serve" in message)
