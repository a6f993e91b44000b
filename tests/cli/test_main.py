"""The command line as a person meets it: exit codes, messages, and what is left on disk."""

import errno
import io
import json
import os
import re
import resource
import subprocess
import sys

import pytest
import torch
from huggingface_hub import HfApi
from transformers import T5EncoderModel

from g2rpo import __version__
from g2rpo.cli.main import main
from g2rpo.cli.output import Heard
from g2rpo.config import recipes
from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.core.stopping import stoppable
from g2rpo.lab.push import push
from g2rpo.rewards.remote import RemoteReward
from g2rpo.train.run.folder import Run
from tests.support.commands import adapter_of, forget_code, g2rpo, own_reward
from tests.support.runs import config
from tests.support.tables import rows
from tests.support.tolerances import reordered

PROGRAM = [sys.executable, "-m", "g2rpo"]


def ended(*command, **environment):
    """A command in a process of its own, with more of an environment."""
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


STARTED = """import atexit, os, sys
names = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
atexit.register(lambda: print(*map(os.environ.get, names), "torch" in sys.modules))
from g2rpo.__main__ import main
main()"""


def test_help_answers_at_once_and_loads_no_model_library():
    """Within ten seconds of a processor, however many others it has to do; the promise of the
    README is shorter. That threads sleep while they wait is set before torch reads it, unless the
    environment says otherwise."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    helped = ended(sys.executable, "-c", STARTED, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert helped.returncode == 0 and "train" in helped.stdout
    assert helped.stdout.endswith("passive 10000 False\n")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    own = ended(sys.executable, "-c", STARTED, "--version", OMP_WAIT_POLICY="active")
    assert own.stdout == f"g2rpo {__version__}\nactive None False\n"
    own = ended(sys.executable, "-c", STARTED, "--version", GOMP_SPINCOUNT="7")
    assert own.stdout == f"g2rpo {__version__}\nNone 7 False\n"


def test_windows_is_refused_in_a_line():
    """It ended in a traceback of an import."""
    program = "import sys; sys.platform = 'win32'; from g2rpo.__main__ import main; main()"
    refused = ended(sys.executable, "-c", program)
    said = "g2rpo: runs on Linux, macOS and WSL, not on Windows itself\n"
    assert (refused.returncode, refused.stderr) == (2, said)


def test_a_locale_without_utf_8_shows_what_it_can_and_refuses_what_it_cannot_read():
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    helped = ended(*PROGRAM, "--help", **plain)  # which names G²RPO
    assert (helped.returncode, helped.stderr) == (0, "") and "G?RPO" in helped.stdout
    refused = ended(*PROGRAM, "sample", "ein rotes Dreieck für mich", "--model=testbed", **plain)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "no text in this locale" in refused.stderr


class Gone(io.StringIO):
    def __init__(self, code):
        super().__init__()
        self.code = code

    def write(self, text):
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EIO, errno.EPIPE])
def test_an_exit_code_is_the_same_where_its_message_cannot_be_written(monkeypatch, code):
    monkeypatch.setattr(sys, "stderr", Gone(code))
    with pytest.raises(SystemExit) as ended:
        main(["report", "absent"])
    assert ended.value.code == 2


def test_a_pipe_that_nobody_reads_is_not_taken_for_code_that_ends_the_command():
    with pytest.raises(BrokenPipeError), stoppable("stopped"):
        Heard(file=Gone(errno.EPIPE)).print("a line")


def test_version_and_short_help(says):
    assert says("-h") == says("--help") and says("train -h") == says("train --help")


COMPLETED = """
se -> serve-reward
train sce -> scenes scenes-fast
train --re -> --resume
"""


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "offered"), rows(COMPLETED))
def test_a_shell_completes_commands_options_and_recipes(typed, offered):
    code = "import sys; from g2rpo.cli.main import main; sys.argv = ['g2rpo']; main()"
    words = {"COMP_WORDS": f"g2rpo {typed}", "COMP_CWORD": str(1 + typed.count(" "))}
    asked = ended(sys.executable, "-c", code, _G2RPO_COMPLETE="complete_bash", **words)
    assert asked.stdout.split() == offered.split()


def test_recipes_are_listed_and_explained(says):
    said, groups = says("recipes"), recipes.groups()
    heads = [title for title in said.splitlines() if title in groups]
    assert heads == list(groups) and set(groups[recipes.HERE]) == {"scenes", "scenes-fast", "words"}
    for name in recipes.names():
        assert re.search(rf"^{name} +{re.escape(recipes.summary(name))}", said, re.MULTILINE)
    assert re.search(r"^flux1-dev-evening .*\n +[\d.]+ GiB; .+ on an H100, rewards", said, re.M)
    assert "group_size: 12" in says("recipes scenes")


def lines_of(path):
    return [json.loads(line) for line in path.open()]


def test_train_resume_repeat_and_sample(says, refuses, tmp_path, tiny_config, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    out = says("train tiny.yaml --run-dir run --resume")
    for suggested in (
        "mpiexec has 2 processes",
        "before_after.png",
        "g2rpo report run",
        "g2rpo sample run 'a red circle'",  # the first of its own held-out prompts
        "g2rpo train run/config.yaml --run-dir run-2",
    ):
        assert suggested in out
    assert [start["iteration"] for start in lines_of(tmp_path / "run/starts.jsonl")] == [0]
    says("train tiny.yaml trainer.iterations=3 --run-dir run --resume")
    says("train run/config.yaml --run-dir again")
    one, two = (adapter_of(tmp_path / run) for run in ("run", "again"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    card = (tmp_path / "run/adapter/README.md").read_text()
    assert "load_lora_weights" in card and "| scene_accuracy | trained on |" in card
    assert (tmp_path / "run/adapter/before_after.png").is_file()

    says("sample run --out pictures 'a red circle' 'a blue square'")
    listed = lines_of(tmp_path / "pictures/prompts.jsonl")
    assert [entry["prompt"] for entry in listed] == ["a red circle", "a blue square"]
    assert all((tmp_path / "pictures" / entry["file"]).is_file() for entry in listed)
    assert "is not empty" in refuses("sample run --out pictures 'a red circle'")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/mine.txt").touch()
    out = says("sample run 'a red circle' --knob noise=0.5 --knob best_of=2")
    assert out.strip() == "1 picture in samples-2, 8 evaluations, 2 readings each"
    (line,) = lines_of(tmp_path / "samples-2/prompts.jsonl")
    assert line["knobs"] == "initial noise x 0.5, best of 2"


def test_a_recipe_is_meant_before_a_folder_of_its_name(refuses, tmp_path):
    (tmp_path / "words").mkdir()
    notes = []
    assert load_config("words", [], notes.append).recipe == "words"
    assert "taken for the recipe" in notes[0]
    assert "./words is a directory" in refuses("compare ./words --algorithms g2rpo")


WRONG = """
train scnes -> scnes
recipes scnes -> scnes
train policy.path=testbed -> policy.path=testbed is an override; name a recipe
train nowhere.yaml -> nowhere.yaml: cannot be read
train words.yaml -> words.yaml: there is no such file; the recipe is called words
plan RUN/samples -> is a directory; name a recipe or a config.yaml
plan RUN -> its config is RUN/config.yaml
resume words -> it is a recipe, and `g2rpo train words` makes a run
export RUN/samples --format diffusers -> it is a part of the run RUN
check-model testbed policy.height=65 -> must be multiples of 16
train scenes prompts.train=/no/prompts.txt -> /no/prompts.txt
train scenes policy.lr=1e-4 -> Did you mean 'optim.learning_rate'?
train scenes trainer.num_steps=4 -> Did you mean 'sampling.num_steps'?
train scenes --iterations 3 -> written without dashes: trainer.iterations=3
train scenes --num-steps=4 -> Settings are written without dashes: sampling.num_steps=4
train scenes --optim.lerning_rate=1e-3 -> without dashes: optim.learning_rate=1e-3
train scenes --set trainer.iterations=3 -> without dashes: trainer.iterations=3
train scenes --prompt x.txt -> without dashes: prompts.train=x.txt
train scenes --dry-run -> `g2rpo plan RECIPE` checks the settings
train scenes --foo -> without dashes: KEY=VALUE
train scenes -hx -> o such option
train scenes --run_dir x -> --run-dir
train scenes run_dir=x -> run_dir=x: is an option here: --run-dir x
train scenes resume=true -> is an option here: --resume
train scenes --resume -> name its directory with --run-dir
train scenes --accept-changes -> is for --resume
train scenes algorithm=mixgrpo -> got 'mixgrpo'; write algorithm.name=mixgrpo
train scenes rewards=ocr -> write rewards.ocr=1
train scenes rewards.best=clip_score -> got 'clip_score'; write rewards.best.kind=clip_score
train scenes rewards.scene_clip=-1 -> rewards.scene_clip: should be at least 0, since a higher score
train scenes algorithm.branch_steps=0,1 -> write it in brackets: [0,1]
train scenes optim.learning_rate=1e39 -> should be 0, or from 1e-18 to 1e+18 in size
train scenes algorithm.name=awm algorithm.old_schedule=[0,1e-300,0.3] -> algorithm.old_schedule
sample --model testbed -> give prompts
sample 'a red circle' -> a red circle is no run directory (no config.yaml). A run comes first
sample 'a red circle' --model testbed --knob best_of=2 -> name a run
sample 'a red circle' --model testbed --knob nois=2 -> Did you mean 'noise'?
sample 'a red circle' --model testbed --guidance -1 -> guidance_scale
sample 'a red circle' --model testbed --size 0 -> height
sample 'a red circle' --model testbed --strength nan -> strength
sample 'a red circle' --model testbed --out RUN/config.yaml -> is a file; name another --out
sample RUN a --guidance 2 -> --guidance is for --model
sample a --model testbed --weights FOLDER -> holds neither
evaluate RUN --size 32 -> --size is for --model
evaluate RUN --model testbed -> name a run, or a pipeline with --model
evaluate --model testbed --num_prompts 3 -> --num-prompts
evaluate --model testbed --num-steps 3 -> without dashes: KEY=VALUE
evaluate --model testbed --rewards my.py:f -> is code; write f:
plan scenes --cards 8 -> `--ranks 8` plans on several
plan scenes --ranks 6 --ranks-per-node 4 -> 6 ranks do not fill such nodes
compare scenes --algorithms g2rpo --steps 10,300 -> less than or equal to 250
compare scenes --algorithms g2rpo alarms.action=stop -> may end a run of the study early
export nowhere -> say which --format: diffusers, comfyui, kohya, ai-toolkit, merged
serve-reward brightness --host 0.0.0.0 -> without a token
serve-reward brightness --token-env NOT_SET -> is not set
"""
"""A command, and words that its message must have."""


@pytest.mark.parametrize(("command", "message"), rows(WRONG))
def test_wrong_input_is_one_message_and_nothing_is_begun(refuses, tmp_path, command, message):
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "RUN/samples").mkdir(parents=True)
    (tmp_path / "RUN/config.yaml").write_text(load_config("scenes", []).to_yaml())
    assert message in " ".join(refuses(command).split())
    assert {path.name for path in tmp_path.iterdir()} == {"RUN", "FOLDER"}


def test_a_prompt_that_is_too_long_for_a_file_is_none(refuses):
    assert "A run comes first, or --model" in refuses(f"sample '{'a red circle, ' * 30}'")


COMMANDS = """
sample 'a red circle' --model testbed --steps 1 --out PLACE
evaluate --model testbed --prompts prompts.txt --rewards brightness --out PLACE
train tiny.yaml --run-dir PLACE
train PLACE/config.yaml
report PLACE
compare tiny.yaml --algorithms g2rpo,mixgrpo --out PLACE
"""


class Hub:
    """Stands in for huggingface_hub.HfApi: remembers what it was told."""

    def __init__(self):
        self.told = []

    def create_repo(self, repository, *, private, exist_ok):
        self.told.append((repository, private))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.told.append(sorted(path.name for path in folder_path.iterdir()))
        return f"https://hub/{repo_id}"


def test_the_newest_run_is_taken_where_none_is_named(says, refuses, tmp_path):
    """And named where something else is."""
    assert "there is none in runs/" in refuses("report")
    for place, name in enumerate(("new", "old")):
        Run(tmp_path / "runs" / name).claim(config())
        os.utime(tmp_path / "runs" / name, (0, 9 - place))
    assert "runs/new: the newest run" in says("report")
    os.utime(tmp_path / "runs/new", (0, 9))
    held = "runs is no run directory (no config.yaml); it holds the runs runs/old, runs/new"
    assert held in refuses("report runs")
    assert "; the newest run is runs/new. A run comes first" in refuses("sample runs/ne 'a circle'")
    (tmp_path / "list.txt").write_text("a red circle")
    for command in ("sample --prompts list.txt", "sample 'a red circle'", "demo", "evaluate"):
        assert "runs/new has no weights yet" in refuses(command)


def test_push_uploads_weights_and_card_or_says_how_to_try_again(tmp_path):
    hub, nowhere = Hub(), HfApi(endpoint="http://127.0.0.1:9", token="hf_x")
    with pytest.raises(UserError, match="no weights yet"):
        push(tmp_path, "me/mine", private=False, api=hub)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/README.md").touch()
    assert push(tmp_path, "me/mine", private=True, api=hub) == "https://hub/me/mine"
    assert hub.told == [("me/mine", True), ["README.md"]]
    with pytest.raises(UserError, match="write owner/name"):
        push(tmp_path, "mine", private=False, api=hub)
    for private, command in ((False, "me/mine"), (True, "me/mine --private")):
        again = f"me/mine: the upload failed: .*\n.*`g2rpo push .* {command}` tries again"
        with pytest.raises(UserError, match=again):
            push(tmp_path, "me/mine", private=private, api=nowhere)


FAILING = """
calls = []

