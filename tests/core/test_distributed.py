"""Several ranks are one trainer: the same weights whatever their number, and one of them writes."""

import re
import socket
import subprocess
import sys

import pytest
import torch

from g2rpo.core.distributed import ALONE, LAUNCHERS, World, apart, joined
from g2rpo.core.errors import RankLost, UserError
from g2rpo.train import learner
from g2rpo.train.listeners import Ask, asked_by
from g2rpo.train.run.checkpoint import checkpoints
from g2rpo.train.run.folder import Run
from tests.support import policies, ranks
from tests.support.commands import done, own_reward
from tests.support.epsilon import epsilon  # noqa: F401  for each test here
from tests.support.runs import ADVANTAGES, asking, brightness, mean, reordered_row, trainer, untimed
from tests.support.tables import rows
from tests.support.tolerances import adam, reordered
from tests.support.variants import few
from tests.support.watched import flat

RATE = 20.0
COMMON = ("trainer.prompts_per_iteration=4", "trainer.iterations=3")
ONE = "trainer.prompts_per_iteration=1"
VARIANTS = {
    "g2rpo": "",
    "gdpo": "algorithm.reward_mix=gdpo algorithm.group_size=8",
    "batch_std": (
        "algorithm.name=flow_grpo algorithm.group_size=6 algorithm.update_every=3"
        " algorithm.kl_weight=0.5"
    ),
    "branch": "algorithm.update_every=branch optim.ema_decay=0.9",
    "plans of a prompt": f"{ONE} algorithm.branch_steps=[0,1,2,4]",
    "plans, in parts": (
        f"{ONE} sampling.num_steps=5 algorithm.name=tests.support.own_algorithms:AllCount"
    ),
}


def patchy(images, prompts):
    """Brightness, but one picture in three or so has no score; which ones depends on a pixel alone,
    so on no sum."""
    scores = brightness(images, prompts)
    return torch.where((images[:, 0, 0, 0] * 100).long() % 3 == 0, torch.nan, scores)


def train_gaussian(world, folder, overrides):
    learner.EPSILON = 1.0
    rate = f"optim.learning_rate={RATE}"
    t = trainer(None, *COMMON, *overrides, rate, rewards={"bright": patchy}, world=world)
    rows = [t.score_heldout().means(), *(t.iterate() for _ in range(3))]
    return rows, mean(t).tolist()


SIZES = [
    *[(variant, 4) for variant in VARIANTS],
    *[(variant, 2) for variant in ("g2rpo", "batch_std", "plans of a prompt")],
]
"""Of each way in which work is divided a quick one: prompts, statistics over all of them, and the
plans of one prompt."""


@pytest.mark.parametrize(("variant", "size"), few(SIZES, lambda case: case[1] == 2))
def test_ranks_learn_what_one_process_learns(tmp_path, variant, size):
    """1 x 4 = 2 x 2 = 4 x 1 prompts, or plans of one prompt. On this policy every member's
    arithmetic is the same whatever its batch, up to the last bit of its score. Gradients of at most
    144 members, 0.01 in one entry, are added in another order. A wrong normalisation shows as
    1e-2."""
    overrides = VARIANTS[variant].split()
    alone, weights = train_gaussian(ALONE, None, overrides)
    assert float(torch.tensor(weights).abs().mean()) > 0.02  # it begins at 0
    norm = max(row["grad_norm"] for row in alone[1:])
    apart = reordered(144, 0.01)["atol"] + ADVANTAGES * norm
    allowed = adam(RATE, updates=3 * 3, gradient=apart)
    (rows, found), *others = ranks.run(size, train_gaussian, tmp_path, overrides)
    assert all(other == found for _, other in others), "ranks have parted"
    torch.testing.assert_close(torch.tensor(found), torch.tensor(weights), **allowed)
    for ours, theirs in zip(untimed(rows), untimed(alone), strict=True):
        own = {"kind", "ranks"}
        if "plans" in variant:
            own.add("evaluations")  # each rank walks to its own branch steps
        assert ours.keys() == theirs.keys()
        same = {name: value for name, value in theirs.items() if name not in own}
        assert {name: ours[name] for name in same} == reordered_row(same)


FLUX = (
    "sampling.batch_size=1 sampling.decode_batch_size=1 trainer.micro_batch_size=1"
    " algorithm.group_size=3 algorithm.branch_steps=[0,1] sampling.num_steps=4"
    " optim.learning_rate=0.5"
)


def train_flux(world, folder, model):
    learner.EPSILON = 1.0  # in this rank's process
    policy = policies.load(model, height=32, width=32, max_sequence_length=12, lora_rank=2)
    prompts = ["a red circle", "two blue squares", "a blue circle", "a green star"]
    t = trainer(None, *COMMON, *FLUX.split(), policy=policy, prompts=prompts, world=world)
    before = flat(t.learner.parameters).tolist()
    for _ in range(2):
        t.iterate()
    return [before, flat(t.learner.parameters).tolist()]


