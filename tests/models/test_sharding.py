"""Weights in pieces learn what whole weights learn, no rank waits for a call that never comes, and
any number resumes."""

import os
import re
import shutil
import signal
from collections import Counter
from functools import cache, partial
from itertools import count
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from g2rpo.config.resolve import resolve
from g2rpo.core.distributed import ALONE
from g2rpo.core.errors import Stopped
from g2rpo.core.stopping import Stopping
from g2rpo.lab.plan.plan import make_plan
from g2rpo.models.adapters import PREFIX
from g2rpo.models.sharding import Sharded
from g2rpo.train import learner
from g2rpo.train.build import Request
from g2rpo.train.command import train_built
from g2rpo.train.ranks import faults_of_sharding, ranks_of_node
from g2rpo.train.run import checkpoint as checkpointing
from g2rpo.train.run.checkpoint import checkpoints
from tests.support import policies, ranks
from tests.support.adapters import random_adapter
from tests.support.epsilon import epsilon  # noqa: F401  for each test here
from tests.support.runs import PLAIN, config, log, trainer, untimed
from tests.support.tiny import sd3_pipeline
from tests.support.tiny_pipelines import save_tiny
from tests.support.tolerances import EXACT, Tolerance, adam, near, network
from tests.support.variants import few

PROMPTS = ["a red circle", "two blue squares", "a blue circle", "a green star"]
SIZE = {"height": 32, "width": 32, "max_sequence_length": 12}
SETTINGS = """
sampling.batch_size=1 sampling.decode_batch_size=1 trainer.micro_batch_size=1
algorithm.group_size=2 sampling.num_steps=3 trainer.prompts_per_iteration=4
trainer.iterations=2 trainer.checkpoint_every=1 optim.learning_rate=0.5 policy.tuning=full
"""
SMALL = SETTINGS.split()
ONE_EACH = "trainer.prompts_per_iteration=2"
BRANCHES = ("algorithm.branch_steps=[0,1]", "algorithm.granularities=[1]")


def build(world, folder, model, mode, *overrides, **options):
    """A trainer of a tiny model, all weights. `mode` is trainer.sharding, and with a number
    trainer.shard_group, as in "full:2"."""
    # in this rank's process: Adam's step is then nearly linear in the gradient
    learner.EPSILON = 1.0
    name, _, group = mode.partition(":")
    groups = int(group) if group else None
    sharding = None if name == "none" else Sharded(world, "cpu", name == "training", groups)
    options = {**SIZE, "tuning": "full", "keep_base": False, **options}
    policy = policies.load(model, sharding=sharding, **options)
    more = {"policy": policy, "prompts": PROMPTS, "world": world, "sharding": sharding}
    return trainer(folder, *SMALL, *(overrides or BRANCHES), **more)


def learn(world, folder, model, mode, killed=False):
    """`g2rpo train` on one rank; `killed` ends rank 1 amidst a network call of the second
    iteration."""
    learner.EPSILON = 1.0
    prompts = str(Path(model) / "prompts.txt")
    groups = {
        "policy": {"path": model, "tuning": "full", **SIZE},
        "prompts": {"train": prompts, "cache": "off"},
        "evaluation": {"prompts": prompts, "num_prompts": 3, "every": 1},
        "rewards": {"brightness": 1.0},
    }
    name, _, group = mode.partition(":")
    sharding = [f"trainer.sharding={name}", f"trainer.shard_group={group or 'all'}"]
    chosen = resolve(PLAIN | groups, [*SMALL, *BRANCHES, *sharding])
    if killed and world.rank == 1:
        passes = count(1)

        def die(module, _):
            # an iteration has a pass for each of a rank's prompts' two branch points
            learns = isinstance(module, FluxSingleTransformerBlock) and torch.is_grad_enabled()
            if learns and next(passes) == 12 // world.size:
                os.kill(os.getpid(), signal.SIGKILL)

        register_module_forward_pre_hook(die)
    begun = (folder / "config.yaml").exists()
    train_built(Request(config=chosen, run_dir=folder, resume=begun, world=world), Stopping(""))


def learn_and_resume(world, folder, model, mode, overrides, options):
    """An iteration, a checkpoint, one more of a trainer that goes on from it, and an evaluation;
    gradients are checkpointed."""
    made = partial(
        build, world, folder, model, mode, *overrides, gradient_checkpointing=True, **options
    )
    begun = made()
    rows = [begun.iterate()]
    begun.save()
    t = made()
    t.resume()
    rows += [t.iterate(), t.score_heldout().means()]
    t.export()
    return rows


