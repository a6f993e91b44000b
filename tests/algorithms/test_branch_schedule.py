"""Branch steps spread over iterations: which one an iteration takes."""

from collections import Counter

from g2rpo.algorithms.g2rpo import GranularGRPO

STEPS = (0, 2, 3, 5)


def taken(algorithm, iterations, seed=0):
    """The branch steps of each iteration."""
    return [
        tuple(plan.branch for plan in algorithm.plans(10, iteration, seed))
        for iteration in range(iterations)
    ]


def test_turns_follow_the_order_and_begin_anew():
    turns = taken(GranularGRPO(branch_steps=(3, 0, 5), branch_schedule="turns"), 7)
    assert turns == [(3,), (0,), (5,)] * 2 + [(3,)]


def test_random_takes_each_equally_often_and_is_a_function_of_the_seed():
    algorithm = GranularGRPO(branch_steps=STEPS, branch_schedule="random")
    drawn = taken(algorithm, 400)
    assert drawn == taken(algorithm, 400) and drawn != taken(algorithm, 400, seed=1)
    often = Counter(drawn)
    assert set(often) == {(step,) for step in STEPS}
    # five standard deviations
    assert all(abs(n - 100) < 5 * (400 * 0.25 * 0.75) ** 0.5 for n in often.values())
