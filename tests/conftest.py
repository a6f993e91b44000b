import gc
import os
import shlex
from functools import cache
from itertools import count
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks cannot be forked from more threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

# The suite tries the same examples every time. `--hypothesis-profile=long` tries new ones, many of
# them (docs/security.md).
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "suite", max_examples=20, derandomize=True, deadline=None, suppress_health_check=_QUIET
)
settings.register_profile(
    "long", max_examples=1000, deadline=None, suppress_health_check=_QUIET, print_blob=True
)
settings.load_profile("suite")


HERE = Path(__file__).parent
QUICK = """
core/test_flow.py core/test_objectives.py core/test_seeding.py core/test_statistics.py
cli/test_main.py algorithms config/test_config.py data/test_pairs.py data/test_prompts.py
rollout/test_engine.py rollout/test_tails.py train/run/test_checkpoint.py train/test_golden.py
train/test_learner.py train/test_moving_average.py train/test_trainer.py
"""
"""`pytest -m quick`: formulas, algorithms, what a config refuses, runs of the Gaussian policy and
of a tiny FLUX, commands."""
LONGEST = """
fake_device models/test_sharding.py lab/demo/test_demo_browser.py models/test_any_pipeline.py
lab/plan/test_plan.py lab/test_export.py lab/compare/test_compare.py core/test_distributed.py
train/test_faults.py lab/plan train models security lab cli repository rewards
"""
"""Begun first, so that no process is left with a long file when the others have finished."""


APART = """
lab/test_evaluate.py::test_evaluate_from_the_command_line
train/test_resume.py::test_a_run_goes_on_by_its_directory_alone
train/test_resume.py::test_a_run_of_which_nothing_was_trained_begins_again
train/test_resume.py::test_the_same_command_again_makes_of_a_killed_run_the_one_that_was_not
train/test_resume.py::test_what_training_made_is_never_overwritten
train/test_stopping.py::test_a_run_whose_output_nobody_reads_any_more_saves
fake_device/test_fake_device.py::test_a_device_with_the_limits_of_apples_trains_as_a_cpu_does
fake_device/test_fake_device.py::test_calls_of_the_network_never_wait_and_iterations_keep_nothing
fake_device/test_fake_device.py::test_the_first_minutes_with_a_gpu_are_rehearsed
lab/compare/test_compare.py::test_a_run_that_fails_or_dies_ends_no_other_and_is_named_with_what_it_said
lab/compare/test_compare.py::test_a_study_runs_resumes_grows_and_refuses_another
lab/demo/test_demo_browser.py
lab/plan/test_cost.py::test_a_forward_of_flux_takes_37_tflop_at_the_papers_size
lab/plan/test_cost.py::test_a_training_row_has_the_price_of_one_call
lab/report/test_report_browser.py
lab/teach/test_teach_browser.py
models/test_any_pipeline.py::test_check_model_finds_each_fault
models/test_any_pipeline.py::test_every_class_passes_check_model
models/test_own_spec.py::test_it_trains_and_what_it_saves_plain_diffusers_draws
models/test_reading.py::test_every_command_tells_of_them_also_with_stored_embeddings
models/test_sharding.py::test_a_rank_out_of_step
models/test_sharding.py::test_a_rank_that_samples
models/test_sharding.py::test_bfloat16_differs
models/test_sharding.py::test_each_layer_is_gathered
models/test_sharding.py::test_memory_that_runs_out
models/test_sharding.py::test_ranks_may_sample
repository/test_examples.py::test_flow_dpo_prefers_the_chosen_pictures_of_a_table
repository/test_nano.py::test_two_iterations_are_the_packages_to_the_bit
train/run/test_run_files.py::test_a_disk_that_fails_from_any_moment_on_is_a_message_and_the_run_can_go_on
core/test_distributed.py::test_ranks_train_a_flux_lora_as_one_process_does
models/test_sharding.py::test_a_killed_run_resumes_bit_for_bit
models/test_sharding.py::test_each_layer_is_gathered_once_a_call_or_once_a_rollout
data/testbed/test_weights.py::test_the_pipeline_draws_scenes
train/test_faults.py::test_a_run_killed_at_random_moments_is_the_run_that_was_not
train/test_faults.py::test_when_a_rank_breaks_the_others_stop_and_say_why
"""
"""Browsers, killed processes, ranks and the longest runs: `make apart`. Environments without time for
all of them take a third, `G2RPO_THIRD=0` to 2, into `make test`."""
THIRDS = 3


@cache
def place_in(path, names):
    """The place of the first of `names` that is `path` or a folder above it; after all if none
    is."""
    names = names.split()
    found = (place for place, name in enumerate(names) if path.is_relative_to(HERE / name))
    return next(found, len(names))


def is_quick(path):
    return any(path.is_relative_to(HERE / name) for name in QUICK.split())


NO_NUMBERS = """
cli core/test_distributed.py fake_device lab/compare lab/demo lab/plan lab/report lab/teach lab/web
models/test_sharding.py repository
"""
"""Mostly start processes and browsers, which compute alike on every processor."""


