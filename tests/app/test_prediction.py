"""The plan of a run beside what it measures, and what is planned for on this machine."""

import json

import pytest

from g2rpo.app.ahead import prompts_to_come
from g2rpo.app.events import Line
from g2rpo.app.prediction import Planned
from g2rpo.app.train import train_all
from g2rpo.assembly.config import load_config
from g2rpo.core.errors import UserError
from g2rpo.lab.plan.cards import CARDS
from g2rpo.lab.plan.plan import Target, find_target, make_plan, predict
from g2rpo.lab.report.page import write_page
from g2rpo.run.run import Run
from tests.support.runs import trainer


def test_a_run_reports_its_plan_once_and_keeps_it(tmp_path, monkeypatch):
    """The injected plan says 2 s and 3 GiB; the peak is injected as well, for a CPU has none."""
    asked, said = [], []

    def planned(config, ranks, prompts, heldout):
        asked.append((config.sampling.batch_size, ranks, len(heldout)))
        return Planned("a card", 2.0, 3 * 2**30)

    t = trainer(tmp_path, "sampling.batch_size=auto", "trainer.iterations=4")
    Run(tmp_path).claim(t.config)
    own = type(t).iterate
    monkeypatch.setattr(
        type(t),
        "iterate",
        lambda self: (
            own(self)
            | {
                "memory_peak": 2**30,
                "seconds": [9.0, 1.0, 5.0][self.iteration - 1] if self.iteration < 4 else 1.0,
            }
        ),
    )
    train_all(t, said.append, planned)
    (line,) = [event.text for event in said if isinstance(event, Line) and "by plan" in event.text]
    assert line == "by plan on a card: 2 s an iteration (3 s measured), 3.0 GiB (1.0 GiB measured)"
    assert (
        asked == [(64, 1, 3)]
        and json.loads((tmp_path / "plan.json").read_text())["measured_seconds"] == 3.0
    )
    assert (
        "on a card, 2 s an iteration (3 s measured)"
        in write_page([tmp_path], tmp_path / "page.html").read_text()
    )
    again = trainer(tmp_path, "sampling.batch_size=auto", "trainer.iterations=8")
    again.resume()
    train_all(again, said.append, planned)
    assert len(asked) == 1
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"plan.json: card: Field required; delete it"):
        t.run.read_plan()


def test_the_plan_of_a_run_is_that_of_the_command_and_a_cpu_has_none(tiny_config, monkeypatch):
    config = load_config(
        str(tiny_config),
        ["policy.device=cpu", "sampling.batch_size=8", "sampling.decode_batch_size=1"],
    )
    prompts, heldout = [f"a {n}" for n in range(6)], [f"the {n}" for n in range(3)]
    assert predict(config, 1, prompts, heldout) is None
    target = Target("a card", True, True, 2**40, CARDS["h100"])
    monkeypatch.setattr("g2rpo.lab.plan.plan.find_target", lambda device: target)
    plan = make_plan(
        config,
        cuda=True,
        heldout=3,
        distinct_prompts=len(prompts_to_come(config, prompts, heldout)),
    )
    found = predict(config, 1, prompts, heldout)
    assert (
        found.seconds == sum(plan.seconds(CARDS["h100"]).iteration.values())
        and found.card == CARDS["h100"].name
    )
    assert found.memory == max(plan.memory.moments.values()) < plan.memory.needed
    monkeypatch.setattr("g2rpo.lab.plan.plan.make_plan", lambda *args, **more: 1 / 0)
    with pytest.raises(UserError, match="no plan stands beside this run: division by zero"):
        predict(config, 1, prompts, heldout)


@pytest.mark.parametrize(
    ("free", "used"), [(79, ""), (60, ", of whose 79.1 GiB other programs use 19.1 GiB")]
)
def test_what_is_free_of_a_card_here_is_what_a_run_has(monkeypatch, free, used):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free * 2**30, int(79.1 * 2**30)))
    target = find_target("cuda")
    assert (target.capacity, target.card) == (free * 2**30, CARDS["h100"]) and target.own
    assert target.name == f"this machine's NVIDIA H100 80GB HBM3{used}"
    with pytest.raises(UserError, match="--device=cuda:9: torch sees 1 CUDA devices"):
        find_target("cuda:9")
