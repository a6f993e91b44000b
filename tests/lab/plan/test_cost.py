"""Predicted work, memory and operations against what tiny real models do, and against published
sizes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from torch.profiler import ProfilerActivity, profile

from g2rpo.assembly import components
from g2rpo.assembly.blueprint import (
    build_on_meta,
    on_meta,
    published,
    read_blueprint,
    shapes_of,
    size_of,
)
from g2rpo.assembly.config import load_config
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import RewardConfig
from g2rpo.core.errors import UserError
from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.controls import NO_CONTROL
from g2rpo.lab.plan import trace
from g2rpo.lab.plan.cards import CARDS, card_of
from g2rpo.lab.plan.counting import count, settled
from g2rpo.lab.plan.fit import fewest, for_memory, overrides_of
from g2rpo.lab.plan.meter import Meter
from g2rpo.lab.plan.model import KnownModels
from g2rpo.lab.plan.plan import make_plan
from g2rpo.lab.plan.rates import RATES
from g2rpo.lab.plan.rewards import cost_of_reward
from g2rpo.lab.plan.seconds import OPTIMIZER_PASSES
from g2rpo.lab.plan.trace import trace_calls
from g2rpo.policies.catalogue import SPECS
from g2rpo.policies.pipelines import blocks_of, read_pipeline
from g2rpo.rewards.analytic import Brightness
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations
from g2rpo.training.trainer import Trainer
from tests.support.tiny import sd3_pipeline
from tests.support.variants import few

PROMPTS = ["a red circle", "two blue square", "a square left of a circle"]


def config(directory, *overrides):
    return resolve(
        {
            "policy": {
                "path": str(directory),
                "height": 32,
                "width": 32,
                "max_sequence_length": 12,
                "lora_rank": 2,
            },
            "algorithm": {"group_size": 3, "branch_steps": [0, 1], "granularities": [1, 2]},
            "rewards": {"brightness": 1.0},
            "prompts": {"train": "none", "cache": "off"},
            "sampling": {"num_steps": 4, "batch_size": 5, "decode_batch_size": 4},
            "optim": {"learning_rate": 1e-3},
            "trainer": {
                "iterations": 3,
                "prompts_per_iteration": 2,
                "checkpoint_every": 2,
                "micro_batch_size": 3,
            },
            "evaluation": {"prompts": "none", "num_prompts": 3, "every": 2},
        },
        ["policy.device=cpu", *overrides],
    )


def train(c, run_dir=None):
    policy = components.build_policy(c.policy, keep_base=c.algorithm.kl_weight > 0)
    return Trainer(
        config=c,
        policy=policy,
        rewards={"brightness": Brightness()},
        prompts=PROMPTS,
        heldout=PROMPTS,
        run_dir=run_dir,
    )


def planned(c, heldout=3):
    return make_plan(c, cuda=False, heldout=heldout, distinct_prompts=6)


@pytest.mark.parametrize("tuning", few(["full", "lora"], "lora".__eq__))
def test_what_loading_takes_of_the_host_is_one_copy_of_the_files(tmp_path, flux_directory, tuning):
    """A model that is stored in policy.dtype: all its weights lie in the mappings of its files,
    which processes share. Adapters are not loaded."""
    pipeline = FluxPipeline.from_pretrained(flux_directory, dtype=torch.bfloat16)
    pipeline.save_pretrained(tmp_path / "model", safe_serialization=True)
    c = config(tmp_path / "model", f"policy.tuning={tuning}", "policy.dtype=bfloat16")
    pipeline = read_pipeline(FluxPipeline, tmp_path / "model", torch.bfloat16, tuning)
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    files = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(tmp_path) in line
    ]
    mapped = [range(int(first, 16), int(last, 16)) for first, last in files]
    weights = [weight for part in parts for weight in part.parameters()]
    assert all(any(weight.data_ptr() in pages for pages in mapped) for weight in weights)
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    adapters = (
        sum(p.nbytes for p in train(c).policy.trainable_parameters()) if tuning == "lora" else 0
    )
    assert planned(c).memory.host == sum(map(size_of, parts)) + adapters


# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularities", "each"),
    few([("[1]", 1112), ("[1,2]", 1496), ("[1,2,3]", 1700)], lambda variant: variant[1] == 1700),
)
def test_the_papers_setting_takes_what_the_engine_takes(granularities, each):
    counts = count(load_config("flux1-dev-hps", [f"algorithm.granularities={granularities}"]), 400)
    ((iteration, times),) = counts.kinds
    assert times == 300 and iteration.evaluations == 16 * each
    assert (iteration.training_rows, iteration.optimizer_steps, counts.times_evaluated) == (
        16 * 8,
        8,
        7,
    )


class Counter:
    """Counts rows that reach the network with gradients, and optimizer steps."""

    def __init__(self, trainer):
        self.rows = self.reference = self.passes = self.steps = 0
        transformer = trainer.policy.transformer
        transformer.register_forward_pre_hook(self._forward, with_kwargs=True)
        trainer.learner.optimizer.register_step_post_hook(self._step)

    def _forward(self, module, args, kwargs):
        rows = len(args[0])
        self.rows += rows * torch.is_grad_enabled()
        self.reference += rows * (not torch.is_grad_enabled())
        self.passes += torch.is_grad_enabled()

    def _step(self, *_):
        self.steps += 1


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.update_every=branch"],
        ["algorithm.kl_weight=0.1"],
        [
            "algorithm.name=mixgrpo",
            "algorithm.group_size=4",
            "algorithm.window_iterations=1",
            "algorithm.window_size=1",
        ],
        ["algorithm.name=flow_grpo", "algorithm.group_size=4"],
    ],
    ids=str,
)
def test_iterations_do_what_was_counted(flux_directory, overrides):
    """Windows that move make iterations differ; groups without a shared noise train on every
    member's own latent."""
    c = config(flux_directory, *overrides, "trainer.iterations=2")
    counts, trainer, sizes = count(c, 3), train(c), []
    seen, trainer.on_evaluations = Counter(trainer), sizes.append
    rows = [trainer.iterate(), trainer.iterate()]
    assert (
        sum(row["evaluations"] for row in rows)
        == sum(sizes)
        == counts.total(lambda it: it.evaluations)
    )
    assert sizes == [size for iteration, times in counts.kinds for size in times * iteration.calls]
    assert sum(row["images"] for row in rows) == counts.total(lambda it: it.images)
    assert seen.rows == counts.total(lambda it: it.training_rows)
    assert seen.passes == counts.total(lambda it: len(it.passes))
    assert seen.steps == counts.total(lambda it: it.optimizer_steps)
    assert seen.reference == counts.total(lambda it: it.evaluations + it.reference_rows)


