"""Teaching by clicks on the Gaussian policy: what an answer changes, what it must not, and that
answers repeat a session."""

import dataclasses
import json
from contextlib import contextmanager

import pytest
import torch
from PIL import Image
from rich.console import Console

from g2rpo.app.events import Results
from g2rpo.app.train import train
from g2rpo.cli.results import show_run
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.images import to_uint8
from g2rpo.core.types import Reward
from g2rpo.lab.teach import pupil
from g2rpo.lab.teach.blind import BlindTest
from g2rpo.lab.teach.commands import UNGUARDED, agree, teach_config
from g2rpo.lab.teach.pupil import Pupil
from g2rpo.lab.teach.session import OVERRIDES, Lesson, Session
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.prompts.order import PromptOrder
from g2rpo.rewards import votes
from g2rpo.rewards.taste import Clicks
from g2rpo.runtime.distributed import ALONE
from tests.support import ranks
from tests.support.runs import brightness, mean, trainer


def redness(images, prompts):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def session(run_dir, *overrides, judges=None, strength=1e9, world=ALONE, **more):
    made = trainer(
        run_dir,
        *OVERRIDES,
        "rewards.clicks=1",
        "algorithm.group_size=12",
        "sampling.num_steps=6",
        "evaluation.num_prompts=3",
        "trainer.iterations=1000",
        "trainer.prompts_per_iteration=2",
        *overrides,
        policy=GaussianPolicy(size=8),
        world=world,
        rewards={"clicks": Clicks(), "bright": brightness},
        judges={"dark": lambda images, prompts: torch.zeros(len(prompts))}
        if judges is None
        else judges,
    )
    s = Session(trainer=made, notify=lambda words: None, **more)
    s.pupil.strength = strength
    return s


def reddest(group):
    return (int(redness(group.images, []).argmax()),)


def teach(s, rounds, person=reddest):
    for _ in range(rounds):
        s.answer(person(s.group), round=s.asked)
    return s


def randomly(group):
    return (int(torch.randint(12, (), generator=torch.Generator().manual_seed(group.round))),)


def test_a_person_who_likes_red_makes_pictures_red(tmp_path):
    s = session(tmp_path, prompt="0")
    with s.begun():
        before = redness(s.trainer.sample(["0", "0.1"]), []).mean()
        teach(s, 10)
        changes = s.pupil.changes
        assert (
            s.pupil.learnt.head.trust > 0.3
            and changes >= 4
            and s.trainer.iteration == pupil.UPDATES * changes
        )
        assert redness(s.trainer.sample(["0", "0.1"]), []).mean() > before + 0.01
        base, now = s.pair
        assert now[0].mean() > base[0].mean()
        table, group = s.finish(), s.group.digest
    assert set(table) >= {"clicks", "bright"} and (tmp_path / "results.json").is_file()
    assert table["clicks"].tuned > table["clicks"].base != 0
    again = session(tmp_path, f"trainer.iterations={s.trainer.iteration}")  # as finish wrote it
    with again.begun():
        assert again.group.digest == group


@pytest.mark.parametrize("person", ["skips", "likes none", "clicks at random"])
def test_who_says_nothing_changes_nothing(tmp_path, person):
    s = session(tmp_path)
    with s.begun():
        before = mean(s.trainer)
        for _ in range(10):
            s.answer(
                randomly(s.group) if person == "clicks at random" else (),
                round=s.asked,
                skipped=person == "skips",
            )
        assert torch.equal(mean(s.trainer), before) and s.pupil.changes == 0 and s.asked == 10


def test_answers_repeat_a_session_bit_for_bit(tmp_path):
    """From the file of another session, and in the run itself, after which both go on alike."""
    s, again = session(tmp_path / "a"), session(tmp_path / "b")
    with s.begun():
        teach(s, 6)
        s.undo()
        s.set_strength(2.0)
        teach(s, 2)
    stored = votes.read(tmp_path / "a" / "votes.jsonl")
    assert [vote.kind for vote in stored] == ["vote"] * 6 + ["undo", "strength"] + ["vote"] * 2
    with again.begun():
        again.repeat(stored)
    assert (
        torch.equal(mean(s.trainer), mean(again.trainer))
        and s.pupil.changes == again.pupil.changes > 0
    )
    reopened = session(tmp_path / "a")
    with reopened.begun():
        assert (
            torch.equal(mean(reopened.trainer), mean(s.trainer))
            and reopened.group.digest == again.group.digest
        )
    assert votes.read(tmp_path / "a" / "votes.jsonl") == stored


