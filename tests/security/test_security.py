"""Files, servers and clients that mean harm: nothing runs, nothing leaks, nobody waits for long."""

import ast
import contextlib
import json
import re
import shutil
import socket
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from transformers import CLIPConfig, CLIPModel

import g2rpo
from g2rpo.assembly.blueprint import on_meta, read_blueprint
from g2rpo.assembly.components import build_policy
from g2rpo.assembly.rewards import build_rewards
from g2rpo.config.schema import PolicyConfig, RewardConfig
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.rewards import cost_of_reward
from g2rpo.lab.report.history import read_runs
from g2rpo.prompts.sources import read_prompts
from g2rpo.rewards.remote import RemoteReward
from g2rpo.rewards.server import Limits, RewardServer
from g2rpo.rewards.transport import NoAnswer, Refused, address, request_json, token_from
from g2rpo.rewards.weights import read_state_dict
from g2rpo.run.checkpoint import _digest, checkpoints
from g2rpo.run.run import Run
from g2rpo.training.model_card import _block
from tests.support.commands import g2rpo as command
from tests.support.fuzzing import mutated
from tests.support.runs import fallen_back, mean, resumed, trainer
from tests.support.servers import serving
from tests.support.tiny import save_flux
from tests.support.variants import few

SECRET = "hunter2-hunter2"


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run of four iterations."""
    folder = tmp_path_factory.mktemp("trained")
    list(trainer(folder).train())
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run."""
    return shutil.copytree(trained, tmp_path / "run")


def newest(run):
    return checkpoints(run / "checkpoints")[-1]


def forged(path, **files):
    """Replaces files of a checkpoint, and its manifest so that every digest is right."""
    for name, write in files.items():
        write(next(path.glob(f"{name}.*")))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: _digest(path / name) for name in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_forged_checkpoint_runs_nothing_and_the_one_before_is_used(run, tmp_path):
    forged(newest(run), state=lambda file: torch.save(Payload(tmp_path / "mark"), file))
    _, complaint = fallen_back(run)
    assert (
        "iteration_000004: is no checkpoint (UnpicklingError" in complaint
        and not (tmp_path / "mark").exists()
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "is no JSON (recursion limit exceeded"),
        ("[]", "is missing or damaged"),
        ('{"g2rpo": "0", "iteration": 7, "files": {}}', "another checkpoint's"),
        (
            '{"g2rpo": "0", "iteration": Infinity, "files": {}}',
            "iteration: Input should be a valid integer, got inf",
        ),
        (
            '{"g2rpo": "0", "iteration": "4", "files": {}}',
            "iteration: Input should be a valid integer, got '4'",
        ),
        (
            '{"g2rpo": "0", "iteration": 4, "files": {"state.pt": 1}}',
            "files.state.pt: Input should be a valid string, got 1",
        ),
        (
            '{"g2rpo": "0", "iteration": 4, "files": {"../../config.yaml": "0"}}',
            "files.../../config.yaml.[key]: String should match pattern",
        ),
    ],
)
def test_a_manifest_that_is_none_is_named(run, content, message):
    (newest(run) / "manifest.json").write_text(content)
    assert message in fallen_back(run)[1]


def rewritten(change):
    """A `forged` state.pt in which `change` was made to what it held."""

    def write(file):
        state = torch.load(file, weights_only=True)
        change(state)
        torch.save(state, file)

    return write


@pytest.mark.parametrize("betas", few(["x", [2.0, -1.0], None, [[]]], lambda betas: betas == "x"))
def test_an_optimizer_has_the_betas_of_the_config_whatever_a_checkpoint_says(run, tmp_path, betas):
    other = shutil.copytree(run, tmp_path / "forged")
    change = rewritten(
        lambda state: state["optimizer"].update(
            param_groups=[{"betas": betas, "weight_decay": betas}]
        )
    )
    forged(newest(other), state=change)
    means = []
    for folder in (run, other):
        again = trainer(folder, "trainer.iterations=6")
        assert again.resume() == []
        list(again.train())
        means.append(mean(again))
    assert torch.equal(*means)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["optimizer"]["state"][0].pop("step"),
        lambda state: state["optimizer"]["state"][0].update(step=torch.zeros(1, 1, 1)),
        lambda state: state.update(optimizer=[]),
        lambda state: state.update(averaged="x"),
    ],
    ids=["lost", "shape", "list", "average"],
)
def test_moments_that_are_none_are_named_and_the_checkpoint_before_is_used(run, change):
    forged(newest(run), state=rewritten(change))
    again, complaint = fallen_back(run)
    assert "iteration_000004: does not fit this model" in complaint
    list(again.train())