def test_ranks_train_a_flux_lora_as_one_process_does(tmp_path, flux_directory):
    """Network calls of one row each, so that matrix products do not depend on the ranks' batches:
    again only the order of sums differs, of 8 branch points' gradients, whose sum is clipped at
    1."""
    before, alone = torch.tensor(train_flux(ALONE, None, flux_directory))
    allowed = adam(0.5, updates=2, gradient=reordered(8, 1.0)["atol"])
    for _, weights in ranks.run(2, train_flux, tmp_path, flux_directory):
        torch.testing.assert_close(torch.tensor(weights), alone, **allowed)
    assert float((alone - before).abs().max()) > 100 * allowed["atol"]


def gather_all(world, folder):
    own = torch.arange(world.rank * 10, world.rank * 10 + world.rank + 1)[:, None].float()
    tensors = [torch.full((3, 2), float(world.rank + 1)), torch.tensor([0.5 * world.rank])]
    world.all_reduce(tensors)
    return [
        world.gather(own).flatten().tolist(),
        world.total(world.rank, 1),
        world.broadcast_text(f"día {world.rank}"),
        world.differing(torch.tensor([min(world.rank, 1)])),
        [t.flatten().tolist() for t in tensors],
    ]


def test_what_ranks_tell_each_other(tmp_path):
    everywhere = [[0, 10, 11, 20, 21, 22], [3, 3], "día 0", [1, 2], [[6.0] * 6, [1.5]]]
    assert ranks.run(3, gather_all, tmp_path) == [everywhere] * 3


def judge(world, folder, count):
    """An evaluation's row, and the base's pictures; before, a checkpoint is due on all ranks because
    it is hours ago by the clock of one."""
    heldout = [str(i / 20) for i in range(count)]
    t = trainer(folder / "run", "trainer.checkpoint_minutes=60", world=world, heldout=heldout)
    t.iteration, t.checkpoints.unsaved = 1, True
    t.checkpoints.saved_at = -1e9 * world.is_main
    assert Ask.SAVE in asked_by(t.listeners, t.stopping, t.world)
    t.iteration = 0
    row, pictures = untimed([t.evaluate()]), t.evaluator.baseline.images
    return row, str(pictures.dtype), pictures.tolist()


@pytest.mark.parametrize(("count", "first"), few([(5, 2), (3, 1), (1, 0)], (3, 1).__ne__))
def test_pictures_meet_on_rank_0_in_8_bits_and_what_they_say_everywhere(count, first, tmp_path):
    """Of 5 held-out pictures rank 0 paints 2 and has all in the end; a single one is painted by
    both. Statistics of pictures are in every rank's row."""
    ((row, dtype, pictures),) = ranks.run(1, judge, tmp_path / "alone", count)
    assert dtype == "torch.uint8"
    parts = [[row, dtype, pictures], [row, dtype, pictures[first:]]]
    assert ranks.run(2, judge, tmp_path / "two", count) == parts


def train_with_a_listener_on_the_last_rank(world, folder):
    options = ["trainer.iterations=3", "evaluation.every=9", "trainer.checkpoint_every=9"]
    t = trainer(folder, *options, world=world)
    if world.rank == world.size - 1:
        asking(t, Ask.EVALUATE | Ask.SAVE, after=1)
    return [[row["kind"], row["iteration"]] for row in t.train()]


def test_what_a_listener_of_one_rank_asks_for_all_ranks_do(tmp_path):
    rows = [["eval", 0], ["train", 1], ["eval", 1], ["train", 2], ["train", 3], ["eval", 3]]
    assert ranks.run(2, train_with_a_listener_on_the_last_rank, tmp_path) == [rows, rows]
    kept = [path.name for path in checkpoints(tmp_path / "checkpoints")]
    assert kept == ["iteration_000001", "iteration_000003"]


def test_dealt_items_are_the_whole_in_order():
    for count in range(12):
        for size in range(1, 6):
            worlds = [World(rank, size) for rank in range(size)]
            dealt = [world.shard(list(range(count))) for world in worlds]
            assert sum(dealt, []) == list(range(count))  # noqa: RUF017 (a few items)
            firsts = [world.first(count) for world in worlds]
            assert firsts == [sum(map(len, dealt[:rank])) for rank in range(size)]


UNEVEN = """
trainer.prompts_per_iteration=6 -> 6 cannot be divided evenly over 4 ranks; 4 or 8 can
algorithm.branch_schedule=turns -> 2 .*each has one group in .*; set it to 4, or start 2
algorithm.branch_steps=[0,1,2] -> 2 .*the 3 groups of a prompt cannot be divided over 2
algorithm.branch_steps=[0,1] algorithm.update_every=branch -> 2 .*algorithm.update_every=branch takes an update from some groups
algorithm.name=tempflow_grpo sampling.num_steps=5 -> 2 .*the algorithm leaves out members without any advantage in all groups
algorithm.name=flow_grpo -> 2 .*each has one group in an iteration; set it
"""


