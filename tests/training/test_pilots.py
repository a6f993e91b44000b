"""Pilots that choose a learning rate: on training prompts, all from one beginning, continued after
an interruption."""

import gc
import math
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from g2rpo.app import build as building
from g2rpo.app import train as app
from g2rpo.app.build import Request, build
from g2rpo.assembly.config import load_config
from g2rpo.core.data import Judged, Prompt
from g2rpo.core.errors import Interrupted, UserError
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.rates import FACTORS, Pilot, Sweep, gains, good_rates
from g2rpo.run.run import Run
from g2rpo.training import pilots
from g2rpo.training.model_card import CARD
from g2rpo.training.pilots import PART, Pilots, pilot_config, pilot_prompts
from g2rpo.training.trainer import Trainer
from tests.support.commands import done
from tests.support.runs import brightness, config, finished, mean, trainer

TRAIN = [f"{0.01 * place:g}" for place in range(12)]
HELDOUT = ["-1", "-2", "-3"]
WORDS = ["trainer.iterations=12", "evaluation.num_prompts=10", "optim.learning_rate=0.02"]


class Seen(GaussianPolicy):
    """Records what it encodes."""

    def __init__(self):
        super().__init__()
        self.prompts = []

    def encode(self, prompts):
        self.prompts += prompts
        return super().encode(prompts)


GIVEN = {"prompts": TRAIN, "heldout": HELDOUT, "judges": {"dark": brightness}}


def parts(*overrides, **more):
    """What pilots are run from, of the plain config."""
    t = trainer(None, *WORDS, *overrides, **GIVEN, **more)
    names = ("config", "policy", "rewards", "prompts", "heldout", "judges")
    names += ("run_dir", "notify", "shards", "trackers")
    return {name: getattr(t, name) for name in names}


def four_rates():
    return Sweep.around(config(*WORDS).optim.learning_rate)


def opened(folder, sweep, *overrides, resume=False, policy=None, **more):
    """The trainer of a run whose rate is found first."""
    given = {**GIVEN, "policy": policy or Seen(), "rewards": {"bright": brightness}, "trackers": []}
    where = {"run_dir": folder, "resume": resume, "notify": lambda said: None, **more}
    return build(Request(config=config(*WORDS, *overrides), given=given, sweep=sweep, **where))


@pytest.mark.slow  # trains twice, after four pilots
def test_a_run_with_a_found_rate_is_the_run_at_that_rate_bit_for_bit(tmp_path):
    policy = Seen()
    found = opened(tmp_path / "a", four_rates(), policy=policy)
    rate = found.config.optim.learning_rate
    assert not set(policy.prompts) & set(HELDOUT)
    assert Run(tmp_path / "a").read_config().optim.learning_rate == rate != 0.02
    sweep = Run(tmp_path / "a").read_rates()
    assert sweep.rate == rate == max(sweep.pilots, key=lambda pilot: pilot.gain).rate
    plain = opened(tmp_path / "b", None, f"optim.learning_rate={rate}")
    for t in (found, plain):
        finished(t)
    assert torch.equal(mean(found), mean(plain)) and found.alarms.rows[-1]["iteration"] == 12
    cards = [(t.run.weights / CARD).read_text() for t in (found, plain)]
    said = f"The learning rate, {rate:g}, was chosen from 0.005, 0.01"
    assert [said in card for card in cards] == [True, False]


