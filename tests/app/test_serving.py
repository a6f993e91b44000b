"""A wrong token or address is refused before anything is loaded."""

import shlex
import socket

import pytest

from g2rpo.app import serving
from g2rpo.app.serving import check_address, token_for
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError
from g2rpo.rewards.server import RewardServer
from tests.support.commands import g2rpo
from tests.support.ports import free_port


def test_only_this_machine_needs_no_token(monkeypatch):
    monkeypatch.setenv("SECRET", " s3cret-of-16-char\n")
    monkeypatch.setenv("SHORT", "s3cret")
    assert [token_for(host, None) for host in ("127.0.0.1", "localhost", "::1")] == [None] * 3
    assert token_for("0.0.0.0", "SECRET") == "s3cret-of-16-char"
    with pytest.raises(
        UserError, match="--token-env SHORT: a token has at least 16 characters"
    ) as refused:
        token_for("127.0.0.1", "SHORT")
    assert "s3cret" not in str(refused.value)
    with pytest.raises(UserError, match="serving on 0.0.0.0 without a token"):
        token_for("0.0.0.0", None)
    with pytest.raises(
        UserError, match="--token-env names an environment variable that is not set"
    ) as refused:
        token_for("127.0.0.1", "hf_pasted")
    assert "hf_pasted" not in str(refused.value)  # what is given as a name may be the token itself


def test_an_address_can_be_listened_on_or_is_refused():
    port = free_port()
    check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)  # it is free again
    for host in ("no such host", "192.0.2.1"):  # the second is kept for documentation (RFC 5737)
        with pytest.raises(UserError, match=f"cannot serve on {host}:{port}: "):
            check_address(host, port)


@pytest.mark.parametrize(("kind", "name"), [("{}/own.py:redness", "redness"), ("hpsv2", "hpsv2")])
def test_the_overrides_that_it_prints_are_taken(capsys, monkeypatch, tmp_path, kind, name):
    (tmp_path / "own.py").write_text(
        "def redness(images, prompts): return images.mean((1, 2, 3))\n"
    )
    kind = kind.format(tmp_path)
    if name == "hpsv2":
        monkeypatch.setattr(
            serving,
            "build_rewards",
            lambda table: dict.fromkeys(table, lambda images, prompts: None),
        )
    monkeypatch.setattr(
        RewardServer, "serve_forever", lambda server: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    monkeypatch.setenv("SCORES", "secret" * 3)
    code, out, _ = g2rpo(
        capsys, "serve-reward", kind, "--port", free_port(), "--token-env", "SCORES"
    )
    (line,) = [line for line in out.splitlines() if line.startswith("  rewards.")]
    reward = load_config("flux1-dev-lora", shlex.split(line)).rewards[name]
    assert code == 0 and reward.kind == "http" and reward.options.keys() == {"url", "endpoint"}


def test_a_reward_is_not_loaded_for_a_port_that_is_taken(capsys, monkeypatch):
    monkeypatch.setattr(serving, "build_rewards", lambda table: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = g2rpo(capsys, "serve-reward", "brightness", "--port", taken.getsockname()[1])
    assert code == 2 and "cannot serve on 127.0.0.1:" in err
