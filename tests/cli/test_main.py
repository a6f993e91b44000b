"""The command line as a person meets it: exit codes, messages, and what is left on disk."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import T5EncoderModel

from g2rpo import __version__
from g2rpo.app.push import push
from g2rpo.assembly.config import load_config
from g2rpo.config import recipes
from g2rpo.config.algorithms import ALGORITHMS, title_of
from g2rpo.config.resolve import resolve
from g2rpo.core.errors import UserError
from g2rpo.rewards.remote import RemoteReward
from g2rpo.run.run import Run
from tests.support.commands import done, forget_code, g2rpo, refused
from tests.support.runs import PLAIN, fits
from tests.support.variants import few

DRAW = ["sample", "a red circle", "--model", "testbed"]


def test_help_answers_at_once_and_loads_no_model_library():
    code = "import sys, g2rpo.cli.main; sys.exit(any(m in sys.modules for m in ('torch', 'diffusers', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    began = time.perf_counter()
    helped = subprocess.run(
        [sys.executable, "-m", "g2rpo", "--help"], capture_output=True, text=True, check=False
    )
    assert helped.returncode == 0 and "train" in helped.stdout
    # a generous bound for a loaded machine; the promise is in the README
    assert time.perf_counter() - began < 10


def test_a_locale_without_utf_8_shows_what_it_can_and_refuses_what_it_cannot_read():
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def said(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "g2rpo", *arguments], capture_output=True, check=False, env=plain
        )

    helped = said("--help")  # which names G²RPO
    assert (helped.returncode, helped.stderr) == (0, b"") and b"G?RPO" in helped.stdout
    refused = said("sample", "ein rotes Dreieck für mich", "--model", "testbed")
    assert (
        refused.returncode == 2
        and b"no text in this locale" in refused.stderr
        and b"Traceback" not in refused.stderr
    )


def test_version_and_short_help(capsys):
    assert g2rpo(capsys, "--version") == (0, f"g2rpo {__version__}\n", "")
    for arguments in (["-h"], ["train", "-h"]):
        code, out, _ = g2rpo(capsys, *arguments)
        assert code == 0 and (code, out, "") == g2rpo(capsys, *arguments[:-1], "--help")


def test_a_shell_completes_commands_options_and_recipes():
    def completed(words):
        asked = {
            "_G2RPO_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        code = "import sys; from g2rpo.cli.main import main; sys.argv = ['g2rpo']; main()"
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **asked},
        ).stdout.split()

    assert completed("g2rpo se") == ["serve-reward"]
    assert completed("g2rpo train sce") == ["scenes", "scenes-fast"]
    assert completed("g2rpo train --re") == ["--resume"]


def test_recipes_are_listed_and_explained(capsys):
    out = done(capsys, "recipes")
    assert [line.split()[0] for line in out.splitlines()] == recipes.names()  # one line each
    assert all(recipes.summary(line.split()[0]) in line for line in out.splitlines())
    out = done(capsys, "recipes", "scenes")
    assert "group_size: 12" in out


def test_train_resume_repeat_and_sample(capsys, tmp_path, monkeypatch, tiny_config):
    run, again = tmp_path / "run", tmp_path / "again"
    monkeypatch.chdir(tmp_path)
    out = done(capsys, "train", tiny_config, "--run-dir", run, "--resume")
    assert "before_after.png" in out and "scene_accuracy" in out and f"g2rpo report {run}" in out
    assert f"g2rpo sample {run} 'a red circle'" in out  # the first of its own held-out prompts
    assert f"g2rpo train {run}/config.yaml --run-dir {run}-2" in out
    assert (
        g2rpo(capsys, "report", run)[0] == 0 and "a red circle" in (run / "report.html").read_text()
    )
    assert [json.loads(line)["iteration"] for line in (run / "starts.jsonl").open()] == [0]
    done(capsys, "train", tiny_config, "trainer.iterations=3", "--run-dir", run, "--resume")
    done(capsys, "train", run / "config.yaml", "--run-dir", again)
    one, two = (
        load_file(where / "adapter" / "pytorch_lora_weights.safetensors") for where in (run, again)
    )
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)

    card = (run / "adapter" / "README.md").read_text()
    assert "load_lora_weights" in card and "| scene_accuracy | trained on |" in card
    assert (run / "adapter" / "before_after.png").is_file()

    pictures = tmp_path / "pictures"
    done(capsys, "sample", run, "--out", pictures, "a red circle", "a blue square")
    listed = [json.loads(line) for line in (pictures / "prompts.jsonl").open()]
    assert [entry["prompt"] for entry in listed] == ["a red circle", "a blue square"]
    assert all((pictures / entry["file"]).is_file() for entry in listed)
    assert "is not empty" in refused(capsys, "sample", run, "--out", pictures, "a red circle")
    for folder in ("samples", "samples-2"):
        out = done(capsys, "sample", run, "a red circle")
        assert (
            out.strip() == f"1 picture in {folder}" and (tmp_path / folder / "0000.png").is_file()
        )
    knobs = [word for knob in ("noise=0.5", "best_of=2") for word in ("--knob", knob)]
    steps = load_config(str(tiny_config), []).sampling.num_steps
    assert done(capsys, "sample", run, "a red circle", *knobs).strip() == (
        f"1 picture in samples-3, {2 * steps} evaluations, 2 readings each"
    )
    (line,) = [json.loads(line) for line in (tmp_path / "samples-3/prompts.jsonl").open()]
    assert line["knobs"] == "initial noise x 0.5, best of 2"


def test_a_recipe_is_meant_before_a_folder_of_its_name(capsys, tmp_path, monkeypatch):
    (tmp_path / "words").mkdir()
    monkeypatch.chdir(tmp_path)
    notes = []
    assert (
        load_config("words", [], notes.append).recipe == "words"
        and "taken for the recipe" in notes[0]
    )
    assert "./words is a directory" in refused(
        capsys, "compare", "./words", "--algorithms", "g2rpo"
    )


OF_EACH_KIND = ("flow_grpo", "mixgrpo", "pave_grpo", "adagrpo", "diffusion_nft", "refl")


@pytest.mark.parametrize(
    "name", few([name for name in ALGORITHMS if name != "g2rpo"], OF_EACH_KIND.__contains__)
)
def test_every_algorithm_trains_by_its_name_alone(capsys, tmp_path, tiny_config, name):
    # the least for the default branch steps and times
    quick = ["sampling.num_steps=8", "algorithm.group_size=3"]
    quick += ["trainer.iterations=1", "evaluation.num_prompts=1"]
    named = [f"algorithm.name={name}", *fits(name)]
    quick += ["rewards.scene_accuracy=", "rewards.brightness=1"] if name == "refl" else []
    out = done(capsys, "train", tiny_config, *named, *quick, "--run-dir", tmp_path / "run")
    note = " ".join(out.split())
    assert (
        f"algorithm.name={name}: its published defaults; {tiny_config}'s" in note
        and "granularities=[1, 2]" in note
    )
    (row,) = [row for row in Run(tmp_path / "run").read_log() if row["kind"] == "train"]
    assert row["evaluations"] > 0 and row["skipped_updates"] == 0
    assert (
        Run(tmp_path / "run").read_config().algorithm
        == resolve(PLAIN, [*named, "algorithm.group_size=3"]).algorithm
    )
    title, paper = title_of(ALGORITHMS[name]())
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert f"tuned with {title}\n" in card and f"({title}, arXiv {paper})" in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "scnes"], "scnes"),
        (["train", "policy.path=testbed"], "policy.path=testbed is an override; name a recipe"),
        (["train", "scenes", "rewards.red=red.py:red"], "red.py:red"),
        (["train", "scenes", "algorithm.gruop_size=4"], "algorithm.gruop_size"),
        (
            ["train", "scenes", "trainer.iterations=soon"],
            "trainer.iterations: input should be a valid integer",
        ),
        (["train", "scenes", "prompts.train=/no/prompts.txt"], "/no/prompts.txt"),
        (["train", "scenes", "--resume"], "name its directory with --run-dir"),
        (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["recipes", "scnes"], "scnes"),
        (["sample", "--model", "testbed"], "give prompts"),
        ([*DRAW, "--knob", "best_of=2"], "name a run"),
        ([*DRAW, "--knob", "nois=2"], "Did you mean 'noise'?"),
        (["sample", "a red circle"], "a red circle is no run directory"),
        (["train", "scenes", "lr=1e-4"], "unknown key 'lr'. Did you mean 'optim.learning_rate'?"),
        (["train", "scenes", "--iterations", "3"], "written without dashes: trainer.iterations=3"),
        (
            ["train", "scenes", "--num-steps=4"],
            "No such option: --num-steps. Settings are written without dashes: sampling.num_steps=4",
        ),
        (
            ["train", "scenes", "--optim.lerning_rate=1e-3"],
            "without dashes: optim.learning_rate=1e-3",
        ),
        (
            ["train", "scenes", "--set", "trainer.iterations=3"],
            "without dashes: trainer.iterations=3",
        ),
        (["train", "scenes", "--prompt", "x.txt"], "without dashes: prompts.train=x.txt"),
        (["train", "scenes", "--foo"], "without dashes: KEY=VALUE"),
        (["train", "scenes", "--run_dir", "x"], "--run-dir"),
        (["evaluate", "--model", "testbed", "--num_prompts", "3"], "--num-prompts"),
        (["evaluate", "--model", "testbed", "--num-steps", "3"], "without dashes: KEY=VALUE"),
        (["train", "scenes", "optim.lr=1e-4"], "Did you mean 'optim.learning_rate'?"),
        (["train", "scenes", "policy.lr=1e-4"], "Did you mean 'optim.learning_rate'?"),
        (
            ["train", "scenes", "rewards.best=clip_score"],
            "is a weight, or a group of settings, got 'clip_score'; write rewards.best.kind=clip_score",
        ),
        (["train", "scenes", "run_dir=x"], "run_dir=x: is an option here: --run-dir x"),
        (["train", "scenes", "resume=true"], "is an option here: --resume"),
        (["train", "scenes", "optim.lerning_rate=1e-3"], "Did you mean 'optim.learning_rate'?"),
        (["train", "scenes", "trainer.num_steps=4"], "Did you mean 'sampling.num_steps'?"),
        (
            ["train", "scenes", "algorithm=mixgrpo"],
            "algorithm is a group of settings, got 'mixgrpo'; write algorithm.name=mixgrpo",
        ),
        (["train", "scenes", "rewards=ocr"], "write rewards.ocr=1"),
        (
            ["train", "scenes", "rewards.scene_clip=-1"],
            "rewards.scene_clip: should be at least 0, since a higher score",
        ),
        (["train", "scenes", "optim=1e-3"], "write optim.KEY=VALUE"),
        (["train", "scenes", "algorithm.branch_steps=0,1"], "write it in brackets: [0,1]"),
        (["sample", "a red circle", "--model", "testbed", "--guidance", "-1"], "guidance_scale"),
        (["sample", "a red circle", "--model", "testbed", "--size", "0"], "height"),
        ([*DRAW, "--strength", "nan"], "strength"),
        ([*DRAW, "--out", __file__], "test_main.py is a file; name another --out"),
        (
            ["train", "scenes", "optim.learning_rate=1e39"],
            "optim.learning_rate: should be 0, or from 1e-18 to 1e+18 in size",
        ),
        (
            ["train", "scenes", "algorithm.name=awm", "algorithm.old_schedule=[0,1e-300,0.3]"],
            "algorithm.old_schedule",
        ),
        (
            ["export", "nowhere"],
            "say which --format: diffusers, comfyui, kohya, ai-toolkit, merged",
        ),
        (["serve-reward", "brightness", "--host", "0.0.0.0"], "without a token"),
        (["serve-reward", "brightness", "--token-env", "NOT_SET"], "is not set"),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, *arguments)
    assert message in " ".join(err.replace("│", " ").split()) and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_run_directory_of_another_config_is_left_alone(capsys, tmp_path, tiny_config):
    run = tmp_path / "run"
    done(capsys, "train", tiny_config, "--run-dir", run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert str(run) in refused(capsys, "train", tiny_config, "--run-dir", run)
    assert "algorithm.group_size" in refused(
        capsys, "train", tiny_config, "algorithm.group_size=4", "--run-dir", run, "--resume"
    )
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "weights.safetensors").write_bytes(b"cut")
        before[checkpoint / "weights.safetensors"] = b"cut"
    assert "weights.safetensors is truncated or changed" in refused(
        capsys, "train", tiny_config, "--run-dir", run, "--resume"
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


class Hub:
    """Stands in for huggingface_hub.HfApi: remembers what it was told."""

    def __init__(self):
        self.told = []

    def create_repo(self, repository, *, private, exist_ok):
        self.told.append((repository, private))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.told.append(sorted(path.name for path in folder_path.iterdir()))
        return f"https://hub/{repo_id}"


def test_push_uploads_weights_and_card(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("README.md", "pytorch_lora_weights.safetensors"):
        (folder / name).touch()
    hub = Hub()
    assert push(tmp_path, "me/mine", private=True, api=hub) == "https://hub/me/mine"
    assert hub.told == [("me/mine", True), ["README.md", "pytorch_lora_weights.safetensors"]]
    for run, repository, message in (
        (tmp_path, "mine", "write owner/name"),
        (tmp_path / "no", "me/mine", "no weights yet"),
    ):
        with pytest.raises(UserError, match=message):
            push(run, repository, private=False, api=hub)


def test_a_push_without_a_network_is_one_message_that_says_how_to_try_again(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "README.md").touch()
    nowhere = HfApi(endpoint="http://127.0.0.1:9", token="hf_x")
    with pytest.raises(
        UserError, match=r"me/mine: the upload failed: .*\n.*`g2rpo push .* me/mine` tries again"
    ):
        push(tmp_path, "me/mine", private=False, api=nowhere)


def test_a_reward_that_fails_in_the_middle_of_a_run_is_one_message(
    capsys, tmp_path, monkeypatch, tiny_config
):
    """Its name, the iteration and the line at fault; the rest is in a file of the run."""
    code = "calls = []\ndef look(images):\n    raise KeyError('no such word')\ndef mine(images, prompts):\n    calls.append(1)\n"
    (tmp_path / "mine.py").write_text(
        code + "    return look(images) if len(calls) > 2 else images.mean((1, 2, 3))\n"
    )
    reward = [
        "rewards.scene_accuracy=",
        "rewards.mine.kind=function",
        f"rewards.mine.options.target={tmp_path}/mine.py:mine",
    ]
    code, _, err = g2rpo(
        capsys,
        "train",
        tiny_config,
        *reward,
        "sampling.decode_batch_size=64",
        "--run-dir",
        tmp_path / "run",
    )
    said = err[err.index("g2rpo:") :]  # loading bars come before it
    assert code == 1 and "Traceback" not in err and len(said.splitlines()) == 2
    message = "g2rpo: after iteration 0: reward 'mine' failed on 12 pictures: KeyError: 'no such word' (in look, "
    assert message in " ".join(err.split())
    assert "Traceback" in (tmp_path / "run" / "traceback_rank0.txt").read_text()
    again = f"`g2rpo resume {tmp_path / 'run'} --plugin {tmp_path / 'mine.py'}` begins again."
    assert err.strip().endswith(again)  # there is no checkpoint yet
    forget_code()
    code, _, err = g2rpo(capsys, "resume", tmp_path / "run", "trainer.iterations=9")
    whole = f"g2rpo resume {tmp_path / 'run'} trainer.iterations=9 --plugin {tmp_path / 'mine.py'}"
    assert code == 2 and err.strip().splitlines()[-1] == whole


def test_memory_that_runs_out_anywhere_is_one_message(capsys, tmp_path, tiny_config, monkeypatch):
    """As in a text encoder, whose calls no batch size bounds."""

    def forward(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nMore words.")

    monkeypatch.setattr(T5EncoderModel, "forward", forward)
    assert (
        "g2rpo: out of memory: CUDA out of memory. Tried to allocate 9.00 GiB. take smaller"
        in " ".join(refused(capsys, "train", tiny_config, "--run-dir", tmp_path / "run").split())
    )


def test_an_operator_that_apples_gpus_lack_is_named(capsys, tmp_path, tiny_config, monkeypatch):
    def forward(*arguments, **options):
        raise NotImplementedError(
            "The operator 'aten::_upsample_bilinear2d_aa.out' is not currently implemented for the MPS device. If you want"
        )

    monkeypatch.setattr(T5EncoderModel, "forward", forward)
    said = " ".join(refused(capsys, "train", tiny_config, "--run-dir", tmp_path / "run").split())
    assert (
        "torch has no aten::_upsample_bilinear2d_aa.out" in said
        and "PYTORCH_ENABLE_MPS_FALLBACK=1" in said
    )


def test_a_variable_shows_the_traceback_of_a_message(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self):\n        raise RuntimeError('deep')\n"
    )
    words = [
        "train",
        "scenes",
        "rewards.x.kind=function",
        f"rewards.x.options.target={tmp_path}/mine.py:Mine",
    ]
    words += ["--run-dir", tmp_path / "run"]
    shown = []
    for value in ("", "1"):
        monkeypatch.setenv("G2RPO_TRACEBACK", value)
        code, _, err = g2rpo(capsys, *words)
        assert code == 2 and "g2rpo: rewards.x: cannot be loaded: RuntimeError: deep" in err
        shown.append(err)
    assert "Traceback" not in shown[0] and "Traceback" in shown[1] and "mine.py" in shown[1]


def test_a_served_reward_answers_a_remote_one(tmp_path):
    """The two halves meet over loopback, the server in its own process, as a user starts it."""
    (tmp_path / "mine.py").write_text(
        "def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
    )
    command = [
        sys.executable,
        "-m",
        "g2rpo",
        "serve-reward",
        "function",
        f"target={tmp_path / 'mine.py'}:redness",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "300"}
    ) as server:
        try:
            address = server.stdout.readline().split(" at ")[1].split(";")[0]
            images = (
                torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)).mul(255).round()
                / 255
            )
            scores = RemoteReward(address)(images, ["a", "b", "c"])
        finally:
            server.terminate()
    torch.testing.assert_close(scores, images[:, 0].mean((1, 2)))


@pytest.mark.parametrize("out", ["prompts.txt/below", "x" * 300])
def test_a_folder_that_cannot_be_is_one_message(capsys, tmp_path, tiny_config, out):
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    place = tmp_path / out
    for command in (
        ["sample", "a red circle", "--model", "testbed", "--steps", "1", "--out", place],
        [
            "evaluate",
            "--model",
            "testbed",
            "--prompts",
            tmp_path / "prompts.txt",
            "--rewards",
            "brightness",
            "--out",
            place,
        ],
        ["train", tiny_config, "--run-dir", place],
        ["train", place / "config.yaml"],
        ["report", place],
        ["compare", tiny_config, "--algorithms", "g2rpo,mixgrpo", "--out", place],
    ):
        code, _, err = g2rpo(capsys, *command)
        assert code == 2 and "Traceback" not in err and len(err) < 2000, command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "scenes", "--cards", "--within", "3h"), "two plans; name one"),
        (("train", "scenes", "--accept-changes"), "is for --resume"),
        (("train", "scenes", "-hx"), "No such option|no such option"),
        (("evaluate", "RUN", "--size", "32"), "--size is for --model"),
        (("evaluate", "RUN", "--model", "testbed"), "name a run, or a pipeline with --model"),
        (("sample", "RUN", "a", "--guidance", "2"), "--guidance is for --model"),
        (("evaluate", "--model", "testbed", "--rewards", "my.py:f"), "is code; write f: "),
        (("sample", "--model", "testbed", "--weights", "FOLDER", "a"), "holds neither"),
        (
            ("compare", "scenes", "--algorithms", "g2rpo", "--steps", "10,300"),
            "less than or equal to 250",
        ),
        (
            ("compare", "scenes", "--algorithms", "g2rpo", "alarms.action=rollback"),
            "may end a run of the study early",
        ),
    ],
)
def test_options_that_would_have_no_effect_or_fail_late_are_refused(
    capsys, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "RUN"
    run.mkdir(), (tmp_path / "FOLDER").mkdir()
    (run / "config.yaml").write_text(load_config("scenes", []).to_yaml())
    assert re.search(message, refused(capsys, *arguments))
    assert {path.name for path in tmp_path.iterdir()} == {"RUN", "FOLDER"}


def test_paths_with_an_equals_sign_are_paths(capsys, tmp_path, tiny_config):
    place = tmp_path / "lr=1"
    place.mkdir()
    config = shutil.copy(tiny_config, place / "config.yaml")
    done(capsys, "train", config, "trainer.iterations=1", "--run-dir", place / "run", "--resume")
    done(
        capsys,
        "evaluate",
        place / "run",
        "--num-prompts",
        "1",
        "--steps",
        "2",
        "--out",
        place / "judged",
    )