def test_weights_that_would_run_code_are_refused(tmp_path):
    torch.save({"state_dict": Payload(tmp_path / "mark")}, tmp_path / "HPS.pt")
    with pytest.raises(UserError, match="unpickling it could run any code"):
        build_rewards(
            {"it": RewardConfig(kind="image_reward", options={"path": str(tmp_path / "HPS.pt")})}
        )
    assert not (tmp_path / "mark").exists()


def test_a_clip_that_would_run_code_is_refused(tmp_path):
    """In transformers' own format, which transformers reads itself."""
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = CLIPConfig(
        text_config={**small, "vocab_size": 50},
        vision_config={**small, "image_size": 32, "patch_size": 16},
    )
    CLIPModel(config).save_pretrained(tmp_path / "clip")
    (tmp_path / "clip" / "model.safetensors").unlink()
    torch.save(Payload(tmp_path / "mark"), tmp_path / "clip" / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"rewards\.it: cannot be loaded: a file holds more than tensors"
    ):
        build_rewards(
            {"it": RewardConfig(kind="clip_score", options={"path": str(tmp_path / "clip")})}
        )
    assert not (tmp_path / "mark").exists()


def test_a_dataset_that_would_run_code_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    with pytest.raises(
        UserError, match="cannot be loaded: RuntimeError: Dataset scripts are no longer supported"
    ):
        read_prompts(f"hf:{tmp_path / 'data'}")
    assert not (tmp_path / "mark").exists()


@pytest.fixture(scope="module")
def weight_files(tmp_path_factory):
    """The bytes of one state dict in both formats, and where to put changed ones."""
    folder = tmp_path_factory.mktemp("weights")
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.float16)}
    torch.save(state, folder / "w.pt")
    return folder, {".pt": (folder / "w.pt").read_bytes(), ".safetensors": save(state)}


PIECES = st.binary(max_size=8) | st.sampled_from(
    [b"\xff" * 8, b"\0" * 8, b"F16", b"9" * 20, b"[" * 2000, b"\x80\x05c"]
)


@given(st.data(), st.sampled_from([".pt", ".safetensors"]))
def test_a_file_of_weights_holds_tensors_or_is_refused(weight_files, data, suffix):
    folder, contents = weight_files
    file = folder / f"changed{suffix}"
    file.unlink(missing_ok=True)  # a new file: the old one may still be mapped
    file.write_bytes(data.draw(mutated(contents[suffix], PIECES)))
    try:
        state = read_state_dict(file)
    except ValueError as error:
        assert str(file) in str(error)
    else:
        assert all(isinstance(value, torch.Tensor) for value in state.values())