def test_learning_in_the_background_learns_the_same(tmp_path):
    """Answers as fast as groups are ready, an undo and a strength; after an error the next answer
    raises it."""
    s, again = (
        session(tmp_path / "a", background=True, prompt="0"),
        session(tmp_path / "b", prompt="0"),
    )
    with s.begun():
        teach(s, 9)
        assert s.learning
        s.undo()
        s.set_strength(2.0)
        teach(s, 1)
        s.finish()
        assert not s.learning and s.pupil.changes > 4
    with again.begun():
        again.repeat(votes.read(tmp_path / "a" / "votes.jsonl"))
    assert torch.equal(mean(s.trainer), mean(again.trainer)) and s.asked == again.asked == 9
    assert torch.equal(s.pair[1], again.pair[1])
    broken = session(tmp_path / "c", background=True)
    with broken.begun():
        broken.pupil.learn = lambda group, vote: 1 / 0
        broken.answer((0,), round=0)
        for act in (
            lambda: broken.answer((0,), round=1) and broken.group,
            broken.undo,
            broken.finish,
        ):
            with pytest.raises(ZeroDivisionError):
                act()


def taught_on_ranks(world, folder):
    """Rank 0 is asked nine times, and takes one answer back; the others follow."""
    s = session(folder / "run", world=world, background=world.is_main)
    with s.begun():
        if world.is_main:
            teach(s, 9).undo()
        else:
            s.follow()
        s.finish()
    return s.pupil.changes, s.asked, len(s.pupil.learnt.looks), mean(s.trainer).flatten().tolist()


def test_ranks_learn_from_the_answers_of_one(tmp_path):
    """What one process learns, but for the order of sums."""
    first, second = ranks.run(2, taught_on_ranks, tmp_path / "two")
    (alone,) = ranks.run(1, taught_on_ranks, tmp_path / "one")
    assert first == second and first[:3] == alone[:3] and first[0] > 4
    torch.testing.assert_close(torch.tensor(first[3]), torch.tensor(alone[3]), rtol=0, atol=1e-4)
    assert len(votes.read(tmp_path / "two" / "run" / "votes.jsonl")) == 10


