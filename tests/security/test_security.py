"""Files, servers and clients that mean harm: nothing runs, nothing leaks, nobody waits for long."""

import ast
import json
import shutil
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
from g2rpo.core.errors import UserError
from g2rpo.core.http import NoAnswer, Refused, address, request_json, token_from
from g2rpo.data.sources import read_prompts
from g2rpo.lab.plan.models import cost_of_reward
from g2rpo.lab.report.history import read_runs
from g2rpo.models.blueprint import read_blueprint
from g2rpo.models.load import build_policy
from g2rpo.models.meta import on_meta
from g2rpo.models.options import PolicyConfig
from g2rpo.rewards.catalogue import RewardConfig, build_rewards
from g2rpo.rewards.remote import RemoteReward
from g2rpo.rewards.server import RewardServer
from g2rpo.rewards.weights import read_state_dict
from g2rpo.train.model_card import _block
from g2rpo.train.run.checkpoint import _digest, checkpoints
from g2rpo.train.run.folder import Run
from tests.support.commands import g2rpo as command
from tests.support.commands import refused
from tests.support.fuzzing import mutated
from tests.support.runs import fallen_back, mean, resumed, trainer
from tests.support.servers import endpoint_that
from tests.support.tables import rows
from tests.support.tiny import save_flux
from tests.support.waiting import PATIENCE_S

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


def marking(mark):
    """Source that leaves a file behind."""
    return f"open({str(mark)!r}, 'w')\n"


def changed(file, **values):
    """Sets values of a file of JSON."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def newest(run):
    return checkpoints(run / "checkpoints")[-1]


def forged(path, **files):
    """Replaces files of a checkpoint, and its manifest so that every digest is right."""
    for name, write in files.items():
        write(next(path.glob(f"{name}.*")))
    held = json.loads((path / "manifest.json").read_text())["files"]
    changed(path / "manifest.json", files={name: _digest(path / name) for name in held})


def test_a_forged_checkpoint_runs_nothing_and_the_one_before_is_used(run, tmp_path):
    forged(newest(run), state=lambda file: torch.save(Payload(tmp_path / "mark"), file))
    _, complaint = fallen_back(run)
    assert "iteration_000004: is no checkpoint (UnpicklingError" in complaint
    assert not (tmp_path / "mark").exists()


MANIFESTS = """
[] -> is missing or damaged
{"g2rpo": "0", "iteration": 7, "files": {}} -> another checkpoint's
{"g2rpo": "0", "iteration": Infinity, "files": {}} -> valid integer, got inf
{"g2rpo": "0", "iteration": 4, "files": {"state.pt": 1}} -> state.pt: Input should be a
{"g2rpo": "0", "iteration": 4, "files": {"../../x": "0"}} -> ../../x.[key]: String should
"""


@pytest.mark.parametrize(("content", "message"), rows(MANIFESTS))
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


def test_an_optimizer_has_the_betas_of_the_config_whatever_a_checkpoint_says(run, tmp_path):
    other, groups = shutil.copytree(run, tmp_path / "forged"), [{"betas": "x", "weight_decay": "x"}]
    change = rewritten(lambda state: state["optimizer"].update(param_groups=groups))
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


def reward_of(kind, path):
    return build_rewards({"it": RewardConfig(kind=kind, options={"path": str(path)})})


def weights(folder, payload):
    torch.save({"state_dict": payload}, folder / "HPS.pt")
    return lambda: reward_of("image_reward", folder / "HPS.pt")


def clip(folder, payload):
    """In transformers' own format, which transformers reads itself."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    of_pictures = {**small, "image_size": 32, "patch_size": 16}
    config = CLIPConfig(text_config={**small, "vocab_size": 50}, vision_config=of_pictures)
    CLIPModel(config).save_pretrained(folder / "clip")
    (folder / "clip" / "model.safetensors").unlink()
    torch.save(payload, folder / "clip" / "pytorch_model.bin")
    return lambda: reward_of("clip_score", folder / "clip")