@pytest.mark.parametrize("inside", [False, True])
def test_a_pipeline_that_names_a_module_of_its_own_runs_nothing(tmp_path, monkeypatch, inside):
    pipe = save_flux(tmp_path / "pipe")
    place = pipe / "transformer" if inside else tmp_path
    (place / "evil_part.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Part: pass\n"
    )
    index = json.loads((pipe / "model_index.json").read_text())
    (pipe / "model_index.json").write_text(
        json.dumps({**index, "transformer": ["evil_part", "Part"]})
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = PolicyConfig(path=str(pipe), height=32, width=32)
    with pytest.raises(UserError, match="cannot be loaded"):
        build_policy(policy)
    with pytest.raises(
        UserError, match="names a part of 'evil_part'; only diffusers and transformers"
    ):
        on_meta(read_blueprint(policy).parts["transformer"])
    with pytest.raises(UserError, match="is no model"):
        on_meta(("diffusers:logging", {}))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("where", ["text_encoder", "text_encoder_2", "reward"])
def test_a_config_that_names_kernels_of_the_hub_is_refused_before_a_model_is_made(tmp_path, where):
    """transformers imports what such a line names, if the library `kernels` is installed."""
    named = {"attn_implementation": "kernels-community/x@deadbeef:f"}
    if where == "reward":
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "clip", "text_config": named})
        )
        entry = RewardConfig(kind="clip_score", options={"path": str(tmp_path)})
        for use in (lambda: build_rewards({"it": entry}), lambda: cost_of_reward(entry, "cpu")):
            with pytest.raises(UserError, match="attn_implementation='kernels-community"):
                use()
        return
    pipe = save_flux(tmp_path / "pipe")
    config = json.loads((pipe / where / "config.json").read_text())
    (pipe / where / "config.json").write_text(json.dumps({**config, **named}))
    policy = PolicyConfig(path=str(pipe), height=32, width=32)
    for use in (lambda: build_policy(policy), lambda: on_meta(read_blueprint(policy).parts[where])):
        with pytest.raises(UserError, match="attn_implementation='kernels-community"):
            use()


def calls(tree):
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_no_source_unpickles_evaluates_or_trusts():
    """`module.eval()` and `model.load` are other things; these are the names that run what a file
    says."""
    root = Path(g2rpo.__file__).parent
    for file in root.rglob("*.py"):
        for name, call in calls(ast.parse(file.read_text())):
            options = {option.arg: ast.unparse(option.value) for option in call.keywords}
            assert name not in {
                "eval",
                "exec",
                "pickle.load",
                "pickle.loads",
                "yaml.unsafe_load",
                "os.system",
            }, file
            assert name != "torch.load" or options.get("weights_only") == "True", file
            assert name != "yaml.load" or file.name == "plain.py", file
            assert not {"trust_remote_code", "allow_pickle", "shell"} & options.keys(), file
            if name.endswith((".read_text", ".write_text")):  # whatever the locale
                assert "encoding" in options, (file, ast.unparse(call))


# --- secrets


