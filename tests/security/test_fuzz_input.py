"""Whatever a config, an override, a prompt file or a file of a run holds: a value that is used as
it stands, or one message."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from g2rpo.cli.main import main
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.read import load_config
from g2rpo.config.resolve import LARGEST, SMALLEST, _leaves, read_yaml, resolve
from g2rpo.core import plugins
from g2rpo.core.errors import Stopped, UserError, refuse
from g2rpo.core.files import append_line, digest_of
from g2rpo.core.plain import as_json, is_text
from g2rpo.data.sources import read_prompts
from g2rpo.lab.compare.results import read_cell
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import write_page
from g2rpo.lab.teach import rounds
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.adapters import check_fit
from g2rpo.models.pipeline_files import missing_parts
from g2rpo.rewards.analytic import load_function
from g2rpo.rewards.weights import read_state_dict
from g2rpo.train.checks import check
from g2rpo.train.evaluation.heldout import load_evaluation, read_picture
from g2rpo.train.monitor.pictures import read_webp
from g2rpo.train.run.checkpoint import latest_checkpoint, save_checkpoint
from g2rpo.train.run.folder import Run
from g2rpo.train.run.records import PlannedAndMeasured, read_log
from tests.support import runs
from tests.support.adapters import random_adapter
from tests.support.fuzzing import CONFIGS, SNIPPETS, mutated, overrides, recipe_texts
from tests.support.odd_adapters import odd
from tests.support.tiny_pipelines import tiny_pipeline
from tests.support.variants import few


@contextlib.contextmanager
def file_of(content, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"file{suffix}")
        path.write_bytes(
            content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        )
        yield path


def is_sound(config):
    """It survives its own file, can be told from others, and its plans are refused with words or
    made."""
    text = config.to_yaml()
    with file_of(text, ".yaml") as path:
        assert resolve(read_yaml(path)) == config
    digest_of(config.model_dump(mode="json")), text.encode()
    with contextlib.suppress(ValueError):
        config.algorithm.plans(config.sampling.num_steps)


def said(error):
    """A message that says something, and can be shown."""
    assert str(error).strip() and len(str(error)) < 100_000


def use_or_refuse(make):
    try:
        built = make()
    except UserError as error:
        said(error)
    else:
        is_sound(built)


ODD = [
    f"trainer.seed={'9' * 5000}",
    f"trainer.seed=0x{'f' * 5000}",
    f"trainer.seed={'[' * 20_000}",
    f"rewards.a.options.{'a.' * 5000}b=1",
    *"""
