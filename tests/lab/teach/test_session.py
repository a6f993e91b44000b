"""Teaching by clicks on the Gaussian policy: what an answer changes, what it must not, and that
answers repeat a session."""

import dataclasses
import html
import json
import shlex
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from g2rpo.app.events import Line, Results
from g2rpo.app.train import train
from g2rpo.cli.results import show_run
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.images import to_uint8
from g2rpo.core.statistics import Interval
from g2rpo.core.types import Reward
from g2rpo.lab.report.history import SeedGroup, read_runs
from g2rpo.lab.report.page import facts
from g2rpo.lab.teach import commands, pupil
from g2rpo.lab.teach.blind import BlindTest
from g2rpo.lab.teach.commands import UNGUARDED, agree, opened, teach_config
from g2rpo.lab.teach.pupil import Pupil
from g2rpo.lab.teach.session import OVERRIDES, Lesson, Session
from g2rpo.lab.teach.told import Told
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.prompts.order import PromptOrder
from g2rpo.rewards import votes
from g2rpo.rewards.picture_features import features_of
from g2rpo.rewards.taste import Choice, Clicks, fit
from g2rpo.run.run import Run
from g2rpo.runtime.distributed import ALONE
from tests.support import ranks
from tests.support.commands import done
from tests.support.pictures import noise
from tests.support.runs import brightness, darkness, mean, picture, trainer
from tests.support.tolerances import near, rounding


def redness(images, prompts=()):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def nothing(images, prompts):
    return torch.zeros(len(prompts))


def session(run_dir, *overrides, judges=None, strength=1e9, world=ALONE, **more):
    made = trainer(
        run_dir,
        *OVERRIDES,
        *("rewards.clicks=1", "algorithm.group_size=12", "sampling.num_steps=6"),
        *("evaluation.num_prompts=3", "trainer.iterations=1000", "trainer.prompts_per_iteration=2"),
        *overrides,
        policy=GaussianPolicy(size=8),
        world=world,
        rewards={"clicks": Clicks(), "bright": brightness},
        judges=judges or {"dark": nothing},
    )
    s = Session(trainer=made, notify=lambda words: None, **more)
    s.pupil.strength = strength
    return s


@contextmanager
def begun(*arguments, **options):
    s = session(*arguments, **options)
    with s.begun():
        yield s


def likes(score, images):
    return (int(score(images, []).argmax()),)


def teach(s, rounds, score=redness):
    """Answers with the picture of the highest score."""
    for _ in range(rounds):
        s.answer(likes(score, s.group.images), round=s.asked)
    return s


def red_after(s):
    return redness(s.trainer.sample(["0", "0.1"])).mean()


@pytest.mark.slow
def test_a_person_who_likes_red_makes_pictures_red(tmp_path):
    with begun(tmp_path, prompt="0") as s:
        before = red_after(s)
        teach(s, 10)
        changes = s.pupil.changes
        assert s.pupil.learnt.head.trust > 0.3 and changes >= 4
        assert s.trainer.iteration == pupil.UPDATES * changes
        assert red_after(s) > before + 0.01
        base, now = s.pair
        assert now[0].mean() > base[0].mean()
        table, group = s.finish(), s.group.digest
    assert set(table) >= {"clicks", "bright"} and (tmp_path / "results.json").is_file()
    assert table["clicks"].tuned > table["clicks"].base != 0
    # as finish wrote it
    with begun(tmp_path, f"trainer.iterations={s.trainer.iteration}") as again:
        assert again.group.digest == group


@pytest.mark.parametrize("person", ["skips", "clicks at random", "likes red"])
def test_who_says_nothing_or_wants_no_change_changes_nothing(tmp_path, person):
    with begun(tmp_path, strength=0 if person == "likes red" else 1e9) as s:
        before = mean(s.trainer)
        for number in range(6):
            chance = torch.randint(12, (), generator=torch.Generator().manual_seed(number))
            clicked = {"skips": (), "likes red": likes(redness, s.group.images)}
            liked = clicked.get(person, (int(chance),))
            s.answer(liked, round=number, skipped=person == "skips")
        assert torch.equal(mean(s.trainer), before) and s.pupil.changes == 0 and s.asked == 6


