"""Packets of a small evaluation on the Gaussian policy, and people who answer them."""

import json

from g2rpo.evaluation.sweep import Judging, JudgingConfig
from g2rpo.lab.packet.answers import check_of
from g2rpo.lab.packet.make import write_packet
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.run import Run
from tests.support.runs import brightness, config, darkness

PLAIN = {
    "policy": {"path": "none", "height": 4, "width": 4},
    "weights": "adapter",
    "prompts": "none",
    "rewards": {"bright": {"kind": "bright"}, "dark": {"kind": "dark"}},
    "trained": ["bright"],
    "steps": [2],
    "shift": 3.0,
}
PROMPTS = [str(number / 100) for number in range(12)]


def judged(folder, policy=None, prompts=PROMPTS):
    """A finished evaluation in a run's folder; the tuned weights are a mean of 0.5."""
    run = Run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run.config.write_text(config().to_yaml())
    judging = Judging(JudgingConfig.model_validate(PLAIN), prompts, run.packets / "evaluation")
    model = policy or GaussianPolicy()
    rewards = {"bright": brightness, "dark": darkness}
    judging.run(judging.missing(), model, lambda: model.mean.data.fill_(0.5), rewards)
    return judging, run


def packet(folder, seed=3, pairs=24):
    """A packet of such an evaluation."""
    judging, run = judged(folder / "mine")
    return write_packet(judging, run, folder / f"out-{seed}", pairs, seed)


def sheet(path, key, says, name="", sheet="0" * 16, **changes):
    """The file of a person who answers what `says` of each pair; None for nothing."""
    answers = {n: said for n, pair in enumerate(key.pairs, 1) if (said := says(pair)) is not None}
    check = check_of(key.packet, sheet, answers)
    told = {"packet": key.packet, "sheet": sheet, "name": name, "answers": answers, "check": check}
    path.write_text(json.dumps(told | changes))
    return path


def side_of(pair, model):
    """On which side the picture of a model is; "same" for a control."""
    return "same" if pair.control else "left" if pair.left == model else "right"