def dataset(folder, payload):
    (folder / "data").mkdir()
    (folder / "data" / "data.py").write_text(marking(payload.mark))
    return lambda: read_prompts(f"hf:{folder / 'data'}")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (weights, "unpickling it could run any code"),
        (clip, r"rewards\.it: cannot be loaded: a file holds more than tensors"),
        (dataset, "cannot be loaded: RuntimeError: Dataset scripts are no longer supported"),
    ],
)
def test_files_that_would_run_code_are_refused(tmp_path, written, message):
    use = written(tmp_path, Payload(tmp_path / "mark"))
    with pytest.raises(UserError, match=message):
        use()
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
    (place / "evil_part.py").write_text(f"{marking(tmp_path / 'mark')}class Part: pass\n")
    changed(pipe / "model_index.json", transformer=["evil_part", "Part"])
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = PolicyConfig(path=str(pipe), height=32, width=32)
    with pytest.raises(UserError, match="cannot be loaded"):
        build_policy(policy)
    with pytest.raises(UserError, match="names a part of 'evil_part'; only diffusers and"):
        on_meta(read_blueprint(policy).parts["transformer"])
    with pytest.raises(UserError, match="is no model"):
        on_meta(("diffusers:logging", {}))
    assert not (tmp_path / "mark").exists()


KERNELS = {"attn_implementation": "kernels-community/x@deadbeef:f"}


@pytest.fixture(params=["reward", "text_encoder", "text_encoder_2"])
def users_of_kernels(request, tmp_path):
    """What reads a config.json that names kernels: of a reward, and of a part of a pipeline."""
    where = request.param
    if where == "reward":
        config = {"model_type": "clip", "text_config": KERNELS}
        (tmp_path / "config.json").write_text(json.dumps(config))
        entry = RewardConfig(kind="clip_score", options={"path": str(tmp_path)})
        return [lambda: build_rewards({"it": entry}), lambda: cost_of_reward(entry, "cpu")]
    pipe = save_flux(tmp_path / "pipe")
    changed(pipe / where / "config.json", **KERNELS)
    policy = PolicyConfig(path=str(pipe), height=32, width=32)
    return [lambda: build_policy(policy), lambda: on_meta(read_blueprint(policy).parts[where])]


def test_a_config_that_names_kernels_of_the_hub_is_refused_before_a_model_is_made(users_of_kernels):
    """transformers imports what such a line names, if the library `kernels` is installed."""
    for use in users_of_kernels:
        with pytest.raises(UserError, match="attn_implementation='kernels-community"):
            use()


RUNNING = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.unsafe_load", "os.system"}
"""Names that run what a file says; `module.eval()` and `model.load` are other things."""