def test_answers_repeat_a_session_bit_for_bit(tmp_path):
    """From the file of another session, and in the run itself, after which both go on alike."""
    with begun(tmp_path / "a") as s:
        teach(s, 5).undo()
        s.set_strength(2.0)
        teach(s, 1)
    stored = votes.read(tmp_path / "a" / "votes.jsonl")
    assert [vote.kind for vote in stored] == ["vote"] * 5 + ["undo", "strength", "vote"]
    with begun(tmp_path / "b") as again:
        again.repeat(stored)
    assert s.pupil.changes == again.pupil.changes > 0
    with begun(tmp_path / "a") as reopened:
        assert reopened.group.digest == again.group.digest
    for other in (again, reopened):
        assert torch.equal(mean(other.trainer), mean(s.trainer))
    assert votes.read(tmp_path / "a" / "votes.jsonl") == stored


@pytest.mark.slow
def test_learning_in_the_background_learns_the_same(tmp_path):
    """Answers as fast as groups are ready, an undo and a strength; after an error the next answer
    raises it."""
    with begun(tmp_path / "a", background=True, prompt="0") as s:
        teach(s, 9)
        assert s.learning
        s.undo()
        s.set_strength(2.0)
        teach(s, 1).finish()
        assert not s.learning and s.pupil.changes > 4
    with begun(tmp_path / "b", prompt="0") as again:
        again.repeat(votes.read(tmp_path / "a" / "votes.jsonl"))
    assert torch.equal(mean(s.trainer), mean(again.trainer)) and s.asked == again.asked == 9
    assert torch.equal(s.pair[1], again.pair[1])
    with begun(tmp_path / "c", background=True) as broken:
        broken.pupil.learn = lambda group, vote: 1 / 0
        broken.answer((0,), round=0)
        answer_again = lambda: broken.answer((0,), round=1) and broken.group  # noqa: E731
        for act in (answer_again, broken.undo, broken.finish):
            with pytest.raises(ZeroDivisionError):
                act()


def taught_on_ranks(world, folder):
    """Rank 0 is asked nine times, takes one answer back and compares; the others follow."""
    with begun(folder / "run", world=world, background=world.is_main) as s:
        if world.is_main:
            teach(s, 9).undo()
            s.begin_blind()
            compared(s, lambda images: likes(redness, images))
        else:
            s.follow()
        s.finish()
    learnt = s.pupil.learnt
    said = s.pupil.changes, s.asked, len(learnt.looks), len(learnt.pairs), s.blind.verdict
    return said, mean(s.trainer).flatten().tolist()


def test_what_a_session_begins_with_is_told_by_one_rank(tmp_path, monkeypatch):
    @contextmanager
    def second(device):
        yield SimpleNamespace(is_main=False, broadcast_text=lambda text: str(tmp_path))

    def built(request):
        request.emit(Line("encoding"))
        raise UserError("built")

    monkeypatch.setattr(commands, "joined", second)
    monkeypatch.setattr(commands, "build", built)
    said = []
    changed = ["algorithm.name=tempflow_grpo"]  # which begins with a note
    with pytest.raises(UserError, match="built"), opened("scenes", changed, emit=said.append):
        pass
    assert said == []


@pytest.mark.slow
def test_ranks_learn_from_the_answers_of_one(tmp_path):
    """What one process learns, but for the order of sums. Adam may make of rounding a whole step
    where a gradient is nearly 0, so not every weight is held to it, but the way of all."""
    first, second = ranks.run(2, taught_on_ranks, tmp_path / "two")
    (alone,) = ranks.run(1, taught_on_ranks, tmp_path / "one")
    assert first == second and first[0] == alone[0] and first[0][0] > 4
    together, lonely = torch.tensor(first[1]), torch.tensor(alone[1])
    way = lonely - GaussianPolicy(size=8).mean.detach().flatten()
    assert (together - lonely).norm() < 0.01 * way.norm()
    assert len(votes.read(tmp_path / "two" / "run" / "votes.jsonl")) == 13


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
        assert after.asked == 9 and torch.equal(mean(after.trainer), mean(whole.trainer))


def test_undo_takes_back_weights_and_answer(tmp_path):
    with begun(tmp_path) as s:
        teach(s, 4)
        weights, group, head = mean(s.trainer), s.group, s.pupil.learnt.head.direction
        teach(s, 1)
        assert not torch.equal(mean(s.trainer), weights)
        s.undo()
        assert torch.equal(mean(s.trainer), weights) and s.pupil.answered == 4
        assert torch.equal(s.pupil.learnt.head.direction, head) and s.group.digest == group.digest
        for _ in range(4):
            s.undo()
        with pytest.raises(UserError, match="no answer"):
            s.undo()