def exported(folder):
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


SHARE = network(1.0, passes=10)["atol"]
ROUNDED = Tolerance(rtol=SHARE, atol=SHARE)
"""Of numbers in a row. A gathered weight may lie elsewhere in memory, and a processor add up in
another order: in three steps of a rollout, the decoder, a training pass and its way back, twice."""


def agree(weights, others):
    """Gradients, clipped at 1, inherit `ROUNDED`: advantages of two members are +-1/sqrt(2) whatever
    rounds their scores. Up to four updates."""
    torch.testing.assert_close(weights, others, **adam(0.5, updates=4, gradient=ROUNDED["atol"]))


def agree_in(rows, others):
    for row, other in zip(untimed(rows), untimed(others), strict=True):
        names = row.keys() - {"kind", "ranks"}
        expected = near({name: other[name] for name in names}, ROUNDED)
        assert {name: row[name] for name in names} == expected


@pytest.fixture(scope="module")
def runs(tmp_path_factory, flux_directory):
    """The folder of a finished run, of so many ranks with this trainer.sharding."""
    (flux_directory / "prompts.txt").write_text("\n".join(PROMPTS))

    @cache
    def finished(size, mode):
        folder = tmp_path_factory.mktemp(f"{size}{mode}")
        ranks.run(size, learn, folder, str(flux_directory), mode)
        return folder

    return finished


MODES = ((2, "full"), (2, "training"), (4, "full"), (4, "full:2"))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "mode"), MODES)
def test_pieces_learn_what_whole_weights_learn(runs, flux_directory, size, mode):
    """1 x 4 prompts with whole weights = 2 x 2 = 4 x 1 with pieces; of two ranks, one has two of
    the three held-out prompts."""
    alone, ours = runs(1, "none"), runs(size, mode)
    agree(exported(ours), exported(alone))
    agree_in(log(ours), log(alone))
    before = exported(flux_directory)
    moved = [(value - before[name]).abs().max() for name, value in exported(ours).items()]
    assert max(moved) > 1e-3
    configs = [(folder / "transformer" / "config.json").read_text() for folder in (ours, alone)]
    assert configs[0] == configs[1]


AVERAGE = ("algorithm.update_every=branch", "optim.ema_decay=0.5", "algorithm.kl_weight=0.5")
OLD = ("algorithm.name=diffusion_nft", "algorithm.old_schedule=[0,0.3,0.5]")
GUIDED = {"guidance_scale": 4.0, "max_sequence_length": 64}
LEARNERS = [
    ("SD3", "full", (*BRANCHES, *AVERAGE), {"keep_base": True}),
    ("CogView4Pipeline", "full", (), GUIDED),
    ("FLUX", "full", (*OLD, "algorithm.kl_weight=0.1"), {"keep_base": True}),
    ("FLUX", "training", (*OLD, "algorithm.kl_weight=0.1"), {"keep_base": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "overrides", "options"), LEARNERS)
def test_other_pipelines_and_learners_learn_and_resume_the_same_in_pieces(
    tmp_path, flux_directory, sd3_directory, name, mode, overrides, options
):
    """SD3.5 with a KL term, an average and an adapter to begin with. CogView4's prompts of
    different lengths are separate calls: ranks make as many, whatever their prompts. DiffusionNFT
    has old weights, which sample."""
    models = {"SD3": sd3_directory, "FLUX": flux_directory}
    model = models.get(name) or save_tiny(name, tmp_path / "model")
    if name == "SD3":
        brought = tmp_path / "brought.safetensors"
        random_adapter(sd3_pipeline().transformer, size=0.02).write(brought, PREFIX)
        options = {**options, "adapter": str(brought)}
    given = (overrides, options)
    alone, pieces = (
        ranks.run(size, learn_and_resume, tmp_path / way, str(model), way, *given, timeout_s=180)[0]
        for size, way in ((1, "none"), (2, mode))
    )
    agree(exported(tmp_path / mode), exported(tmp_path / "none"))
    agree_in(pieces, alone)
    assert not options.get("keep_base") or pieces[1]["kl"] > 0


def held(world, folder, model, mode):
    """Bytes of this rank's gradients in an update, of its weights and moments after it, and how
    often layers were summed over groups."""
    t = build(world, None, model, mode)
    parameters, gradients = list(t.learner.parameters), []

    def bytes_of(tensors):
        return sum(getattr(it, "to_local", lambda it=it: it)().nbytes for it in tensors)

    t.learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(bytes_of(p.grad for p in parameters))
    )
    with Gathers() as sums:
        t.iterate()
    assert all(p.grad is None for p in parameters)
    moments = [value for p in parameters for value in t.learner.optimizer.state[p].values()]
    held = [gradients[0], bytes_of(parameters), bytes_of(moments)]
    return [*held, sums.seen["c10d.allreduce_.default"]]


