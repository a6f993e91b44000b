"""Teaching by clicks on the Gaussian policy: what an answer changes, what it must not, and that
answers repeat a session."""

from contextlib import contextmanager

import pytest
import torch

from g2rpo.core.errors import UserError
from g2rpo.core.rewards import Reward
from g2rpo.data.pairs import read_pairs
from g2rpo.data.prompts import PromptOrder
from g2rpo.lab.teach import rounds
from g2rpo.lab.teach import session as sessions
from g2rpo.lab.teach.command import TEACH_OVERRIDES, opened, teach_config
from g2rpo.lab.teach.session import ITERATIONS_PER_ANSWER, Session
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rewards.pairs import Pairs
from g2rpo.train.command import train
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.run.folder import Run
from tests.support.runs import brightness, mean, trainer
from tests.support.tables import rows


def redness(images, prompts=()):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def nothing(images, prompts):
    return torch.zeros(len(prompts))


@contextmanager
def begun(run_dir, *overrides, judges=None, **more):
    words = """rewards.clicks={kind: pairs}
        algorithm.group_size=12
        sampling.num_steps=4
        evaluation.num_prompts=3
        trainer.iterations=1000
        trainer.prompts_per_iteration=2"""
    made = trainer(
        run_dir,
        *(own for own in TEACH_OVERRIDES if not own.startswith("rewards.")),
        *map(str.strip, words.splitlines()),
        *overrides,
        policy=GaussianPolicy(size=8),
        rewards={"clicks": Pairs(), "bright": brightness},
        judges=judges or {"dark": nothing},
    )
    s = Session(trainer=made, notify=lambda words: None, **more)
    with s.begun():
        yield s


@pytest.fixture(autouse=True)
def far(monkeypatch):
    """Learning does not pause."""
    monkeypatch.setattr(sessions, "AIMED_RISE", 1e9)


def teach(s, rounds, score=redness):
    """Answers with the picture of the highest score."""
    for _ in range(rounds):
        s.answer((int(score(s.group.images).argmax()),), round=s.asked)
    return s


def red_after(s):
    return redness(s.trainer.sample(["0", "0.1"])).mean()


def test_a_person_who_likes_red_makes_pictures_red(tmp_path):
    """And the answers are kept as pairs, to which the reward of another run is fitted."""
    with begun(tmp_path) as s:
        before = red_after(s)
        teach(s, 10)
        assert s.learnt.head.trusted and s.trainer.iteration >= 4 * ITERATIONS_PER_ANSWER
        assert red_after(s) > before + 0.01
        assert "deviations more as you like it" in s.headline
        _, was, now = s.changed()[0]
        assert redness(now[None].float()) > redness(was[None].float())
        table = s.finish()
    assert table["clicks"].tuned > table["clicks"].base != 0
    assert len(read_pairs(tmp_path / "pairs.jsonl")) == 10 * 11
    again = Pairs(path=str(tmp_path / "pairs.jsonl"))
    again.prepare(8, 8)
    red, grey = torch.zeros(2, 3, 8, 8) + 0.5, torch.zeros(2, 3, 8, 8) + 0.5
    red[:, 0] += 0.3
    assert (again(red, ["", ""]) > again(grey, ["", ""])).all()


@pytest.mark.parametrize("person", ["none", "clicks at random"])
def test_who_says_nothing_changes_nothing(tmp_path, person):
    with begun(tmp_path) as s:
        before = mean(s.trainer)
        for number in range(6):
            chance = torch.randint(12, (), generator=torch.Generator().manual_seed(number))
            s.answer(() if person == "none" else (int(chance),), round=number)
        assert torch.equal(mean(s.trainer), before) and s.trainer.iteration == 0 and s.asked == 6