trainer.seed=2024-13-45
trainer.seed=0b_
rewards.a.options.x=&a [*a]
rewards.a.options.x=!!binary /w==
algorithm.name=awm algorithm.old_schedule=[1,2,3]
algorithm.name=awm algorithm.old_schedule=[1]
algorithm.name=awm algorithm.old_schedule=[]
rewards.a.options={1: 2}
rewards.a.options.x={null: 1}
rewards.a.options.x=[{true: 1}]
rewards={1: 2}
policy.negative_prompt="\\ud800"
""".strip().splitlines(),
]
"""Overrides that once broke something; a space before a key begins another."""


@pytest.mark.slow
@given(st.sampled_from(CONFIGS), overrides)
def test_overrides_are_used_or_refused(config, words):
    use_or_refuse(lambda: resolve(config.model_dump(mode="json"), words))


def test_overrides_that_once_broke_something_are_used_or_refused():
    for row in ODD:
        use_or_refuse(lambda row=row: resolve(runs.PLAIN, re.split(r" (?=algorithm)", row)))


@given(recipe_texts, overrides)
@example("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", [])
def test_a_config_file_is_used_or_refused(text, words):
    with file_of(text, ".yaml") as path:
        use_or_refuse(lambda: load_config(str(path), words))


@given(recipe_texts, overrides)
def test_the_command_line_says_one_thing_and_ends_with_2(text, words):
    """`encode` with the cache turned off reads everything, and then has nothing to do, which is
    wrong input too."""
    words = [word for word in words if not word.startswith("-")]
    with (
        file_of(text, ".yaml") as path,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as end,
    ):
        main(["encode", str(path), *words, "prompts.cache=off"])
    assert end.value.code == 2
    assert (
        "g2rpo:" in err.getvalue()
        and "Traceback" not in err.getvalue()
        and "\x1b" not in err.getvalue()
    )


TYPED_WRONG = """
algorithm.name=awm algorithm.old_schedule=[9] -> 'algorithm.old_schedule.1' is missing
algorithm.group_size=4294967296 -> algorithm.group_size: input should be less than or equal to 10000
algorithm.granularities=[4294967296] -> algorithm.granularities.0: input should be less
algorithm.name=refl algorithm.group_size=4294967296 -> algorithm.group_size: input should be
rewards.r.kind=function -> rewards.r.options.target is missing
rewards.r.kind=function rewards.r.options.target=r.py -> options.target: a function is named
rewards.r.kind=function rewards.r.options.target=[1] -> str: Input should be a valid string, got [1]
'rewards.scene_accuracy.options={1: 2}' -> rewards.scene_accuracy.options.1
rewards.brightness.options.negative=3 -> options.negative: Input should be a valid boolean
rewards.clip_score.options.batch_size=many -> options.batch_size: Input should be a valid int
rewards.geneval.options.score=most -> options.score: Input should be 'partial' or 'correct'
"""


@pytest.mark.parametrize("row", TYPED_WRONG.strip().splitlines())
def test_a_typing_error_is_one_message_before_anything_is_loaded(row):
    words, said = row.split(" -> ")

    with pytest.raises(UserError) as error:
        check(load_config("scenes", shlex.split(words)))
    assert said in str(error.value)


LINES = '{"prompt": "a red circle"}\n{"prompt": "two\u2028lines"}\n'


@given(
    mutated(LINES) | mutated("a red circle\r\ntwo blue squares\n") | st.binary(max_size=60),
    st.sampled_from([".txt", ".jsonl", ".parquet"]),
)
@example('{"prompt": "\\ud800"}', ".jsonl")
@example('{"prompt": ' + "9" * 5000 + "}", ".jsonl")
@example("[" * 100_000, ".jsonl")
@example("\0", ".txt")
@example("x" * 10**6, ".txt")
def test_a_prompt_file_gives_prompts_or_one_message(content, suffix):
    with file_of(content, suffix) as path:
        try:
            prompts = read_prompts(path)
        except UserError as error:
            said(error)
        else:
            assert prompts and all(
                prompt == prompt.strip() and prompt and is_text(prompt) for prompt in prompts
            )


FAMILIES = ("FluxPipeline", "ZImagePipeline", "Flux2KleinPipeline", "WanPipeline")


@pytest.fixture(scope="module")
def models():
    pipelines = {kind: tiny_pipeline(kind) for kind in FAMILIES}
    return {
        kind: (it, random_adapter(it.transformer, ["to_q", "to_out.0"]))
        for kind, it in pipelines.items()
    }


@given(st.data(), st.sampled_from(FAMILIES))
def test_an_adapter_is_finite_and_fits_or_is_refused_in_one_message(models, data, kind):
    """By every converter's family: kohya's, ai-toolkit's and the plain one."""
    pipeline, adapter = models[kind]
    with tempfile.TemporaryDirectory() as folder:
        file = data.draw(odd(Path(folder), adapter))
        try:
            read = read_adapter(file, type(pipeline), pipeline.transformer)
            check_fit("policy.adapter", read, pipeline.transformer)
        except UserError as error:
            said(error)
            assert len(str(error)) < 3000
        else:
            assert read.layers.keys() <= adapter.layers.keys() and read.scale > 0
            assert all(read.delta(module).isfinite().all() for module in read.layers)


def float_keys(config):
    """The dotted keys of `config` that hold floats."""
    for key, leaf in _leaves(config.model_dump(mode="json")):
        if any(isinstance(value, float) for value in (leaf if isinstance(leaf, list) else [leaf])):
            yield key, leaf


OF_EACH_KIND = ("g2rpo", "diffusion_nft")