@pytest.mark.parametrize("iterations", few([3, 4], (3).__eq__))
def test_a_run_evaluates_and_saves_as_often_as_was_counted(flux_directory, tmp_path, iterations):
    c = config(flux_directory, f"trainer.iterations={iterations}", "trainer.keep_checkpoints=9")
    trainer, pictures = train(c, tmp_path), []
    trainer.policy.decode = lambda x, inner=trainer.policy.decode: (
        pictures.append(len(x)) or inner(x)
    )
    list(trainer.train())
    trainer.finish()
    counts = count(c, 3)
    # the run's first group is kept for the report
    first = c.algorithm.group_size * len(trainer.plans(0)[0].tails)
    assert (
        sum(pictures)
        == counts.total(lambda it: it.images) + counts.times_evaluated * counts.heldout + first
    )
    assert len(list((tmp_path / "checkpoints").iterdir())) == counts.checkpoints


def test_automatic_batch_sizes_are_settled():
    c = load_config(
        "flux1-dev-lora", ["sampling.batch_size=auto", "sampling.decode_batch_size=auto"]
    )
    assert [
        (s.batch_size, s.decode_batch_size)
        for s in (settled(c, where).sampling for where in (True, False))
    ] == [
        (8, 1),
        (64, 8),
    ]


# --- models without weights -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "millions"),
    # model cards and papers: 12 B, 2.5 B (with 0.23 B of positions, which are no parameters), 8.1
    # B, 4.7 B, 123 M, 84 M
    [
        ("black-forest-labs/FLUX.1-dev", "transformer", 11901.4),
        ("black-forest-labs/FLUX.1-dev", "text_encoder_2", 4762.3),
        ("black-forest-labs/FLUX.1-dev", "vae", 83.8),
        ("stabilityai/stable-diffusion-3.5-medium", "transformer", 2243.2),
    ],
)
def test_published_models_have_their_published_sizes(name, part, millions):
    module = on_meta(published(name).parts[part])
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize(
    ("name", "billions"),  # as their cards name them: 4B, 20B, 6B, 1.3B, 12B
    [
        ("Qwen/Qwen-Image", 20.43),
        ("Tongyi-MAI/Z-Image", 6.15),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1.42),
    ],
)
def test_open_models_have_their_published_sizes_and_can_be_planned(name, billions):
    module = on_meta(published(name).parts["transformer"])
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    c = load_config(
        "scenes",
        ["policy.pipeline=", f"policy.path={name}", "policy.height=512", "policy.width=512"],
    )
    policy = build_on_meta(published(name), c.policy)
    assert shapes_of(policy, published(name)).image_tokens == 1024


