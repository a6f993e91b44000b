"""Everything that a run lacks, in one message, before anything heavy is loaded."""

import json
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from g2rpo.config import recipes
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.read import load_config
from g2rpo.config.resolve import differences
from g2rpo.core import plugins
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.data.prompts import build_prompts, starter_caution, trained_on
from g2rpo.models import hub, load
from g2rpo.models.blueprint import read_blueprint, trained_on_meta
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipeline_files import missing_parts
from g2rpo.rewards.catalogue import RewardConfig, find_reward
from g2rpo.train import checks
from g2rpo.train.checks import check, check_policy
from g2rpo.train.consistency import faults_of_clips, fitting_plans, refuse_all
from g2rpo.train.found import NOTHING, Found, Given
from g2rpo.train.run.folder import Run
from tests.support.commands import done, refused
from tests.support.pages import ROOT
from tests.support.refusals import refusal
from tests.support.servers import endpoint_that
from tests.support.tables import rows
from tests.support.variants import few
from tests.support.waiting import PATIENCE_S

MOTION = str(ROOT / "examples" / "rewards" / "clips.py") + ":Motion"
LACKING = [
    "policy.device=cuda:7",
    "policy.path=/no/such/model",
    "prompts.train=/no/train.txt",
    "evaluation.prompts=/no/heldout.txt",
    "trackers=wandb",
    "algorithm.branch_steps=[99]",
    "rewards.hpsv2={options: {path: /no/weights, tokenizer: somebody/somewhere}}",
    "rewards.http={options: {url: 'http://127.0.0.1:9'}}",
    "rewards.vlm_judge={options: {url: 'http://127.0.0.1:9/v1', model: m, endpoint: {token_env: NOT_SET}}}",
    "rewards.clip_score=1",
    "rewards.brightnes=1",
    "rewards.saturation={options: {x: 1}}",
    "evaluation.rewards.scene_accuracy=1",
    "evaluation.rewards.scene_clip.options.x=1",
]