def test_answers_repeat_a_session_bit_for_bit(tmp_path):
    """From the file of another session, and in the run itself, after which both go on alike."""
    with begun(tmp_path / "a") as s:
        teach(s, 6).undo()
        teach(s, 1)
    stored = rounds.read_votes(tmp_path / "a" / "votes.jsonl")
    assert [vote.kind for vote in stored] == ["vote"] * 6 + ["undo", "vote"]
    with begun(tmp_path / "b") as again:
        again.repeat(stored)
    with begun(tmp_path / "a") as reopened:
        assert reopened.group.digest == again.group.digest
    for other in (again, reopened):
        assert torch.equal(mean(other.trainer), mean(s.trainer)) and s.trainer.iteration > 0
    assert rounds.read_votes(tmp_path / "a" / "votes.jsonl") == stored


@pytest.mark.slow
def test_learning_in_the_background_learns_the_same(tmp_path):
    """Answers as fast as groups are ready, and an undo; after an error the next answer raises it."""
    with begun(tmp_path / "a", background=True) as s:
        teach(s, 9).undo()
        teach(s, 1).finish()
    with begun(tmp_path / "b") as again:
        again.repeat(rounds.read_votes(tmp_path / "a" / "votes.jsonl"))
        again.finish()
    assert torch.equal(mean(s.trainer), mean(again.trainer)) and s.asked == again.asked == 9
    with begun(tmp_path / "c", background=True) as broken:
        broken._learn = lambda group, liked: 1 / 0
        broken.answer((0,), round=0)
        answer_again = lambda: broken.answer((0,), round=1) and broken.group  # noqa: E731
        for act in (answer_again, broken.undo, broken.finish):
            with pytest.raises(ZeroDivisionError):
                act()


