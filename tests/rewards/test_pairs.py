"""The reward `pairs`: a head fitted to what people chose in a table, and what it says of itself."""

import json

import pytest
import torch

from g2rpo.config.read import load_config
from g2rpo.core.errors import UserError
from g2rpo.rewards.pairs import Pairs
from g2rpo.train.build import Request, build
from tests.support.runs import picture

LEVELS = (50, 200)


@pytest.fixture
def table(tmp_path):
    """Twelve pairs, of which the brighter picture is chosen."""
    rows = []
    for number in range(12):
        names = [f"{number}_{level}.png" for level in LEVELS]
        for name, level in zip(names, LEVELS, strict=True):
            picture(tmp_path / name, (level + number,) * 3, (12, 8))
        rows.append({"prompt": f"a cat {number}", "chosen": names[1], "rejected": names[0]})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def grey(*levels):
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(len(levels), 3, 8, 12)


def test_a_head_prefers_what_was_chosen_and_says_how_often_it_is_right(table):
    reward = Pairs(path=str(table))
    said = reward.prepare(8, 12)
    assert "fitted to 12 choices" in said and "orders 100\N{NO-BREAK SPACE}% [8" in said
    dark, bright = reward(grey(0.3, 0.7), ["x", "x"])
    assert bright > dark + 1 and reward.prepare(8, 12) is None
    lazily = Pairs(path=str(table))(grey(0.3, 0.7), ["x", "x"])
    assert torch.equal(lazily, torch.stack([dark, bright]))


def test_a_run_prints_how_often_the_head_is_right_before_it_trains(table):
    lines = []
    overrides = ["rewards=", "rewards.liked.kind=pairs", f"rewards.liked.options.path={table}"]
    config = load_config("scenes", [*overrides, "prompts.cache=off"])
    build(Request(config=config, emit=lines.append))
    assert any("of pairs that it was not fitted to" in getattr(line, "text", "") for line in lines)


def test_what_cannot_be_fitted_is_refused_before_anything_loads(table):
    one = table.with_name("one.jsonl")
    one.write_text(table.read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"^path: .*one.jsonl: has fewer than two pairs"):
        Pairs.check_options({"path": str(one)})
    with pytest.raises(UserError, match=r"^path: .*none: there is no such file or folder"):
        Pairs.check_options({"path": str(table.with_name("none"))})