@pytest.mark.slow  # imports torch anew
def test_no_model_library_is_imported_by_a_command_that_is_refused(tmp_path):
    code = f"""
import sys
from g2rpo.cli.main import main
try:
    main(["train", "scenes", *{LACKING!r}, "--run-dir", "{tmp_path}/run"])
finally:
    sys.stderr.write("loaded: " + " ".join({{"diffusers", "transformers", "peft"}} & {{*sys.modules}}))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.endswith("loaded: ")


def test_all_that_is_missing_is_one_message_before_a_model_is_built(capsys, tmp_path, monkeypatch):
    """An endpoint that says nothing may be busy, and is not waited for: this one answers when the
    check has ended."""
    ended = threading.Event()
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_, **__: pytest.fail("built"))
    with endpoint_that(lambda handler, count: ended.wait(PATIENCE_S)) as (silent, _):
        slow = f"rewards.slow={{kind: http, options: {{url: '{silent}'}}}}"
        try:
            said = refused(capsys, "train", "scenes", *LACKING, slow, "--run-dir", tmp_path / "run")
        finally:
            ended.set()
    assert not (tmp_path / "run").exists()
    assert "14 things are missing or wrong:" in said and said.count(" - ") == 14, said
    for wanted in (
        "policy.device=cuda:7: torch sees ",
        "algorithm: branch_steps must lie in",
        "trackers: wandb is not installed",
        "policy.path=/no/such/model",
        "prompts.train=/no/train.txt",
        "evaluation.prompts=/no/heldout.txt",
        "rewards.hpsv2.options.path: /no/weights",
        "rewards.clip_score.options.path",
        "rewards.brightnes: ",
        "rewards.saturation.options: ",
        "rewards.http: http://127.0.0.1:9/health",
        "rewards.vlm_judge: ",
        "evaluation.rewards.scene_accuracy: is trained on, and so judged anyway",
        "evaluation.rewards.scene_clip.options: unknown option 'x'.",
    ):
        assert f" - {wanted}" in said, (wanted, said)


def test_own_code_that_fails_is_one_complaint_beside_others(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from g2rpo.algorithms.g2rpo import GranularGRPO\n\n\n"
        "class Mine(GranularGRPO):\n    def plans(self, num_steps):\n        return [3]\n"
    )
    plugins.allow(str(mine))
    heading, *complaints = refusal(*LACKING[1:3], f"algorithm.name={mine}:Mine").splitlines()
    assert heading == "3 things are missing or wrong:" and len(complaints) == 3
    assert any(line.startswith("- algorithm Mine") for line in complaints), complaints


WRONG = """
scenes-fast rewards.scene_accuracy=0 -> every weight is 0, so nothing is learned
scenes rewards.moves.kind=MOTION -> moves: MOTION scores clips, and here
scenes evaluation.rewards.moves.kind=MOTION -> moves: MOTION scores clips, and here
scenes rewards.moves.kind=MOTION rewards.moves.frames.every=2 -> moves.frames: this reward takes whole
scenes policy.height=128 -> scene_clip takes pictures of 64x64, and here they have
scenes evaluation.width=32 -> scene_clip takes pictures of 64x64, and here they have
scenes policy.height=128 evaluation.height=64 evaluation.rewards.scene_clip= rewards.scene_clip=1 \
-> scene_clip takes pictures of 64x64, and here they have
words rewards.far.kind=http rewards.far.options.url=http://10.1.2.3:8 -> rewards.far: a proxy variable
scenes rewards.calm.kind=python -> rewards.calm.kind=python: this run was begun from P
words algorithm.name=python -> algorithm.name=python: this run was begun from P
"""
"""Trained rewards see pictures of both sizes, judges the held-out ones alone."""


@pytest.mark.parametrize(("asked", "said"), rows(WRONG))
def test_what_fits_nothing_or_teaches_nothing_is_refused_once(asked, said, monkeypatch, tmp_path):
    monkeypatch.setenv("http_proxy", "ftp://x")
    plugins.allow(MOTION)
    recipe, *overrides = asked.replace("MOTION", MOTION).split()
    with pytest.raises(UserError) as refusal:
        check(load_config(recipe, overrides), directory=tmp_path)
    assert str(refusal.value).count(said.replace("MOTION", MOTION)) == 1


def test_rewards_that_fit_the_pictures_are_not():
    check(load_config("scenes", ["policy.height=128", "evaluation.height=64"]))
    clips = PolicyConfig(path="x", height=64, width=64, num_frames=5)
    plugins.allow(MOTION)
    moves = find_reward("rewards.moves", RewardConfig(kind=MOTION))
    assert list(faults_of_clips([moves], clips)) == []


@pytest.mark.parametrize(
    "missing", ["pick.kind=pickscore", "ask={kind: http, options: {url: 'http://127.0.0.1:9'}}"]
)
def test_a_judge_that_is_not_there_can_be_left_out_as_the_message_says(
    tmp_path, monkeypatch, missing
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    overrides = [f"evaluation.rewards.{missing}"]
    config = load_config("scenes", overrides)
    with pytest.raises(UserError) as refusal:
        check(config, directory=tmp_path)
    (advice,) = {*re.findall(r"(\S+=) leaves this reward out", str(refusal.value))}
    check(load_config("scenes", [*overrides, advice]))
    Run(tmp_path).claim(config)  # a run that has begun keeps its judges
    with pytest.raises(UserError) as refusal:
        check(config, directory=tmp_path)
    assert advice not in str(refusal.value)


def test_what_can_be_downloaded_is_a_block_of_commands(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as refusal:
        check(load_config("flux1-dev-lora", []))
    _, _, block = str(refusal.value).partition("\nTo download all of it")
    heading, *lines = block.splitlines()
    assert constants.HF_HUB_CACHE in heading
    tokenizer = "--include '*.json' --include '*.txt' --include '*.model'"
    assert lines[:4] == [  # not what else is in their repositories
        "hf download black-forest-labs/FLUX.1-dev --include '*/*' --include '*model_index.json'",
        "hf download xswu/HPSv2",
        f"hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K {tokenizer}",
        "hf download apple/DFN5B-CLIP-ViT-H-14",
    ]
    assert len(lines) == len({*lines}) and all(line.startswith("hf download ") for line in lines)


@pytest.mark.parametrize(
    ("train", "heldout", "said"),
    [
        ("mine.txt", "starter:heldout", True),
        ("starter:train", "starter:heldout", False),
        ("mine.txt", "own.txt", False),
    ],
)
def test_prompts_of_ones_own_that_are_judged_on_others_are_mentioned(train, heldout, said):
    assert ("evaluation.prompts=FILE" in (starter_caution(train, heldout) or "")) == said


def test_what_is_wrong_with_a_list_is_told_by_what_it_is(tmp_path, monkeypatch):
    """A file of one's own may begin like the embedded lists, and one that is there is not called
    missing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "testbed_own.txt").write_text("a red circle\n")
    assert build_prompts("testbed_own.txt", "prompts.train") == ["a red circle"]
    (tmp_path / "a.csv").write_text("words\na red circle\n")
    for source, there in (("testbed", True), ("a.csv:word", True), ("b.csv:word", False)):
        with pytest.raises(UserError) as refusal:
            build_prompts(source, "prompts.train")
        assert ("there is no such file" in str(refusal.value)) is not there


