"""Several ranks are one trainer: the same weights whatever their number, and one of them writes."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from g2rpo.core.errors import RankLost, UserError
from g2rpo.run.checkpoint import checkpoints
from g2rpo.run.run import Run
from g2rpo.runtime.distributed import ALONE, World, joined
from g2rpo.training import learner
from g2rpo.training.listeners.listener import Ask, asked_by
from tests.support import policies, ranks
from tests.support.commands import done
from tests.support.runs import asking, brightness, trainer, untimed

COMMON = ("trainer.prompts_per_iteration=4", "trainer.iterations=3")
ONE = ("trainer.prompts_per_iteration=1",)
VARIANTS = {
    "g2rpo": (),
    "gdpo": ("algorithm.reward_mix=gdpo", "algorithm.group_size=8"),
    "batch_std": (
        "algorithm.name=flow_grpo",
        "algorithm.group_size=6",
        "algorithm.update_every=3",
        "algorithm.kl_weight=0.5",
    ),
    "branch": ("algorithm.update_every=branch", "optim.ema_decay=0.9"),
    "plans of a prompt": (*ONE, "algorithm.branch_steps=[0,1,2,4]"),
    "plans, in parts": (
        *ONE,
        "algorithm.name=tests.support.own_algorithms:AllCount",
        "sampling.num_steps=5",
    ),
    "chosen prompts": (
        "algorithm.name=adagrpo",
        "algorithm.candidates=3",
        "algorithm.branch_steps=[0,2]",
    ),
}


def patchy(images, prompts):
    """Brightness, but one picture in three or so has no score; which ones depends on the picture
    alone."""
    scores = brightness(images, prompts)
    return torch.where((scores * 1e4).long() % 3 == 0, torch.nan, scores)


def train_gaussian(world, folder, overrides):
    t = trainer(folder, *COMMON, *overrides, rewards={"bright": patchy}, world=world)
    rows = [t.score_heldout().means(), *(t.iterate() for _ in range(3))]
    save_file({"mean": t.policy.mean.detach()}, folder / f"weights_{world.rank}.safetensors")
    return rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_learn_what_one_process_learns(tmp_path, variant):
    """1 x 4 = 2 x 2 = 4 x 1 prompts, or plans of one prompt. On this policy every member's
    arithmetic is the same whatever its batch, so only the order differs in which float32 gradients
    of n <= 144 members are added: an error of at most n 2^-24 < 1e-5 of the sum of their sizes.
    Adam divides by the gradient's own size, and lr = 0.05: 1e-5 in the weights leaves room for
    entries whose sum is up to twenty times smaller than its terms. A wrong normalisation shows as
    1e-2."""
    weights, logs = {}, {}
    sizes = (1, 2, 4) if variant in ("g2rpo", "plans of a prompt") else (1, 4)
    for size in sizes:
        folder = tmp_path / str(size)
        logs[size], *_ = ranks.run(size, train_gaussian, folder, VARIANTS[variant])
        files = [load_file(folder / f"weights_{rank}.safetensors")["mean"] for rank in range(size)]
        assert all(torch.equal(file, files[0]) for file in files), "ranks have parted"
        weights[size] = files[0]
    assert float(weights[1].abs().mean()) > 0.02  # it begins at 0
    for size in sizes[1:]:
        torch.testing.assert_close(weights[size], weights[1], atol=1e-5, rtol=0)
        for ours, alone in zip(logs[size], logs[1], strict=True):
            assert ours.keys() == alone.keys()
            same = {
                key
                for key in alone
                if not key.startswith("seconds") and key not in ("kind", "ranks")
            }
            if "plans" in variant:
                same.discard("evaluations")  # each rank walks to its own branch steps
            assert {key: ours[key] for key in same} == pytest.approx(
                {key: alone[key] for key in same}, rel=1e-4, abs=1e-6, nan_ok=True
            )


def train_flux(world, folder, model):
    options = (
        "sampling.batch_size=1",
        "sampling.decode_batch_size=1",
        "trainer.micro_batch_size=1",
    )
    options += ("algorithm.group_size=3", "algorithm.branch_steps=[0,1]", "sampling.num_steps=4")
    options += ("optim.learning_rate=0.5",)
    learner.EPSILON = 1.0  # in this rank's process
    policy = policies.load(model, height=32, width=32, max_sequence_length=12, lora_rank=2)
    prompts = ["a red circle", "two blue squares", "a blue circle", "a green star"]
    t = trainer(None, *COMMON, *options, policy=policy, prompts=prompts, world=world)
    for _ in range(2):
        t.iterate()
    own = {f"{i:03d}": p.detach() for i, p in enumerate(t.learner.parameters)}
    save_file(own, folder / f"weights_{world.rank}.safetensors")


def test_ranks_train_a_flux_lora_as_one_process_does(tmp_path, flux_directory):
    """Network calls of one row each, so that matrix products do not depend on the ranks' batches:
    again only the order of sums differs, of 8 branch points, by at most 8 x 2^-24 of gradients that
    are clipped at 1. With eps = 1 Adam's step is lr x m / (sqrt(v) + 1), which changes by at most
    lr = 0.5 times as much: 2.4e-7."""
    first = None
    for size in (1, 2):
        folder = tmp_path / str(size)
        ranks.run(size, train_flux, folder, str(flux_directory))
        for rank in range(size):
            own = load_file(folder / f"weights_{rank}.safetensors")
            first = first or own
            for name, value in own.items():
                torch.testing.assert_close(value, first[name], atol=3e-7, rtol=0)
    policy = policies.load(flux_directory, height=32, width=32, max_sequence_length=12, lora_rank=2)
    moved = [
        float((p.detach() - first[f"{i:03d}"]).abs().max())
        for i, p in enumerate(policy.trainable_parameters())
    ]
    assert max(moved) > 1e-3


def gather_all(world, folder):
    from_ranks = world.gather(
        torch.arange(world.rank * 10, world.rank * 10 + world.rank + 1)[:, None].float()
    )
    tensors = [torch.full((3, 2), float(world.rank + 1)), torch.tensor([0.5 * world.rank])]
    world.all_reduce(tensors)
    return [
        from_ranks.flatten().tolist(),
        world.total(world.rank, 1),
        world.broadcast_text(f"día {world.rank}"),
        world.differing(torch.tensor([min(world.rank, 1)])),
        [t.flatten().tolist() for t in tensors],
    ]


def test_what_ranks_tell_each_other(tmp_path):
    everywhere = [[0, 10, 11, 20, 21, 22], [3, 3], "día 0", [1, 2], [[6.0] * 6, [1.5]]]
    assert ranks.run(3, gather_all, tmp_path) == [everywhere] * 3


def judge(world, folder, count):
    heldout = [str(i / 20) for i in range(count)]
    t = trainer(folder / "run", "trainer.checkpoint_minutes=60", world=world, heldout=heldout)
    t.loop.iteration, t.checkpoints.unsaved = 1, True
    # hours ago by the clock of one rank: a checkpoint is due on all
    t.checkpoints.saved_at = -1e9 * world.is_main
    assert Ask.SAVE in asked_by(t.listeners, t.stopping, t.world)
    t.loop.iteration = 0
    row = untimed([t.evaluate()])
    return row, str(t.evaluator.baseline.images.dtype), t.evaluator.baseline.images.tolist()


def train_with_a_listener_on_the_last_rank(world, folder):
    options = ["trainer.iterations=3", "evaluation.every=9", "trainer.checkpoint_every=9"]
    t = trainer(folder, *options, world=world)
    if world.rank == world.size - 1:
        asking(t, Ask.EVALUATE | Ask.SAVE, after=1)
    rows = [[row["kind"], row["iteration"]] for row in t.train()]
    return rows, [
        path.name for path in checkpoints(folder / "checkpoints")
    ] if world.is_main else []


def test_what_a_listener_of_one_rank_asks_for_all_ranks_do(tmp_path):
    rows = [["eval", 0], ["train", 1], ["eval", 1], ["train", 2], ["train", 3], ["eval", 3]]
    first, second = ranks.run(2, train_with_a_listener_on_the_last_rank, tmp_path)
    assert first == [rows, ["iteration_000001", "iteration_000003"]] and second[0] == rows


@pytest.mark.parametrize(("count", "first"), [(5, 2), (3, 1), (1, 0)])
def test_pictures_meet_on_rank_0_in_8_bits_and_what_they_say_everywhere(count, first, tmp_path):
    """Of 5 held-out pictures rank 0 paints 2 and has all in the end; a single one is painted by
    both. Statistics of pictures are in every rank's row."""
    ((row, _, pictures),) = ranks.run(1, judge, tmp_path / "alone", count)
    assert ranks.run(2, judge, tmp_path / "two", count) == [
        [row, "torch.uint8", pictures],
        [row, "torch.uint8", pictures[first:]],
    ]


