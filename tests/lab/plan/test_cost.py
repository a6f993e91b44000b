"""Predicted work, memory and operations against what tiny real models do, and against published
sizes."""

import json
import math
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from diffusers import FluxPipeline
from torch.profiler import ProfilerActivity, profile

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.config.read import load_config
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import EvaluationConfig
from g2rpo.core.distributed import World
from g2rpo.core.errors import UserError
from g2rpo.core.noise import generator_for
from g2rpo.lab.plan import trace
from g2rpo.lab.plan.answer import fewest, for_memory, overrides_of
from g2rpo.lab.plan.cards import CARDS, card_of
from g2rpo.lab.plan.counting import count, settled, spread_evaluations
from g2rpo.lab.plan.kernels import RATES, Meter
from g2rpo.lab.plan.models import KnownModels, RewardCost, cost_of_reward
from g2rpo.lab.plan.plan import make_plan
from g2rpo.lab.plan.seconds import OPTIMIZER_PASSES, PlannedSeconds, Reached, reached
from g2rpo.lab.plan.trace import trace_calls
from g2rpo.models import load
from g2rpo.models.blueprint import published, read_blueprint, shapes_of, size_of
from g2rpo.models.catalogue import SPECS
from g2rpo.models.meta import on_meta
from g2rpo.models.pipelines import read_pipeline
from g2rpo.rewards.analytic import Brightness
from g2rpo.rewards.catalogue import RewardConfig
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations
from g2rpo.train import evaluator
from g2rpo.train.ranks import divided
from g2rpo.train.trainer import Trainer
from tests.lab.counting import Counting
from tests.support import runs
from tests.support.policies import build_on_meta
from tests.support.tables import rows
from tests.support.tiny import sd3_pipeline
from tests.support.variants import few

PROMPTS = ["a red circle", "two blue square", "a square left of a circle"]
FULL, NARROW = "policy.tuning=full", "policy.dtype=bfloat16"
KNOWN = KnownModels()
"""Of all plans here but those of the test that it changes no number."""


def config(directory, *overrides):
    size = {"height": 32, "width": 32, "max_sequence_length": 12}
    trainer = {"prompts_per_iteration": 2, "checkpoint_every": 2, "micro_batch_size": 3}
    return resolve(
        {
            "policy": {"path": str(directory), "lora_rank": 2, **size},
            "algorithm": {"group_size": 3, "branch_steps": [0, 1], "granularities": [1, 2]},
            "rewards": {"brightness": 1.0},
            "prompts": {"train": "none", "cache": "off"},
            "sampling": {"num_steps": 4, "batch_size": 5, "decode_batch_size": 4},
            "optim": {"learning_rate": 1e-3},
            "trainer": {"iterations": 3, **trainer},
            "evaluation": {"prompts": "none", "num_prompts": 3, "every": 2},
        },
        ["policy.device=cpu", *overrides],
    )


def train(c):
    policy = load.build_policy(c.policy, keep_base=c.algorithm.kl_weight > 0)
    rewards = {"brightness": Brightness()}
    return Trainer(config=c, policy=policy, rewards=rewards, prompts=PROMPTS, heldout=PROMPTS)


def planned(c, known=KNOWN, **ranks):
    return make_plan(c, cuda=False, heldout=3, distinct_prompts=6, known=known, **ranks)


# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularities", "each"),
    few([("[1]", 1112), ("[1,2]", 1496), ("[1,2,3]", 1700)], lambda variant: variant[1] == 1700),
)
def test_the_papers_setting_takes_what_the_engine_takes(granularities, each):
    counts = count(load_config("flux1-dev-hps", [f"algorithm.granularities={granularities}"]), 400)
    ((iteration, times),) = counts.kinds
    assert times == 300 and iteration.evaluations == 16 * each and counts.times_evaluated == 7
    assert (iteration.training_rows, iteration.optimizer_steps) == (16 * 8, 8)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ["algorithm.update_every=branch", "algorithm.kl_weight=0.1"], marks=pytest.mark.slow
        ),
        ["algorithm.name=mixgrpo", "algorithm.window_iterations=1", "algorithm.window_size=1"],
        ["algorithm.name=flow_grpo", "algorithm.group_size=4"],
    ],
    ids=str,
)
def test_iterations_do_what_was_counted(tmp_path, overrides):
    """Windows that move make iterations differ; groups without a shared noise train on every
    member's own latent. A run evaluates and saves as often as was counted, and draws the first
    group once more, which is kept for the report."""
    overrides = [*overrides, "trainer.micro_batch_size=3", "trainer.keep_checkpoints=9"]
    c, policy, pictures, sizes, steps = runs.config(*overrides), Counting(), [], [], []
    t = runs.trainer(tmp_path, *overrides, policy=policy)
    decode, t.on_evaluations = policy.decode, sizes.append
    policy.decode = lambda x: pictures.append(len(x)) or decode(x)
    t.learner.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    counts = count(c, 3)
    rows = [row for row in t.train() if row["kind"] == "train"]
    t.finish()
    evaluations, images = (counts.total(lambda it, n=n: getattr(it, n)) for n in NAMES)
    heldout = counts.times_evaluated * counts.heldout
    assert sizes == [size for it, times in counts.kinds for size in times * it.calls]
    assert sum(row["evaluations"] for row in rows) == sum(sizes) == evaluations
    assert sum(row["images"] for row in rows) == images
    first = t.plans(0)[0].tails
    assert sum(pictures) == images + heldout + c.algorithm.group_size * len(first)
    assert policy.trained == counts.total(lambda it: it.training_rows)
    assert policy.passes == counts.total(lambda it: len(it.passes))
    assert len(steps) == counts.total(lambda it: it.optimizer_steps)
    reference = counts.total(lambda it: it.reference_rows)
    sampled = heldout * counts.heldout_steps
    assert policy.without_gradient - sampled == evaluations + reference
    assert len(list((tmp_path / "checkpoints").iterdir())) == counts.checkpoints


NAMES = "evaluations", "images"


def test_ranks_that_share_a_prompt_are_planned_as_the_one_with_most_evaluations(flux_directory):
    c = config(flux_directory)
    division = divided(c, World(size=4))
    each = [count_evaluations([plan], 3) for plan in c.algorithm.plans(4)]
    assert division.by_prompt.share(2, "prompts") == 1 and each[0] > each[1]
    assert count(c, 3, division.by_plan).mean(lambda it: it.evaluations) == 2 * max(each)


@dataclass(frozen=True)
class Listed(GranularGRPO):
    """An algorithm of a user's, which has no hash."""

    kept: list[int] = field(default_factory=list)


def test_an_algorithm_without_a_hash_is_counted():
    c = load_config("scenes", [])
    own = {each.name: getattr(c.algorithm, each.name) for each in fields(c.algorithm)}
    listed = c.model_copy(update={"algorithm": Listed(**own)})
    assert count(listed, 3) == count(c, 3)


def test_diversity_is_counted_as_the_run_evaluates_it(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "SPREAD_SHARE", math.inf)
    t = runs.trainer(tmp_path)
    steps, watched = t.evaluator.sampler.num_steps, Mock(wraps=t.evaluator.evaluate)
    t.evaluator.evaluate = watched
    t.evaluator.spread(0, lambda rows: None)
    counts = count(t.config, 3)
    ((_, _, prompts), _) = watched.call_args
    found = spread_evaluations(t.config, 3, counts.times_evaluated)
    assert prompts and found == counts.times_evaluated * len(prompts) * steps
    assert replace(counts, spread=18 * steps).looks == counts.times_evaluated + 6


def test_automatic_batch_sizes_are_settled():
    auto = ["sampling.batch_size=auto", "sampling.decode_batch_size=auto"]
    c = load_config("flux1-dev-lora", auto)
    sizes = [settled(c, cuda).sampling for cuda in (True, False)]
    assert [(s.batch_size, s.decode_batch_size) for s in sizes] == [(8, 1), (32, 8)]


# --- models without weights -----------------------------------------------------------------------


SIZES = """
black-forest-labs/FLUX.1-dev transformer -> 11901.4
black-forest-labs/FLUX.1-dev text_encoder_2 -> 4762.3
black-forest-labs/FLUX.1-dev vae -> 83.8
stabilityai/stable-diffusion-3.5-medium transformer -> 2243.2
Qwen/Qwen-Image transformer -> 20430.4
Tongyi-MAI/Z-Image transformer -> 6154.9
Wan-AI/Wan2.1-T2V-1.3B-Diffusers transformer -> 1419.0
"""
"""Millions of parameters, as model cards and papers have them: 12 B, 4.7 B, 84 M, 2.5 B (with 0.23 B
of positions, which are no parameters), 20 B, 6 B, 1.3 B."""