def grey(images, prompts):
    return -redness(images)


def hardly_grey(images, prompts):
    """Its falls are small beside the deviation between prompts."""
    return grey(images, prompts) + torch.tensor([100.0 * sum(map(ord, one)) for one in prompts])


@pytest.mark.parametrize(
    ("judge", "directly"),
    [(nothing, False), (grey, False), (nothing, True), (grey, True), (hardly_grey, True)],
)
def test_weights_go_back_when_a_judge_falls(tmp_path, judge, directly):
    """A judge that is minus red finds every look bad: weights stay the base's, and steps shrink.
    With one that knows nothing, steps grow, up to the largest. Without a head as well. The report
    is of the weights that were kept."""
    learns = judge is not grey
    strength = 1.0 if directly else 1e9
    with begun(tmp_path, "alarms.pictures=off", judges={"dark": judge}, strength=strength) as s:
        before, base = mean(s.trainer), s.trainer.base
        if directly:
            s.learn_directly()
        while not s.pupil.learnt.looks:
            teach(s, 1)
        learnt = s.pupil.learnt
        assert torch.equal(mean(s.trainer), before) != learns
        assert learnt.looks[0].wrong.startswith("dark") != learns
        grown = min(pupil.LARGEST_STEP, pupil.GROW)
        assert learnt.step == (grown if learns else pupil.SHRINK) and s.trainer.base is base
        clicks = s.pupil.clicks.scores(base.images.float() / 255, base.prompts)
        # of the head that scored the others
        assert torch.equal(s.trainer.run.read_scores(0, ["clicks"])["clicks"], clicks)
        table = s.finish()
    (run,) = read_runs([tmp_path])
    told = SeedGroup((run,)).changes
    for name, one in table.items():
        assert (told[name].base, told[name].tuned) == pytest.approx((one.base, one.tuned))
    assert facts(run)["Iterations"] == f"{s.trainer.iteration} of {s.trainer.iteration}"


def test_what_is_told_in_the_end_is_of_the_weights_that_are_kept(tmp_path, monkeypatch):
    """Which need not be the last ones that were nearer to the taste."""
    monkeypatch.setattr(Pupil, "_nearer", lambda *seen: False)
    with begun(tmp_path) as s:
        while not s.pupil.learnt.looks:
            teach(s, 1)
        s.finish()
    kept = features_of(s.trainer.final.images.float() / 255, s.trainer.heldout)
    assert torch.equal(s.pupil.learnt.heldout[1]["colour"], kept["colour"])


@pytest.mark.slow
def test_weights_go_back_when_two_looks_are_no_nearer_to_the_taste(tmp_path):
    with begun(tmp_path, "alarms.pictures=off") as s:
        s.pupil.rate = 0
        while len(s.pupil.learnt.looks) < pupil.USELESS:
            teach(s, 1)
        said = [look.wrong for look in s.pupil.learnt.looks]
        assert said == ["", "no nearer to the guess of your taste"] and s.pupil.moved[0] == 0


def test_learning_pauses_where_it_was_to_go(tmp_path, monkeypatch):
    """At the first look pictures are further than a hundredth of `AIM`; with more strength it
    learns on. A rise counts less one posterior deviation."""
    with begun(tmp_path, strength=0.01) as s:
        p = s.pupil
        while not p.learnt.looks:
            teach(s, 1)
        base, now = (p.learnt.head(one).mean() for one in p.learnt.heldout)
        changes, (rise, error) = p.changes, p.moved
        close = rounding(8, size=float(max(now.abs(), base.abs())))
        assert p.reached and rise == near(float(now - base), close) and rise - error > 0.005
        teach(s, 1)
        assert p.changes == changes
        p.strength = 1e9
        teach(s, 1)
        assert p.changes == changes + 1
        p.strength = 1
        for rise, enough in ((pupil.AIM + 0.31, True), (pupil.AIM + 0.29, False)):
            monkeypatch.setattr(Pupil, "moved", (rise, 0.3))
            assert p.reached is enough