def test_heldout_prompts_that_are_trained_on_are_counted():
    edit = Prompt("make it red", ["a.png"])
    assert trained_on(["a cat", edit], ["a dog", Prompt("make it red", ["b.png"])]) is None
    said = trained_on(["a cat", "a cat", edit], ["a dog", "a cat", edit])
    assert said.startswith("2 of 3 held-out prompts are")
    assert trained_on(["a caf\u00e9"], ["A Cafe\u0301"])  # as a Mac writes file names
    one = trained_on(["a cat"], ["A  cat"])
    assert one.startswith("1 of 1 held-out prompt is a training prompt too")


def test_what_a_large_model_refuses_is_told_before_it_is_loaded(
    capsys, tmp_path, monkeypatch, tiny_config
):
    monkeypatch.setattr(checks, "LARGE_TRANSFORMER", 0)
    monkeypatch.setattr(load.Pipeline, "load", lambda *_, **__: pytest.fail("loaded"))
    wrong = ["policy.width=33", "rewards.brightnes=1"]
    err = refused(capsys, "train", tiny_config, *wrong, "--run-dir", tmp_path / "run")
    assert "policy.height and policy.width must be multiples of 4 for this model, got 32x33" in err
    assert "Did you mean 'brightness'" in err and not (tmp_path / "run").exists()


def test_a_pipeline_without_one_of_its_parts_is_named(flux_directory, tiny_config, tmp_path):
    """Also a shard that an index names; together with the key of the config."""
    pipeline = shutil.copytree(flux_directory, tmp_path / "pipe")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    vae = pipeline / "vae"
    (vae / "diffusion_pytorch_model.safetensors").rename(vae / names["a"])
    (vae / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (pipeline / "transformer/config.json").unlink()
    shutil.rmtree(pipeline / "text_encoder")
    missing = "text_encoder/", "transformer/config.json", f"vae/{names['b']}"
    assert sorted(missing_parts(pipeline)) == [f"{part} is missing" for part in missing]
    with pytest.raises(UserError, match=f"^policy.path={re.escape(str(pipeline))}: .* is missing"):
        check(load_config(str(tiny_config), [f"policy.path={pipeline}"]))


def test_a_disk_without_room_for_the_checkpoints_is_named(
    tiny_config, tmp_path, monkeypatch, capsys
):
    """What a run writes is what was reckoned with, but for a few headers: of each parameter 4
    bytes of weights, average and two moments in two checkpoints, and of the weights at the end."""
    words = ["trainer.keep_checkpoints=2", "policy.tuning=full", "optim.ema_decay=0.5"]
    done(capsys, "train", tiny_config, *words, "--run-dir", tmp_path / "run")
    config = load_config(str(tiny_config), words)
    _, trained = trained_on_meta(read_blueprint(config.policy), config.policy)
    entries = sum(each.numel() for each in trained.values())
    written = sum(
        path.stat().st_size
        for folder in ("checkpoints", "transformer")
        for path in (tmp_path / "run" / folder).rglob("*")
        if path.suffix in (".safetensors", ".pt")
    )
    assert 4 * entries * (2 * 4 + 1) == pytest.approx(written, rel=0.15)

    disk = SimpleNamespace(free=4 * entries * (3 * 4 + 1))  # one more, until it is whole
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: disk)
    check(config, directory=tmp_path / "new")
    disk.free -= 1
    with pytest.raises(UserError, match=r"new: checkpoints and weights take .* free; free some"):
        check(config, directory=tmp_path / "new")


@pytest.mark.parametrize(
    ("status", "why"),
    [(401, "refuses it .*401"), (403, "refuses it .*403"), (200, None), (500, None)],
)
def test_a_repository_that_the_hub_refuses_is_known_at_once(monkeypatch, status, why):
    def answer(handler, count):
        handler.send_response(status)
        handler.end_headers()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with endpoint_that(answer) as (address, _):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        said = hub.obstacle("me/mine")
        if why is None:
            assert said is None
        else:
            whole = f"policy.path=me/mine: is no local directory, and is not in .* the hub {why}"
            with pytest.raises(UserError, match=whole):
                load.find_pipeline(PolicyConfig(path="me/mine", height=64, width=64))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "hub cache, and http://127.0.0.1:9 cannot be reached" in hub.obstacle("me/mine")