def test_a_kill_between_an_answer_and_its_update_loses_nothing(tmp_path, monkeypatch):
    s, whole = session(tmp_path / "a"), session(tmp_path / "b")
    with whole.begun():
        teach(whole, 9)
    with s.begun():
        teach(s, 8)
        monkeypatch.setattr(s.trainer, "iterate", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            teach(s, 1)
    after = session(tmp_path / "a")
    with after.begun():
        assert after.asked == 9 and torch.equal(mean(after.trainer), mean(whole.trainer))


def test_undo_takes_back_weights_and_answer(tmp_path):
    s = session(tmp_path)
    with s.begun():
        teach(s, 8)
        weights, group, head = mean(s.trainer), s.group, s.pupil.learnt.head.direction
        teach(s, 1)
        assert not torch.equal(mean(s.trainer), weights)
        s.undo()
        assert (
            torch.equal(mean(s.trainer), weights)
            and s.group.digest == group.digest
            and s.pupil.answered == 8
        )
        assert torch.equal(s.pupil.learnt.head.direction, head)
        while s._before:
            s.undo()
        with pytest.raises(UserError, match="no answer"):
            s.undo()


def test_weights_go_back_when_a_judge_falls(tmp_path):
    """The judge is minus red, so every look is bad: weights stay the base's, and steps shrink."""
    s = session(tmp_path, judges={"grey": lambda images, prompts: -redness(images, prompts)})
    with s.begun():
        before = mean(s.trainer)
        while not s.pupil.learnt.looks:
            teach(s, 1)
        assert (
            s.pupil.learnt.looks[0].wrong.startswith("grey") and s.pupil.learnt.step == pupil.SHRINK
        )
        assert torch.equal(mean(s.trainer), before)
    useless = session(tmp_path / "c", "alarms.pictures=off")
    with useless.begun():
        useless.pupil.rate = 0
        while len(useless.pupil.learnt.looks) < 2:
            teach(useless, 1)
        said = [look.wrong for look in useless.pupil.learnt.looks]
        assert said == ["", "no nearer to the guess of your taste"] and useless.pupil.moved == 0
    contented = session(tmp_path / "b", "alarms.pictures=off")
    with contented.begun():
        while not contented.pupil.learnt.looks:
            teach(contented, 1)
        learnt = contented.pupil.learnt
        assert learnt.looks[0].wrong == "" and learnt.step == min(pupil.LARGEST_STEP, pupil.GROW)


def test_learning_pauses_where_it_was_to_go(tmp_path):
    """At the first look pictures are further than a hundredth of `AIM`; with more strength it
    learns on."""
    s = session(tmp_path, strength=0.01)
    with s.begun():
        p = s.pupil
        while not p.learnt.looks:
            teach(s, 1)
        base, now = (p.learnt.head(one).mean() for one in p.learnt.heldout)
        changes, moved = p.changes, p.moved
        assert p.reached and moved == pytest.approx(float(now - base)) and moved > 0.01
        teach(s, 2)
        assert p.changes == changes and p.reached
        p.strength = 1e9
        teach(s, 1)
        assert p.changes == changes + 1


def test_without_a_head_the_model_learns_from_the_clicks_alone(tmp_path, monkeypatch):
    """Four groups make an update, whose advantages are the clicks. Red rises."""
    monkeypatch.setattr(pupil, "LOOK", 1000)
    s, again = session(tmp_path / "a"), session(tmp_path / "b")
    with s.begun():
        before = redness(s.trainer.sample(["0", "0.1"]), []).mean()
        s.learn_directly()
        teach(s, 6)
        assert s.pupil.learnt.direct and s.pupil.changes == 1 and s.trainer.iteration == 0
        teach(s, 18)  # the group that lies ready when weights change is not learnt from
        assert s.pupil.changes == 5 and redness(s.trainer.sample(["0", "0.1"]), []).mean() > before
    with again.begun():
        again.repeat(votes.read(tmp_path / "a" / "votes.jsonl"))
    assert torch.equal(mean(s.trainer), mean(again.trainer))


def test_a_blind_test_says_which_is_better_and_repeats(tmp_path):
    """The person sees sides, never which is which; the answers are stored, learn nothing, and are
    read again."""
    s = session(tmp_path, prompt="0")
    with s.begun():
        teach(s, 8)
        weights = mean(s.trainer).clone()
        with pytest.raises(UserError, match="reload the page"):
            s.compare((0,), pair=0)
        s.begin_blind()
        count = len(s.trainer.heldout)
        assert (
            s.pupil.changes
            and len(s.blind.prompts) == count
            and s.blind.now.ne(s.blind.before).any()
        )
        for pair in range(count):
            redder = int(redness(torch.stack(s.blind.pair()).float(), []).argmax())
            s.compare((redder,) if pair else (), pair=pair)
        assert s.blind.done
        with pytest.raises(UserError, match="reload the page"):
            s.compare((0,), pair=count)
        expected = redness(s.blind.now.float(), []) > redness(s.blind.before.float(), [])
        assert s.blind.answers == [(), *((int(now),) for now in expected[1:])]
        assert torch.equal(mean(s.trainer), weights)
    reopened = session(tmp_path, prompt="0")
    with reopened.begun():
        assert reopened.blind.answers == s.blind.answers and torch.equal(
            mean(reopened.trainer), weights
        )


def test_the_sides_of_a_blind_test_are_hidden():
    """Of many tests about half of the first pairs have the base on the left; 4 standard deviations
    of 200 fair coins are 28."""
    tests = [BlindTest(["a"], torch.zeros(1), torch.ones(1), seed) for seed in range(200)]
    assert abs(sum(test.sides()[0] for test in tests) - 100) < 28


def test_the_sign_test_of_a_blind_test_is_exact():
    """9 of 10: p = 2 (1 + 10) / 2^10; the ends of Clopper and Pearson are those of published
    tables."""
    test = BlindTest(["a"] * 12, torch.zeros(12), torch.ones(12), 0, [(1,)] * 9 + [(0,)] + [()] * 2)
    assert str(test) == (
        "Blind test of 12 pairs: now better 9, before better 1, no difference 2. Of those that differ 90% [55%, 100%] are "
        "better now; exact sign test p = 0.021."
    )
    nothing = BlindTest(["a"], torch.zeros(1), torch.ones(1), 0, [()])
    assert str(nothing).endswith("no difference 1.")


def test_wrong_answers_are_refused_and_not_written(tmp_path):
    s = session(tmp_path)
    with s.begun():
        for act, said in [
            (lambda: s.answer((0,), round=3), "round 4 is not the one that is asked, which is 1"),
            (lambda: s.answer((12,), round=0), "some of the 12 pictures"),
            (lambda: s.answer(range(12), round=0), "not all of them"),
            (
                lambda: s.answer([0, 1.5], round=0),
                "an answer's liked.1: Input should be a valid integer, got 1.5",
            ),
            (
                lambda: s.answer(("x",), round=0),
                "an answer's liked.0: Input should be a valid integer, got 'x'",
            ),
            (
                lambda: s.answer((-1,), round=0),
                "an answer's liked.0: Input should be greater than or equal to 0",
            ),
            (
                lambda: s.answer((0,), round=None),
                "an answer's round: Input should be a valid integer",
            ),
            (
                lambda: s.answer((0,), round=1e300),
                "an answer's round: Input should be a valid integer",
            ),
            (
                lambda: s.set_strength(5.0),
                "an answer's strength: Input should be less than or equal to 4",
            ),
            (
                lambda: s.set_strength(float("nan")),
                "an answer's strength: Input should be a finite number",
            ),
            (
                lambda: s.set_strength("much"),
                "an answer's strength: Input should be a valid number",
            ),
            (s.undo, "no answer"),
        ]:
            with pytest.raises(UserError, match=said):
                act()
        assert votes.read(tmp_path / "votes.jsonl") == []
        first = s.answer((0,), round=0)
        other = [first.model_copy(update={"round": 1})]
        with pytest.raises(UserError, match="pictures of round 2 are not those"):
            s.repeat(other)
        own = {"round": 1, "digest": s.group.digest, "prompt": s.group.prompt, "step": s.group.step}
        for change in ({"prompt": "another"}, {"step": 0}, {"digest": "0"}):
            with pytest.raises(UserError, match="pictures of round 2 are not those"):
                s.repeat([first.model_copy(update=own | change)])
    with pytest.raises(UserError, match="no such file"):
        votes.read(tmp_path / "none.jsonl")
    for change in (
        {"kind": "like"},
        {"kind": []},
        {"round": "0"},
        {"round": -1},
        {"round": 10**9},
        {"iteration": 1.5},
        {"step": -1},
        {"liked": [-1]},
        {"liked": [True]},
        {"liked": 3},
        {"liked": {"0": 1}},
        {"strength": float("inf")},
        {"strength": -0.1},
        {"skipped": 1},
        {"prompt": ["a"]},
        {"digest": 0},
        {"time": 3},
        {"more": 1},
    ):
        (tmp_path / "bad.jsonl").write_text(
            json.dumps({"round": 0, "iteration": 0} | change) + "\n"
        )
        with pytest.raises(UserError, match=f"bad.jsonl, line 1: {next(iter(change))}"):
            votes.read(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text("kind\n")
    with pytest.raises(UserError, match="bad.jsonl, line 1: is no JSON"):
        votes.read(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"kind": "undo", "round": 0, "iteration": 0}\n')
    with pytest.raises(UserError, match="takes back more answers than it has"):
        votes.read(tmp_path / "bad.jsonl")


def test_the_page_shows_the_input_pictures_of_an_edit(tmp_path):
    page = pytest.importorskip("g2rpo.lab.teach.page")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "in.png")
    s = session(tmp_path / "run")
    with s.begun():
        plain = page.choice_html(s)
        edit = Prompt("make it <blue>", images=(str(tmp_path / "in.png"),))
        s.groups[0] = dataclasses.replace(s.group, prompt=edit)
        shown = page.choice_html(s)
    assert (
        plain.count("<img") == 12 and shown.count("<img") == 13 and "make it &lt;blue&gt;" in shown
    )


def test_the_page_says_no_more_than_is_known(tmp_path, monkeypatch):
    page = pytest.importorskip("g2rpo.lab.teach.page")
    s = session(tmp_path, strength=1.0)
    with s.begun():
        assert "Group 1 of about 20" in page.guide(s)
        teach(s, 1)
        assert "1 answer, 0 changes" in page.status(s, False)
        teach(s, 3)
        monkeypatch.setattr(Pupil, "moved", 0.84)
        said = page.status(s, False)
    assert "rose by 0.8 of 0.75" in said and "a person has not confirmed it" in said
    assert "Trained on beside your clicks: bright" in said and "Enough" not in said


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
    ("overrides", "weight"),
    [([], 0.85), (["rewards.ocr="], 0.35), (["rewards.ocr=", "rewards.clicks=0.2"], 0.2)],
    ids=["the recipe's guards", "fewer guards", "a weight of one's own"],
)
def test_clicks_weigh_half_as_much_as_the_guards(overrides, weight):
    assert teach_config("words", overrides, print).rewards["clicks"].weight == pytest.approx(weight)