def test_without_a_head_the_model_learns_from_the_clicks_alone(tmp_path, monkeypatch):
    """Four groups make an update, whose advantages are the clicks; the group that lies ready when
    weights change is not learnt from. Red rises."""
    monkeypatch.setattr(pupil, "LOOK", 1000)
    with begun(tmp_path / "a") as s:
        before = red_after(s)
        s.learn_directly()
        teach(s, 6)
        assert s.pupil.learnt.direct and s.pupil.changes == s.trainer.iteration == 1
        assert red_after(s) > before
    with begun(tmp_path / "a") as again:
        assert torch.equal(mean(s.trainer), mean(again.trainer))


def compared(s, person):
    """Answers the comparison; `person` gets the pictures of a pair, from left to right."""
    while s.comparing:
        s.compare(person(torch.stack(s.comparing.pair()).float()), pair=len(s.comparing.answers))


def test_a_comparison_says_which_is_better_teaches_the_head_and_repeats(tmp_path):
    """The person sees sides, never which is which; weights stay, and answers can be taken back."""
    with begun(tmp_path, prompt="0") as s:
        teach(s, 5)
        weights, head = mean(s.trainer), s.pupil.learnt.head
        s.begin_blind()
        # all but the one that is shown before and now
        assert s.pupil.unconfirmed and s.comparing.prompts == [*s.trainer.heldout[1:]]
        s.compare((), pair=0)
        s.undo()
        assert s.comparing.answers == ()
        compared(s, lambda images: ())
        assert not s.pupil.unconfirmed
        for _ in s.blind.prompts:  # nobody has confirmed anything then
            s.undo()
        assert s.pupil.unconfirmed and s.comparing.answers == ()
        s.compare((), pair=0)
        compared(s, lambda images: likes(redness, images))
        now, before = (redness(images.float()) for images in (s.blind.now, s.blind.before))
        assert s.blind.answers == ((), *((int(one),) for one in (now > before)[1:]))
        assert torch.equal(mean(s.trainer), weights) and not s.pupil.unconfirmed
        learnt = s.pupil.learnt
        assert len(learnt.pairs) == len(s.blind.prompts) + 1  # no difference is one each way
        assert not torch.equal(learnt.head.direction, head.direction)
        assert learnt.head.agreement.count == head.agreement.count
    with begun(tmp_path, prompt="0") as again:
        assert again.blind.answers == s.blind.answers and torch.equal(mean(again.trainer), weights)
        assert torch.equal(again.pupil.learnt.head.direction, learnt.head.direction)


@pytest.mark.parametrize("confirms", [True, False])
def test_who_liked_it_better_before_may_go_back_to_what_was_confirmed(tmp_path, confirms):
    with begun(tmp_path, prompt="0") as s:
        base = mean(s.trainer)
        teach(s, 5)
        s.begin_blind()
        first = mean(s.trainer)
        new = lambda images: (s.comparing.sides().index(1 if confirms else 0),)  # noqa: E731
        compared(s, new)
        assert s.blind.verdict == ("better" if confirms else "worse")
        teach(s, 2)
        assert s.pupil.unconfirmed and not torch.equal(mean(s.trainer), first)
        assert s.told_of_blind.startswith("Of earlier weights: Blind comparison of 2 pairs")
        looks = len(s.pupil.learnt.looks)
        s.go_back()
        assert torch.equal(mean(s.trainer), first if confirms else base)
        assert not s.pupil.unconfirmed
        # what is told is of these weights, or says that it is not
        assert s.told_of_blind.startswith("Blind" if confirms else "Of earlier weights: ")
        assert len(s.pupil.learnt.looks) < looks and bool(s.pupil.learnt.looks) == confirms
        s.undo()
        assert not torch.equal(mean(s.trainer), first if confirms else base)


def test_enough_is_confirmed_by_a_comparison_once(tmp_path):
    with begun(tmp_path, strength=0.01, prompt="0") as s:
        while not s.comparing:
            teach(s, 1)
        assert s.pupil.reached and s.pupil.learnt.looks
        compared(s, lambda images: ())
        s.pupil.strength = 0
        teach(s, 2)
        assert s.comparing is None


def test_a_comparison_confirms_only_the_weights_that_it_showed(tmp_path):
    """An answer that was given before it began may change them meanwhile."""
    with begun(tmp_path, prompt="0") as s:
        teach(s, 5)
        shown = s.pupil.changes
        s.begin_blind()
        s.pupil.iterate()
        compared(s, lambda images: (s.comparing.sides().index(1),))
        assert s.blind.verdict == "better" and s.pupil.compared == shown
        assert s.pupil.unconfirmed and s.pupil.learnt.confirmed is None


