"""The plan of a run beside what it measures, and what is planned for on this machine."""

import json
from dataclasses import replace

import pytest

from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError, refuse
from g2rpo.core.events import Line
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import Target, find_target, make_plan, predict
from g2rpo.lab.plan.seconds import COMPILING
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.train import build
from g2rpo.train.build import Planned, Request
from g2rpo.train.command import train_all
from g2rpo.train.found import Given
from g2rpo.train.ranks import prompts_to_come
from g2rpo.train.run.folder import Run
from g2rpo.train.trainer import Trainer
from tests.support.runs import resumed, trainer

H100 = CARDS["h100"]


def test_a_run_reports_its_plan_once_and_keeps_it(tmp_path, monkeypatch):
    """The injected plan says 2 s and 3 GiB; times and the peak are injected as well, for a CPU has
    no peak. The first three iterations take 3 s in the median without the first."""
    asked, said = [], []

    def planned(config, ranks, prompts, heldout):
        asked.append((config.sampling.batch_size, ranks, len(heldout)))
        return Planned("a card", 2.0, 3 * 2**30)

    def measured(self, own=Trainer.iterate):
        seconds = {1: 1.0, 2: 5.0}.get(self.iteration, 9.0)
        return own(self) | {"memory_peak": 2**30, "seconds": seconds}

    monkeypatch.setattr(Trainer, "iterate", measured)
    t = trainer(tmp_path, "sampling.batch_size=auto")
    Run(tmp_path).claim(t.config)
    train_all(t, said.append, planned)
    (line,) = [event.text for event in said if isinstance(event, Line) and "by plan" in event.text]
    assert line == "by plan on a card: 2 s an iteration (3 s measured), 3.0 GiB (1.0 GiB measured)"
    assert json.loads((tmp_path / "plan.json").read_text())["measured_seconds"] == 3.0
    train_all(resumed(tmp_path, "trainer.iterations=5"), said.append, planned)
    assert asked == [(32, 1, 3)]
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"plan.json: card: Field required; delete it"):
        t.run.read_plan()


@pytest.mark.slow  # two plans
def test_the_plan_of_a_run_is_that_of_the_command_and_a_cpu_has_none(tiny_config, monkeypatch):
    batches = ["sampling.batch_size=8", "sampling.decode_batch_size=1"]
    config = load_config(str(tiny_config), ["policy.device=cpu", *batches])
    prompts, heldout = [f"a {n}" for n in range(6)], ["x", "y", "z"]
    assert predict(config, 1, prompts, heldout) is None
    target = Target("a card", True, 2**40, H100)
    monkeypatch.setattr("g2rpo.lab.plan.plan.find_target", lambda device: target)
    distinct = len(prompts_to_come(config, prompts, heldout))
    plan = make_plan(config, cuda=True, heldout=3, distinct_prompts=distinct)
    found = predict(config, 1, prompts, heldout)
    assert (found.seconds, found.card) == (sum(plan.seconds(H100).iteration.values()), H100.name)
    assert found.memory == max(plan.memory.moments.values()) < plan.memory.needed
    monkeypatch.setattr("g2rpo.lab.plan.plan.make_plan", lambda *args, **more: 1 / 0)
    with pytest.raises(UserError, match="no plan stands beside this run: division by zero"):
        predict(config, 1, prompts, heldout)


def test_what_is_free_of_a_card_here_is_what_a_run_has(monkeypatch):
    gib, name = 2**30, "NVIDIA H100 80GB HBM3"
    answers = {"is_available": True, "device_count": 1, "get_device_name": name}
    answers["mem_get_info"] = (60 * gib, int(79.1 * gib))
    for asked, answer in answers.items():
        monkeypatch.setattr(f"torch.cuda.{asked}", lambda *_, answer=answer: answer)
    target = find_target("cuda")
    assert (target.capacity, target.card) == (60 * gib, H100)
    used = "of whose 79.1 GiB other programs use 19.1 GiB"
    assert target.name == f"this machine's {name}, {used}"
    with pytest.raises(UserError, match="--device=cuda:9: torch sees 1 CUDA device here"):
        find_target("cuda:9")


def test_auto_compiles_where_that_saves_twice_its_time_and_no_ratio_is_clipped(
    tiny_config, monkeypatch
):
    """Of two iterations, with the compiler's seconds as they are and as they would pay."""
    auto = "policy.compile=auto", "trainer.iterations=2"

    def asked(*settings):
        return load_config(str(tiny_config), ["sampling.batch_size=8", *auto, *settings])

    plan, always = (
        make_plan(asked(word), cuda=True, heldout=3, distinct_prompts=9)
        for word in ("policy.compile=auto", "policy.compile=true")
    )
    own = ["policy.tuning=lora", "policy.gradient_checkpointing=true"]
    clipped, offloaded = (
        replace(plan, config=asked(*words))
        for words in (["algorithm.update_every=branch"], ["policy.offload=true", *own])
    )

    def compiled(plan):
        seconds = plan.seconds(H100)
        assert (sum(seconds.iteration.values()) == fast) == (seconds.compiling > 0)
        return seconds.compiling

    fast = sum(always.seconds(H100).iteration.values())
    assert compiled(always) == 2 * COMPILING and not compiled(plan)
    monkeypatch.setattr("g2rpo.lab.plan.seconds.COMPILING", 1e-9)
    assert compiled(plan) and not compiled(clipped) and not compiled(offloaded)


@pytest.mark.parametrize(
    ("predicted", "settings", "line"),
    [
        (lambda *run: Planned("a card", 2.0, 3, 142.0), "", "blocks are compiled, in 142 s by plan"),
        (lambda *run: Planned("a card", 2.0, 3), "", "by plan it would not save twice what it takes"),
        (lambda *run: None, "", "there is no plan"),
        (None, "", "there is no plan"),
        (lambda *run: refuse(["no plan"]), "", "as they are: no plan"),
        (None, "algorithm.update_every=branch", "a rollout has several updates, whose ratios"),
    ],
)  # fmt: skip
def test_a_run_follows_the_plan_and_says_so(tiny_config, monkeypatch, predicted, settings, line):
    """On a pretended GPU, whose compiler is not called."""
    asked, said = [], []
    monkeypatch.setattr(DiffusersPolicy, "compile", lambda self: asked.append(True))
    monkeypatch.setattr(build, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(build, "built_rewards", lambda *given: {})
    config = load_config(str(tiny_config), ["policy.compile=auto", *settings.split()])
    given = Given(prompts=["a"], heldout=["b"])
    build.build(Request(config=config, given=given, notify=said.append, predict=predicted))
    (only,) = [each for each in said if "policy.compile=auto" in each]
    assert line in only
    assert bool(asked) == ("are compiled" in only)
