"""More like these: the head finds what a folder has in common, follows the run, and is resumed and
shared by ranks exactly."""

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

from g2rpo.assembly.checks import check
from g2rpo.assembly.config import load_config
from g2rpo.core.capabilities import learner_of
from g2rpo.core.errors import RankLost, UserError
from g2rpo.core.images import to_pil, to_uint8
from g2rpo.core.types import as_reward
from g2rpo.monitor.alarms import fallen_rewards
from g2rpo.rewards.style import Style
from g2rpo.training.reward_states import learn
from tests.rewards.learned import save_pickscore
from tests.support.ranks import finish, start
from tests.support.runs import brightness, trainer


def noisy(count, level, seed, side=16):
    """Pictures of `level` in blue, with other colours and grain by chance."""
    made = (
        torch.rand(count, 3, 1, 1, generator=torch.Generator().manual_seed(seed))
        .expand(-1, -1, side, side)
        .clone()
    )
    made += 0.1 * torch.randn(made.shape, generator=torch.Generator().manual_seed(seed + 1))
    made[:, 2] = level + 0.05 * torch.randn(
        count, side, side, generator=torch.Generator().manual_seed(seed + 2)
    )
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
    base, like = noisy(200, 0.3, 10), noisy(50, 0.9, 20)
    assert not reward(base, [""] * 200).any()  # before there is a head
    found = see(reward, base)
    assert found["agreement"] > 0.95 and 1 < found["nearest"] < 10
    scores, others = reward(like, [""] * 50), reward(base, [""] * 200)
    assert scores.min() > others.max() and abs(float(others.mean())) < 1e-4 < 1 < float(
        scores.mean()
    )
    near, copied = (
        see(reward, noisy(200, 0.9, 30), 5),
        see(reward, noisy(20, 0.9, 0).repeat(10, 1, 1, 1), 10),
    )
    # half of what it is compared with is the base's
    assert near["agreement"] < found["agreement"] - 0.1
    assert 0.5 < near["nearest"] < 1.5 and copied["nearest"] < 0.05
    # pictures that are none teach nothing
    assert see(reward, torch.full((4, 3, 16, 16), torch.nan), 15) == {}
    again = Style(str(tmp_path / "blue"))
    again.state = reward.state
    assert torch.equal(again(like, [""] * 50), reward(like, [""] * 50))


def test_a_folder_like_the_run_itself_is_no_reward(tmp_path):
    reward = Style(save(tmp_path / "same", noisy(20, 0.3, 0)))
    see(reward, noisy(200, 0.3, 10))
    assert reward.head is not None and not reward(noisy(9, 0.3, 40), [""] * 9).any()


@pytest.mark.parametrize("kind", ["clip", "dino"])
def test_a_folder_is_seen_by_an_encoder(kind, tmp_path):
    if kind == "clip":
        path = save_pickscore(tmp_path / "encoder")
    else:
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        }
        Dinov2Model(Dinov2Config(**sizes)).save_pretrained(path := str(tmp_path / "encoder"))
    reward = Style(save(tmp_path / "blue", noisy(12, 0.9, 0)), path=path)
    assert see(reward, noisy(60, 0.3, 10))["agreement"] > 0.9
    assert set(reward.base) == {"colour", "layout", "pixels", "encoder"}
    assert "head" in reward.state and reward(noisy(3, 0.9, 5), [""] * 3).isfinite().all()


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda folder: [path.unlink() for path in folder.iterdir()], "has 0 pictures"),
        (
            lambda folder: [(folder / f"{i}.png").unlink() for i in range(4)],
            "has 8 pictures .* give it 10 to 200",
        ),
        (
            lambda folder: (folder / "5.png").write_text("no picture"),
            r"5\.png: cannot be read as PNG",
        ),
        (
            lambda folder: (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:-60]),
            r"5\.png: .*truncated",
        ),
        (lambda folder: folder.rename(folder.with_name("gone")), "there is no such folder"),
    ],
)
def test_a_folder_that_is_none_is_refused_ahead(change, fact, tmp_path):
    folder = save(tmp_path / "blue", noisy(12, 0.9, 0))
    change(tmp_path / "blue")
    with pytest.raises(UserError, match=rf"rewards\.style\.options\.folder=.*{fact}") as refused:
        check(load_config("scenes", [f"rewards.style.options.folder={folder}"]))
    assert "things are missing" not in str(refused.value)


