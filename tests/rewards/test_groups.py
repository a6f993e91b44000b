"""Rewards that compare: they see whole groups of one prompt in training, held-out evaluation and on
every rank; win rates."""

import itertools
import math
from collections import Counter

import pytest
import torch

from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.rewards.pairwise import PairwiseVLM, pairs_of
from g2rpo.rewards.server import RewardServer
from g2rpo.rollout.scoring import score
from tests.rewards.chat_server import ChatServer, mean_of, running
from tests.support.edits import edits
from tests.support.ranks import finish, start
from tests.support.runs import brightness, trainer

QUICK = {"timeout_s": 5.0, "retries": 0}
GREY = torch.tensor([0.2, 0.8, 0.6, 0.4])


class Ranks:
    """The share of the other pictures that are darker; remembers the sizes of groups."""

    group = True

    def __init__(self):
        self.sizes = []

    def __call__(self, images, prompts):
        assert len(set(prompts)) == 1
        self.sizes.append(len(images))
        means = images.flatten(1).mean(1)
        return (means[:, None] > means).sum(1) / (len(means) - 1)


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_a_group_is_one_prompt_step_and_granularity_whatever_the_batch(batch, monkeypatch):
    both = ["rewards.alone=1.0", f"sampling.decode_batch_size={batch}"]
    t = trainer(None, *both, rewards={"bright": Ranks(), "alone": brightness})
    kept = []
    collect = t.collector.collect
    monkeypatch.setattr(
        t.collector, "collect", lambda *arguments: kept.append(collect(*arguments)) or kept[0]
    )
    t.iterate()
    members = t.algorithm.group_size
    assert set(t.rewards["bright"].scorer.sizes) == {members}
    ranks, means = kept[0].rewards[:, 0], kept[0].rewards[:, 1]  # [N, M, G]
    assert ranks.shape[1] > 1 and len(t.rewards["bright"].scorer.sizes) == ranks.shape[:2].numel()
    torch.testing.assert_close(
        ranks, (means[..., None] > means[..., None, :]).sum(-1) / (members - 1)
    )


def test_a_held_out_picture_is_compared_with_the_bases_of_the_same_noise():
    t = trainer(None, rewards={"bright": Ranks()}, judges={"alone": brightness})
    first = t.score_heldout()
    assert not first.scores["bright"].any()  # it is the base's own picture: nothing is darker
    with torch.no_grad():
        t.learner.parameters[0].add_(0.5)
    before, now = first.scores["alone"], (second := t.score_heldout()).scores["alone"]
    assert (
        torch.equal(second.scores["bright"], (now > before).float())
        and second.scores["bright"].any()
    )


def train_on(world, folder):
    t = trainer(folder / "run", "trainer.iterations=2", rewards={"bright": Ranks()}, world=world)
    rows = list(t.train())
    return [[row["reward/bright"] for row in rows], t.learner.parameters[0].tolist()]


def test_ranks_compare_what_one_process_compares(tmp_path):
    alone = trainer(tmp_path / "alone", "trainer.iterations=2", rewards={"bright": Ranks()})
    rows = list(alone.train())
    one, two = (left["answer"] for left in finish(start(2, train_on, tmp_path), tmp_path))
    assert one == two and one[0] == pytest.approx([row["reward/bright"] for row in rows], abs=1e-6)


def test_where_there_is_nothing_to_compare_a_run_is_refused(tmp_path):
    (tmp_path / "ranks.py").write_text(
        "def ranks(images, prompts):\n    return [0.0] * len(prompts)\nranks.group = True\n"
    )
    plugins.allow(f"{tmp_path}/ranks.py")
    judge = [
        "rewards.judge.kind=pairwise_vlm",
        "rewards.judge.options.url=http://127.0.0.1:9",
        "rewards.judge.options.model=m",
    ]
    for override, fact in (
        ("algorithm.name=adagrpo", "single pictures"),
        ("policy.tuning=full", "held-out pictures are compared"),
    ):
        with pytest.raises(UserError, match=fact):
            check(load_config("scenes", [*judge, override]))
    with pytest.raises(
        UserError, match="compares the pictures of a group, and these are single ones"
    ):
        score({"ranks": Ranks()}, torch.zeros(2, 3, 4, 4), ["a", "b"])
    with pytest.raises(ValueError, match="whole groups"):
        RewardServer(Ranks())