def test_pilots_are_short_runs_from_one_beginning_and_share_the_evaluation_of_the_base(tmp_path):
    judged, began = [], []

    class Counted:
        """Its state begins with its first scores."""

        state = None

        def __call__(self, images, prompts):
            judged.append(list(prompts))
            return brightness(images, prompts)

        def observe(self, iteration, scores):
            began.append(self.state)
            self.state = {"seen": iteration}

    one = parts(rewards={"bright": Counted()})
    before, sweep, told = one["policy"].mean.detach().clone(), four_rates(), []
    Pilots(one).find(sweep, Run(tmp_path), tell=told.append)
    assert len(told) == len(FACTORS) and torch.equal(one["policy"].mean, before)
    assert began.count(None) == len(FACTORS) and one["rewards"]["bright"].state is None
    assert {pilot.iterations for pilot in sweep.pilots} == {12 // PART}
    assert judged.count(TRAIN[:10]) == 1 + len(FACTORS)
    alone = Sweep(sweep.own, sweep.rates[3:4])
    Pilots(one).find(alone, Run(tmp_path))
    assert replace(alone.pilots[0], seconds=0) == replace(sweep.pilots[3], seconds=0)


def test_moments_and_averages_of_no_two_trainers_are_in_memory(tmp_path, monkeypatch):
    """Of the pilots, of a run before its length is known, and of the run itself."""
    learners = []

    def made(**options):
        assert not [ref for ref in learners if ref() is not None]
        t = Trainer(**options)
        learners.append(weakref.ref(t.learner))
        return t

    monkeypatch.setattr(pilots, "Trainer", made)
    monkeypatch.setattr(building, "Trainer", made)
    gc.disable()  # it may come late
    try:
        sweep = Sweep(0.02, [0.02, 0.04])
        opened(tmp_path / "run", sweep, within=100.0, ends_at=time.monotonic() + 100)
    finally:
        gc.enable()
    assert len(learners) == 1 + 1 + 2 + 1 + 1  # one more tells how long a pilot may be


@pytest.mark.slow  # eight pilots
def test_pilots_that_are_done_are_kept_when_the_others_are_interrupted(tmp_path, monkeypatch):
    own, ended = Pilots._pilot, []

    def twice(self, *arguments):
        if len(ended) == 2:
            raise Interrupted("stopped", 130)
        ended.append(own(self, *arguments))
        return ended[-1]

    monkeypatch.setattr(Pilots, "_pilot", twice)
    with pytest.raises(Interrupted):
        opened(tmp_path / "a", four_rates())
    monkeypatch.setattr(Pilots, "_pilot", own)
    rest = Run(tmp_path / "a").read_rates()
    assert rest.pilots == ended and rest.rate is None
    again = opened(tmp_path / "a", rest, resume=True).config.optim.learning_rate
    assert again == opened(tmp_path / "b", four_rates()).config.optim.learning_rate
    assert rest.pilots[:2] == ended and len(rest.pilots) == len(FACTORS)


def test_a_run_that_is_interrupted_in_its_first_pilot_is_resumed_with_pilots(tmp_path, monkeypatch):
    def interrupted(self, *arguments):
        raise Interrupted("stopped", 130)

    monkeypatch.setattr(Pilots, "_pilot", interrupted)
    with pytest.raises(Interrupted):
        opened(tmp_path, four_rates())
    assert app._sweep_of(tmp_path, Run(tmp_path).read_config(), find_rate=False) == four_rates()


@pytest.mark.slow  # takes six seconds
def test_pilots_are_as_long_as_their_share_of_the_time(tmp_path):
    one, sweep, began = parts("trainer.iterations=4000"), four_rates(), time.monotonic()
    Pilots(one).find(sweep, Run(tmp_path), ends_at=began + 6)
    (length,) = {pilot.iterations for pilot in sweep.pilots}
    assert 3 <= length < 1000 == -(-4000 // PART) and sweep.seconds < 6


def test_a_pilot_is_the_run_in_small():
    own = ["trainer.iterations=40", "optim.warmup_iterations=8", "alarms.action=stop"]
    own += ["optim.ema_decay=0.9", "optim.ema_every=8", "alarms.drift=off"]
    c = config(*own)
    p = pilot_config(c, 0.5)
    assert (p.trainer.iterations, p.evaluation.every) == (10, 10)
    assert (p.optim.learning_rate, p.optim.warmup_iterations, p.optim.ema_every) == (0.5, 2, 2)
    assert p.optim.ema_decay == pytest.approx(0.6) and p.trainer.seed == c.trainer.seed + 1000
    assert p.alarms == {"action": "warn", "drift": "off"}


def pilot(rate, gain, error=0.1, *alarms):
    return Pilot(rate, gain, gain - error, gain + error, dict.fromkeys(alarms, "..."), 3, 1.0)


@pytest.mark.parametrize(
    ("gains", "taken"),
    [
        ({1: 0.2, 2: 0.5, 4: 0.2, 8: 0.2}, 2),  # clearly the best
        # 1, 2 and 8 are within the best's error; 2 is nearest to 4
        ({1: 0.45, 2: 0.5, 4: 0.3, 8: 0.55}, 2),
        ({1: 0.2, 2: 0.5, 4: 0.46, 8: 0.55}, 4),  # the config's own is among them
        ({1: 0.2, 2: 0.5, 4: 0.3, 8: 0.55}, 2),  # 2 and 8 are as near; the smaller
        ({1: 0.2, 2: 0.2, 4: 0.3, 8: 0.55}, 8),
        ({1: 0.05, 2: 0.05, 4: 0.08, 8: 0.12}, 4),  # one learns
    ],
)
def test_the_rate_taken_is_the_nearest_to_the_configs_of_those_within_an_error_of_the_best(
    gains, taken
):
    assert Sweep(4, [*gains], [pilot(*it) for it in gains.items()]).choose() == taken


def test_a_rate_with_an_alarm_is_not_taken_and_does_not_count_as_the_best():
    chance = pilot(4, 0.9, 1.0)
    fell = [pilot(2, 0.5, 0.1, "decline"), pilot(3, 0.5, 0.1, "hacking")]
    gamed = pilot(5, 0.8, 0.1, "pictures")

    def taken(*pilots):
        return Sweep(2, [1, 2, 3, 4, 5], [*pilots]).choose()

    sound = [pilot(1, 0.2), pilot(2, 0.5), pilot(3, 0.5)]
    assert taken(*sound, chance, gamed) == 2
    # says nothing of the model
    quiet = pilot(2, 0.5, 0.1, "saturated", "silent")
    assert taken(sound[0], quiet, sound[2], chance, gamed) == 2
    # and 4, whose gain may be chance; both are as near to 2
    assert taken(sound[0], *fell, chance, gamed) == 1
    with pytest.raises(UserError, match=r"(?s)no rate learns.*\n  1 .*decline.*hacking.*pictures"):
        taken(pilot(1, 0.05), *fell, chance, gamed)


def test_if_none_learns_the_two_best_sound_rates_are_tried_for_twice_as_long(tmp_path, monkeypatch):
    """The last of the short ones is the best, and has an alarm."""
    sweep, ran = four_rates(), []
    gains = dict(zip(sweep.rates, (0.0, 0.05, 0.08, 0.3), strict=True))
    _, second, third, last = sweep.rates

    def piloted(self, rate, length, began):
        ran.append((rate, length))
        gain = 0.25 if (rate, length) == (second, 6) else gains[rate]
        alarms = ["hacking"] if rate == last else []
        return replace(pilot(rate, gain, 0.1, *alarms), iterations=length or 3)

    monkeypatch.setattr(Pilots, "_pilot", piloted)
    assert Pilots(parts()).find(sweep, Run(tmp_path)) == second
    assert ran[4:] == [(third, 6), (second, 6)] and not sweep.missing()
    assert Run(tmp_path).read_rates().pilots == sweep.pilots
    assert Sweep(sweep.own, sweep.rates, sweep.pilots[:5]).missing() == [second]
    blind = replace(sweep.pilots[0], gain=math.nan)  # no score: it sorts nowhere
    assert Sweep(sweep.own, sweep.rates, [blind, *sweep.pilots[1:4]]).missing() == [third, second]
    sweep.pilots[5:] = [pilot(second, 0.05)]
    with pytest.raises(UserError, match="no rate learns"):
        sweep.choose()


@pytest.mark.parametrize(
    "few", [{"overrides": ["evaluation.num_prompts=7"]}, {"prompts": TRAIN[:7]}]
)
def test_pilots_on_too_few_prompts_are_refused_before_anything_is_loaded(few):
    """An interval takes 8 values, and a rate without one never learns."""
    given = {**GIVEN, "policy": None, "rewards": {}, "prompts": few.get("prompts", TRAIN)}
    settings = config(*WORDS, *few.get("overrides", ()))
    with pytest.raises(UserError, match="on 7 training prompts, .* takes 8; raise"):
        build(Request(config=settings, given=given, sweep=four_rates()))


def test_a_pilot_that_stops_is_no_choice_but_does_not_end_the_others(tmp_path, monkeypatch):
    # every update counts as too many without one
    monkeypatch.setattr("g2rpo.training.listeners.early_stop.SKIPPED", 0)
    sweep = four_rates()
    with pytest.raises(UserError, match="no rate learns.*|stopped"):
        Pilots(parts()).find(sweep, Run(tmp_path))
    assert ["stopped" in pilot.alarms for pilot in sweep.pilots] == [True] * len(FACTORS)


@pytest.mark.slow  # trains the tiny FLUX
def test_the_command_trains_with_the_rate_that_it_found(capsys, tmp_path, tiny_config, monkeypatch):
    found = []

    def piloted(self, rate, length, began):
        found.append(pilot(rate, 0.5 if rate == 2e-3 else 0.2))
        return found[-1]

    monkeypatch.setattr(Pilots, "_pilot", piloted)
    more = "prompts.train=testbed:train", "evaluation.num_prompts=8"
    words = ["train", tiny_config, *more, "--find-rate", "--run-dir", tmp_path / "run"]
    shown = done(capsys, *words)
    assert "+0.500 [+0.400, +0.600]" in shown.partition("0.002 is taken")[0] != shown
    run = Run(tmp_path / "run")
    assert run.read_log()[1]["learning_rate"] == run.read_config().optim.learning_rate == 2e-3
    done(capsys, *words, "--resume")
    assert len(found) == len(FACTORS)


CHOSEN = [
    ("optim.learning_rate", "1e-4", "4e-4", {"find_rate": True}),
    ("trainer.iterations", "37", "100", {"within": "5m"}),
    ("evaluation.every", "13", "20", {"within": "5m"}),
    ("evaluation.num_prompts", "16", "64", {"within": "5m"}),
]


@pytest.mark.parametrize(("key", "found", "begun", "option"), CHOSEN, ids=[c[0] for c in CHOSEN])
def test_a_run_goes_on_with_what_it_found_whatever_its_overrides_begin_with(
    tmp_path, monkeypatch, key, found, begun, option
):
    """As a queue starts the same command again."""
    folder, seen = tmp_path / "run", []
    folder.mkdir()
    found = load_config("words", [f"{key}={found}"])
    Run(folder).config.write_text(found.to_yaml())
    if "find_rate" in option:
        Run(folder).write_rates(Sweep(4e-4, [4e-4], rate=1e-4))
    monkeypatch.setattr(app, "train_built", lambda request, *_: seen.append(request.config))
    app.train("words", [f"{key}={begun}"], folder, resume=True, **option)
    assert seen == [found]


def test_a_run_without_pilots_is_not_resumed_with_another_rate(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    Run(folder).config.write_text(load_config("words", []).to_yaml())
    with pytest.raises(UserError, match="learning_rate"):
        app.train("words", ["optim.learning_rate=4e-3"], folder, resume=True, find_rate=True)


def test_pilots_of_pairs_are_evaluated_on_as_many_prompts_as_others():
    """Not on two prompts twice: a prompt has many pairs. One with another target is another."""
    c = load_config("words", ["evaluation.num_prompts=3"])
    prompts = [Prompt("p0", metadata={"text": text}) for text in "ab"] + [Prompt("p1")]
    pairs = [
        Judged.of(prompt, [f"{n}.png", "x.png"], (True, False))
        for prompt in prompts
        for n in range(2)
    ]
    assert pilot_prompts(c, pairs) == prompts


def test_a_gain_is_in_units_of_the_base():
    def gained(first, last, weight=1.0):
        return np.nanmean(gains({"a": np.array(first)}, {"a": np.array(last)}, {"a": weight}))

    assert gained([0.0, 2.0], [1.0, 3.0], 2.0) == 2.0  # +1 in a spread of 1, twice
    assert gained([1.0, 1.0], [2.0, 4.0]) == 2.0  # nothing varies: as it is
    assert gained([0.0, 2.0, math.nan], [1.0, 3.0, 9.0]) == 1.0
    before = {"a": np.array([0.0, 2.0]), "b": np.full(2, math.nan)}
    after = before | {"a": np.array([1.0, 3.0])}
    assert gains(before, after, {"a": 1.0, "b": 0.0}).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("tried", "good"),
    [
        ([(0.2,), (0.5,), (0.2,)], [1]),
        ([(0.41,), (0.45,), (0.5,)], [0, 1, 2]),
        ([(0.39,), (0.45,), (0.9, 0.1, "hacking")], [0, 1]),  # an alarm is not the best
        ([(0.39,), (0.9, 0.1, "decline"), (0.9, 0.1, "stopped")], [0]),
        ([(0.39,), (0.45, 0.1, "silent")], [0, 1]),  # says nothing of the model
        ([(0.2,), (0.9, 1.0)], [0, 1]),  # the best is one that learns
        ([(-0.5,), (-0.2,), (-0.15,)], [1, 2]),  # none learns
        ([(math.nan,), (0.3, math.nan), (0.2, math.nan)], [1]),  # no score; no error
        ([(0.5, 0.1, "pictures")], []),
        ([], []),
    ],
)
def test_good_rates_are_those_within_an_error_of_the_best_without_an_alarm(tried, good):
    found = [pilot(rate, *own) for rate, own in enumerate(tried)]
    assert good_rates(found) == good == good_rates(found[::-1])