def test_an_address_with_a_password_is_refused_unrepeated(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in (
        f"http://me:{SECRET}@host:80/v1",
        f"http://{SECRET}@host",
        f"http://host/?key={SECRET}",
        f"ftp://a:{SECRET}@host",
        f"http:/me:{SECRET}@host",
        f"http:me:{SECRET}@host",
        f"//me:{SECRET}@host",
        f"http://host:80;{SECRET}",
        f"http://host:{SECRET}",
        f"http://[{SECRET}/v1",
        f"http://me:{SECRET}@/v1",
        f"{SECRET}",
        f"http://host/#{SECRET}",
        f"http://host/ {SECRET}",
    ):
        with pytest.raises(ValueError, match="an address") as refusal:
            address(url)
        assert SECRET not in str(refusal.value)
        words = [
            "train",
            "scenes",
            "rewards.scene_accuracy=",
            f"rewards.r={{kind: http, options: {{url: '{url}'}}}}",
        ]
        code, out, err = command(capsys, *words)
        assert code == 2 and SECRET not in out + err and not list(tmp_path.iterdir())


@given(
    mutated(
        f"http://me:{SECRET}@host:80/v1",
        st.sampled_from([*"/@:;#?[] \t", "//", "ftp", "é"]),
        most=4,
    )
)
def test_no_address_that_is_refused_is_repeated(url):
    try:
        address(url)
    except ValueError as error:
        assert "hunter2" not in str(error) and len(str(error)) < 300


def test_a_password_in_the_wrong_place_is_not_repeated(capsys):
    for words in (
        ["policy.path=", ""],
        ["rewards.r={kind: http, options: '", "'}"],
        ["trainer.seed=", ""],
    ):
        code, out, err = command(
            capsys, "train", "scenes", f"{words[0]}http://me:{SECRET}@host{words[1]}"
        )
        assert code == 2 and SECRET not in out + err


def test_a_token_that_cannot_stand_in_a_header_is_refused_unrepeated(monkeypatch):
    monkeypatch.setenv("TOKEN", f" {SECRET}\r\n")
    assert token_from("TOKEN") == SECRET  # as `$(cat file)` and editors leave it
    for bad in (f"{SECRET}\r\nX-Evil: 1", f"{SECRET}é"):
        monkeypatch.setenv("TOKEN", bad)
        with pytest.raises(ValueError, match="printable ASCII") as refusal:
            token_from("TOKEN")
        assert SECRET not in str(refusal.value)


@contextlib.contextmanager
def answering(make):
    """The address of a server that answers one request with `make(token)`, and what it heard."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(65536))
                token = re.search(rb"Bearer ([^\r]*)", heard[0])[1]
                with contextlib.suppress(OSError):
                    connection.sendall(make(token))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        thread.join()


def test_a_token_is_nowhere_but_in_the_request(monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("TOKEN", SECRET)
    with (
        answering(lambda token: b"HTTP/1.0 403 \x1b[31mno\r\n\r\nnot \x1b[2Jyou") as (url, heard),
        pytest.raises(OSError, match="answered 403: not .*you") as refusal,
    ):
        RemoteReward(url, endpoint={"token_env": "TOKEN", "timeout_s": 5})
    assert f"Bearer {SECRET}".encode() in heard[0]
    assert SECRET not in str(refusal.value) + caplog.text and "\x1b" not in str(refusal.value)


@pytest.mark.parametrize(
    "status", [b"200 OK", b"401 no", b"403 no", b"429 slow", b"500 broken", b"302 there"]
)
@pytest.mark.parametrize(
    "echo",
    [
        lambda token: b"\r\n\r\nyou said Authorization: Bearer " + token,
        lambda token: b" " + token + b"\r\n\r\n",  # as the reason
        lambda token: b'\r\n\r\n{"said": "Bearer ' + token.replace(b"/", b"\\/") + b'"}',
        lambda token: b"\r\n\r\n" + b"x" * 285 + token,  # cut off in its middle
        lambda token: b"\r\n\r\n" + json.dumps({"scores": ["", token.decode()]}).encode(),
        lambda token: b"\r\n" + token + b"\x00\r\n\r\n",  # as a header that is none
    ],
    ids=["body", "reason", "escaped", "cut", "scores", "header"],
)
def test_a_server_that_sends_the_token_back_is_not_quoted(monkeypatch, caplog, status, echo):
    """What remains of a token in any text is seven letters or digits at most."""
    caplog.set_level("DEBUG")
    token = "sk-4f9a/Qm27xT+bWc/81Lp=="
    monkeypatch.setenv("TOKEN", token)
    with answering(lambda token: b"HTTP/1.0 " + status + echo(token)) as (url, _):
        reward = RemoteReward(
            url, endpoint={"token_env": "TOKEN", "timeout_s": 5, "retries": 0, "check": False}
        )
        try:
            assert reward(torch.zeros(1, 3, 8, 8), ["a"]).isnan().all()
            said = ""
        except Refused as error:
            said = "".join(traceback.format_exception(error))
    letters = "".join(filter(str.isalnum, token))
    text = "".join(filter(str.isalnum, said + caplog.text))
    assert not any(letters[i : i + 8] in text for i in range(len(letters) - 7)), said + caplog.text


# --- who takes his time


class Zero:
    def __call__(self, images, prompts):
        return torch.zeros(len(images))


def client(server):
    return socket.create_connection(server.server_address, timeout=10)


SCORE = "POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ALLOWED = f"{SCORE}Authorization: Bearer {SECRET}\r\n"


def test_a_client_that_drips_its_headers_is_cut_off():
    with (
        serving(RewardServer(Zero(), port=0, limits=Limits(headers_s=0.5))) as server,
        client(server) as slow,
    ):
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            while True:  # for ever, if the server let it
                slow.sendall(b"X")
                time.sleep(0.02)


@pytest.mark.parametrize(
    "said", [b"", b"GET /health HTTP/1.1\r\nX: "], ids=["silent", "half a header"]
)
def test_connections_that_say_nothing_keep_nobody_out(said):
    """200 of them, where 128 may wait: each newcomer takes the idlest one's place, and is answered
    at once."""
    with (
        serving(RewardServer(Zero(), port=0, token=SECRET)) as server,
        contextlib.ExitStack() as idle,
    ):
        before = threading.active_count()
        for _ in range(200):
            idle.enter_context(client(server)).sendall(said)
        began = time.monotonic()
        assert (
            request_json(f"{server.address}/health", dict, token=SECRET, timeout_s=5)["status"]
            == "ok"
        )
        assert time.monotonic() - began < 5 and len(server.strangers) <= server.limits.incomplete
        until = time.monotonic() + 5
        while (
            threading.active_count() - before > server.limits.decoding and time.monotonic() < until
        ):
            time.sleep(0.01)
        assert threading.active_count() - before <= server.limits.decoding  # none for a connection


BODY = json.dumps({"images": [], "prompts": []}).encode()


def asked(server):
    """How the server answers an honest client, which finds its body empty."""
    with pytest.raises(Refused, match="answered 400: .*images"):
        request_json(
            f"{server.address}/score", dict, token=SECRET, timeout_s=5, body=json.loads(BODY)
        )


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"{" + b" " * 100_000], ids=["nothing", "a byte", "more than is buffered"]
)
def test_clients_whose_bodies_stop_keep_nobody_out(sent):
    """300 of them with a token, more than all that may be open without a whole request, and an
    honest one in their midst."""
    headers = f"{ALLOWED}Content-Length: 1000000\r\n\r\n".encode()
    with (
        serving(RewardServer(Zero(), port=0, token=SECRET)) as server,
        contextlib.ExitStack() as idle,
    ):
        for number in range(300):
            idle.enter_context(client(server)).sendall(headers + sent)
            if number % 100 == 99:
                began = time.monotonic()
                asked(server)
                assert time.monotonic() - began < 3
        assert (
            len(server.strangers) <= server.limits.incomplete and server.held_bytes < 128 * 150_000
        )


def test_a_body_that_comes_slowly_is_kept_while_others_stop():
    """What makes room is what has been idle longest, not what is oldest."""
    limits = Limits(incomplete=4)
    with (
        serving(RewardServer(Zero(), port=0, token=SECRET, limits=limits)) as server,
        client(server) as slow,
        contextlib.ExitStack() as idle,
    ):
        slow.sendall(f"{ALLOWED}Content-Length: {len(BODY)}\r\n\r\n".encode())
        for place in range(len(BODY)):
            idle.enter_context(client(server)).sendall(
                f"{ALLOWED}Content-Length: 9\r\n\r\n[".encode()
            )
            slow.sendall(BODY[place : place + 1])
            time.sleep(0.01)
        assert b" 400 " in slow.recv(100)


@pytest.mark.parametrize("sent", [b"", b"{"])
def test_a_body_that_stops_is_dropped(sent):
    limits = Limits(gap_s=0.2)
    with serving(RewardServer(Zero(), port=0, limits=limits)) as server, client(server) as stopped:
        stopped.sendall(f"{SCORE}Content-Length: 9\r\n\r\n".encode() + sent)
        assert b" 408 " in stopped.recv(100)
        assert server.held_bytes == 0


def test_a_body_that_drips_is_dropped():
    with (
        serving(RewardServer(Zero(), port=0, limits=Limits(read_s=0.5))) as server,
        client(server) as dripping,
    ):
        dripping.sendall(f"{SCORE}Content-Length: 999999\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            while True:  # for ever, if the server let it
                dripping.sendall(b" ")
                time.sleep(0.02)


def test_bodies_that_are_held_have_a_bound_together():
    """Who finds no room is told to come back, and does."""
    limits = Limits(held_bytes=1000, gap_s=1.0)
    with (
        serving(RewardServer(Zero(), port=0, token=SECRET, limits=limits)) as server,
        client(server) as first,
    ):
        first.sendall(f"{ALLOWED}Content-Length: 2000\r\n\r\n".encode() + b" " * 990)
        while server.held_bytes < 990:
            time.sleep(0.01)
        with pytest.raises(NoAnswer, match="answered 503: .*busy") as busy:
            request_json(
                f"{server.address}/score", dict, token=SECRET, timeout_s=5, body=json.loads(BODY)
            )
        assert busy.value.after_s == 1
        while server.held_bytes:
            time.sleep(0.01)
        asked(server)


@pytest.mark.parametrize(
    ("length", "status"), [("9" * 5000, 400), ("²", 400), ("-1", 400), ("", 400), ("9" * 18, 413)]
)
def test_a_content_length_is_a_number_that_can_be_read(length, status):
    with serving(RewardServer(Zero(), port=0)) as server, client(server) as asking:
        asking.sendall(f"{SCORE}Content-Length: {length}\r\n\r\n".encode("latin-1"))
        assert int(asking.recv(100).split()[1]) == status


def test_a_blank_token_is_none():
    with pytest.raises(ValueError, match="without a token"):
        RewardServer(Zero(), "0.0.0.0", 0, token=" ")
    with RewardServer(Zero(), port=0, token=" \n") as server:
        assert server.token is None


@pytest.mark.parametrize(
    "beginning",
    [b"", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 500 x\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"],
)
def test_an_endpoint_that_drips_is_left_in_time(beginning):
    """Each byte comes well within the socket's own time limit."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(beginning)
                while not stop.wait(0.02):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NoAnswer):  # if it were not left, this would never end
            request_json(f"http://127.0.0.1:{listener.getsockname()[1]}", dict, timeout_s=0.3)
        stop.set()
        thread.join()