def test_the_sides_of_a_blind_test_are_hidden():
    """Of many tests about half of the first pairs have the base on the left; 4 standard deviations
    of 200 fair coins are 28."""
    tests = [BlindTest(["a"], torch.zeros(1), torch.ones(1), seed) for seed in range(200)]
    assert abs(sum(test.sides()[0] for test in tests) - 100) < 28


@pytest.mark.parametrize(
    ("now", "before", "verdict"),
    [
        (6, 0, "better"),
        (8, 3, "no clear difference"),
        (4, 7, "no clear difference"),
        (4, 8, "worse"),
    ],
)
def test_the_verdict_of_a_comparison_is_by_what_is_left_of_twelve(now, before, verdict):
    answers = ((1,),) * now + ((0,),) * before + ((),) * (12 - now - before)
    test = BlindTest(["a"] * 12, torch.zeros(12), torch.ones(12), 0, answers)
    assert test.verdict == verdict


def test_a_taste_and_what_nobody_asked_for_are_told_in_words():
    """Of pictures of noise the darkest is liked. Held-out ones become much darker, and a
    little greener."""
    shades = torch.linspace(0.3, 1, 12)[:, None, None, None]
    groups = [one * shades for one in noise(144, 16, 16).split(12)]
    choices = {
        round: Choice(features_of(one, ["x"] * 12), likes(darkness, one))
        for round, one in enumerate(groups)
    }
    base = torch.cat(groups[:4])
    now = base * torch.tensor([0.3, 0.33, 0.3])[:, None, None]
    heldout = tuple(features_of(one, ["x"] * len(one)) for one in (base, now))
    learnt = pupil.Learnt(None, head=fit(list(choices.values())), choices=choices, heldout=heldout)
    told = Told.of(learnt)
    assert "darker" in told.taste and told.unasked.startswith("greener by")
    assert Told.of(pupil.Learnt(None)) is None
    assert Told.of(dataclasses.replace(learnt, heldout=None)).unasked == ""
    unsure = dataclasses.replace(learnt.head, agreement=Interval(0.6, 0.4, 0.8, 3))
    assert Told.of(dataclasses.replace(learnt, head=unsure)).taste == ""


def test_a_change_is_told_in_deviations_of_what_can_be_seen():
    """Grey pictures differ in saturation and warmth by rounding alone; a later one is warmer by two
    steps of 8 bit."""
    groups = [
        one.mean(1, keepdim=True).expand(-1, 3, -1, -1) for one in noise(48, 16, 16).split(12)
    ]
    groups = [one + 1e-6 * noise(12, 16, 16) for one in groups]
    choices = {
        round: Choice(features_of(one, ["x"] * 12), likes(darkness, one))
        for round, one in enumerate(groups)
    }
    now = groups[0] + torch.tensor([2 / 255, 0, 0])[:, None, None]
    heldout = tuple(features_of(one, ["x"] * 12) for one in (groups[0], now))
    learnt = pupil.Learnt(None, head=fit(list(choices.values())), choices=choices, heldout=heldout)
    # numbers up to 1 are rounded, and a step of 8 bits is 1 / 255 of them
    most = 2 + 255 * rounding(8, size=1.0)["atol"]
    assert float(Told.of(learnt).change.abs().max()) <= most


def test_the_sign_test_of_a_blind_test_is_exact():
    """9 of 10: p = 2 (1 + 10) / 2^10; the ends of Clopper and Pearson are those of published
    tables."""
    answers = ((1,),) * 9 + ((0,),) + ((),) * 2
    test = BlindTest(["a"] * 12, torch.zeros(12), torch.ones(12), 0, answers)
    assert str(test) == (
        "Blind comparison of 12 pairs: now better 9, before better 1, no difference 2. Of those that"
        " differ 90% [55%, 100%] are better now; exact sign test p = 0.021."
    )
    no_answer = BlindTest(["a"], torch.zeros(1), torch.ones(1), 0, ((),))
    assert str(no_answer).endswith("no difference 1.")