PUBLISHED = {
    name: model.parts
    for spec in SPECS.values()
    for name, model in spec.known.items()
    if model.parts
}


@pytest.mark.parametrize(
    "name",
    [name for name, parts in PUBLISHED.items() if parts["vae"][0] == "diffusers:AutoencoderKL"],
)
def test_published_vaes_tile_above_1024_pixels(name):
    """Their config's sample_size. diffusers' default, 32, makes hundreds of tiles of a picture, and
    minutes of a plan."""
    vae = on_meta(published(name).parts["vae"])
    assert vae.tile_sample_min_size == 1024 and vae.tile_latent_min_size == 128


@pytest.mark.parametrize("t5", [True, False])
def test_a_folder_is_read_as_the_policy_reads_it(tmp_path, t5):
    sd3_pipeline(t5=t5).save_pretrained(tmp_path, safe_serialization=True)
    c = config(tmp_path, "policy.dtype=bfloat16")
    blueprint = read_blueprint(c.policy)
    meta, real = build_on_meta(blueprint, c.policy), components.build_policy(c.policy)
    for name in blueprint.parts:
        assert size_of(getattr(meta.pipeline, name)) == size_of(getattr(real.pipeline, name))
    shapes, cond = shapes_of(meta, blueprint), real.encode(PROMPTS[:1])
    assert {name: tuple(value.shape[1:]) for name, value in cond.tensors.items()} == shapes.cond
    assert all(value.dtype == torch.bfloat16 for value in cond.tensors.values())


def test_rewards_weigh_what_their_published_state_dicts_do():
    """Recorded names and shapes of upstream's full-size classes; ImageReward's head (0.2 %) is left
    out."""
    fixtures = Path(__file__).parents[2] / "rewards" / "fixtures"
    for kind, tolerance in (("hpsv2", 1e-4), ("image_reward", 0.01)):
        shapes = json.loads((fixtures / f"{kind}.json").read_text())[
            "published_state_dict"
        ].values()
        published = 4 * sum(torch.Size(shape).numel() for shape in shapes)
        assert cost_of_reward(RewardConfig(kind=kind), "cuda").bytes == pytest.approx(
            published, rel=tolerance
        )
    half = cost_of_reward(RewardConfig(kind="hpsv2", options={"dtype": "bfloat16"}), "cuda")
    assert half.bytes == cost_of_reward(RewardConfig(kind="pickscore"), "cuda").bytes // 2
    assert (
        cost_of_reward(RewardConfig(kind="clip_score", options={"path": "someone/unknown"}), "cuda")
        is None
    )


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "overrides"),
    few(
        [
            ("flux", ["policy.dtype=bfloat16"]),
            ("flux", ["policy.tuning=full", "policy.dtype=bfloat16", "algorithm.kl_weight=0.1"]),
            ("sd3", ["optim.ema_decay=0.9"]),
            ("sd3", ["policy.tuning=full", "policy.dtype=bfloat16", "optim.ema_decay=0.9"]),
        ],
        lambda variant: variant[0] == "flux" and "policy.tuning=full" in variant[1],
    ),
    ids=str,
)
def test_what_stays_after_an_update_is_what_was_planned_to_the_byte(
    flux_directory, sd3_directory, model, overrides
):
    c = config(flux_directory if model == "flux" else sd3_directory, *overrides)
    trainer, parts = train(c), planned(c).memory.parts
    trainer.iterate()
    parameters, pipeline = list(trainer.learner.parameters), trainer.policy.pipeline
    state = [
        value for entry in trainer.learner.optimizer.state.values() for value in entry.values()
    ]
    assert parts["trained weights"] == sum(p.nbytes for p in parameters)
    assert parts["gradients"] == sum(p.grad.nbytes for p in parameters)
    assert parts["moments"] == sum(value.nbytes for value in state)
    assert parts["frozen weights"] == size_of(pipeline.transformer) - parts["trained weights"]
    assert parts["VAE"] == size_of(pipeline.vae)
    encoders = [
        part
        for name, part in pipeline.components.items()
        if name.startswith("text_encoder") and part is not None
    ]
    assert parts["text encoders"] == sum(size_of(part) for part in encoders)
    average = (
        [] if trainer.learner.average is None else list(trainer.learner.average.module.parameters())
    )
    assert parts.get("moving average", 0) == sum(p.nbytes for p in average)
    base = getattr(trainer.policy.tuning, "_base", None)
    assert parts.get("base copy for the KL term", 0) == (
        sum(p.nbytes for p in base.parameters()) if base else 0
    )