def test_dealt_items_are_the_whole_in_order():
    for count in range(12):
        for size in range(1, 6):
            dealt = [World(rank, size).shard(list(range(count))) for rank in range(size)]
            assert [item for part in dealt for item in part] == list(range(count))
            assert [World(rank, size).first(count) for rank in range(size)] == [
                sum(map(len, dealt[:r])) for r in range(size)
            ]


def test_prompts_that_cannot_be_dealt_evenly_are_refused():
    with pytest.raises(
        UserError,
        match=r"prompts_per_iteration=6 cannot be divided evenly over 4 ranks; 4 or 8 can",
    ):
        trainer(None, "trainer.prompts_per_iteration=6", world=World(1, 4))
    for more, why in (
        (
            "algorithm.branch_schedule=turns",
            "each has one group in .*branch_schedule=all one for every branch step; set it to 4, or start 2 ranks",
        ),
        (
            "algorithm.branch_steps=[0,1,2]",
            "the 3 groups of a prompt cannot be divided over 2 ranks",
        ),
        (
            "algorithm.branch_steps=[0,1] algorithm.update_every=branch",
            "algorithm.update_every=branch takes an update from some groups",
        ),
        (
            "algorithm.name=tempflow_grpo sampling.num_steps=5",
            "the algorithm leaves out members without any advantage in all groups",
        ),
        ("algorithm.name=flow_grpo", "each has one group in an iteration; set it"),
    ):
        with pytest.raises(
            UserError, match=f"prompts_per_iteration=2 cannot be divided over 4 ranks: {why}"
        ):
            trainer(None, "trainer.prompts_per_iteration=2", *more.split(), world=World(1, 4))
    with pytest.raises(UserError, match="=1 .* 4 ranks"):
        World(0, 4).share(1, "x")
    assert ALONE.share(7, "x") == 7