# --- what a run directory says


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "train"', "line 2: is no JSON"),
        (
            '{"kind": "train", "iteration": "../../x"}',
            "line 2: train.iteration: Input should be a valid integer",
        ),
        ("[" * 100_000, "line 2: is no JSON .recursion limit exceeded"),
    ],
)
def test_a_damaged_log_is_named_and_a_torn_last_line_is_not_missed(tmp_path, line, message):
    good = '{"kind": "eval", "iteration": 0, "seconds": 1.0, "reward/x": null}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UserError, match=message, check=lambda error: "metrics.jsonl" in str(error)):
        Run(tmp_path).read_log()
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{good[:20]}")
    assert len(Run(tmp_path).read_log()) == 1


def test_a_log_cut_within_a_letter_is_gone_on_with(tmp_path):
    t = trainer(tmp_path)
    list(t.train())
    log = tmp_path / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + '{"kind": "eval", "alarms": {"x": "é'.encode()[:-1])
    again = trainer(tmp_path, "trainer.iterations=5")
    assert again.resume() == [] and len(list(again.train())) == 2
    assert (
        log.read_bytes().startswith(whole)
        and len(Run(tmp_path).read_log()) == len(whole.splitlines()) + 2
    )


def test_a_torn_start_is_left_out_and_the_next_one_does_not_join_it(run):
    Run(run).claim(trainer(None).config)
    Run(run).record_start(0, torch.device("cpu"))
    with (run / "starts.jsonl").open("ab") as file:
        file.write(b'{"time": "2026-')
    assert len(read_runs([run])[0].starts) == 1
    Run(run).record_start(3, torch.device("cpu"))
    assert [start.iteration for start in read_runs([run])[0].starts] == [0, 3]
    whole = (run / "starts.jsonl").read_text().splitlines()[0]
    (run / "starts.jsonl").write_text(f"{whole}\n{{\n{whole}\n")
    with pytest.raises(UserError, match=r"starts\.jsonl, line 2: is no JSON"):
        read_runs([run])


@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_damaged_base_evaluation_is_named(run, damage):
    base = run / "baseline.safetensors"
    if damage == "cut":
        base.write_bytes(base.read_bytes()[:50])
    elif damage == "gone":
        base.unlink()
    else:
        shutil.copy(newest(run) / "weights.safetensors", base)
    again = resumed(run)
    with pytest.raises(
        UserError, match=r"baseline\.safetensors: (cannot be read|does not hold 3 pictures)"
    ):
        again.finish()


def test_nothing_in_a_card_ends_its_code_block():
    assert _block("yaml", "a: '```'\n````").splitlines() == [
        "`````yaml",
        "a: '```'",
        "````",
        "`````",
    ]
