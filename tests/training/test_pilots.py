"""Pilots that choose a learning rate: on training prompts, all from one beginning, continued after
an interruption."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from g2rpo.app.build import Request, build
from g2rpo.core.errors import Interrupted, UserError
from g2rpo.lab.report.page import write_page
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.rates import FACTORS, Pilot, RateGain, Sweep, gains, good_rates
from g2rpo.run.run import Run
from g2rpo.training.model_card import CARD
from g2rpo.training.pilots import PART, Pilots, pilot_config
from tests.support.commands import done, g2rpo
from tests.support.runs import brightness, config, mean, trainer

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


def parts(*overrides, policy=None, rewards=None):
    t = trainer(
        None,
        *WORDS,
        *overrides,
        policy=policy,
        rewards=rewards,
        prompts=TRAIN,
        heldout=HELDOUT,
        judges={"dark": brightness},
    )
    names = (
        "config",
        "policy",
        "rewards",
        "prompts",
        "heldout",
        "judges",
        "run_dir",
        "notify",
        "shards",
        "trackers",
    )
    return {name: getattr(t, name) for name in names}


def sweep_of(one):
    return Sweep.around(one["config"].optim.learning_rate)


def opened(folder, sweep, *overrides, resume=False, policy=None):
    given = {
        "policy": policy or Seen(),
        "rewards": {"bright": brightness},
        "judges": {"dark": brightness},
    }
    given |= {"prompts": TRAIN, "heldout": HELDOUT, "trackers": []}
    said = []
    asked = Request(
        config=config(*WORDS, *overrides), given=given, run_dir=folder, resume=resume, sweep=sweep
    )
    return build(replace(asked, notify=said.append))


def test_a_run_with_a_found_rate_is_the_run_at_that_rate_bit_for_bit(tmp_path):
    policy = Seen()
    found = opened(tmp_path / "a", sweep_of(parts()), policy=policy)
    rate = found.config.optim.learning_rate
    assert not set(policy.prompts) & set(HELDOUT)
    assert Run(tmp_path / "a").read_config().optim.learning_rate == rate and rate != 0.02
    sweep = Run(tmp_path / "a").read_rates()
    assert sweep.rate == rate == max(sweep.pilots, key=lambda pilot: pilot.gain).rate
    plain = opened(tmp_path / "b", None, f"optim.learning_rate={rate}")
    for t in (found, plain):
        list(t.train())
    assert torch.equal(mean(found), mean(plain)) and found.alarms.rows[-1]["iteration"] == 12
    page = write_page([tmp_path / "a"], tmp_path / "page.html").read_text()
    assert f"{rate:g}, chosen from 0.005, 0.01, 0.02, 0.04" in page
    for t in (found, plain):
        t.finish()
    cards = [(t.run.weights / CARD).read_text() for t in (found, plain)]
    assert [
        f"The learning rate, {rate:g}, was chosen from 0.005, 0.01" in card for card in cards
    ] == [True, False]


def test_pilots_are_short_runs_from_one_beginning_and_share_the_evaluation_of_the_base(tmp_path):
    calls = []

    def counted(images, prompts):
        calls.append(prompts)
        return brightness(images, prompts)

    one = parts(rewards={"bright": counted})
    before = mean(trainer(None, policy=one["policy"]))
    calls.clear()
    (tmp_path / "run").mkdir()
    sweep, told = sweep_of(one), []
    Pilots(one).find(sweep, Run(tmp_path / "run"), tell=told.append)
    assert len(told) == len(FACTORS) and torch.equal(one["policy"].mean.detach(), before)
    assert {pilot.iterations for pilot in sweep.pilots} == {12 // PART}
    judged = [prompts for prompts in calls if list(prompts) == TRAIN[:10]]
    assert len(judged) == 1 + len(FACTORS)
    alone = Sweep(sweep.own, sweep.rates[3:4])
    Pilots(one).find(alone, Run(tmp_path / "run"))
    assert replace(alone.pilots[0], seconds=0) == replace(sweep.pilots[3], seconds=0)


def test_pilots_that_are_done_are_kept_when_the_others_are_interrupted(tmp_path, monkeypatch):
    whole = opened(tmp_path / "a", sweep_of(parts())).config.optim.learning_rate
    own, ended = Pilots._pilot, []

    def twice(self, *arguments):
        if len(ended) == 2:
            raise Interrupted("stopped", 130)
        ended.append(own(self, *arguments))
        return ended[-1]

    monkeypatch.setattr(Pilots, "_pilot", twice)
    with pytest.raises(Interrupted):
        opened(tmp_path / "b", sweep_of(parts()))
    monkeypatch.setattr(Pilots, "_pilot", own)
    rest = Run(tmp_path / "b").read_rates()
    assert [pilot.rate for pilot in rest.pilots] == rest.rates[:2] and rest.rate is None
    assert opened(tmp_path / "b", rest, resume=True).config.optim.learning_rate == whole
    assert rest.pilots[:2] == ended and len(rest.pilots) == len(FACTORS)


def test_pilots_are_as_long_as_their_share_of_the_time(tmp_path):
    one = parts("trainer.iterations=4000")
    sweep, began = sweep_of(one), time.monotonic()
    Pilots(one).find(sweep, Run(tmp_path), ends_at=began + 6)
    assert 3 <= sweep.pilots[0].iterations < 1000 == -(-4000 // PART)
    assert {pilot.iterations for pilot in sweep.pilots} == {
        sweep.pilots[0].iterations
    } and sweep.seconds < 6


def test_a_pilot_is_the_run_in_small():
    c = config(
        "trainer.iterations=40",
        "optim.warmup_iterations=8",
        "optim.ema_decay=0.9",
        "alarms.action=stop",
        "alarms.drift=off",
    )
    p = pilot_config(c, 0.5)
    assert (
        p.trainer.iterations,
        p.evaluation.every,
        p.optim.warmup_iterations,
        p.optim.learning_rate,
    ) == (10, 10, 2, 0.5)
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
    sweep = Sweep(
        2,
        [1, 2, 3, 4, 5],
        [
            pilot(1, 0.2),
            pilot(2, 0.5),
            pilot(3, 0.5),
            pilot(4, 0.9, 1.0),
            pilot(5, 0.8, 0.1, "pictures"),
        ],
    )
    assert sweep.choose() == 2
    sweep.pilots[1] = pilot(2, 0.5, 0.1, "saturated", "silent")  # says nothing of the model
    assert sweep.choose() == 2
    sweep.pilots[1:3] = [pilot(2, 0.5, 0.1, "decline"), pilot(3, 0.5, 0.1, "hacking")]
    assert sweep.choose() == 1  # and 4, whose gain may be chance; both are as near to 2
    sweep.pilots[0] = pilot(1, 0.05)
    with pytest.raises(
        UserError,
        match=r"no rate learns(.|\n)*\n  1 .*\n  2 .*decline\n  3 .*hacking\n  4 .*\n  5 .*pictures",
    ):
        sweep.choose()


def test_if_none_learns_the_two_best_sound_rates_are_tried_for_twice_as_long(tmp_path, monkeypatch):
    one = parts()
    sweep, run, ran = sweep_of(one), Run(tmp_path), []
    short = dict(zip(sweep.rates, [0.0, 0.05, 0.08, 0.3], strict=True))

    def piloted(self, rate, length, began):
        ran.append((rate, length))
        longer = len(ran) > len(FACTORS)
        alarm = ["hacking"] if rate == sweep.rates[3] else []
        return replace(
            pilot(rate, 0.25 if longer and rate == 0.01 else short[rate], 0.1, *alarm),
            iterations=length or 3,
        )

    monkeypatch.setattr(Pilots, "_pilot", piloted)
    assert Pilots(one).find(sweep, run) == 0.01  # the second best of the short ones
    assert ran == [
        *((rate, 3 if rate != 0.005 else None) for rate in sweep.rates),
        (0.02, 6),
        (0.01, 6),
    ]
    interrupted = Sweep(sweep.own, sweep.rates, sweep.pilots[:5])
    assert (
        interrupted.missing() == [0.01]
        and not sweep.missing()
        and run.read_rates().pilots == sweep.pilots
    )
    sweep.pilots[5:] = [pilot(0.01, 0.05)]
    with pytest.raises(UserError, match="no rate learns"):
        sweep.choose()


def test_a_pilot_that_stops_is_no_choice_but_does_not_end_the_others(tmp_path, monkeypatch):
    one = parts()
    # every update counts as too many without one
    monkeypatch.setattr("g2rpo.training.listeners.early_stop.SKIPPED", 0)
    with pytest.raises(UserError, match="no rate learns.*|stopped"):
        Pilots(one).find(sweep := sweep_of(one), Run(tmp_path))
    assert all("stopped" in pilot.alarms for pilot in sweep.pilots) and len(sweep.pilots) == len(
        FACTORS
    )


def test_the_command_trains_with_the_rate_that_it_found(capsys, tmp_path, tiny_config, monkeypatch):
    found = []

    def piloted(self, rate, length, began):
        found.append(pilot(rate, 0.5 if rate == 2e-3 else 0.2))
        return found[-1]

    monkeypatch.setattr(Pilots, "_pilot", piloted)
    words = ["train", tiny_config, "--find-rate", "--run-dir", tmp_path / "run"]
    out = done(capsys, *words)
    assert "0.002 is taken" in out and out.index("+0.500 [+0.400, +0.600]") < out.index(
        "0.002 is taken"
    )
    rows = Run(tmp_path / "run").read_log()
    assert (
        rows[1]["learning_rate"] == 2e-3 == Run(tmp_path / "run").read_config().optim.learning_rate
    )
    assert g2rpo(capsys, *words, "--resume")[0] == 0 and len(found) == len(FACTORS)


def test_an_average_of_every_so_many_steps_is_of_fewer_in_a_pilot():
    assert (
        pilot_config(config("trainer.iterations=40", "optim.ema_every=8"), 0.1).optim.ema_every == 2
    )
    assert pilot_config(config("trainer.iterations=40"), 0.1).optim.ema_every is None


def test_a_state_that_begins_with_its_first_scores_begins_so_in_every_pilot(tmp_path):
    class Rising:
        state = None

        def __call__(self, images, prompts):
            return images.flatten(1).mean(1)

        def observe(self, iteration, scores):
            began.append(self.state)
            self.state = {"seen": iteration}

    began, one = [], parts(rewards={"bright": Rising()})
    Pilots(one).find(sweep_of(one), Run(tmp_path))
    assert began.count(None) == len(FACTORS) and one["rewards"]["bright"].state is None


def test_a_gain_is_in_units_of_the_base():
    def gained(first, last, weight=1.0):
        return float(
            np.nanmean(
                gains({"a": np.array(first, float)}, {"a": np.array(last, float)}, {"a": weight})
            )
        )

    assert gained([0, 2], [1, 3], 2.0) == 2.0  # +1 in a spread of 1, twice
    assert gained([1, 1], [2, 4]) == 2.0  # nothing varies: as it is
    assert gained([0, 2, math.nan], [1, 3, 9]) == 1.0


def tried(rate, gain, error=0.1, *alarms):
    return RateGain(rate, gain, gain - error, gain + error, dict.fromkeys(alarms, "..."))


@pytest.mark.parametrize(
    ("gains", "good"),
    [
        ([tried(1, 0.2), tried(2, 0.5), tried(4, 0.2)], [2]),
        ([tried(1, 0.41), tried(2, 0.45), tried(4, 0.5)], [1, 2, 4]),
        ([tried(1, 0.39), tried(2, 0.45), tried(4, 0.5)], [2, 4]),
        # an alarm is not the best
        ([tried(1, 0.39), tried(2, 0.45), tried(4, 0.9, 0.1, "hacking")], [1, 2]),
        (
            [
                tried(1, 0.39),
                tried(2, 0.45),
                tried(4, 0.9, 0.1, "decline"),
                tried(8, 0.9, 0.1, "stopped"),
            ],
            [1, 2],
        ),
        ([tried(1, 0.39), tried(2, 0.45, 0.1, "silent")], [1, 2]),  # says nothing of the model
        ([tried(1, 0.2), tried(2, 0.9, 1.0)], [1, 2]),  # the best is one that learns
        ([tried(1, -0.5), tried(2, -0.2), tried(4, -0.15)], [2, 4]),  # none learns
        # no score; no error
        ([tried(1, math.nan, 0.1), tried(2, 0.3, math.nan), tried(4, 0.2, math.nan)], [2]),
        ([tried(1, 0.5, 0.1, "pictures")], []),
        ([], []),
    ],
)
def test_good_rates_are_those_within_an_error_of_the_best_without_an_alarm(gains, good):
    assert good_rates(gains) == good == good_rates(gains[::-1])
