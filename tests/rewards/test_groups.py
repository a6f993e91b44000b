"""Rewards that compare: they see whole groups of one prompt in training, held-out evaluation and on
every rank; win rates."""

import itertools
import math
from collections import Counter

import pytest
import torch

from g2rpo.core.errors import UserError
from g2rpo.rewards.pairwise import PairwiseVLM, pairs_of
from g2rpo.rollout.scoring import score
from tests.rewards.chat_server import chatting, means_in, pictures_in, text_in
from tests.support.edits import edits
from tests.support.pictures import flat
from tests.support.ranks import run
from tests.support.refusals import refusal
from tests.support.runs import brightness, groups_of, trainer

GREY = torch.tensor([51, 204, 153, 102]) / 255


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
def test_a_group_is_one_prompt_step_and_granularity_whatever_the_batch(batch):
    ranks, overrides = Ranks(), ["rewards.alone=1.0", f"sampling.decode_batch_size={batch}"]
    t = trainer(None, *overrides, rewards={"bright": ranks, "alone": brightness})
    members, rewards = t.algorithm.group_size, groups_of(t).rewards  # [N, R, M, G]
    shares, means = rewards[:, 0], rewards[:, 1]
    assert ranks.sizes == [members] * shares.shape[:2].numel() and shares.shape[1] > 1
    darker = (means[..., None] > means[..., None, :]).sum(-1) / (members - 1)
    torch.testing.assert_close(shares, darker)


def test_a_held_out_picture_is_compared_with_the_bases_of_the_same_noise():
    t = trainer(None, rewards={"bright": Ranks()}, judges={"alone": brightness})
    first = t.score_heldout().scores
    assert not first["bright"].any()  # it is the base's own picture: nothing is darker
    with torch.no_grad():
        t.learner.parameters[0].add_(0.5)
    second = t.score_heldout().scores
    assert torch.equal(second["bright"], (second["alone"] > first["alone"]).float())
    assert second["bright"].any()
    with t.policy.base():  # as controls are sampled after training; a batch at a time
        t.sizes.rollout = 1
        again = t.score_heldout().scores
    assert torch.equal(again["alone"], first["alone"]) and not again["bright"].any()


def train_on(world, folder):
    t = trainer(folder / "run", rewards={"bright": Ranks()}, world=world)
    rewards = [t.iterate()["reward/bright"] for _ in range(2)]
    return [rewards, t.learner.parameters[0].tolist()]


def test_ranks_compare_what_one_process_compares(tmp_path):
    alone = trainer(tmp_path / "alone", rewards={"bright": Ranks()})
    rewards = [alone.iterate()["reward/bright"] for _ in range(2)]
    one, two = run(2, train_on, tmp_path)
    # of sums of float32 in another order
    assert one == two and one[0] == pytest.approx(rewards, abs=1e-6)


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("policy.tuning=full", "held-out pictures are compared"),
    ],
)
def test_where_there_is_nothing_to_compare_a_run_is_refused(override, fact):
    judge = "rewards.judge={kind: pairwise_vlm, options: {url: 'http://127.0.0.1:9', model: m}}"
    assert fact in refusal(judge, override)


def test_clips_are_compared_moment_by_moment():
    halves = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.9, 0.6]]).repeat_interleave(4, 1)
    clips = halves[..., None, None, None].expand(3, 8, 3, 2, 2)
    assert score({"ranks": Ranks()}, clips, ["a"] * 3, members=3).tolist() == [[0.5, 0.25, 0.75]]
    with pytest.raises(UserError, match="compares the pictures of a group, and these are single"):
        score({"ranks": Ranks()}, torch.zeros(2, 3, 4, 4), ["a", "b"])


def win_of(first, second, bias=1.0):
    return 1 / (1 + math.exp(-(4 * (first - second) + bias)))


def test_win_rates_are_free_of_a_preference_for_a_place():
    """A model that likes bright pictures, and whatever is first. Greys are levels of 8 bits, and a
    mean of float32 logarithms errs by 1e-6."""

    def first_token(body):
        win = win_of(*means_in(body)[-2:]) if len(pictures_in(body)) > 1 else 0.5
        shares = {"1": 0.9 * win, " 2": 0.9 * (1 - win)}
        rows = [{"token": word, "logprob": math.log(share)} for word, share in shares.items()]
        return {**rows[0], "top_logprobs": rows}

    with chatting() as server:
        server.first_token = first_token
        judge = PairwiseVLM(server.url, "judge")
        scores = judge(flat(*GREY), ["a"] * 4)
        asked = {tuple(means_in(body)) for body in server.requests[1:]}
        assert len(asked) == len(server.requests[1:]) == 12
        same = judge(flat(*GREY[[0, 0, 0]]), ["a"] * 3).tolist()
    assert same == pytest.approx([0.5] * 3, abs=1e-6)
    wins = [[(win_of(i, j) + 1 - win_of(j, i)) / 2 for j in GREY if j != i] for i in GREY]
    torch.testing.assert_close(scores, torch.tensor(wins).mean(1), atol=1e-5, rtol=0)


def test_words_ties_and_missing_answers(tmp_path):
    """In words: bright ones are better, near ones equal, and the darkest cannot be judged when it
    is first."""

    def says(body):
        first, second = means_in(body)[-2:]
        better = 1.5 if abs(first - second) < 0.25 else 1 if first > second else 2
        said = f"Better Picture: 1 or 2?\nBetter Picture: {better}"
        return "I cannot say." if first < 0.3 else said

    (prompt,) = edits(tmp_path, red=(0.5,))
    with chatting(says=says) as server:
        scores = PairwiseVLM(server.url, "judge", form="final")(flat(*GREY), [prompt] * 4)
        last = server.requests[-1]
    assert "by this instruction:\nmake it red" in text_in(last) and len(pictures_in(last)) == 3
    # .8 ties .6 and beats .4; .6 ties both
    assert scores[0].isnan() and scores[1:].tolist() == [0.75, 0.5, 0.25]


@pytest.mark.parametrize("members", [2, 3, 5, 6, 12])
def test_pairs_are_a_tournament(members):
    everyone = [frozenset(pair) for pair in pairs_of(members, None, 0)]
    assert sorted(map(sorted, everyone)) == [*map(list, itertools.combinations(range(members), 2))]
    for most in range(1, len(everyone)):
        pairs, met = pairs_of(members, most, 0), Counter(dict.fromkeys(range(members), 0))
        met.update(itertools.chain(*pairs))
        assert len(pairs) == most
        assert max(met.values()) - min(met.values()) <= 1 + members % 2
    assert members == 2 or pairs_of(members, None, 1) != pairs_of(members, None, 0)