REFUSED = [
    (lambda s: s.answer((0,), round=3), "round 4 is not the one that is asked, which is 1"),
    (lambda s: s.answer((0,), round=0, digest="0"), "round 1 has other pictures by now"),
    (lambda s: s.answer((12,), round=0), "some of the 12 pictures"),
    (lambda s: s.answer(range(12), round=0), "not all of them"),
    (lambda s: s.answer((-1,), round=0), "an answer's liked.0: Input should be greater than or"),
    (lambda s: s.answer((0,), round=None), "an answer's round: Input should be a valid integer"),
    (lambda s: s.set_strength(float("nan")), "an answer's strength: Input should be a finite"),
    (
        lambda s: s.set_strength(5.0),
        "an answer's strength: Input should be less than or equal to 4",
    ),
    (lambda s: s.undo(), "no answer"),
    (lambda s: s.compare((0,), pair=0), "not the one that is asked"),
    (lambda s: s.begin_blind(), "nothing has been learnt yet"),
    (lambda s: s.go_back(), "compare before and now first"),
]
UNREADABLE = [
    ({"kind": "like"}, "line 1: kind"),
    ({"liked": [True]}, "line 1: liked"),
    ({"more": 1}, "line 1: more"),
    ({"kind": "undo"}, "takes back more answers than it has"),
]


def test_wrong_answers_are_refused_and_not_written(tmp_path):
    with begun(tmp_path) as s:
        for act, said in REFUSED:
            with pytest.raises(UserError, match=said):
                act(s)
        assert votes.read(tmp_path / "votes.jsonl") == []
        first = s.answer((0,), round=0)
        own = {"round": 1, "digest": s.group.digest, "prompt": s.group.prompt, "step": s.group.step}
        for change in ({"prompt": "another"}, {"step": 0}, {"digest": "0"}):
            with pytest.raises(UserError, match="pictures of round 2 are not those"):
                s.repeat([first.model_copy(update=own | change)])
        with pytest.raises(UserError, match="pair 1 of a comparison is not asked here"):
            s.repeat([first.model_copy(update={"kind": "blind"})])
    bad = tmp_path / "bad.jsonl"
    for change, said in UNREADABLE:
        bad.write_text(json.dumps({"round": 0, "iteration": 0} | change) + "\n")
        with pytest.raises(UserError, match=f"bad.jsonl.*{said}"):
            votes.read(bad)


def test_the_page_shows_the_group_and_says_no_more_than_is_known(tmp_path, monkeypatch):
    page = pytest.importorskip("g2rpo.lab.teach.page")
    with begun(tmp_path / "my run", strength=1.0) as s:
        kept = html.unescape(page.kept_html(s, {}))
        assert f"g2rpo demo '{tmp_path}/my run'" in kept and '<div role="status">\n<h3>' in kept
        assert "Group 1 of about 20" in page.guide(s) and page.choice_html(s).count("<img") == 12
        edit = Prompt("make it <blue>", images=(picture(tmp_path / "in.png"),))
        s.groups[0] = dataclasses.replace(s.group, prompt=edit)
        shown = page.choice_html(s)
        assert f'data-digest="{s.group.digest}"' in shown  # of which a tab tells what it shows
        assert shown.count("<img") == 13 and "make it &lt;blue&gt;" in shown
        teach(s, 1)
        assert "1 answer, 0 changes" in page.status(s, False)
        teach(s, 3)
        monkeypatch.setattr(Pupil, "moved", (0.84, 0.31))
        said = page.status(s, False)
        head = s.pupil.learnt.head
        assert f"in {100 * head.agreed:.0f} % of pairs" in said and head.agreed > 0.5
        assert round(100 * head.agreed) != round(100 * head.agreement.mean)  # nearer to chance
        teach(s, 3)
        hard = "pictures hardly move towards your taste"
        for after, *moved, told in (1, 0, 0, False), (0, 0.14, 0.1, True), (0, 0.14, 0.12, False):
            monkeypatch.setattr(pupil, "HARD", after)
            monkeypatch.setattr(Pupil, "moved", tuple(moved))
            assert (hard in page.status(s, False)) is told
    assert "rose by 0.8 ± 0.3 deviations. That is enough" in said.replace("</p><p>", " ")
    assert "Trained on beside your clicks: bright" in said and hard not in said