KINDS = ("rewards.bright.kind=brightness", "evaluation.rewards.dark.kind=brightness")


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_a_rank_holds_what_the_plan_says(tmp_path, flux_directory, groups):
    """Rows of odd matrices fall to one of two ranks, so the larger share is above half, by a
    twentieth at most here.

    Two groups of two ranks hold twice as much together. They sum each layer's gradients once,
    though each rank has two passes.
    """
    model, options = str(flux_directory), ("trainer.sharding=full", "trainer.shard_group=2")
    asked = resolve(
        PLAIN | {"policy": {"path": model, **SIZE}}, [*SMALL, *BRANCHES, *KINDS, *options]
    )
    plan = make_plan(asked, cuda=False, heldout=4, distinct_prompts=4, ranks=2 * groups).memory
    *whole, _ = held(ALONE, None, model, "none")
    *parts, sums = zip(*ranks.run(2 * groups, held, tmp_path, model, "full:2"), strict=True)
    names, planned = ("gradients", "trained weights", "moments"), plan.parts | plan.working
    for name, alone, own in zip(names, whole, parts, strict=True):
        # each rank has every tensor's step counter
        slack = 4 * 2 * 1000 if name == "moments" else 0
        assert groups * alone <= sum(own) <= groups * (alone + slack)
        assert planned[name] <= max(own) <= 1.05 * planned[name]
    assert set(sums) == {LAYERS * (groups - 1)}


# --- checkpoints


def saves(world, folder, model, mode):
    """The bytes that this rank writes of a checkpoint, those of all ranks, and the gathers
    meanwhile; then nothing is written, because the disk of rank 1 is full."""
    t = build(world, folder, model, mode, *BRANCHES, "optim.ema_decay=0.9")
    t.iterate()
    written, save_file = [], checkpointing.save_file

    def counted(tensors, path):
        written.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, path)

    checkpointing.save_file = counted
    with Gathers() as gathers:
        t.save()
    t.iteration += 1

    def full(tensors, path):
        if world.rank == 1 and "average" in path.name:
            raise OSError("no space left")
        save_file(tensors, path)

    checkpointing.save_file = full
    with pytest.raises(Stopped, match=r"iteration_000002: cannot be written \(no space left\)"):
        t.save()
    # weights, average, two moments, in float32
    whole = 4 * sum(4 * p.numel() for p in t.learner.parameters)
    return [sum(written), whole, gathers.counts()]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "mode"), [(2, "full"), (4, "full:2")])
def test_each_rank_writes_its_pieces_and_all_or_none_are_kept(tmp_path, flux_directory, size, mode):
    found = ranks.run(size, saves, tmp_path, str(flux_directory), mode)
    own, (whole, *_), gathers = zip(*found, strict=True)
    assert sum(own) == whole and max(own) < 0.53 * whole and not any(own[2:])
    assert gathers == ([0, 0],) * size
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration_000001"]


# --- resuming


@pytest.mark.parametrize(("size", "mode"), few([(2, "full"), (4, "full:2")], (2, "full").__eq__))
def test_a_killed_run_resumes_bit_for_bit(tmp_path, runs, flux_directory, size, mode):
    model, straight = str(flux_directory), runs(size, mode)
    first, second, *_ = ranks.finish(
        ranks.start(size, learn, tmp_path, model, mode, True), tmp_path
    )
    lost = "RankLost: rank 0 stops: another rank died, or did not answer"
    assert first["error"].startswith(lost) and second == {}
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["iteration_000001"]
    (tmp_path / "0.json").unlink()
    ranks.run(size, learn, tmp_path, model, mode)
    torch.testing.assert_close(exported(tmp_path), exported(straight), **EXACT)
    assert log(tmp_path) == log(straight)