@pytest.mark.parametrize(("model", "millions"), rows(SIZES))
def test_published_models_have_their_published_sizes(model, millions):
    name, part = model.split()
    module = on_meta(published(name).parts[part])
    found = sum(weight.numel() for weight in module.parameters()) / 1e6
    assert found == pytest.approx(float(millions), abs=0.05)


@pytest.mark.slow  # four plans
def test_ranks_share_the_work(deep):
    """Each of two ranks has half of the prompts. What it holds, tests/models/test_sharding.py
    measures."""

    def plan(ranks, mode):
        c = config(deep["flux"], FULL, NARROW, f"trainer.sharding={mode}")
        return planned(c, ranks=ranks)

    whole, *shared = (
        plan(ranks, mode)
        for ranks, mode in ((1, "none"), (2, "none"), (2, "full"), (2, "training"))
    )
    evaluations = whole.counts.mean(lambda it: it.evaluations)
    for one in shared:
        assert 2 * one.counts.prompts == whole.counts.prompts == 2 and one.counts.heldout == 2
        assert 2 * one.counts.mean(lambda it: it.evaluations) == evaluations
        assert one.memory.checkpoint == whole.memory.checkpoint
        assert one.memory.embeddings == whole.memory.embeddings
    gathered = "all weights, gathered to sample"
    assert [one.memory.working[gathered] > 0 for one in shared] == [False, False, True]
    with pytest.raises(UserError, match="prompts_per_iteration=2 .* 3 ranks"):
        planned(config(deep["flux"]), ranks=3)


PUBLISHED_VAES = {
    name: model.parts["vae"]
    for spec in SPECS.values()
    for name, model in spec.known.items()
    if model.parts and model.parts["vae"][0] == "diffusers:AutoencoderKL"
}


@pytest.mark.parametrize("name", list(PUBLISHED_VAES))
def test_published_vaes_tile_above_1024_pixels(name):
    """Their config's sample_size. diffusers' default, 32, makes hundreds of tiles of a picture, and
    minutes of a plan."""
    vae = on_meta(PUBLISHED_VAES[name])
    assert vae.tile_sample_min_size == 1024 and vae.tile_latent_min_size == 128


@pytest.mark.parametrize("t5", few([True, False], bool))
def test_a_folder_is_read_as_the_policy_reads_it(tmp_path, t5):
    sd3_pipeline(t5=t5).save_pretrained(tmp_path, safe_serialization=True)
    c = config(tmp_path, NARROW)
    blueprint = read_blueprint(c.policy)
    meta, real = build_on_meta(blueprint, c.policy), load.build_policy(c.policy)
    for name in blueprint.parts:
        assert size_of(getattr(meta.pipeline, name)) == size_of(getattr(real.pipeline, name))
    tensors = real.encode(PROMPTS[:1]).tensors
    shapes = {name: tuple(value.shape[1:]) for name, value in tensors.items()}
    assert shapes == shapes_of(meta, blueprint).cond
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}


def test_rewards_weigh_what_their_published_state_dicts_do():
    """Recorded names and shapes of upstream's full-size classes; ImageReward's head (0.2 %) is left
    out."""
    fixtures = Path(__file__).parents[2] / "rewards" / "fixtures"

    def cost(kind, **options):
        return cost_of_reward(RewardConfig(kind=kind, options=options), "cuda")

    for kind, tolerance in (("hpsv2", 1e-4), ("image_reward", 0.01)):
        recorded = json.loads((fixtures / f"{kind}.json").read_text())["published_state_dict"]
        numbers = sum(torch.Size(shape).numel() for shape in recorded.values())
        assert cost(kind).bytes == pytest.approx(4 * numbers, rel=tolerance)
    assert cost("hpsv2", dtype="bfloat16").bytes == cost("pickscore").bytes // 2
    assert cost("clip_score", path="someone/unknown") is None


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_what_loading_takes_of_the_host_is_one_copy_of_the_files(tmp_path, flux_directory, tuning):
    """A model that is stored in policy.dtype: all its weights lie in the mappings of its files,
    which processes share. Adapters are not loaded."""
    folder = tmp_path / "model"
    stored = FluxPipeline.from_pretrained(flux_directory, dtype=torch.bfloat16)
    stored.save_pretrained(folder, safe_serialization=True)
    c = config(folder, f"policy.tuning={tuning}", NARROW)
    pipeline = read_pipeline(FluxPipeline, folder, torch.bfloat16, tuning)
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    maps = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in maps if str(tmp_path) in line]
    mapped = [range(int(first, 16), int(last, 16)) for first, last in ends]
    weights = [weight for part in parts for weight in part.parameters()]
    assert all(any(weight.data_ptr() in pages for pages in mapped) for weight in weights)
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    adapters = train(c).policy.trainable_parameters() if tuning == "lora" else []
    assert planned(c).memory.host == sum(map(size_of, [*parts, torch.nn.ParameterList(adapters)]))


