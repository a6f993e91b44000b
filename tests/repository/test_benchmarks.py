"""The loop that the engine is measured against does what is published, and gives the same latents."""

import pytest
import torch
from PIL import Image

from benchmarks.fast_tails import agreement
from benchmarks.machine import matmul_rate
from benchmarks.published_loop import PublishedLoop
from benchmarks.rollout import published_evaluations
from benchmarks.second_reader import available, read_words
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.rollout.engine import Engine
from g2rpo.testbed.words.drawing import draw
from g2rpo.testbed.words.language import parse, prompts
from tests.rollout.test_engine import SIGMAS, Network, noise
from tests.support.runs import brightness


@pytest.mark.parametrize(("granularities", "published"), [((1,), 1216), ((1, 2), 1792), ((1, 2, 3), 2188)])
def test_the_published_loop_needs_what_is_published_and_the_engine_gives_its_latents(granularities, published):
    """Elementwise float32 arithmetic in another batch: the last bits of |x| ~ 3 over 16 steps."""
    algorithm, policy = GranularGRPO(granularities=granularities), Network(size=1)
    loop = PublishedLoop(policy, SIGMAS, algorithm, {"bright": brightness})
    (finals,) = loop.rollout(["0.1"], noise)
    assert loop.evaluations == published == published_evaluations(algorithm)
    engine = Engine(policy=policy, cond=policy.encode(["0.1"]), sigmas=SIGMAS)
    rollouts = engine.rollout(algorithm.plans(16), algorithm.group_size, algorithm.kernel(SIGMAS), noise)
    torch.testing.assert_close(torch.stack([rollout.finals for rollout in rollouts]), finals, atol=1e-5, rtol=0)


def test_agreement_of_rewards():
    """By hand: one group keeps its ranks, one turns them round, one is silent; errors are 0, (2 + 0 + 2) / 3 and 1."""
    exact = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    fast = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 2.0, 2.0]])
    found = agreement(exact, fast)
    assert found["absolute_error"] == pytest.approx((0 + 4 / 3 + 1) / 3)
    assert (found["spearman"], found["groups"]) == (pytest.approx(0), 2)
    assert found["spearman_std"] == pytest.approx(2**0.5)  # of +1 and -1
    assert found["spread_in_groups"] == pytest.approx(2 / 3)


def test_the_rate_of_a_matrix_product_is_counted_right():
    """A clock that says one second for every product: 2 * 1024^3 operations a second."""
    ticks = iter(range(10**6))
    assert matmul_rate(torch.float32, torch.device("cpu"), lambda: next(ticks), seconds=0.05) == 2 * 1024**3


@pytest.mark.skipif(not available(), reason="tesseract is not installed")
def test_the_second_reader_reads_clean_words_in_their_order(tmp_path):
    words = [parse(prompt) for prompt in prompts("heldout")[:6]]
    files = [tmp_path / f"{i}.png" for i in range(6)]
    for word, file in zip(words, files, strict=True):
        Image.fromarray(draw(word)).save(file)
    assert read_words(files) == [word.letters for word in words]