@pytest.mark.quick
@pytest.mark.parametrize("resume", [False, True])
def test_training_on_the_clicks_of_nobody_is_refused(tmp_path, resume):
    """As the config of a session has them: all of their scores would be 0."""
    own = teach_config("words", ["trainer.iterations=1"], print)
    (tmp_path / "config.yaml").write_text(own.to_yaml(), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"rewards.clicks: has no clicks to be fitted to.*g2rpo teach RUN"
    ):
        train(
            None if resume else str(tmp_path / "config.yaml"),
            [],
            tmp_path if resume else tmp_path / "run",
            resume=resume,
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.quick
def test_the_config_of_a_session_is_taught_as_it_is(tmp_path):
    """A weight and steps of one's own stay, so that `g2rpo teach RUN/config.yaml` repeats the
    run."""
    own = teach_config(
        "words", ["rewards.ocr=", "rewards.clicks=0.2", "algorithm.branch_steps=[0]"], print
    )
    (tmp_path / "config.yaml").write_text(own.to_yaml(), encoding="utf-8")
    again = teach_config(str(tmp_path / "config.yaml"), [], print)
    assert again.model_dump(exclude={"recipe"}) == own.model_dump(exclude={"recipe"})


def test_the_printed_command_repeats_a_session(tmp_path, capsys):
    s = session(tmp_path / "run")
    with s.begun():
        table = s.finish()
    show_run(Results(tmp_path / "run", table, s.trainer.heldout, [], False), Console(width=200))
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["repeat"]
    ]
    run = tmp_path / "run"
    assert line.split()[1:] == [
        *("g2rpo", "teach", f"{run / 'config.yaml'}", "--votes", f"{run / 'votes.jsonl'}"),
        *("--run-dir", f"{tmp_path / 'run-2'}"),
    ]