KEPT = """
flux policy.dtype=bfloat16
flux policy.tuning=full policy.dtype=bfloat16 algorithm.kl_weight=0.1
sd3 optim.ema_decay=0.9
sd3 policy.tuning=full policy.dtype=bfloat16 optim.ema_decay=0.9
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", KEPT.strip().splitlines())
def test_what_stays_after_an_update_is_what_was_planned_to_the_byte(
    flux_directory, sd3_directory, words
):
    model, *overrides = words.split()
    c = config({"flux": flux_directory, "sd3": sd3_directory}[model], *overrides)
    t, parts = train(c), planned(c).memory.parts
    t.iterate()
    learner, pipeline = t.learner, t.policy.pipeline
    average, base = learner.average, getattr(t.policy.tuning, "_base", None)
    held = {
        "trained weights": learner.parameters,
        "moments": [value for of in learner.optimizer.state.values() for value in of.values()],
        "moving average": average.module.parameters() if average else [],
        "base copy for the KL term": base.parameters() if base else [],
    }
    encoders = [part for name, part in pipeline.components.items() if name in ENCODERS and part]
    expected = {part: sum(tensor.nbytes for tensor in own) for part, own in held.items()}
    expected["frozen weights"] = size_of(pipeline.transformer) - parts["trained weights"]
    expected |= {"VAE": size_of(pipeline.vae), "text encoders": sum(map(size_of, encoders))}
    assert {part: parts.get(part, 0) for part in expected} == expected
    assert all(weight.grad is None for weight in learner.parameters)


TRACED = """
flux trainer.prompts_per_iteration=4
flux policy.dtype=bfloat16 policy.gradient_checkpointing=true
flux policy.dtype=bfloat16 policy.tuning=full
sd3 policy.dtype=bfloat16
sd3 policy.gradient_checkpointing=true policy.tuning=full
"""


ENCODERS = "text_encoder", "text_encoder_2", "text_encoder_3"


def real_peak(run):
    """Bytes at the peak of `run`, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = prof.profiler.kineto_results.events()
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    return peak


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("words", TRACED.strip().splitlines())
def test_traced_activations_are_the_allocators(deep, one_thread, words):
    """A shallow model of fake tensors against the whole model at work. Kernels' own scratch is not
    seen by the trace; every thread has some, so there is one."""
    model, *overrides = words.split()
    sizes = "trainer.prompts_per_iteration=4", "trainer.micro_batch_size=8", "sampling.batch_size=8"
    c = config(deep[model], *overrides, *sizes)
    blueprint = read_blueprint(c.policy)
    predicted = trace_calls(blueprint, c, count(c, 3), like_cuda=False)
    policy = load.build_policy(c.policy)
    shapes, plans = shapes_of(policy, blueprint), c.algorithm.plans(c.sampling.num_steps)
    for parameter in policy.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)
    calls = {
        "velocity": torch.no_grad()(lambda: policy.velocity(*trace.inputs(policy, shapes, 8))),
        "training": lambda: trace.training_pass(policy, c, shapes, plans, 8),
        "decode": torch.no_grad()(lambda: policy.decode(torch.zeros(4, *shapes.latent))),
    }
    if NARROW in overrides:  # some CPUs convolve in copies of their own, of twice what is held
        del calls["decode"]
    for name, run in calls.items():
        run()  # what is made once is made
        assert getattr(predicted, name).peak == pytest.approx(real_peak(run), rel=0.1), name