@pytest.mark.parametrize(
    "command",
    [
        "serve-reward hpsv2",
        "evaluate --model testbed --prompts testbed:heldout --steps 2 --rewards hpsv2",
        "demo --model testbed --rewards hpsv2",
    ],
)
def test_whatever_loads_a_reward_names_all_that_it_lacks_before(
    capsys, monkeypatch, tmp_path, command
):
    """The library of the hub would try for half a minute, and name one file."""
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, *command.split())
    assert "2 things are missing" in err and "`hf download xswu/HPSv2` fetches it" in err


def test_metadata_that_a_reward_cannot_read_are_refused_ahead(tmp_path):
    detector, prompts = tmp_path / "detector", tmp_path / "prompts.jsonl"
    options = f"rewards.geneval={{options: {{detector: {detector}, clip: {tmp_path}}}}}"
    (tmp_path / "config.json").write_text("{}")
    detector.mkdir()
    (detector / "config.json").write_text("{}")
    for line, said in (
        ('{"prompt": "a cat"}', r"none of 1 prompts has metadata in GenEval's format"),
        (
            '{"prompt": "a cat", "include": [{"class": "cat"}]}',
            "the metadata of prompt 'a cat': include.0.count: Field required",
        ),
    ):
        prompts.write_text(line)
        with pytest.raises(UserError, match=said):
            check(load_config("scenes", [f"prompts.train={prompts}", options]))


def test_a_machine_without_a_gpu_is_told_once_what_works(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    own = ["evaluation.rewards.pickscore.options.device=cuda"]
    with pytest.raises(UserError) as refused:
        check(load_config("flux1-dev-evening", own))
    (line,) = [line for line in str(refused.value).split("\n") if "no GPU" in line]
    keys = ("rewards.hpsv2", "rewards.clip_score", "evaluation.rewards.pickscore")
    advice = " ".join(f"{key}.options.device=cpu" for key in keys)
    assert "`g2rpo train words`" in line and line.endswith(advice)
    with pytest.raises(UserError, match="^(?!.*GPU)"):
        check(load_config("flux1-dev-evening", [*own, *advice.split()]))


def told_of(recipe, *overrides):
    """The config, and what was told of changes."""
    said = []
    config = load_config(recipe, overrides, said.append)
    return config, " ".join(message for message in said if " needs " in message)


@pytest.mark.parametrize("recipe", few(["scenes", "words"], "scenes".__eq__))
def test_which_algorithms_a_recipe_can_be_given_by_name_alone(recipe):
    """README.md names those that are refused."""
    sentence = re.search("`algorithm.name=` puts any of .*", (ROOT / "README.md").read_text())[0]
    refused_ones, policies = set(), {}
    for name in ALGORITHMS:
        config, _ = told_of(recipe, f"algorithm.name={name}")
        if config.policy.lora_above not in policies:
            policies[config.policy.lora_above] = load.build_policy(config.policy)
        try:
            check(config, Given(trackers=[]))
            check_policy(config, policies[config.policy.lora_above])
        except UserError:
            refused_ones.add(name)
    assert refused_ones == {word for word in re.findall(r"`(\w+)`", sentence) if word in ALGORITHMS}


@pytest.mark.parametrize(
    "recipe", few(recipes.names(), ("words", "flux1-dev-lora", "wan-lora").__contains__)
)
def test_what_a_name_brings_is_told_and_all_else_is_published_or_the_recipes(recipe):
    own = load_config(recipe, [])
    for name in ALGORITHMS.keys() - {own.algorithm.name}:
        config, told = told_of(recipe, f"algorithm.name={name}")
        refuse_all([fitting_plans], Found(config=config, given=NOTHING))
        published = config.model_copy(update={"algorithm": ALGORITHMS[name]()})
        others = {key for key in differences(config, own) if not key.startswith("algorithm.")}
        named = {*re.findall(r"([\w.]+)=", told)} - {"algorithm.name", "sampling.num_steps"}
        assert differences(config, published).keys() | others == named, name


@pytest.mark.parametrize(
    "asked",
    [
        "words algorithm.name=flow_grpo policy.lora_above=0.4",
        "scenes algorithm.name=e_grpo algorithm.merged_steps=[1,1,1,1,1,1,1,3]",
        "words algorithm.name=g2rpo algorithm.branch_steps=[9]",
    ],
)
def test_what_was_asked_for_is_not_replaced(asked):
    assert not told_of(*asked.split())[1]