def test_a_group_is_of_the_prompt_whose_pictures_differ_most(tmp_path):
    """The slope of the sigmoid that makes pictures of latents is .25 at 0 and at most .05 from 3
    on: "0" differs most."""
    s = session(tmp_path)
    s.asker.order = PromptOrder(["3", "-3", "0", "4", "-4"], seed=1)
    with s.begun():
        groups = [s.asker.group(round, 0) for round in range(4)]
        assert [group.prompt for group in groups] == ["0"] * 4
        assert [s.asker.group(round, 0).digest for round in range(4)] == [
            group.digest for group in groups
        ]


def test_the_prompt_that_is_drawn_before_and_after_is_one_that_the_base_draws_wrong(tmp_path):
    """From the noise of the evaluation in which it was wrong."""

    class Third(Reward):
        right = 1.0

        def __call__(self, images, prompts):
            return torch.tensor([float(prompt != "0.2") for prompt in prompts])

    s = session(tmp_path, judges={"third": Third()})
    with s.begun():
        assert s.trainer.heldout.index("0.2") > 0 and s.prompt == "0.2"
        base = s.trainer.evaluator.base().images[s.trainer.heldout.index("0.2")]
        assert torch.equal(to_uint8(s.pair[0]), base)


def test_what_cannot_be_taught_is_refused(tmp_path):
    plain = trainer(tmp_path, rewards={"bright": brightness})
    with pytest.raises(UserError, match="needs the reward `clicks`"):
        Session(trainer=plain)
    other = trainer(
        tmp_path,
        "algorithm.name=flow_grpo",
        "rewards.clicks=1",
        "rewards.bright=",
        rewards={"clicks": Clicks()},
    )
    with pytest.raises(UserError, match="learns by G2RPO"):
        Session(trainer=other)