@pytest.mark.parametrize("algorithm", few(list(ALGORITHMS), OF_EACH_KIND.__contains__))
def test_numbers_that_are_allowed_train_or_stop_with_a_message(algorithm):
    """The largest and the smallest of every setting, one at a time, through every line of the
    trainer: of an algorithm, and of all else once."""
    words = [f"algorithm.name={algorithm}", "algorithm.group_size=3", "trainer.iterations=1"]
    words += ["evaluation.num_prompts=1"]
    tried = 0
    for key, now in float_keys(runs.config(*words)):
        if algorithm != "g2rpo" and not key.startswith("algorithm."):
            continue
        for extreme in (LARGEST, SMALLEST, 0.0, -1.0):
            value = [extreme] * len(now) if isinstance(now, list) else extreme
            given = [*words, f"{key}={value}"]
            with contextlib.suppress(UserError, Stopped):
                list(runs.trainer(None, *given, notify=lambda message: None).train())
            tried += 1
    assert tried >= (4 if algorithm in ("refl", "self_opd") else 12)  # these have one number


def test_a_line_separator_of_unicode_is_a_part_of_a_prompt():
    for content, suffix in ((LINES, ".jsonl"), ("a red circle\ntwo\u2028lines", ".txt")):
        with file_of(content, suffix) as path:
            assert read_prompts(path) == ["a red circle", "two\u2028lines"]


@contextlib.contextmanager
def within(seconds):
    """What waits for longer fails."""

    def give_up(number, frame):
        raise TimeoutError("waited for what never comes")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def a_socket(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # a short name
        made.bind(path.name)


OPENED = {
    **dict.fromkeys(("list.txt", "list.csv", "list.jsonl", "list.parquet"), read_prompts),
    "recipe.yaml": lambda path: load_config(str(path), []),
    "adapter.safetensors": read_adapter,
    **dict.fromkeys(("weights.safetensors", "weights.pt"), read_state_dict),
    "baseline.safetensors": lambda path: load_evaluation(path, ["a"], ["bright"]),
    "code.py": lambda path: [plugins.allow(str(path)), load_function(f"{path}:it")],
    "metrics.jsonl": read_log,
    "000000.png": read_picture,
    "clip.webp": read_webp,
    **{
        f"iteration_000001/{name}": lambda path: latest_checkpoint(path.parents[1])
        for name in ("weights.safetensors", "state.pt", "manifest.json")
    },
    "transformer/model.safetensors": lambda path: refuse(missing_parts(path.parents[1])),
}
"""How what is at a path from outside is read."""


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, a_socket, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "folder", "socket", "device"],
)
@pytest.mark.parametrize("name", OPENED)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, make, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.parent.name == "iteration_000001":
        save_checkpoint(tmp_path, 1, {"weights": [torch.ones(2)]}, {}, keep=1)
        path.unlink()
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    make(path)
    folder = make is os.mkdir
    if folder and path.parent.name == "transformer":
        return  # libraries put caches there
    said = "is a folder" if folder and name.startswith("list") else "no regular file"
    with within(20), pytest.raises(Exception, match=said) as refused:
        OPENED[name](path)
    assert isinstance(refused.value, UserError | ValueError)


LOOPS = """
report loop
train words --run-dir loop
train words --plugin loop.py algorithm.name=loop.py:Mine
"""