def look(images):
    raise KeyError('no such word')

def it(images, prompts):
    calls.append(1)
    return look(images) if len(calls) > 2 else images.mean((1, 2, 3))
"""


def test_a_reward_that_fails_in_the_middle_of_a_run_is_one_message(capsys, tmp_path, tiny_config):
    """Its name, the iteration and the line at fault; the rest is in a file of the run."""
    words, run = own_reward(tmp_path / "mine.py", FAILING), tmp_path / "run"
    more = ["sampling.decode_batch_size=64", "--run-dir", run]
    code, _, err = g2rpo(capsys, "train", tiny_config, *words, *more)
    said = err[err.index("g2rpo:") :]  # loading bars come before it
    assert code == 1 and "Traceback" not in err and len(said.splitlines()) == 2
    failed = "reward 'it' failed on 12 pictures: KeyError: 'no such word' (in look"
    assert f"after iteration 0: {failed}" in " ".join(err.split())
    assert "Traceback" in (run / "traceback_rank0.txt").read_text()
    # there is no checkpoint yet
    again = f"--plugin {tmp_path / 'mine.py'}"
    assert err.strip().endswith(f"`g2rpo resume {run} {again}` begins again.")
    forget_code()
    code, _, err = g2rpo(capsys, "resume", run, "trainer.iterations=9")
    whole = f"g2rpo resume {run} trainer.iterations=9 {again}"
    assert code == 2 and err.strip().splitlines()[-1] == whole


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nMore words."),
            ["g2rpo: out of memory: CUDA out of memory. Tried to allocate 9.00 GiB. take smaller"],
        ),
        (
            NotImplementedError(
                "The operator 'aten::_x.out' is not currently implemented for the MPS device."
            ),
            ["torch has no aten::_x.out", "PYTORCH_ENABLE_MPS_FALLBACK=1"],
        ),
    ],
    ids=["memory", "operator"],
)
def test_what_a_device_lacks_is_one_message(refuses, monkeypatch, tiny_config, error, said):
    """As in a text encoder, whose calls no batch size bounds."""

    def forward(*arguments, **options):
        raise error

    monkeypatch.setattr(T5EncoderModel, "forward", forward)
    message = " ".join(refuses("train tiny.yaml --run-dir run").split())
    assert all(words in message for words in said)


@pytest.mark.parametrize("value", ["", "1"])
def test_a_variable_shows_the_traceback_of_a_message(capsys, tmp_path, monkeypatch, value):
    source = tmp_path / "mine.py"
    source.write_text("class Mine:\n    def __init__(self):\n        raise RuntimeError('deep')\n")
    monkeypatch.setenv("G2RPO_TRACEBACK", value)
    words = ["rewards.x.kind=function", f"rewards.x.options.target={source}:Mine"]
    code, _, err = g2rpo(capsys, "train", "scenes", *words, "--run-dir", tmp_path / "run")
    assert code == 2 and "g2rpo: rewards.x: cannot be loaded: RuntimeError: deep" in err
    assert ("Traceback" in err) == (value == "1")


@pytest.mark.slow
def test_a_served_reward_answers_a_remote_one(tmp_path):
    """The two halves meet over loopback, the server in its own process, as a user starts it."""
    own_reward(
        tmp_path / "mine.py", "def it(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
    )
    target = f"target={tmp_path / 'mine.py'}:it"
    command = [*PROGRAM, "serve-reward", "function", target, "--port", "0"]
    environment = {**os.environ, "COLUMNS": "300"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            address = server.stdout.readline().split(" at ")[1].split(";")[0]
            images = torch.randint(256, (3, 3, 8, 8)) / 255
            scores = RemoteReward(address)(images, ["a", "b", "c"])
        finally:
            server.terminate()
    torch.testing.assert_close(scores, images[:, 0].mean((1, 2)), **reordered(64, 0.5))


@pytest.mark.parametrize("place", ["prompts.txt/below", "x" * 300])
@pytest.mark.parametrize("command", COMMANDS.strip().splitlines())
def test_a_folder_that_cannot_be_is_one_message(refuses, tiny_config, command, place):
    assert len(refuses(command.replace("PLACE", place))) < 2000


def test_paths_with_an_equals_sign_are_paths(says, tmp_path, tiny_config):
    tiny_config.rename(tmp_path / "lr=1.yaml")
    says("train lr=1.yaml trainer.iterations=1 evaluation.num_prompts=1 --run-dir lr=1/run")
    says("evaluate lr=1/run --num-prompts 1 --steps 2 --out lr=1/judged")