LAYOUTS = [
    ((2, "full"), (1, "none")),
    ((1, "none"), (2, "training")),
    ((4, "full:2"), (2, "full")),
    ((2, "full"), (4, "full:2")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_a_run_resumes_in_other_pieces(tmp_path, runs, flux_directory, before, after):
    again = shutil.copytree(runs(*before), tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "iteration_000002")
    shutil.rmtree(again / "transformer")
    size, mode = after
    ranks.run(size, learn, again, str(flux_directory), mode)
    agree(exported(again), exported(runs(1, "none")))


# --- meetings


class Gathers(TorchDispatchMode):
    """Counts the gathers and scatters of weights and gradients; meetings through `World` are other
    operations."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen[str(function)] += 1
        return function(*arguments, **(options or {}))

    def counts(self):
        names = ("c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default")
        return [self.seen[name] for name in names]


def counted(world, model, mode):
    """[calls without gradients, calls with, gathers, scatters] of one iteration in which ranks have
    as many rows a call."""
    rows = ("sampling.batch_size=8", "trainer.micro_batch_size=1", ONE_EACH)
    t, calls = build(world, None, model, mode, *BRANCHES, *rows), Counter()
    network = t.policy.transformer
    network.register_forward_pre_hook(lambda *_: calls.update([torch.is_grad_enabled()]))
    with Gathers() as gathers:
        t.iterate()
    return [calls[False], calls[True], *gathers.counts()]


def with_cond(*arguments, **options):
    t = build(*arguments, **options)
    t.cond = t.policy.encode(PROMPTS[:1])
    return t


def call(t, seed):
    g = torch.Generator().manual_seed(seed)
    return t.policy.velocity(torch.randn(1, 64, 16, generator=g), torch.tensor([0.4]), t.cond)


def apart(a, b):
    """The largest difference, by the size of the larger."""
    return float((a - b).abs().max() / torch.maximum(a.abs(), b.abs()).max())


def facts(world, folder, model):
    """What ranks of two find in one process: starting them is what takes time."""
    found = {mode: counted(world, model, mode) for mode in ("full", "training")}
    t, alone = with_cond(world, None, model, "full"), with_cond(ALONE, None, model, "none")
    with torch.no_grad():
        with t.shards.sampling():
            own = [call(t, seed) for seed in range(1 + 2 * world.rank)]
        found["uneven"] = [apart(v, call(alone, seed)) for seed, v in enumerate(own)]
        found["others"] = apart(call(alone, 1), call(alone, 2))
    found["pictures"] = apart(*(each.sample(PROMPTS[:1]) for each in (t, alone)))
    found["errors"] = [error_of(call, t, 0), error_of(one_more_pass, t, world.rank)]
    found["bfloat16"] = rounding(world, model)
    found["decode"] = short_of_memory_when_decoding(world, model)
    found["halved"] = short_of_memory(world, folder, model, "training")
    return found


def error_of(action, *arguments):
    try:
        action(*arguments)
    except (RuntimeError, Stopped) as error:
        return f"{type(error).__name__}: {error}"


def one_more_pass(t, more):
    with t.shards.training():
        for seed in range(1 + more):
            call(t, seed).sum().backward()


def rounding(world, model):
    """How far a gradient in bfloat16 is from that of one process, relatively, and the dtype of
    positions."""
    pieces, alone = (
        with_cond(of, None, model, mode, dtype=torch.bfloat16)
        for of, mode in ((world, "full"), (ALONE, "none"))
    )
    positions = set()

    def see(module, arguments, named):
        positions.add(str(named["image_rotary_emb"][0].dtype))

    block = pieces.policy.transformer.transformer_blocks[0]
    block.register_forward_pre_hook(see, with_kwargs=True)
    gradients = []
    for t, seeds in ((pieces, [world.rank]), (alone, [0, 1])):
        with torch.no_grad():
            for p in t.learner.parameters:
                p.mul_(1.003)  # fresh scales of norms are 1, which bfloat16 has
        with t.shards.training():
            for seed in seeds:
                call(t, seed).float().square().mean().backward()
        grads = [p.grad for p in t.learner.parameters]
        whole = [g.full_tensor() if t is pieces else g for g in grads]
        gradients.append(torch.cat([g.flatten() for g in whole]))
    ours, theirs = gradients
    return [float((ours - theirs).norm() / theirs.norm()), list(positions)]


@pytest.fixture(scope="module")
def found(tmp_path_factory, flux_directory):
    return ranks.run(2, facts, tmp_path_factory.mktemp("facts"), str(flux_directory))


LAYERS = 3
"""Two blocks and the rest."""


def test_each_layer_is_gathered_once_a_call_or_once_a_rollout(found):
    """And once more on the way back of a training pass, which scatters each layer's gradients
    once."""
    for rank in found:
        for mode in ("full", "training"):
            calls, passes, gathers, scatters = rank[mode]
            assert calls > 1 and passes > 1
            assert gathers == LAYERS * ((calls if mode == "full" else 1) + 2 * passes)
            assert scatters == LAYERS * passes


def test_ranks_may_sample_as_often_as_they_like(found):
    """One, and three times, and a picture, of three steps and the decoder; velocities of other
    latents are far apart."""
    assert [len(rank["uneven"]) for rank in found] == [1, 3]
    once, drawn = (network(1.0, passes)["atol"] for passes in (1, 4))
    assert all(value < once < 0.1 < rank["others"] for rank in found for value in rank["uneven"])
    assert all(rank["pictures"] < drawn for rank in found)


def test_a_rank_out_of_step_is_an_error_on_all(found):
    outside = "RuntimeError: a divided model is called inside sampling() or training()"
    more = (
        "Stopped: the ranks have fallen out of step: some make another training pass, others do not"
    )
    for rank in found:
        assert rank["errors"][0].startswith(outside) and rank["errors"][1] == more


def test_bfloat16_differs_by_its_rounding(found):
    """Scales of norms are rounded as matrices are; one process rounds matrices alone. What a scale
    multiplies moves by up to 2^-8, in both directions. Positions stay in float32: bfloat16 cannot
    tell the 257th from the 258th."""
    for rank in found:
        gradient, positions = rank["bfloat16"]
        assert gradient < 2**-7 and positions == ["torch.float32"]


def run_out_above(rows, call):
    """`call`, which has memory for so many rows where nothing is learnt."""

    def small(x, *arguments):
        if len(x) > rows and not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("pretended")
        return call(x, *arguments)

    return small


def short_of_memory(world, folder, model, mode):
    t = build(world, None, model, mode, *BRANCHES, "sampling.batch_size=8", ONE_EACH)
    if world.rank == 1:
        t.policy.velocity = run_out_above(3, t.policy.velocity)
    return [t.iterate()["out_of_memory"], t.sizes.rollout]


def short_of_memory_when_decoding(world, model):
    rows = ("sampling.batch_size=2", "sampling.decode_batch_size=2")
    t = build(world, None, model, "full", *BRANCHES, *rows)
    t.policy.decode = run_out_above(1, t.policy.decode)
    t.score_heldout()
    return t.sizes.decode


def test_a_rank_that_samples_its_heldout_prompts_again_is_waited_for(found):
    """Rank 1 has two of the three, and its decoder's memory runs out."""
    assert [rank["decode"] for rank in found] == [2, 1]


def test_memory_that_runs_out_on_one_rank_halves_its_batch_where_samples_meet_nobody(found):
    assert [rank["halved"] for rank in found] == [[2, 8], [2, 2]]


def test_memory_that_runs_out_where_calls_are_shared_ends_the_run_and_says_what_to_set(
    tmp_path, flux_directory
):
    launched = ranks.start(2, short_of_memory, tmp_path, str(flux_directory), "full")
    first, second = ranks.finish(launched, tmp_path)
    words = "UserError: out of memory with sampling.batch_size=8: "
    assert second["error"].startswith(words) and "g2rpo resume RUN sampling." in second["error"]
    assert first["error"].startswith(f"RankLost: rank 0 stops: rank 1 stopped with {words}")


REFUSED = """
1 | | trainer.sharding=full .* torchrun
2 | policy.tuning=lora | policy.tuning=full
6 | trainer.shard_group=4 | trainer.shard_group=4: .* divisor of 6
2 | trainer.shard_group=node | trainer.shard_group=node .*LOCAL_WORLD_SIZE
2 | trainer.sharding=none trainer.shard_group=2 | trainer.sharding .* none
"""


def test_what_cannot_be_divided_is_refused():
    """Each by one complaint."""
    for case in REFUSED.strip().splitlines():
        ranks_asked, overrides, message = (part.strip() for part in case.split("|"))
        asked = config("policy.tuning=full", "trainer.sharding=full", *overrides.split())
        (fault,) = faults_of_sharding(asked, int(ranks_asked), ranks_of_node())
        assert re.search(message, fault), case