def real_peak(run):
    """Bytes at the peak of `run`, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = [
        event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model", "overrides"),
    few(
        [
            ("flux", []),
            ("flux", ["policy.dtype=bfloat16", "policy.gradient_checkpointing=true"]),
            ("flux", ["policy.dtype=bfloat16", "policy.tuning=full"]),
            ("sd3", ["policy.dtype=bfloat16"]),
            ("sd3", ["policy.gradient_checkpointing=true", "policy.tuning=full"]),
        ],
        lambda variant: variant[0] == "sd3" and "policy.tuning=full" in variant[1],
    ),
    ids=str,
)
def test_traced_activations_are_the_allocators(deep, one_thread, model, overrides):
    """A shallow model of fake tensors against the whole model at work. Kernels' own scratch is not
    seen by the trace; every thread has some, so there is one."""
    c = config(
        deep[model],
        *overrides,
        "trainer.prompts_per_iteration=4",
        "trainer.micro_batch_size=8",
        "sampling.batch_size=8",
    )
    blueprint = read_blueprint(c.policy)
    counts = count(c, 3)
    predicted = trace_calls(blueprint, c, counts, like_cuda=False)
    policy = components.build_policy(c.policy)
    shapes = shapes_of(policy, blueprint)
    for parameter in policy.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def velocity():
        policy.velocity(*trace.inputs(policy, shapes, 8))

    def training():
        trace.training_pass(policy, c, shapes, c.algorithm.plans(c.sampling.num_steps), 8)

    @torch.no_grad()
    def decode():
        policy.decode(torch.zeros(4, *shapes.latent))

    # some CPUs convolve bfloat16 in copies of their own, of twice what decoding holds
    narrow = c.policy.dtype == "bfloat16"
    for run in (velocity, training, *([] if narrow else [decode])):
        run()  # what is made once is made
        assert getattr(predicted, run.__name__).peak == pytest.approx(real_peak(run), rel=0.1), (
            run.__name__
        )


@pytest.mark.parametrize("batch_size", few([4, 16, 64], lambda size: size == 16))
def test_latents_of_a_rollout_stay_within_what_was_planned(flux_directory, batch_size):
    c = config(flux_directory, "algorithm.group_size=12", f"sampling.batch_size={batch_size}")
    trainer = train(c)
    cond = trainer.policy.encode(PROMPTS[:2])
    engine = Engine(policy=trainer.policy, cond=cond, sigmas=trainer.sigmas, batch_size=batch_size)
    working = planned(c).memory.working
    with Meter() as live:
        engine.rollout(trainer.plans(), 12, trainer.algorithm.kernel(trainer.sigmas), generator_for)
    latents = working["latents"] + working["finished latents, as rows"]
    assert 0.85 < live.peak / (latents + working["network call"]) < 1


@pytest.mark.slow  # four plans; what ranks hold is measured in tests/runtime/test_sharding.py
def test_ranks_share_the_work_and_with_pieces_the_state(deep):
    """Of two ranks each has half of the prompts; in pieces half of the state, and gathers a block,
    the next, and the rest."""
    whole, two, full, training = (
        make_plan(
            config(
                deep["flux"],
                "policy.tuning=full",
                "policy.dtype=bfloat16",
                f"trainer.sharding={mode}",
            ),
            cuda=False,
            heldout=3,
            distinct_prompts=6,
            ranks=size,
        )
        for size, mode in ((1, "none"), (2, "none"), (2, "full"), (2, "training"))
    )
    for plan in (two, full, training):
        assert 2 * plan.counts.prompts == whole.counts.prompts == 2 and plan.counts.heldout == 2
        assert plan.counts.mean(lambda it: it.evaluations) * 2 == whole.counts.mean(
            lambda it: it.evaluations
        )
        assert (
            plan.memory.checkpoint == whole.memory.checkpoint
            and plan.memory.embeddings == whole.memory.embeddings
        )
    for part in ("trained weights", "gradients", "moments"):
        assert two.memory.parts[part] == whole.memory.parts[part]
        assert (
            full.memory.parts[part]
            == training.memory.parts[part]
            == -(-whole.memory.parts[part] // 2)
        )
    c = config(deep["flux"], "policy.tuning=full", "policy.dtype=bfloat16")
    transformer = build_on_meta(read_blueprint(c.policy), c.policy).transformer
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(transformer)]
    everything = sum(p.numel() for p in transformer.parameters())
    layers = 2 * (everything - sum(blocks) + 2 * max(blocks))
    assert (
        full.memory.working["gathered layers"]
        == training.memory.working["gathered layers"]
        == layers
    )
    assert training.memory.working["all weights, gathered to sample"] == 2 * everything
    assert (
        training.memory.moments["rollout"] - full.memory.moments["rollout"]
        == 2 * everything - layers
    )
    assert "gathered layers" not in two.memory.working
    # autocast has nothing to cast
    assert training.memory.working["network call"] < whole.memory.working["network call"]
    with pytest.raises(UserError, match="prompts_per_iteration=2 .* 3 ranks"):
        make_plan(config(deep["flux"]), cuda=False, heldout=3, distinct_prompts=6, ranks=3)


def test_ranks_that_share_a_prompt_are_planned_as_the_one_with_most_evaluations(flux_directory):
    c = config(flux_directory)
    counts = make_plan(c, cuda=False, heldout=3, distinct_prompts=6, ranks=4).counts
    each = [count_evaluations([plan], 3) for plan in c.algorithm.plans(4)]
    assert (
        counts.prompts == 1
        and counts.mean(lambda it: it.evaluations) == max(each) == each[0] > each[1]
    )


@pytest.mark.slow  # five plans
def test_what_earlier_plans_know_changes_no_number(flux_directory):
    known = KnownModels()

    def plan(*overrides, known=known):
        return make_plan(
            config(flux_directory, *overrides),
            cuda=False,
            heldout=3,
            distinct_prompts=6,
            known=known,
        )

    first, judged, small = (
        plan(),
        plan("evaluation.rewards.brightness=1"),
        plan("sampling.batch_size=1"),
    )
    assert first.model is judged.model is small.model and first.traced == judged.traced
    assert (
        small.traced.training == first.traced.training
        and small.traced.velocity != first.traced.velocity
    )
    assert small.memory == plan("sampling.batch_size=1", known=None).memory
    assert plan("policy.lora_rank=3").model is not first.model


def advised(c, measure, limit):
    changes, fits = fewest(list(for_memory(c, 1)), measure, limit)
    return overrides_of(changes) if fits else None


def test_what_fits_keeps_only_what_is_needed(flux_directory):
    c = config(flux_directory, "policy.tuning=full")
    needs = {"micro": 4, "batch": 4, "checkpointing": 8, "cache": 1, "dtype": 16, "lora": 64}

    def needed(overrides):
        return 100 - sum(
            size for word, size in needs.items() if any(word in override for override in overrides)
        )

    assert advised(c, needed, 92) == ["policy.gradient_checkpointing=true"]
    assert advised(c, needed, 76) == ["policy.gradient_checkpointing=true", "policy.dtype=bfloat16"]
    assert advised(c, needed, 36) == ["policy.tuning=lora", "optim.learning_rate=1e-4"]
    assert advised(c, needed, 1) is None
    scored = config(flux_directory, "rewards.hpsv2=1")
    halved = ["rewards.hpsv2.options.dtype=bfloat16"]
    assert advised(scored, lambda overrides: halved[0] not in overrides, 0) == halved


def test_rewards_on_the_cpu_are_advised_before_any_change_of_method(flux_directory):
    """Those of evaluations first, which cost less time; trained ones only where that is not
    enough."""
    c = config(
        flux_directory,
        "rewards.hpsv2=1",
        "evaluation.rewards.pickscore=1",
        "evaluation.rewards.clip_score=1",
    )
    judged = [
        "evaluation.rewards.pickscore.options.device=cpu",
        "evaluation.rewards.clip_score.options.device=cpu",
    ]
    trained = ["rewards.hpsv2.options.device=cpu"]
    assert advised(c, lambda overrides: not set(judged) <= set(overrides), 0) == judged
    assert (
        advised(c, lambda overrides: not set(judged + trained) <= set(overrides), 0)
        == judged + trained
    )
    there = config(flux_directory, "rewards.hpsv2.options.device=cpu")
    assert (
        advised(there, lambda overrides: "rewards.hpsv2.options.dtype=bfloat16" not in overrides, 0)
        is not None
    )


# --- operations and time --------------------------------------------------------------------------


def test_a_forward_of_flux_takes_37_tflop_at_the_papers_size():
    """By hand: 12 width^2 weights a token in a stream of 19 double blocks and of 38 single ones,
    width 3072, 2,537 tokens."""
    c = load_config("flux1-dev-hps", [])
    blueprint = read_blueprint(c.policy)
    tokens, width = 2025 + 512, 3072
    traced = trace_calls(blueprint, c, count(c, 1), like_cuda=True).velocity
    by_hand = 57 * (2 * 12 * width**2 * tokens + 4 * tokens**2 * width)
    assert traced.roofline.flops / traced.rows == pytest.approx(by_hand, rel=0.01)
    assert by_hand == pytest.approx(37e12, rel=0.02)


def test_time_on_a_card_is_that_of_its_calls(flux_directory):
    plan = planned(config(flux_directory))
    card = CARDS["h200"]
    seconds, traced = plan.seconds(card), plan.traced
    passed, decoded = (it.roofline.call(card) for it in (traced.training, traced.decode))
    (iteration, _), *more = plan.counts.kinds
    assert not more and traced.velocity.rows == max(iteration.calls) == 5
    rollout = sum(traced.velocity.roofline.call(card, rows=rows / 5) for rows in iteration.calls)
    assert seconds.iteration["rollout"] == pytest.approx(rollout)
    assert seconds.iteration["decode"] == pytest.approx(
        iteration.images * decoded / traced.decode.rows
    )
    step = OPTIMIZER_PASSES * plan.memory.parts["trained weights"] / RATES.moved(card)
    assert seconds.iteration["update"] == pytest.approx(4 * passed / 3 + step)
    total = (
        3 * sum(seconds.iteration.values())
        + plan.counts.times_evaluated * seconds.evaluation
        + seconds.encoding
    )
    assert seconds.run == pytest.approx(total)


@pytest.mark.parametrize(
    ("told", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA H20", "h20"),
        ("Radeon VII", None),
    ],
)
def test_cards_are_known_by_what_torch_calls_them(told, card):
    assert card_of(told) == (CARDS[card] if card else None)


def test_what_is_advised_can_be_done_here(monkeypatch):
    """Without bitsandbytes no nf4; adapters are not sharded."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "policy.quantize=nf4" not in overrides_of(
        list(for_memory(load_config("scenes", ["policy.tuning=lora"]), 1))
    )
    sharded = load_config("scenes", ["policy.tuning=full", "trainer.sharding=full"])
    (low_rank,) = [
        change for change in for_memory(sharded, 1) if "policy.tuning=lora" in change.overrides
    ]
    assert "trainer.sharding=none" in low_rank.overrides


def test_free_knobs_and_diversity_are_counted_as_the_run_evaluates_them(flux_directory, tmp_path):
    c = config(flux_directory, "evaluation.controls=true")
    t, evaluations = train(c, tmp_path), []
    evaluate, steps = t.evaluator.evaluate, t.evaluator.sampler.num_steps

    def counted(iteration, on_rows, prompts, control=NO_CONTROL, **more):
        evaluations.append(len(prompts) * control.evaluations(steps))
        return evaluate(iteration, on_rows, prompts, control, **more)

    t.evaluator.evaluate = counted
    t.evaluator.sample_controls(0, lambda rows: None)
    t.evaluator.sample_tuned_control(0, lambda rows: None)
    controls = sum(evaluations)
    t.evaluator.spread(0, lambda rows: None)
    counts = make_plan(c, cuda=False, heldout=3, distinct_prompts=5).counts
    assert controls and counts.knobs == controls + counts.times_evaluated * evaluations[-1]
    assert counts.looks == counts.times_evaluated + counts.knobs / (3 * steps)
