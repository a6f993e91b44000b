"""Packets: nothing in a page tells base from tuned, and answers are counted by hand."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from g2rpo.core.errors import UserError
from g2rpo.core.plain import read_as, read_lines_as
from g2rpo.core.types import Prompt
from g2rpo.lab.packet import key as keys
from g2rpo.lab.packet.answers import open_key
from g2rpo.lab.packet.key import Key, file_of, places
from g2rpo.lab.packet.make import write_packet
from g2rpo.monitor.clips import read_clip
from g2rpo.run.run import Run
from tests.lab.packet.packets import PROMPTS, judged, packet, sheet, side_of
from tests.support.commands import done, refused, write_tiny
from tests.support.runs import Clips, Editing, config, picture

URI = re.compile(r"data:image/webp;base64,([\w+/=]*)")


@pytest.fixture
def made(tmp_path):
    return packet(tmp_path)


def test_no_page_tells_base_from_tuned(tmp_path, monkeypatch):
    """With the pictures of both exchanged, and all sides turned, it is the same page byte for
    byte."""
    judging, run = judged(tmp_path / "mine")
    page = write_packet(judging, run, tmp_path / "one", 24, seed=3).page.read_bytes()
    base, tuned, between = (
        judging.directory / "pictures/steps_002" / name for name in ["base", "tuned", "x"]
    )
    for old, new in ((base, between), (tuned, base), (between, tuned)):
        old.rename(new)
    drawn = keys.fair_sides
    monkeypatch.setattr(keys, "fair_sides", lambda *key: [not side for side in drawn(*key)])
    turned = write_packet(judging, run, tmp_path / "two", 24, seed=3).page
    assert turned.read_bytes() == page and turned.name == next((tmp_path / "one").iterdir()).name
    words = URI.sub("", page.decode()).casefold()
    for told in ("base", "tuned", "mine", "adapter", "seed", str(tmp_path)):
        assert told not in words
    assert "http" not in words.replace("http-equiv", "")
    monkeypatch.undo()
    assert write_packet(judging, run, tmp_path / "three", 24, seed=3).page.read_bytes() != page


def test_the_key_says_what_the_page_shows(made, tmp_path):
    """Both pictures pixel for pixel, in the order of the key, without metadata."""
    key = read_as(Key, file_of(Run(tmp_path / "mine"), made.key.packet, "key.json"))
    assert key == made.key and [path.name for path in made.page.parent.iterdir()] == [
        made.page.name
    ]
    shown = [base64.b64decode(found) for found in URI.findall(made.page.read_text())]
    assert len(shown) == 2 * len(key.pairs) == 2 * len(PROMPTS)
    for number, content in enumerate(shown):
        pair = key.pairs[number // 2]
        file = tmp_path / "mine/packets" / pair.pictures[(pair.left, pair.right)[number % 2]]
        with Image.open(io.BytesIO(content)) as found, Image.open(file) as expected:
            assert np.array_equal(np.asarray(found), np.asarray(expected))
            assert not {"exif", "icc_profile", "xmp"} & found.info.keys()
    assert sum(pair.control for pair in key.pairs) == 2
    assert len({pair.prompt for pair in key.pairs}) == len(PROMPTS)


@pytest.mark.parametrize(
    ("prompts", "pairs", "shown", "controls"),
    [(26, 24, 24, 2), (40, 3, 3, 2), (5, 24, 4, 1), (2, 24, 2, 0)],
)
def test_sides_are_balanced_and_controls_have_prompts_of_their_own(prompts, pairs, shown, controls):
    drawn = [places(prompts, pairs, seed) for seed in range(40)]
    for found in drawn:
        assert len({place.index for place in found}) == len(found) == shown + controls
        assert sum(place.left == place.right for place in found) == controls
        turned = sum((place.left, place.right) == ("tuned", "base") for place in found)
        assert abs(2 * turned - shown) == shown % 2
    # 6 deviations of 40 fair coins
    assert 1 <= sum(found[0].left == "tuned" for found in drawn) <= 39
    assert len({tuple(place.index for place in found) for found in drawn}) > (
        1 if prompts == 2 else 20
    )


def test_clips_and_input_pictures_are_shown(tmp_path):
    judging, run = judged(tmp_path / "clips", Clips())
    clips = write_packet(judging, run, tmp_path / "moving", 24, seed=0)
    shown = base64.b64decode(URI.search(clips.page.read_text())[1])
    (tmp_path / "shown.webp").write_bytes(shown)
    assert read_clip(tmp_path / "shown.webp", 3)[0].shape == (3, 3, 4, 4)
    prompts = [Prompt("brighter", [picture(tmp_path / "in.png", size=(20, 10))])] * 2
    judging, run = judged(tmp_path / "edits", Editing(), prompts)
    edits = write_packet(judging, run, tmp_path / "edited", 24, seed=0)
    given = json.loads(re.search(r"pairs = (\[.*\]);", edits.page.read_text())[1])[0]["input"]
    with Image.open(io.BytesIO(base64.b64decode(URI.match(given)[1]))) as found:
        assert found.size == (384, 192)


def test_answers_of_one_person_by_hand(made, tmp_path):
    """Ten pairs: tuned 6, base 2, same 1, one cannot tell; one control is called the same."""
    answers, controls = (
        iter(["tuned"] * 6 + ["base"] * 2 + ["same", "cannot tell"]),
        iter(["same", "left"]),
    )

    def says(pair):
        said = next(controls) if pair.control else next(answers)
        return side_of(pair, said) if said in ("tuned", "base") else said

    path = sheet(tmp_path / "a.json", made.key, says, "Ada\u200b")
    opened, results, pairs = open_key(tmp_path / "mine", [path])
    (person,) = opened.people
    assert person.name == "Ada" and (person.controls, person.controls_same) == (2, 1)
    assert (person.answered, person.tuned, person.base, person.same, person.cannot_tell) == (
        10,
        6,
        2,
        1,
        1,
    )
    # 6 of 8 by Clopper and Pearson, whose ends tables give as .349 and .968
    assert (opened.preferred.mean, opened.preferred.count) == (0.75, 8)
    assert (opened.preferred.low, opened.preferred.high) == pytest.approx((0.349, 0.968), abs=5e-4)
    assert opened.p == pytest.approx(2 * (1 + 8 + 28) / 2**8) and opened.agreement is None
    assert json.loads(results.read_text())["preferred"]["mean"] == 0.75
    votes = read_lines_as(dict[str, str], pairs)
    assert len(votes) == 8 and votes[0].keys() == {"prompt", "chosen", "rejected"}
    assert sum("/tuned/" in vote["chosen"] and "/base/" in vote["rejected"] for vote in votes) == 6
    assert all((pairs.parent / vote["chosen"]).is_file() for vote in votes)


def test_several_people_and_the_rewards_that_agree_with_them(made, tmp_path):
    """Two choose the brighter picture, as the reward `bright` and never as `dark`. Of a third only
    the first five pairs are there, always the left one."""

    def brighter(pair):
        scores = pair.scores["bright"]
        return side_of(pair, max(scores, key=lambda model: scores[model]))

    first = made.key.pairs[:5]
    files = [
        sheet(tmp_path / "a.json", made.key, brighter, sheet="a" * 16),
        sheet(tmp_path / "b.json", made.key, brighter, sheet="b" * 16),
        sheet(
            tmp_path / "c.json",
            made.key,
            lambda pair: "left" if pair in first else None,
            sheet="c" * 16,
        ),
    ]
    two, *_ = open_key(tmp_path / "mine", files[:2])
    assert (two.judges["bright"].agrees.mean, two.judges["dark"].agrees.mean) == (1, 0)
    assert two.judges["bright"].trained and not two.judges["dark"].trained
    assert two.agreement is not None and two.agreement.observed == 1
    three, *_ = open_key(tmp_path / "mine", files)
    asked = sum(not pair.control for pair in first)
    assert [person.answered for person in three.people] == [10, 10, asked]
    assert three.people[2].left == asked and three.left.count == 20 + asked
    assert [person.name for person in three.people] == ["person 1", "person 2", "person 3"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("says", "told"),
    [
        (["cannot tell"] * 2, ["Nobody found one picture of a pair better"]),
        (["same"] * 2, ["Nobody found one picture of a pair better"]),
        ([None] * 2, ["Nobody found one picture of a pair better"]),  # only the controls
        (["tuned"] * 2, ["1.000 [0.692, 1.000]; tuned", "no kappa, as everybody always said"]),
        # 10 of 10 agree: .692 and more by Clopper and Pearson, where .5 is chance
        (["half", "half"], ["by chance 50%; kappa 1.000 [0.383, 1.000]"]),
    ],
)
def test_answers_that_decide_little_or_all_alike_are_told(made, tmp_path, capsys, says, told):
    half = [pair for pair in made.key.pairs if not pair.control][:5]
    files = []
    for number, said in enumerate(says):

        def answer(pair, said=said):
            if pair.control:
                return "same"
            model = ("tuned" if pair in half else "base") if said == "half" else said
            return side_of(pair, model) if model in ("tuned", "base") else model

        files.append(sheet(tmp_path / f"{number}.json", made.key, answer, sheet=str(number) * 16))
    shown = done(capsys, "evaluate", tmp_path / "mine", "--answers", *files)
    for words in told:
        assert words in shown
    assert "nan" not in shown


def test_a_damaged_picture_is_named(tmp_path):
    judging, run = judged(tmp_path / "mine")
    damaged = judging.directory / "pictures/steps_002/tuned/000007.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(UserError, match=f"{damaged}: is damaged .*; delete it"):
        write_packet(judging, run, tmp_path / "out", 24, 0)
    assert not (tmp_path / "out").exists()


REFUSED = [
    ({"packet": "0123456789ab"}, "is of packet 0123456789ab, of which"),
    ({"packet": "../../../etc"}, "packet: String should match pattern"),
    ({"answers": {1: "right"}}, "was changed after the page wrote it"),
    ({"answers": {40: "left"}}, "answers pair 40; the packet has pairs 1 to 12"),
    (
        {"answers": {1: "both"}},
        "answers.1: Input should be 'left', 'right', 'same' or 'cannot tell'",
    ),
    ({"answers": {}}, "answers: Dictionary should have at least 1 item"),
    ({"more": 1}, "more: Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_wrong_answers_are_one_message(made, tmp_path, capsys, changes, said):
    path = sheet(tmp_path / "a.json", made.key, lambda pair: "left", **changes)
    before = sorted((tmp_path / "mine").rglob("*"))
    told = refused(capsys, "evaluate", tmp_path / "mine", "--answers", path)
    assert said in told and str(path) in told
    assert sorted((tmp_path / "mine").rglob("*")) == before


def test_answers_that_do_not_belong_together_are_refused(made, tmp_path, capsys):
    run, one, other = tmp_path / "mine", tmp_path / "a.json", tmp_path / "b.json"
    sheet(one, made.key, lambda pair: "left")
    sheet(other, packet(tmp_path, seed=4).key, lambda pair: "left", sheet="1" * 16)
    for words, said in (
        ([run, "--answers", one, one], "are of one person"),
        ([run, "--answers", one, other], "is of another packet than"),
        ([run, "--answers", tmp_path / "none.json"], "none.json: cannot be read"),
        ([tmp_path / "nowhere", "--answers", one], "is no run directory"),
        (["--answers", one], "--answers are of the packet of a run"),
        ([run, "--answers", one, "--controls"], "without other options"),
        ([run, "--answers", one, "--steps", "4"], "without other options"),
    ):
        assert said in refused(capsys, "evaluate", *words), said
    shown = done(capsys, "evaluate", run, "--answers", one)
    assert "10 pairs of base and tuned" in shown and "0.5 is without bias" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "has no weights yet"),
        (["--weights", "w", "--packet", "full"], "--packet full: is not empty"),
        (["--weights", "w", "--packet", "mine/packets"], "the key would lie in it"),
        (
            ["--weights", "w", "steps=[2,3]"],
            "--packet shows pictures of one step count, got [2, 3]",
        ),
        (["--weights", "w", "base=false"], "leave base=false out"),
        (["--weights", "w", "--controls"], "without --model, --controls and --out"),
    ],
)
def test_what_no_packet_can_be_made_of_is_refused(tmp_path, refuses, words, said):
    """Before anything is loaded; the folder of the packet is not made."""
    for folder in ("mine", "full"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.yaml").write_text(config().to_yaml())
    arguments = " ".join(words if "--packet" in words else [*words, "--packet", "out"])
    assert said in refuses(f"evaluate mine {arguments}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_packet_of_a_run_from_the_command_line(tmp_path, flux_directory, capsys):
    """The second one has the same pictures, which are not drawn again, on other sides."""
    run = tmp_path / "run"
    tiny = write_tiny(tmp_path, flux_directory)
    few = ["trainer.iterations=1", "optim.learning_rate=0.1", "--run-dir", run]
    done(capsys, "train", tiny, *few)
    shown = done(capsys, "evaluate", run, "--num-prompts", 1, "--packet", tmp_path / "one")
    assert "1 pair of base and tuned" in shown and "building" in shown
    key = read_as(Key, next((run / "packets").glob("*.key.json")))
    assert key.contents["weights"] and len(key.pairs) == 1
    again = done(capsys, "evaluate", run, "--num-prompts", 1, "--packet", tmp_path / "two")
    assert "building" not in again