def test_no_source_unpickles_evaluates_or_trusts():
    for file in Path(g2rpo.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            options = {option.arg: ast.unparse(option.value) for option in call.keywords}
            assert name not in RUNNING, file
            assert name != "torch.load" or options.get("weights_only") == "True", file
            assert name != "yaml.load" or file.name == "plain.py", file
            assert not {"trust_remote_code", "allow_pickle", "shell"} & options.keys(), file
            if name.endswith((".read_text", ".write_text")):  # whatever the locale
                assert "encoding" in options, (file, ast.unparse(call))


# --- secrets


ADDRESSES = """
http://me:SECRET@host:80/v1 http://SECRET@host http://host/?key=SECRET ftp://a:SECRET@host
http:/me:SECRET@host http:me:SECRET@host //me:SECRET@host http://host:80;SECRET http://host:SECRET
http://[SECRET/v1 http://me:SECRET@/v1 SECRET http://host/#SECRET
"""


def test_an_address_with_a_password_is_refused_unrepeated():
    for url in [*ADDRESSES.replace("SECRET", SECRET).split(), f"http://host/ {SECRET}"]:
        with pytest.raises(ValueError, match="an address") as refusal:
            address(url)
        assert SECRET not in str(refusal.value)


PARTS = st.sampled_from([*"/@:;#?[] \t", "//", "ftp", "é"])


@given(mutated(f"http://me:{SECRET}@host:80/v1", PARTS, most=4))
def test_no_address_that_is_refused_is_repeated(url):
    try:
        address(url)
    except ValueError as error:
        assert "hunter2" not in str(error) and len(str(error)) < 300


def test_a_password_in_a_setting_is_not_repeated(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for setting in ("policy.path", "trainer.seed", "rewards.r.kind=http rewards.r.options.url"):
        words = f"{setting}=http://me:{SECRET}@host".split()
        code, out, err = command(capsys, "train", "scenes", *words)
        assert code == 2 and SECRET not in out + err and not list(tmp_path.iterdir())


def test_a_token_that_cannot_stand_in_a_header_is_refused_unrepeated(monkeypatch):
    monkeypatch.setenv("TOKEN", f" {SECRET}\r\n")
    assert token_from("TOKEN") == SECRET  # as `$(cat file)` and editors leave it
    for bad in (f"{SECRET}\r\nX-Evil: 1", f"{SECRET}é"):
        monkeypatch.setenv("TOKEN", bad)
        with pytest.raises(ValueError, match="printable ASCII") as refusal:
            token_from("TOKEN")
        assert SECRET not in str(refusal.value)


def answering(make):
    """Answers a request with the bytes `make(token)`."""

    def answer(handler, count):
        handler.wfile.write(make(handler.headers["Authorization"].removeprefix("Bearer ")))

    return endpoint_that(answer)


TOKENS = """
endpoint.token={}
endpoint.api_key={}
endpoint={{Authorization: {}}}
endpoint.token_env={}
headers.Authorization=Bearer {}
request.extra_headers.X-Api-Key={}
request.password={}
token={}
url='http://me:{}@127.0.0.1:9/v1'
url='http://127.0.0.1:9/v1?api_key={}'
url=http://127.0.0.1:9/sk-proj-{}/v1
"""


@pytest.mark.parametrize("setting", TOKENS.strip().splitlines())
def test_a_token_in_a_setting_is_refused_and_not_repeated(tmp_path, capsys, caplog, setting):
    """Before anything is written: it would stand in config.yaml."""
    judge = "{kind: vlm_judge, options: {url: 'http://127.0.0.1:9/v1', model: m}}"
    token = "hunter2hunter2hunter2"
    given = [f"rewards.j={judge}", f"rewards.j.options.{setting.format(token)}"]
    said = refused(capsys, "train", "scenes-fast", *given, "--run-dir", tmp_path / "run")
    assert "hunter2" not in said + caplog.text and not (tmp_path / "run").exists()
    assert "environment variable" in said or "unknown option 'headers'" in said, said


def test_a_token_is_nowhere_but_in_the_request(monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("TOKEN", SECRET)
    heard, refused = [], b"HTTP/1.0 403 \x1b[31mno\r\n\r\nnot \x1b[2Jyou"
    with (
        answering(lambda token: heard.append(token) or refused) as (url, _),
        pytest.raises(OSError, match="answered 403: not .*you") as refusal,
    ):
        RemoteReward(url, endpoint={"token_env": "TOKEN", "timeout_s": PATIENCE_S})
    assert heard == [SECRET]
    assert SECRET not in str(refusal.value) + caplog.text and "\x1b" not in str(refusal.value)


ECHOES = {
    "body": "\r\n\r\nyou said Authorization: Bearer {}",
    "reason": " {}\r\n\r\n",
    "escaped": '\r\n\r\n{{"said": "Bearer {}"}}',
    "cut": f"\r\n\r\n{285 * 'x'}{{}}",  # off in its middle
    "scores": '\r\n\r\n{{"scores": ["", "{}"]}}',
    "header": "\r\n{}\x00\r\n\r\n",  # that is none
}


@pytest.mark.parametrize("status", ["200 OK", "401 no", "429 slow", "500 broken", "302 there"])
@pytest.mark.parametrize("how", ECHOES)
def test_a_server_that_sends_the_token_back_is_not_quoted(monkeypatch, caplog, status, how):
    """What remains of a token in any text is seven letters or digits at most."""
    caplog.set_level("DEBUG")
    token = "sk-4f9a/Qm27xT+bWc/81Lp=="
    monkeypatch.setenv("TOKEN", token)

    def answer(heard):
        said = heard.replace("/", "\\/" if how == "escaped" else "/")
        return f"HTTP/1.0 {status}{ECHOES[how].format(said)}".encode()

    with answering(answer) as (url, _):
        options = {"token_env": "TOKEN", "timeout_s": PATIENCE_S, "retries": 0, "check": False}
        reward = RemoteReward(url, endpoint=options)
        try:
            assert reward(torch.zeros(1, 3, 8, 8), ["a"]).isnan().all()
            said = ""
        except Refused as error:
            said = "".join(traceback.format_exception(error))
    letters = "".join(filter(str.isalnum, token))
    text = "".join(filter(str.isalnum, said + caplog.text))
    assert not any(letters[i : i + 8] in text for i in range(len(letters) - 7)), said + caplog.text


# --- servers


def mean_of_pictures(images, prompts):
    return images.mean(dim=(1, 2, 3))


def test_a_blank_token_is_none():
    with pytest.raises(ValueError, match="without a token"):
        RewardServer(mean_of_pictures, "0.0.0.0", 0, token=" ")
    with RewardServer(mean_of_pictures, port=0, token=" \n") as server:
        assert server.token is None


@pytest.mark.parametrize(
    "beginning",
    [b"", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 500 x\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"],
)
def test_an_endpoint_that_drips_is_left_in_time(beginning):
    """Each byte comes well within the socket's own time limit."""

    def drip(handler, count):
        handler.wfile.write(beginning)
        while True:  # until the client has left, when writing fails
            time.sleep(0.02)
            handler.wfile.write(b"x")

    # if it were not left, this would never end
    with endpoint_that(drip) as (url, _), pytest.raises(NoAnswer):
        request_json(url, dict, timeout_s=0.3)


# --- what a run directory says


LINES = [
    ('{"kind": "train"', "is no JSON"),
    ('{"kind": "train", "iteration": "../../x"}', "train.iteration: Input should be a valid int"),
    ("[" * 100_000, "is no JSON .recursion limit exceeded"),
]


@pytest.mark.parametrize(("line", "message"), LINES)
def test_a_damaged_log_is_named_and_a_torn_last_line_is_not_missed(tmp_path, line, message):
    good = '{"kind": "eval", "iteration": 0, "seconds": 1.0, "reward/x": null}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UserError, match=f"metrics.jsonl, line 2: {message}"):
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
    assert log.read_bytes().startswith(whole)
    assert len(Run(tmp_path).read_log()) == len(whole.splitlines()) + 2


def test_a_torn_start_is_left_out_and_the_next_one_does_not_join_it(run):
    Run(run).claim(trainer(None).config)
    Run(run).record_start(0, torch.device("cpu"))
    with (run / "starts.jsonl").open("ab") as file:
        file.write(b'{"time": "2026-')
    assert len(read_runs([run])[0].starts) == 1
    Run(run).record_start(3, torch.device("cpu"))
    assert [start.iteration for start in read_runs([run])[0].starts] == [0, 3]


def test_a_damaged_base_evaluation_is_named(run):
    """Cut off, and then gone; what a whole file may hold is in tests of input."""
    base, again = run / "baseline.safetensors", resumed(run)
    base.write_bytes(base.read_bytes()[:50])
    for _ in range(2):
        with pytest.raises(UserError, match=r"baseline\.safetensors: cannot be read"):
            again.finish()
        base.unlink(missing_ok=True)


def test_nothing_in_a_card_ends_its_code_block():
    lines = _block("yaml", "a: '```'\n````").splitlines()
    assert lines == ["`````yaml", "a: '```'", "````", "`````"]