@pytest.mark.parametrize("words", LOOPS.strip().splitlines())
def test_a_link_to_itself_is_one_message(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for name in ("loop", "loop.py"):
        Path(name).symlink_to(name)
    with (
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as end,
    ):
        main(words.split())
    assert end.value.code == 2 and "g2rpo: " in err.getvalue()


def test_a_config_of_half_a_megabyte_is_refused_unread(tmp_path):
    (tmp_path / "config.yaml").write_text("a: b\n" * 100_000)
    with pytest.raises(UserError, match="500000 bytes large; at most 262144"):
        read_yaml(tmp_path / "config.yaml")


def test_snippets_are_all_tried_alone():
    """The ones that once broke something, in the place of a value and in that of a whole file."""
    for snippet in SNIPPETS:
        for source in (f"recipe: {snippet}\n", snippet):
            with file_of(source, ".yaml") as path, pytest.raises(UserError):
                load_config(str(path), [])


SHORT = ("trainer.iterations=2", "evaluation.every=1", "trainer.checkpoint_every=1")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A finished run with every file that a run may have, and answers to two groups."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    Run(folder).claim(runs.config(*SHORT))
    Run(folder).record_start(0, torch.device("cpu"), {"prompts": "0"})
    runs.finished(runs.trainer(folder, *SHORT))
    (folder / "plan.json").write_text(as_json(PlannedAndMeasured("a card", 1.0, 2, 3.0, None)))
    vote = rounds.Vote(round=0, liked=(1,), members=2, prompt="a", digest="0")
    append_line(folder / "votes.jsonl", vote.model_dump_json())
    read_all(folder)
    return folder


def read_all(folder):
    """Whatever is read of a run by `report`, `compare`, `resume` and a model card."""
    write_page(read_runs([folder]), folder / "page.html")
    read_cell([folder])
    Run(folder).finished_at()
    Run(folder).check_contents({"prompts": "0"}, accept=True)
    rounds.read_votes(folder / "votes.jsonl")
    latest_checkpoint(folder / "checkpoints")
    t = runs.trainer(folder, *SHORT)
    t.resume()
    runs.finished(t)


WRONG_IN_THE_BASE = {
    "images": [
        None,
        lambda v: v.float(),
        lambda v: v[:2],
        lambda v: v[:, :2],
        lambda v: v[0, 0, 0, 0],
    ],
    "score/bright": [
        None,
        lambda v: v / 0,
        lambda v: v[:2],
        lambda v: v[None],
        lambda v: v.long(),
        lambda v: v.double() * 1e299,
    ],
    "right": [lambda v: v * 2 + 3],
}


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, each) for name, changes in WRONG_IN_THE_BASE.items() for each in changes],
)
def test_a_wrong_base_is_one_message(whole_run, tmp_path, name, change):
    file = shutil.copytree(whole_run, tmp_path / "run") / "baseline.safetensors"
    stored = load_file(file)
    value = stored.pop(name, torch.ones(3))
    save_file(stored | ({} if change is None else {name: change(value).contiguous()}), file)
    with pytest.raises(UserError, match=f"{re.escape(str(file))}: .*put it back"):
        runs.finished(runs.resumed(file.parent, *SHORT))


DELETED = object()


def changed_in(text, place, value):
    """JSON `text`, of a log the first line, with a value at a place."""
    first, *others = text.split("\n") if "\n{" in text or text.endswith("\n") else [text]
    data = inner = json.loads(first)
    *groups, last = place.split(" ")
    for group in groups:
        inner = inner[int(group) if isinstance(inner, list) else group]
    if value is DELETED:
        del inner[int(last) if isinstance(inner, list) else last]
    else:
        inner[last] = value
    return "\n".join([json.dumps(data), *others])


WRONG_IN_A_RUN = """
results.json | iteration | Infinity
results.json | rewards bright count | -1
results.json | right | {"base": 1, "tuned": 1, "error": 0, "least": []}
metrics.jsonl | kind | "test"
metrics.jsonl | iteration | 1000000000
metrics.jsonl | alarms | ["hacking"]
metrics.jsonl | reward/bright | "much"
metrics.jsonl | reward/bright | 1e301
metrics.jsonl | image/saturation/high |
metrics.jsonl | image/saturation |
metrics.jsonl | scored/bright | null
results.json | rewards bright base | Infinity
starts.jsonl | contents | {"prompts": 0}
starts.jsonl | time | 2026
plan.json | seconds | "1"
votes.jsonl | ahead | 100000
scores/iteration_000000.jsonl | scores bright | "0.5"
scores/iteration_000001.jsonl | index | null
"""
"""A file, a place in it, and what is written there; nothing: it is deleted."""


@pytest.mark.parametrize("row", WRONG_IN_A_RUN.strip().splitlines())
def test_a_wrong_value_in_a_file_of_a_run_is_one_message(whole_run, tmp_path, row):
    name, place, text = (part.strip() for part in f"{row} ".split(" | "))
    value = json.loads(text) if text else DELETED
    file = shutil.copytree(whole_run, tmp_path / "run") / name
    file.write_text(changed_in(file.read_text(), place, value))
    with pytest.raises(UserError, match=re.escape(str(file))):
        read_all(tmp_path / "run")


@given(st.data())
@settings(max_examples=settings().max_examples // 6)  # a second each
def test_a_damaged_file_of_a_run_is_read_or_one_message(whole_run, data):
    files = sorted(path for path in whole_run.rglob("*.json*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    text = data.draw(mutated(path.read_text()))
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(whole_run, Path(place, "run"))
        (folder / path.relative_to(whole_run)).write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            read_all(folder)
        except (UserError, Stopped) as error:
            said(error)