@pytest.mark.quick
@pytest.mark.parametrize("recipe", UNGUARDED)
def test_the_tab_of_the_demo_has_no_guard_that_says_what_is_right(recipe):
    """Else it would teach that, whatever is clicked. The judges of these recipes are the same
    checks."""
    config = teach_config(recipe, UNGUARDED[recipe], print)
    trained, judged = (
        {entry.kind for entry in table.values()}
        for table in (config.rewards, config.evaluation.rewards)
    )
    assert trained > {"clicks"} and not trained & judged and judged & {"ocr", "scene_accuracy"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        ([], {"ocr": 0.1, "word_drawing": 0.04, "word_colour": 0.03, "clicks": 1.7}),
        (["rewards.ocr="], {"word_drawing": 0.04, "word_colour": 0.03, "clicks": 0.7}),
        (
            ["rewards.ocr=", "rewards.clicks=0.2"],
            {"word_drawing": 0.4, "word_colour": 0.3, "clicks": 0.2},
        ),
    ],
    ids=["the recipe's guards", "without a guard", "a weight of one's own"],
)
def test_guards_weigh_a_tenth_of_the_clicks(overrides, weights):
    rewards = teach_config("words", overrides, print).rewards
    assert {name: one.weight for name, one in rewards.items()} == weights


@pytest.mark.quick
def test_the_config_of_a_session_is_taught_as_it_is_and_not_trained(tmp_path):
    """A weight and steps of one's own stay. Training would have the clicks of nobody: all of their
    scores would be 0."""
    changes = "rewards.ocr=", "rewards.clicks=0.2", "algorithm.branch_steps=[0]"
    own = teach_config("words", changes, print)
    path = tmp_path / "config.yaml"
    path.write_text(own.to_yaml(), encoding="utf-8")
    again = teach_config(str(path), [], print)
    assert again.model_dump(exclude={"recipe"}) == own.model_dump(exclude={"recipe"})
    nobody = r"rewards.clicks: has no clicks to be fitted to.*g2rpo teach RUN"
    for recipe, run, resume in ((str(path), tmp_path / "run", False), (None, tmp_path, True)):
        with pytest.raises(UserError, match=nobody):
            train(recipe, [], run, resume=resume)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # a large model, twice
def test_the_printed_command_repeats_a_session(tmp_path, capsys):
    """Of the embedded model: the same answers and, to the bit, the same weights."""
    run = tmp_path / "run"
    short = "sampling.num_steps=3", "algorithm.group_size=4", "algorithm.branch_steps=[0]"
    few = "evaluation.num_prompts=2", "trainer.prompts_per_iteration=1"
    with opened("scenes-fast", [*short, *few], run) as s:
        s.learn_directly()
        teach(s, pupil.DIRECT)
        assert s.pupil.changes
        table = s.finish()
    show_run(Results(run, table, s.trainer.heldout, [], False), Console(width=400))
    told = capsys.readouterr().out.splitlines()
    (command,) = [shlex.split(line)[1:] for line in told if line.split()[:1] == ["repeat"]]
    done(capsys, *command[1:])
    again = Run(Path(command[-1]))
    assert votes.read(again.votes) == votes.read(run / "votes.jsonl")
    (weights,) = (run / "adapter").glob("*.safetensors")
    other = again.path / "adapter" / weights.name
    assert weights.read_bytes() == other.read_bytes()


def test_a_group_is_of_the_prompt_whose_pictures_differ_most(tmp_path):
    """The slope of the sigmoid that makes pictures of latents is .25 at 0 and at most .05 from 3
    on: "0" differs most."""
    s = session(tmp_path)
    s.asker.order = PromptOrder(["3", "-3", "0", "4", "-4"], seed=1)
    with s.begun():
        first, again = ([s.asker.group(round, 0) for round in range(3)] for _ in range(2))
    assert [group.prompt for group in first] == ["0"] * 3
    assert [group.digest for group in first] == [group.digest for group in again]


def test_a_picture_that_is_not_finite_is_black_and_ends_no_session(tmp_path, monkeypatch):
    s = session(tmp_path)
    drawn = s.trainer.pictures

    def broken(groups):
        found = drawn(groups)
        for pictures in found:
            pictures[:, 1] = torch.nan
        return found

    monkeypatch.setattr(s.trainer, "pictures", broken)
    with s.begun():
        teach(s, pupil.FIRST)
        assert s.pupil.learnt.head is not None and not s.group.images[1].any()


class Third(Reward):
    right = 1.0

    def __call__(self, images, prompts):
        return torch.tensor([float(prompt != "0.2") for prompt in prompts])


