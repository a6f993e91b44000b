"""More like these: the head finds what a folder has in common, follows the run, and is resumed and
shared by ranks exactly."""

import pytest
import torch

from g2rpo.core.capabilities import learner_of
from g2rpo.core.errors import RankLost, UserError
from g2rpo.core.images import to_pil, to_uint8
from g2rpo.core.types import as_reward
from g2rpo.monitor.alarms import fallen_rewards
from g2rpo.rewards.style import Style
from g2rpo.training.reward_states import fit_rewards
from tests.rewards.learned import save_dino
from tests.support import ranks
from tests.support.refusals import refusal
from tests.support.runs import brightness, trainer


def noisy(count, level, seed, side=16):
    """Pictures of `level` in blue, with other colours and grain by chance."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.rand(count, 3, 1, 1, generator=generator).expand(-1, -1, side, side).clone()
    made[:, 2] = level
    made += 0.07 * torch.randn(made.shape, generator=generator)
    return made.clamp(0, 1)


def save(folder, pictures):
    folder.mkdir(exist_ok=True)
    for place, picture in enumerate(to_pil(to_uint8(pictures))):
        picture.save(folder / f"{place}.png")
    return str(folder)


def see(reward, pictures, iteration=0):
    return reward.learn(iteration, reward.look(pictures, [""] * len(pictures)))


def test_the_head_finds_what_the_folder_has_in_common_and_then_something_else(tmp_path):
    reward = Style(save(tmp_path / "blue", noisy(20, 0.9, 0)))
    base, like = noisy(100, 0.3, 10), noisy(50, 0.9, 20)
    assert not reward(base, [""] * 100).any()  # before there is a head
    found = see(reward, base)
    assert found["agreement"] > 0.95 and 1 < found["nearest"] < 10
    scores, others = reward(like, [""] * 50), reward(base, [""] * 100)
    assert scores.min() > others.max() and scores.mean() > 1 and abs(others.mean()) < 1e-4
    near = see(reward, noisy(100, 0.9, 30), 5)
    copied = see(reward, noisy(20, 0.9, 0).repeat(5, 1, 1, 1), 10)
    # half of what it is compared with is the base's
    assert near["agreement"] < found["agreement"] - 0.1
    assert 0.5 < near["nearest"] < 1.5 and copied["nearest"] < 0.05
    # which is still that of the first fit
    assert abs(reward(base, [""] * 100).mean()) < 1e-4
    # pictures that are none teach nothing
    assert see(reward, torch.full((4, 3, 16, 16), torch.nan), 15) == {}
    again = Style(str(tmp_path / "blue"))
    again.state = reward.state
    assert torch.equal(again(like, [""] * 50), reward(like, [""] * 50))


def test_a_folder_like_the_run_itself_is_no_reward(tmp_path):
    reward = Style(save(tmp_path / "same", noisy(20, 0.3, 0)))
    see(reward, noisy(100, 0.3, 10))
    assert reward.head is not None and not reward(noisy(9, 0.3, 40), [""] * 9).any()


@pytest.mark.parametrize("kind", ["clip", pytest.param("dino", marks=pytest.mark.slow)])
def test_a_folder_is_seen_by_an_encoder(kind, learned, tmp_path):
    path = learned["pickscore"]["path"] if kind == "clip" else save_dino(tmp_path / "encoder")
    reward = Style(save(tmp_path / "blue", noisy(12, 0.9, 0)), path=path)
    assert see(reward, noisy(60, 0.3, 10))["agreement"] > 0.9
    assert set(reward.base) == {"colour", "layout", "pixels", "encoder"}
    assert "head" in reward.state and reward(noisy(3, 0.9, 5), [""] * 3).isfinite().all()


def test_a_repository_is_not_asked_for_what_it_costs(monkeypatch):
    monkeypatch.setattr("g2rpo.rewards.style.fetch", None)
    with torch.device("meta"):
        assert Style.model_of({"path": "facebook/dinov2-base"}) is not None
        assert Style.model_of({"path": "someone/else"}) is None


def without(count):
    """Unlinks that many of a folder's pictures."""
    return lambda folder: [path.unlink() for path in sorted(folder.iterdir())[:count]]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (without(12), "has 0 pictures"),
        (without(4), "has 8 pictures"),
        (lambda folder: (folder / "5.png").write_text("none"), "5.png: cannot be read as PNG"),
        (lambda folder: (folder / "5.png").write_bytes(half_of(folder / "4.png")), "truncated"),
        (lambda folder: folder.rename(folder.with_name("gone")), "there is no such folder"),
    ],
)
def test_a_folder_that_is_none_is_refused_ahead(change, fact, tmp_path):
    folder = save(tmp_path / "blue", noisy(12, 0.9, 0))
    change(tmp_path / "blue")
    said = refusal(f"rewards.style.options.folder={folder}")
    assert f"rewards.style.options.folder={folder}" in said and fact in said
    assert "things are missing" not in said