def test_what_a_system_adds_to_a_folder_is_no_picture(tmp_path):
    folder = save(tmp_path / "blue", noisy(12, 0.9, 0))
    for name in ("._3.png", ".hidden.jpg", ".DS_Store", "Thumbs.db", "desktop.ini"):
        (tmp_path / "blue" / name).write_bytes(b"\0\5\x16\7 no picture")
    assert len(Style(folder).pictures) == 12


def folder_for(place):
    return save(
        place / "folder",
        (torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(3)) * 0.2 + 0.8),
    )


def styled(place, *overrides, folder, **more):
    return trainer(
        place,
        *overrides,
        rewards={"bright": Style(folder, every=2)},
        judges={"level": brightness},
        **more,
    )


def test_a_run_resumes_bit_for_bit(tmp_path):
    folder = folder_for(tmp_path)
    whole = styled(tmp_path / "whole", folder=folder)
    rows = list(whole.train())
    learnt = [row for row in rows if "bright/nearest" in row]
    assert [row["iteration"] for row in learnt] == [1, 3] and whole.rewards["bright"].head.trust > 0
    list(styled(tmp_path / "parts", "trainer.iterations=3", folder=folder).train())
    resumed = styled(tmp_path / "parts", folder=folder)
    assert resumed.resume() == []
    list(resumed.train())
    for one, other in zip(whole.learner.parameters, resumed.learner.parameters, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(
        whole.rewards["bright"].head.direction, resumed.rewards["bright"].head.direction
    )


def train_on(world, place, folder):
    t = styled(place / "run", "trainer.iterations=3", folder=folder, world=world)
    rows = list(t.train())
    return [
        [row["bright/nearest"] for row in rows if "bright/nearest" in row],
        t.learner.parameters[0].tolist(),
    ]


def test_ranks_learn_what_one_process_learns(tmp_path):
    folder = folder_for(tmp_path)
    alone = styled(tmp_path / "alone", "trainer.iterations=3", folder=folder)
    nearest = [row["bright/nearest"] for row in alone.train() if "bright/nearest" in row]
    one, two = (left["answer"] for left in finish(start(2, train_on, tmp_path, folder), tmp_path))
    assert one == two and one[0] == pytest.approx(nearest, rel=1e-4)
    torch.testing.assert_close(
        torch.tensor(one[1]), alone.learner.parameters[0].detach(), atol=1e-4, rtol=1e-3
    )


def test_a_moving_reward_may_fall_and_still_counts_as_risen():
    low, high = torch.randn(2, 64) * 0.1 + torch.tensor([[0.0], [1.0]])
    fallen = {0: {"style": high, "judge": low}, 5: {"style": low, "judge": low}}
    assert "style" in fallen_rewards(fallen, ["style"])["decline"]
    assert fallen_rewards(fallen, ["style"], frozenset({"style"})) == {}
    hacked = {0: {"style": low, "judge": high}, 5: {"style": high, "judge": low}}
    assert "while style rose" in fallen_rewards(hacked, ["style"], frozenset({"style"}))["hacking"]


def test_a_rank_that_is_lost_while_others_learn_is_not_a_reward_that_failed():
    class Lost:
        def gather(self, own):
            raise RankLost("rank 0 stops")

    class Learner:
        learns_every = 1

        def __call__(self, images, prompts):
            return brightness(images, prompts)

        def look(self, images, prompts):
            return images.flatten(1)

        def learn(self, iteration, seen):
            return {}

    with pytest.raises(RankLost):
        learn(
            {"bright": as_reward(Learner())}, 0, lambda: (torch.rand(2, 3, 2, 2), ["", ""]), Lost()
        )


def test_a_reward_that_says_it_learns_but_cannot_is_refused():
    def half(images, prompts):
        return brightness(images, prompts)

    half.learns_every = 2
    with pytest.raises(UserError, match="half: with learns_every it needs look and learn"):
        learner_of(as_reward(half))