def test_the_prompt_that_is_drawn_before_and_after_is_one_that_the_base_draws_wrong(tmp_path):
    """From the noise of the evaluation in which it was wrong."""
    with begun(tmp_path, judges={"third": Third()}) as s:
        place = s.trainer.heldout.index("0.2")
        assert place > 0 and s.prompt == "0.2"
        assert torch.equal(to_uint8(s.pair[0]), s.trainer.evaluator.base().images[place])


def test_what_cannot_be_taught_is_refused(tmp_path):
    plain = trainer(tmp_path, rewards={"bright": brightness})
    with pytest.raises(UserError, match="needs the reward `clicks`"):
        Session(trainer=plain)
    clicks = "algorithm.name=flow_grpo", "rewards.clicks=1", "rewards.bright="
    other = trainer(tmp_path, *clicks, rewards={"clicks": Clicks()})
    with pytest.raises(UserError, match="learns by G2RPO"):
        Session(trainer=other)


def test_rewards_are_set_against_the_persons_answers(tmp_path):
    """A person who likes the brightest picture agrees with `brightness` in every pair, and with its
    negative in none. The t interval of six groups and one at chance: of mean 13 / 14, deviation .5
    / sqrt(7), and t(.975; 6) = 2.447. The session's judge `brightness` is its negative."""
    negative = {"kind": "brightness", "options": {"negative": True}}
    s = session(tmp_path, f"evaluation.rewards.brightness={json.dumps(negative)}")
    with s.begun():
        teach(s, 7, brightness).undo()
        s.answer((), round=6)
    found = agree(tmp_path, {"brightness": {}, "dark": negative})
    bright, dark, low = found["brightness"], found["dark"], (13 - 2.447) / 14
    assert (bright.mean, bright.high, bright.count) == (1, 1, 6)
    close = 0.0005 / 14  # half of the last digit of 2.447
    assert bright.low == pytest.approx(low, abs=close)
    assert (dark.mean, dark.low) == (0, 0) and dark.high == pytest.approx(1 - low, abs=close)
    Run(tmp_path).config.write_text(s.trainer.config.to_yaml(), encoding="utf-8")
    for named, share in (({}, 0), ({"kind": "brightness"}, 1)):
        assert agree(tmp_path, {"brightness": named})["brightness"].mean == share
    with pytest.raises(UserError, match="no such file"):
        agree(tmp_path / "none", {"brightness": {}})
    with pytest.raises(UserError, match="clicks: is fitted to these answers"):
        agree(tmp_path, {"clicks": {}})
    path = tmp_path / "votes.jsonl"
    first = votes.read(path)[0]
    for change, said in [
        ({"prompt": "another"}, "another prompt or other pictures"),
        ({"digest": "0"}, "another prompt or other pictures"),
        ({"liked": (0, 0)}, "each once"),
    ]:
        path.unlink()
        votes.append(path, first.model_copy(update=change))
        with pytest.raises(UserError, match=said):
            agree(tmp_path, {"brightness": {}})


@pytest.mark.slow
def test_a_head_can_be_fitted_to_a_stored_session(tmp_path):
    """From pictures in 8 bit it is nearly the session's within a group, from its rounded features:
    they move it by 3.5 % of its deviation, of which three times as much is allowed."""
    with begun(tmp_path) as s:
        teach(s, 8)
    stored, images = Clicks(run=str(tmp_path)), s.group.images
    ours, theirs = (head(images, ["0"] * 12) for head in (s.pupil.clicks, stored))
    assert stored.head.block == s.pupil.clicks.head.block
    close = 0.1 * float(ours.std())
    torch.testing.assert_close(theirs - theirs.mean(), ours - ours.mean(), atol=close, rtol=0)
    with pytest.raises(UserError, match="no such file"):
        Clicks(run=str(tmp_path / "none"))


def test_what_could_not_be_finished_is_finished_later(tmp_path, monkeypatch):
    """A full disk, say: the page says why, and `Finish` or the end of the command try it again."""
    lesson = Lesson(lambda: begun(tmp_path))
    s = lesson.begin()
    with monkeypatch.context() as full:
        full.setattr(s.trainer, "save", lambda: (_ for _ in ()).throw(UserError("no space")))
        with pytest.raises(UserError, match="no space"):
            lesson.finish()
    assert lesson.session is s and lesson.ended is None
    assert lesson.finish() == lesson.finish() == lesson.ended and lesson.session is None
    assert (tmp_path / "results.json").is_file()