@pytest.mark.slow
def test_a_kill_between_an_answer_and_its_update_loses_nothing(tmp_path, monkeypatch):
    with begun(tmp_path / "b") as whole:
        teach(whole, 9)
    with begun(tmp_path / "a") as s:
        teach(s, 8)
        monkeypatch.setattr(s.trainer, "iterate", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            teach(s, 1)
    with begun(tmp_path / "a") as after:
        assert torch.equal(mean(after.trainer), mean(whole.trainer))


def test_undo_takes_back_weights_and_answer(tmp_path):
    with begun(tmp_path) as s:
        teach(s, 6)
        before, head, asked = mean(s.trainer), s.learnt.head, s.group.digest
        teach(s, 1)
        assert not torch.equal(mean(s.trainer), before)
        s.undo()
        assert torch.equal(mean(s.trainer), before) and s.group.digest == asked
        assert s.learnt.head is head is s.clicks.head
        for _ in range(6):
            s.undo()
        with pytest.raises(UserError, match="no answer that could be taken back"):
            s.undo()


class Falls(Reward):
    """A judge by which pictures are worse after the first evaluation, each by its own."""

    def __init__(self):
        self.seen = 0

    def __call__(self, images, prompts):
        self.seen += 1
        worse = 0.0 if self.seen == 1 else 1.0
        return torch.linspace(0.0, 0.1, len(images)) - worse


def test_weights_go_back_when_a_judge_falls(tmp_path):
    with begun(tmp_path, judges={"fell": Falls()}) as s:
        before, said = mean(s.trainer), []
        s.notify = said.append
        while s.learnt.rate_factor == 1.0:
            teach(s, 1)
        assert torch.equal(mean(s.trainer), before) and s.learnt.rate_factor == 0.5
    assert "fell fell, so the weights before are back" in said[0]


def test_learning_pauses_where_it_was_to_go(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "AIMED_RISE", 0.05)
    with begun(tmp_path) as s:
        while not s.learnt.enough:
            teach(s, 1)
        done, rise = s.trainer.iteration, s.learnt.rise
        teach(s, 2)
        assert rise[0] - rise[1] >= 0.05
        assert s.trainer.iteration == done or not s.learnt.enough


def test_wrong_answers_are_refused_and_not_written(tmp_path):
    refused = [
        ((0,), {"round": 1}, "is not the one that is asked"),
        ((0,), {"round": 0, "digest": "0" * 16}, "has other pictures by now"),
        ((12,), {"round": 0}, "names some of the 12 pictures"),
        ((-1,), {"round": 0}, "names some of the 12 pictures"),
        (range(12), {"round": 0}, "not all of them"),
    ]
    with begun(tmp_path) as s:
        for liked, of, said in refused:
            with pytest.raises(UserError, match=said):
                s.answer(liked, **of)
        sound = {"act": "answer", "round": 0, "digest": "", "liked": [0]}
        for wrong in ({"act": "like"}, {"round": None}, {"digest": 0}, {"liked": [{}]}):
            with pytest.raises(UserError, match=f"a page sent no answer: {next(iter(wrong))}"):
                s.hear(sound | wrong)
        assert rounds.read_votes(tmp_path / "votes.jsonl") == []
        t = s.trainer
        first = PromptOrder(t.prompts, t.config.trainer.seed).batch(0, rounds.MOST_PROMPTS)
        assert s.group.prompt in first  # those that training begins with


def test_what_changed_is_first_what_became_right(tmp_path):
    """The headline has the shares; of two prompts the one that became right comes first."""
    with begun(tmp_path) as s:
        teach(s, 4)
        base = s.trainer.base
        was, now = (
            Evaluation(base.prompts, base.images, base.scores, torch.tensor(right))
            for right in ([0.0, 1.0, 0.0], [0.0, 1.0, 1.0])
        )
        s.trainer.evaluator.baseline, s.learnt.shown = was, now
        assert s.headline.replace("\N{NO-BREAK SPACE}", " ") == "33 % → 67 % right"
        assert s.changed()[0][0] == base.prompts[2]


GUARDS = """
trainer.seed=1 -> ocr=0.05882 word_drawing=0.02353 word_colour=0.01765 clicks=1
rewards.ocr= -> word_drawing=0.05714 word_colour=0.04286 clicks=1
rewards.ocr= rewards.clicks.weight=0.2 -> word_drawing=0.4 word_colour=0.3 clicks=0.2
"""
"""With all of the guards, without one, and with a weight of one's own."""


@pytest.mark.quick
@pytest.mark.parametrize(("overrides", "weights"), rows(GUARDS))
def test_guards_weigh_a_tenth_of_the_clicks(overrides, weights):
    rewards = teach_config("words", overrides.split(), print).rewards
    assert " ".join(f"{name}={one.weight:g}" for name, one in rewards.items()) == weights


@pytest.mark.quick
def test_the_config_of_a_session_is_taught_as_it_is_and_not_trained(tmp_path):
    config = teach_config("words", [], print)
    Run(tmp_path).claim(config)
    assert teach_config(str(tmp_path / "config.yaml"), [], print).rewards == config.rewards
    with pytest.raises(UserError, match=r"rewards.clicks.options.path: names no pairs"):
        train(str(tmp_path / "config.yaml"), [], tmp_path / "other")
    with pytest.raises(UserError, match="was not begun by g2rpo teach"), opened(str(tmp_path)):
        pass
    Run(tmp_path).votes.touch()
    elsewhere = pytest.raises(UserError, match="--run-dir is for a recipe; .* goes on where it is")
    with elsewhere, opened(str(tmp_path), run_dir=tmp_path / "other"):
        pass
    with pytest.raises(UserError, match="algorithm.name=g2rpo and a reward clicks of the kind"):
        Session(trainer=trainer(None))


def test_a_group_is_of_the_prompt_whose_pictures_differ_most(tmp_path, monkeypatch):
    with begun(tmp_path) as s:
        candidates = list(dict.fromkeys(s._drawn.order.batch(5, rounds.CANDIDATE_PROMPTS)))
        wide = candidates[-1]

        def drawn(round, step, prompts, size, first=0):
            return [torch.rand(size, 3, 8, 8) * (1.0 if one == wide else 0.1) for one in prompts]

        monkeypatch.setattr(s._drawn, "pictures", drawn)
        assert s._drawn.draw(5).prompt == wide