@pytest.mark.slow
def test_latents_of_a_rollout_stay_within_what_was_planned(flux_directory):
    """A seventh of what is planned is left for a rollout whose peaks do not fall together."""
    c = config(flux_directory, "algorithm.group_size=12", "sampling.batch_size=16")
    t, working = train(c), planned(c).memory.working
    cond = t.policy.encode(PROMPTS[:2])
    engine = Engine(policy=t.policy, cond=cond, sigmas=t.sigmas, batch_size=16)
    with Meter() as live:
        engine.rollout(t.plans(), 12, t.algorithm.kernel(t.sigmas), generator_for)
    names = "latents", "finished latents, as rows", "network call"
    assert 0.85 < live.peak / sum(working[name] for name in names) < 1


@pytest.mark.slow  # five plans
def test_what_earlier_plans_know_changes_no_number(flux_directory):
    known = KnownModels()

    def plan(*overrides, known=known):
        return planned(config(flux_directory, *overrides), known)

    first, small = plan(), plan("sampling.batch_size=1")
    judged = plan("evaluation.rewards.brightness=1")
    assert first.model is judged.model is small.model and first.traced == judged.traced
    assert small.traced.training == first.traced.training
    assert small.traced.velocity != first.traced.velocity
    assert small.memory == plan("sampling.batch_size=1", known=None).memory
    assert plan("policy.lora_rank=3").model is not first.model


def advised(c, measure, limit):
    return fewest(list(for_memory(c, 1)), measure, limit)


def test_what_fits_keeps_only_what_is_needed(flux_directory):
    c = config(flux_directory, FULL)
    needs = {"micro": 4, "batch": 4, "checkpointing": 8, "cache": 1, "dtype": 16, "lora": 64}

    def needed(overrides):
        saved = [size for word, size in needs.items() if word in " ".join(overrides)]
        return 100 - sum(saved)

    checkpointing = "policy.gradient_checkpointing=true"
    assert advised(c, needed, 92) == [checkpointing]
    assert advised(c, needed, 76) == [checkpointing, NARROW]
    assert advised(c, needed, 36) == ["policy.tuning=lora", "optim.learning_rate=1e-4"]
    assert advised(c, needed, 1) is None


def test_rewards_on_the_cpu_are_advised_before_any_change_of_method(flux_directory):
    """Those of evaluations first, which cost less time; trained ones only where that is not
    enough."""
    others = [f"evaluation.rewards.{name}" for name in ("pickscore", "clip_score")]
    judged = [f"{reward}.options.device=cpu" for reward in others]
    trained, halved = (f"rewards.hpsv2.options.{how}" for how in ("device=cpu", "dtype=bfloat16"))
    every = ["rewards.hpsv2=1", *(f"{reward}=1" for reward in others)]
    for overrides, wanted in (
        (every, judged),
        (every, [*judged, trained]),
        (["rewards.hpsv2=1"], [halved]),
        ([trained], [halved]),
    ):
        lacks = lambda given, wanted=wanted: not {*wanted} <= {*given}  # noqa: E731
        assert advised(config(flux_directory, *overrides), lacks, 0) == wanted


def test_what_is_advised_can_be_done_here(monkeypatch):
    """Without bitsandbytes no nf4; adapters are not sharded."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    changes = for_memory(load_config("scenes", ["policy.tuning=lora"]), 1)
    assert "policy.quantize=nf4" not in overrides_of(list(changes))
    sharded = load_config("scenes", [FULL, "trainer.sharding=full"])
    (low_rank,) = [one for one in for_memory(sharded, 1) if "policy.tuning=lora" in one.overrides]
    assert "trainer.sharding=none" in low_rank.overrides


# --- operations and time --------------------------------------------------------------------------


def test_a_forward_of_flux_takes_37_tflop_at_the_papers_size():
    """By hand: 12 width^2 weights a token in a stream of 19 double blocks and of 38 single ones,
    width 3072, 2,537 tokens."""
    c = load_config("flux1-dev-hps", ["policy.gradient_checkpointing=false"])
    tokens, width = 2025 + 512, 3072
    traced = trace_calls(read_blueprint(c.policy), c, count(c, 1), like_cuda=True).velocity
    by_hand = 57 * (2 * 12 * width**2 * tokens + 4 * tokens**2 * width)
    assert traced.roofline.flops / traced.rows == pytest.approx(by_hand, rel=0.01)
    assert by_hand == pytest.approx(37e12, rel=0.02)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("examples/algorithms/lc_grpo.py:LCGRPO", 2),
        pytest.param("pave_grpo", 4, marks=pytest.mark.slow),
    ],
)
def test_a_training_row_has_the_price_of_one_call(flux_directory, name, calls):
    """A pass of several calls is traced whole, and all its rows are counted: two of LC-GRPO, and
    Pave-GRPO's step in one, two and three parts (1 + 1 + 2)."""
    steps = ["algorithm.branch_steps=[0,1]"] if name == "pave_grpo" else []
    c = config(flux_directory, f"algorithm.name={name}", "algorithm.group_size=3", *steps)
    counts = count(c, 3)
    traced = trace_calls(read_blueprint(c.policy), c, counts, like_cuda=False).training
    assert traced.rows == calls * counts.largest(lambda it: it.passes)