def half_of(file):
    return file.read_bytes()[:-60]


def test_what_a_system_adds_to_a_folder_is_no_picture(tmp_path):
    folder = save(tmp_path / "blue", noisy(12, 0.9, 0))
    for name in ("._3.png", ".hidden.jpg", ".DS_Store", "Thumbs.db", "desktop.ini"):
        (tmp_path / "blue" / name).write_bytes(b"\0\5\x16\7 no picture")
    assert len(Style(folder).pictures) == 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("folder"), 0.8 + 0.2 * noisy(12, 0.5, 3, side=4))


def train(place, folder, iterations, **more):
    """A run that learns after every second iteration; what it then finds nearest, by iteration."""
    t = trainer(
        place,
        f"trainer.iterations={iterations}",
        rewards={"bright": Style(folder, every=2)},
        judges={"level": brightness},
        **more,
    )
    assert t.resume() == []
    rows = [row for row in t.train() if "bright/nearest" in row]
    return t, {row["iteration"]: row["bright/nearest"] for row in rows}


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path, folder):
    whole, learnt = train(tmp_path / "whole", folder, 4)
    assert [*learnt] == [1, 3] and whole.rewards["bright"].head.trust > 0
    train(tmp_path / "parts", folder, 3)
    resumed, _ = train(tmp_path / "parts", folder, 4)
    one, other = (
        [*t.learner.parameters, t.rewards["bright"].head.direction] for t in (whole, resumed)
    )
    assert all(map(torch.equal, one, other))


def train_on(world, place, folder):
    t, nearest = train(place / "run", folder, 3, world=world)
    return [[*nearest.values()], t.learner.parameters[0].tolist()]


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns(tmp_path, folder):
    alone, nearest = train(tmp_path / "alone", folder, 3)
    one, two = ranks.run(2, train_on, tmp_path, folder)
    assert one == two and one[0] == pytest.approx([*nearest.values()], rel=1e-4)
    weights = alone.learner.parameters[0].detach()
    torch.testing.assert_close(torch.tensor(one[1]), weights, atol=1e-4, rtol=1e-3)


def test_a_moving_reward_may_fall_and_still_counts_as_risen():
    low, high = torch.randn(2, 64) * 0.1 + torch.tensor([[0.0], [1.0]])
    fallen = {0: {"style": high, "judge": low}, 5: {"style": low, "judge": low}}
    assert "style" in fallen_rewards(fallen, ["style"])["decline"]
    assert fallen_rewards(fallen, ["style"], frozenset({"style"})) == {}
    hacked = {0: {"style": low, "judge": high}, 5: {"style": high, "judge": low}}
    assert "while style rose" in fallen_rewards(hacked, ["style"], frozenset({"style"}))["hacking"]


class Learner:
    learns_every = 1

    def __call__(self, images, prompts):
        return brightness(images, prompts)

    def look(self, images, prompts):
        return images.flatten(1)

    def learn(self, iteration, seen):
        return {}


def test_a_rank_that_is_lost_while_others_learn_is_not_a_reward_that_failed():
    class Lost:
        def gather(self, own):
            raise RankLost("rank 0 stops")

    seen = torch.rand(2, 3, 2, 2), ["", ""]
    with pytest.raises(RankLost):
        fit_rewards({"bright": as_reward(Learner())}, 0, lambda: seen, Lost())


def test_a_reward_that_says_it_learns_but_cannot_is_refused():
    def half(images, prompts):
        return brightness(images, prompts)

    half.learns_every = 2
    with pytest.raises(UserError, match="half: with learns_every it needs look and learn"):
        learner_of(as_reward(half))