def test_rewards_are_set_against_the_persons_answers(tmp_path):
    """A person who likes the brightest picture agrees with `brightness` in every pair, and with its
    negative in none. The t interval of eight groups and one at chance: of mean 17 / 18, deviation 1
    / 6, and t(.975; 8) = 2.306."""
    s = session(tmp_path)
    with s.begun():
        teach(s, 8, lambda group: (int(brightness(group.images, []).argmax()),))
        teach(s, 1, lambda group: (int(brightness(group.images, []).argmin()),))
        s.undo()
        s.answer((), round=8)
    found = agree(
        tmp_path, {"brightness": {}, "dark": {"kind": "brightness", "options": {"negative": True}}}
    )
    low = 17 / 18 - 2.306 / 6 / 9**0.5
    assert (found["brightness"].mean, found["brightness"].high, found["brightness"].count) == (
        1.0,
        1.0,
        8,
    )
    assert found["brightness"].low == pytest.approx(low, abs=1e-4)
    assert (found["dark"].mean, found["dark"].low) == (0, 0) and found[
        "dark"
    ].high == pytest.approx(1 - low, abs=1e-4)
    with pytest.raises(UserError, match="no such file"):
        agree(tmp_path / "none", {"brightness": {}})
    with pytest.raises(UserError, match="clicks: is fitted to these answers"):
        agree(tmp_path, {"clicks": {}})
    first, *others = votes.read(tmp_path / "votes.jsonl")
    for change, said in [
        ({"prompt": "another"}, "another prompt or other pictures"),
        ({"digest": "0"}, "another prompt or other pictures"),
        ({"liked": (12,)}, "some of the 12 pictures"),
        ({"liked": (0, 0)}, "each once"),
    ]:
        (tmp_path / "votes.jsonl").unlink()
        for vote in (first.model_copy(update=change), *others):
            votes.append(tmp_path / "votes.jsonl", vote)
        with pytest.raises(UserError, match=said):
            agree(tmp_path, {"brightness": {}})


def test_a_name_means_the_sessions_own_reward_and_few_groups_have_an_interval(tmp_path):
    """The session's judge `brightness` is dark: its settings are in config.yaml. Six groups are
    fewer than other means need."""
    own = "evaluation.rewards.brightness={kind: brightness, options: {negative: true}}"
    s = session(tmp_path, own)
    (tmp_path / "config.yaml").write_text(s.trainer.config.to_yaml(), encoding="utf-8")
    with s.begun():
        teach(s, 6, lambda group: (int(brightness(group.images, []).argmin()),))
    (found,) = agree(tmp_path, {"brightness": {}}).values()
    assert found.mean == 1 and 0 < found.low < 1 and f"{found:}".endswith("1.000]")
    (found,) = agree(tmp_path, {"brightness": {"kind": "brightness"}}).values()
    assert found.mean == 0


def test_a_head_can_be_fitted_to_a_stored_session(tmp_path):
    """From pictures in 8 bit it is nearly the session's within a group, from its rounded
    features."""
    s = session(tmp_path)
    with s.begun():
        teach(s, 8)
    stored, images = Clicks(run=str(tmp_path)), s.group.images
    ours, theirs = s.pupil.clicks(images, ["0"] * 12), stored(images, ["0"] * 12)
    assert stored.head.block == s.pupil.clicks.head.block and torch.allclose(
        theirs - theirs.mean(), ours - ours.mean(), atol=0.05 * float(ours.std())
    )
    with pytest.raises(UserError, match="no such file"):
        Clicks(run=str(tmp_path / "none"))


def test_what_could_not_be_finished_is_finished_later(tmp_path, monkeypatch):
    """A full disk, say: the page says why, and `Finish` or the end of the command try it again."""
    s = session(tmp_path / "run")

    @contextmanager
    def opened():
        with s.begun():
            yield s

    lesson = Lesson(opened)
    lesson.begin()
    with monkeypatch.context() as full:
        full.setattr(s.trainer, "save", lambda: (_ for _ in ()).throw(UserError("no space")))
        with pytest.raises(UserError, match="no space"):
            lesson.finish()
    assert lesson.session is s and lesson.ended is None
    assert lesson.finish() == lesson.finish() == lesson.ended and lesson.session is None
    assert (tmp_path / "run" / "results.json").is_file()