@pytest.mark.parametrize(("overrides", "why"), rows(UNEVEN))
def test_prompts_that_cannot_be_dealt_evenly_are_refused(overrides, why):
    with pytest.raises(UserError, match=f"prompts_per_iteration={why}"):
        trainer(None, *overrides.split(), world=World(1, 4))


def test_a_number_is_shared_evenly_or_refused():
    with pytest.raises(UserError, match="=1 .* 4 ranks"):
        World(0, 4).share(1, "x")
    assert ALONE.share(7, "x") == 7


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "WORLD_SIZE"])
def test_an_environment_without_numbers_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "two")
    with pytest.raises(UserError, match=f"the environment's {variable}: "), joined("cpu"):
        pass


LAUNCHED = """
SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8 -> srun has .*RANK=[$].*docs/scaling.md
SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=8 -> None
SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8 RANK=0 WORLD_SIZE=8 -> None
SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 -> None
SLURM_PROCID=0 SLURM_NTASKS=8 -> None
OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 -> mpirun has .*RANK=[$]
PMI_SIZE=2 -> mpiexec has .*RANK=[$]
PMI_SIZE=two -> None
"""


@pytest.mark.parametrize(("variables", "said"), rows(LAUNCHED))
def test_processes_that_each_train_alone_are_told_once(monkeypatch, variables, said):
    """A batch script of a job with several tasks is a single process."""
    for name in ("RANK", "WORLD_SIZE", *(name for own in LAUNCHERS.values() for name in own)):
        monkeypatch.delenv(name, raising=False)
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))
    assert re.match(said, str(apart()))


LAUNCH = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"


def test_a_port_that_is_taken_is_no_rank_that_is_missing(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        for pair in f"{LAUNCH} MASTER_PORT={other.getsockname()[1]}".split():
            monkeypatch.setenv(*pair.split("="))
        with pytest.raises(RankLost, match="address already in use"), joined("cpu", 1):
            pass


@pytest.mark.slow
def test_ranks_that_are_never_started_are_not_waited_for_for_ever(monkeypatch):
    for pair in LAUNCH.split():
        monkeypatch.setenv(*pair.split("="))

    def refused(error, fact, device="cpu"):
        with pytest.raises(error, match=fact), joined(device, 1):
            pass

    refused(UserError, "WORLD_SIZE=2 asks for several processes, but .*MASTER_PORT")
    monkeypatch.setenv("MASTER_PORT", str(ranks.free_port()))
    refused(RankLost, "the 2 ranks did not find each other: Timed out after")
    refused(UserError, "policy.device=cuda:1: with several processes write auto", "cuda:1")


def part(world, folder):
    t = trainer(folder, world=world)
    if world.rank == 1:
        with torch.no_grad():
            t.policy.mean[0, 0, 0] += 1e-7
    t.save()


def test_weights_that_have_parted_are_not_saved(tmp_path):
    results = ranks.finish(ranks.start(2, part, tmp_path), tmp_path)
    assert all("the weights of ranks [1] are not rank 0's" in result["error"] for result in results)
    assert not (tmp_path / "checkpoints").exists()


REWARD = """
import os, signal
calls = 0
def it(images, prompts):
    global calls
    calls += 1
    if calls == 6 and os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return images.flatten(1).mean(1)
"""
"""Its calls: tried; base; iteration, evaluation, twice."""


@pytest.mark.slow  # three processes that import everything
def test_torchrun_is_all_it_takes_and_ends_when_a_rank_is_killed(capsys, tmp_path, tiny_config):
    """The whole launch, as a user starts it: two iterations, then rank 1 is killed within an
    evaluation, and nothing waits."""
    run, file = tmp_path / "run", tmp_path / "reward.py"
    launch = "-m torch.distributed.run --nproc-per-node=2 --standalone -m g2rpo train"
    reward = own_reward(file, REWARD)
    options = [str(tiny_config), "trainer.prompts_per_iteration=2", *map(str, reward)]
    command = [sys.executable, *launch.split(), *options, "--run-dir", str(run)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and "Signal 9 (SIGKILL)" in ended.stderr, ended.stderr
    assert ended.stdout.count("on 2 ranks") == 1
    begun = [("eval", 0), ("train", 1), ("eval", 1), ("train", 2)]
    rows = Run(run).read_log()
    assert [(row["kind"], row["iteration"]) for row in rows] == begun
    assert {row["ranks"] for row in rows if row["kind"] == "train"} == {2}
    done(capsys, "resume", run, "--plugin", file)
    assert [(row["kind"], row["iteration"]) for row in Run(run).read_log()] == [*begun, ("eval", 2)]
    assert (run / "adapter" / "pytorch_lora_weights.safetensors").is_file()


def test_memory_that_runs_out_in_a_collective_is_not_a_lost_rank():
    with pytest.raises(torch.OutOfMemoryError), World()._collective():
        raise torch.OutOfMemoryError("CUDA out of memory")