def test_clips_are_compared_moment_by_moment():
    clips = (
        torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.9, 0.6]])
        .repeat_interleave(4, 1)[..., None, None, None]
        .expand(3, 8, 3, 2, 2)
    )
    assert score({"ranks": Ranks()}, clips, ["a"] * 3, members=3).tolist() == [[0.5, 0.25, 0.75]]


def flat(values):
    return values.reshape(-1, 1, 1, 1).expand(-1, 3, 24, 32).contiguous()


def of_pair(body):
    """The means of the two last pictures of a request."""
    return [mean_of(part) for part in body["messages"][0]["content"][:-1]][-2:]


def win_of(first, second, bias=1.0):
    return 1 / (1 + math.exp(-(4 * (first - second) + bias)))


def prefers_the_first(server):
    """A model that likes bright pictures, and whatever is first."""

    def first_token(body):
        win = win_of(*of_pair(body)) if len(body["messages"][0]["content"]) > 2 else 0.5
        rows = [
            {"token": "1", "logprob": math.log(0.9 * win)},
            {"token": " 2", "logprob": math.log(0.9 * (1 - win))},
        ]
        return {**rows[0], "top_logprobs": rows}

    server.first_token = first_token
    return server


def test_win_rates_are_free_of_a_preference_for_a_place():
    with running(server := prefers_the_first(ChatServer("vllm"))):
        judge = PairwiseVLM(server.url, "judge", endpoint=QUICK)
        scores = judge(flat(GREY), ["a"] * 4)
        asked = [of_pair(body) for body in server.requests[1:]]
        assert len(asked) == 12 and len({tuple(map(str, pair)) for pair in asked}) == 12
        assert judge(flat(GREY[[0, 0, 0]]), ["a"] * 3).tolist() == pytest.approx(
            [0.5] * 3, abs=1e-6
        )
    levels = GREY.mul(255).round().div(255)
    wins = [[(win_of(i, j) + 1 - win_of(j, i)) / 2 for j in levels if j != i] for i in levels]
    torch.testing.assert_close(scores, torch.tensor(wins).mean(1), atol=1e-5, rtol=0)


def test_words_ties_and_missing_answers(tmp_path):
    """In words: bright ones are better, near ones equal, and the darkest cannot be judged when it
    is first."""

    def says(body):
        first, second = of_pair(body)
        better = 1.5 if abs(first - second) < 0.25 else 1 if first > second else 2
        return (
            "I cannot say." if first < 0.3 else f"Better Picture: 1 or 2?\nBetter Picture: {better}"
        )

    (prompt,) = edits(tmp_path, red=(0.5,))
    with running(server := ChatServer("vllm", says=says)):
        judge = PairwiseVLM(server.url, "judge", form="final", endpoint=QUICK)
        scores = judge(flat(GREY), [prompt] * 4)
        assert (
            "by this instruction:\nmake it red"
            in server.requests[-1]["messages"][0]["content"][-1]["text"]
        )
        assert len(server.requests[-1]["messages"][0]["content"]) == 4
    assert scores.isnan().tolist() == [True, False, False, False]
    assert scores[1:].tolist() == [0.75, 0.5, 0.25]  # .8 ties .6 and beats .4; .6 ties both


@pytest.mark.parametrize("members", [2, 3, 5, 6, 12])
def test_pairs_are_a_tournament(members):
    everyone = [frozenset(pair) for pair in pairs_of(members, None, 0)]
    assert len(everyone) == len(set(everyone)) and set(everyone) == set(
        map(frozenset, itertools.combinations(range(members), 2))
    )
    for most in range(1, len(everyone)):
        counts = Counter(member for pair in pairs_of(members, most, 0) for member in pair)
        assert (
            max(counts.values()) - min(counts[member] for member in range(members))
            <= 1 + members % 2
        )
    assert members == 2 or pairs_of(members, None, 1) != pairs_of(members, None, 0)