def test_ranks_that_are_never_started_are_not_waited_for_for_ever(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(
            UserError, match="WORLD_SIZE=2 asks for several processes, but .*MASTER_PORT"
        ),
        joined("cpu", 1),
    ):
        pass
    monkeypatch.setenv("MASTER_PORT", str(ranks.free_port()))
    with (
        pytest.raises(RankLost, match="the 2 ranks did not find each other within 1 s"),
        joined("cpu", 1),
    ):
        pass
    with (
        pytest.raises(UserError, match="policy.device=cuda:1: with several processes write auto"),
        joined("cuda:1", 1),
    ):
        pass


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


# three processes that import everything; ranks with torchrun's variables are forked in all other
# tests
@pytest.mark.slow
def test_torchrun_is_all_it_takes_and_ends_when_a_rank_is_killed(capsys, tmp_path, tiny_config):
    """The whole launch, as a user starts it: two iterations, then rank 1 is killed within an
    evaluation, and nothing waits."""
    lines = [
        "import os, signal",
        "calls = 0",
        "def it(images, prompts):",
        "    global calls",
        "    calls += 1",
    ]
    lines += [
        "    if calls == LAST and os.environ.get('RANK') == '1':",
        "        os.kill(os.getpid(), signal.SIGKILL)",
    ]
    lines += ["    return images.flatten(1).mean(1)"]
    # tried; base; iteration, evaluation, twice
    (tmp_path / "reward.py").write_text("\n".join(lines).replace("LAST", "6"))
    run, plugin = tmp_path / "run", ["--plugin", str(tmp_path / "reward.py")]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "g2rpo",
        "train",
    ]
    reward = f"rewards.it={{kind: function, options: {{target: {tmp_path / 'reward.py'}:it}}}}"
    options = [
        str(tiny_config),
        "trainer.prompts_per_iteration=2",
        "rewards=",
        reward,
        "--run-dir",
        str(run),
        *plugin,
    ]
    ended = subprocess.run([*launch, *options], capture_output=True, text=True, timeout=300)
    assert (
        ended.returncode == 1
        and "Signal 9 (SIGKILL)" in ended.stderr
        and ended.stdout.count("on 2 ranks") == 1
    ), ended.stderr
    begun = [("eval", 0), ("train", 1), ("eval", 1), ("train", 2)]
    rows = Run(run).read_log()
    assert [(row["kind"], row["iteration"]) for row in rows] == begun
    assert {row["ranks"] for row in rows if row["kind"] == "train"} == {2}
    done(capsys, "resume", run, *plugin)
    assert [(row["kind"], row["iteration"]) for row in Run(run).read_log()] == [*begun, ("eval", 2)]
    assert (run / "adapter" / "pytorch_lora_weights.safetensors").is_file()


def test_memory_that_runs_out_in_a_collective_is_not_a_lost_rank():
    with pytest.raises(torch.OutOfMemoryError), World()._collective():
        raise torch.OutOfMemoryError("CUDA out of memory")