@pytest.mark.slow
def test_time_on_a_card_is_that_of_its_calls(flux_directory):
    plan, card = planned(config(flux_directory)), CARDS["h200"]
    seconds, traced = plan.seconds(card), plan.traced
    ((iteration, _),) = plan.counts.kinds
    assert traced.velocity.rows == max(iteration.calls) == 5
    rollout = sum(traced.velocity.roofline.call(card, rows=rows / 5) for rows in iteration.calls)
    decode = iteration.images * traced.decode.roofline.call(card) / traced.decode.rows
    step = OPTIMIZER_PASSES * plan.memory.parts["trained weights"] / RATES.moved(card)
    update = 4 * traced.training.roofline.call(card) / 3 + step
    parts = {"rollout": rollout, "decode": decode, "update": update}
    assert {name: seconds.iteration[name] for name in parts} == pytest.approx(parts)
    evaluated = plan.counts.times_evaluated * seconds.evaluation
    whole = 3 * sum(seconds.iteration.values()) + evaluated + seconds.encoding
    assert seconds.run == pytest.approx(whole)


REACHED = """
25 None 99 -> 0 []
25 None 100 -> 0 [0]
25 None 110 -> 1 [0]
25 None 399 -> 25 [0]
25 None 409 -> 25 [0, 25]
1000 12 209 -> 6 [0]
1000 12 219 -> 6 [0, 6]
40 None 1000000 -> 100 [0, 40, 80, 100]
"""
"""evaluation.every, .every_minutes and the seconds; the iteration and the evaluations. 25 iterations
are done after 100 + 250 s, and evaluated 50 s later; a twelfth of 12 minutes are 6 iterations."""


@pytest.mark.slow
def test_a_reward_on_the_cpu_takes_what_its_cores_take(flux_directory):
    """Pictures are scored during the rollout, so an iteration takes what is left; a plan without a
    word of it said 0 s."""
    plan, card = planned(config(flux_directory)), CARDS["h200"]
    without, images = plan.seconds(card), plan.counts.mean(lambda it: it.images)
    scored = replace(plan, reward_costs={"brightness": RewardCost(0, 80e12, "cpu", "float32")})
    seconds = scored.seconds(card, cores=4)  # 250 s a picture
    rollout = without.iteration["rollout"]
    assert seconds.iteration["rewards"] == pytest.approx(250 * images - rollout)
    assert seconds.evaluation - without.evaluation == pytest.approx(250 * plan.counts.heldout)
    assert "brightness on 4 cores of 80 GFLOP/s (assumed)" in seconds.basis


CALLED = """
NVIDIA H100 80GB HBM3 -> h100
NVIDIA A100-SXM4-80GB -> a100
NVIDIA A100-PCIE-40GB -> a100-40
NVIDIA L40 -> l40
NVIDIA GH200 480GB -> gh200
NVIDIA GH200 144G HBM3e -> none
NVIDIA H20 -> h20
Radeon VII -> none
"""


@pytest.mark.parametrize(("told", "card"), rows(CALLED))
def test_cards_are_known_by_what_torch_calls_them(told, card):
    assert card_of(told) == CARDS.get(card)


@pytest.mark.parametrize(("asked", "then"), rows(REACHED))
def test_what_is_reached_by_a_time(asked, then):
    """Of 100 iterations of 10 s; the base is evaluated in 50 s after 50 s of encoding."""
    every, minutes, within = map(json.loads, asked.replace("None", "null").split())
    iteration, evaluated = then.split(maxsplit=1)
    seconds = PlannedSeconds({"rollout": 6.0, "update": 4.0}, 30.0, 20.0, 50.0, 1200.0, "")
    looks = EvaluationConfig(prompts="x", every=every, every_minutes=minutes)
    expected = Reached(int(iteration), json.loads(evaluated))
    assert reached(seconds, 100, looks, within) == expected