@cache
def compares_numbers(path):
    """Whether a file has tolerances, which must hold on every processor."""
    if any(path.is_relative_to(HERE / name) for name in NO_NUMBERS.split()):
        return False
    return "from tests.support.tolerances import" in path.read_text(encoding="utf-8")


RULES = {"quick": is_quick, "numbers": compares_numbers}
"""Markers that all tests of a file have."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """Workers and the ranks of their tests are forked from one process that has imported torch and
    the model libraries, 15 s. `-m quick` starts no ranks and needs half of these."""
    from execnet import gateway_io

    from tests.support.workers import Forked

    if config.option.markexpr != "quick":
        gateway_io.Popen2IOMaster = Forked


def pytest_ignore_collect(collection_path, config):
    """`-m quick` and `-m "numbers and ..."` import no other file of tests: importing all takes as
    long as theirs."""
    rule = RULES.get(config.option.markexpr.partition(" and ")[0])
    asked = rule is not None and collection_path.match("test_*.py")
    return True if asked and not rule(collection_path) else None


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: place_in(item.path, LONGEST))
    apart, third = APART.split(), os.environ.get("G2RPO_THIRD")
    for item in items:
        name = f"{item.path.relative_to(HERE)}::{getattr(item, 'originalname', item.name)}"
        places = [place for place, each in enumerate(apart) if name.startswith(each)]
        if places and (third is None or places[0] % THIRDS != int(third) % THIRDS):
            item.add_marker("apart")
        for name, rule in RULES.items():
            if rule(item.path):
                item.add_marker(name)


def pytest_collection():
    """What imports make is no garbage."""
    gc.disable()


def pytest_collection_finish():
    """What has been imported by now stays, so the garbage collector need not look at it again."""
    gc.enable()
    gc.set_threshold(100_000)  # a twentieth less of the suite's time than with 700
    gc.freeze()


def pytest_sessionfinish():
    """The process ends: what pytest and Python would still look through, for seconds, is gone with
    it."""
    gc.freeze()


@pytest.fixture(scope="session")
def of_the_user(tmp_path_factory):
    """Where a test has what a user has at home."""
    return tmp_path_factory.mktemp("user")


@pytest.fixture(scope="session", autouse=True)
def own_home(of_the_user):
    """What is made once for a module sees nothing of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("G2RPO_CACHE", str(of_the_user / "cache"))
        patch.setenv("XDG_STATE_HOME", str(of_the_user / "state"))
        yield


NUMBERS = count()


@pytest.fixture(autouse=True)
def alone(of_the_user, monkeypatch):
    """No test sees the embeddings or runs the code of another, or of the user; and what a command
    prints does not depend on the machine's load.

    The folders are made by what writes into them: pytest's own would search all those before it.
    """
    from g2rpo.core import plugins

    home = of_the_user / str(next(NUMBERS))
    monkeypatch.setenv("G2RPO_CACHE", str(home / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setattr(plugins, "_allowed", set())
    monkeypatch.setattr("g2rpo.cli.life.FIRST_SILENCE", 1e9)


@pytest.fixture(scope="session")
def flux_directory(tmp_path_factory):
    from tests.support.tiny import save_flux

    return save_flux(tmp_path_factory.mktemp("models") / "flux")


@pytest.fixture(scope="session")
def sd3_directory(tmp_path_factory):
    from tests.support.tiny import save_sd3

    return save_sd3(tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """Tiny models with more blocks than a plan traces: FLUX with 3 + 4, SD3.5 with 2 dual, 2 plain
    and the last one, Qwen-Image with 5."""
    from tests.support.tiny import flux_pipeline, sd3_pipeline
    from tests.support.tiny_pipelines import tiny_pipeline

    folder = tmp_path_factory.mktemp("deep")
    for name, pipeline, changes in (
        ("flux", flux_pipeline(), {"num_layers": 3, "num_single_layers": 4}),
        ("sd3", sd3_pipeline(), {"num_layers": 5, "dual_attention_layers": (0, 1)}),
        ("qwen", tiny_pipeline("QwenImagePipeline"), {"num_layers": 5}),
    ):
        kind = type(pipeline.transformer)
        pipeline.transformer = kind.from_config({**pipeline.transformer.config, **changes})
        pipeline.save_pretrained(folder / name, safe_serialization=True)
    return {name: folder / name for name in ("flux", "sd3", "qwen")}


@pytest.fixture
def tiny_config(tmp_path, flux_directory):
    """A config that trains the tiny random FLUX; its path."""
    from tests.support.commands import write_tiny

    return write_tiny(tmp_path, flux_directory)


@pytest.fixture
def says(capsys, tmp_path, monkeypatch):
    """A function: what a command prints that is typed in the test's folder and ends with 0."""
    from tests.support.commands import done

    monkeypatch.chdir(tmp_path)
    return lambda command: done(capsys, *shlex.split(command))


@pytest.fixture
def refuses(capsys, tmp_path, monkeypatch):
    """A function: the message, in one line, of a command that is wrong input."""
    from tests.support.commands import refused

    monkeypatch.chdir(tmp_path)
    return lambda command: refused(capsys, *shlex.split(command)).replace("│ ", "")
