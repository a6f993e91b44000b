"""The reward ocr: RapidOCR's own reading, the asked text of a prompt, and Flow-GRPO's score."""

import itertools
import sys
import unicodedata

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from g2rpo.config.read import load_config
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.images import to_tensor
from g2rpo.rewards import ocr
from g2rpo.rewards.ocr import OCR, edit_distance
from g2rpo.train.build import show_prompts
from g2rpo.train.checks import check
from tests.support.refusals import refusal
from tests.support.tables import rows

WORDS = ("tiger", "bemo", "quilt", "Zebra")


def picture(text):
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSansMono-Bold.ttf", 24)
    image = Image.new("RGB", (96, 32), "white")
    ImageDraw.Draw(image).text((48, 16), text, fill=(200, 30, 30), font=font, anchor="mm")
    return image


def pictures(*words):
    return to_tensor([picture(word) for word in words]) / 255


@pytest.fixture(scope="module")
def line():
    """Reads a picture as one line."""
    return OCR(detect=False, width=144)


def test_words_are_read_whatever_the_number_of_threads(line, monkeypatch):
    """Of these pictures every letter is .99 likelier than the next: no rounding makes another."""
    reader = getattr(line.engine, "text_rec", None) or line.engine._load_rec_model()  # since 3.10
    options = reader.session.session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    images = pictures(*WORDS, "")
    prompts = [f'"{word}"' for word in ("tiger", "demo", "quill", "zebra", "x")]
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(line(images, prompts), torch.tensor([1, 3 / 4, 4 / 5, 1, 0]))
    assert torch.equal(line(images[2:3], prompts[2:3]), torch.tensor([4 / 5]))
    monkeypatch.setattr(line, "exact", True)
    assert line(images, prompts).tolist() == [1, 0, 0, 1, 0]
    monkeypatch.setattr(line, "contains", True)
    assert line(images[:1], ["'tig'"]).tolist() == [1]


def test_a_picture_is_read_once_by_rewards_that_read_alike(monkeypatch):
    """Whatever they make of it; and only the newest texts are kept."""
    monkeypatch.setattr(ocr, "KEPT", 2)
    share, exact = (OCR(detect=False, width=144, exact=each) for each in (False, True))
    wide = OCR(detect=False, width=160)
    assert share.engine is exact.engine and wide.known is not exact.known
    share.known.clear()
    read = []
    for reward in (share, exact):
        monkeypatch.setattr(reward, "read", lambda one: read.append(one) or "tiger")
    images, prompts = pictures("tiger", "quilt", "tiger"), ["'tigers'", "'tiger'", "'x'"]
    assert torch.equal(share(images, prompts), torch.tensor([5 / 6, 1, 0]))
    assert exact(images, prompts).tolist() == [0, 1, 0] and len(read) == 2
    share(pictures("a", "b"), ["'a'", "'b'"])
    exact(images[:1], prompts[:1])
    assert len(read) == 5
    share.known.clear()  # of what was not really read


def test_a_squeezed_line_reads_the_same_words():
    """Whose letters are large; and not what was read of the whole picture."""
    whole, half = (OCR(detect=False, width=72, squeeze=share) for share in (1, 0.5))
    images, prompts = pictures(*WORDS), [f"'{word}'" for word in WORDS]
    assert half.narrowed(picture("tiger")).size == (48, 32)
    half.known.clear()
    assert whole(images, prompts).tolist() == half(images, prompts).tolist() == [1] * len(WORDS)
    assert half.known is whole.known and len(half.known) == 2 * len(WORDS)
    assert OCR.model_of({"detect": True, "squeeze": 0.5}).flops == 12e9


def test_no_text_and_no_finite_pixel_are_no_score(line, caplog):
    images = pictures("tiger", "tiger", "tiger")
    images[2, 0, 0, 0] = torch.nan
    for _ in range(2):
        scores = line(images, ["'tiger'", "tiger", "'tiger'"])
        assert scores.isnan().tolist() == [False, True, True]
    assert caplog.text.count("1 of 3 prompts, the first: 'tiger'") == 1


def noise(seed):
    """A word under noise, which is misread."""
    rough = np.random.default_rng(seed).normal(np.asarray(picture(WORDS[seed])), 90)
    return Image.fromarray(rough.clip(0, 255).astype(np.uint8))


@pytest.mark.slow
def test_it_reads_what_rapidocrs_own_call_reads():
    """RapidOCR called as its manual does, with its defaults but for the classifier of upside-down
    lines."""
    from rapidocr import RapidOCR

    own, ours, plain = RapidOCR(), OCR(detect=True), OCR(detect=False)
    scene = Image.new("RGB", (320, 200), (230, 240, 230))
    scene.paste(picture("tiger"), (30, 20))
    scene.paste(picture("Wolf"), (180, 130))
    assert ours.read(scene) == "".join(own(scene, use_cls=False).txts) == "tigerWolf"
    for image in [*map(picture, WORDS), *map(noise, range(4))]:
        found = own(np.asarray(image)[:, :, ::-1], use_det=False, use_cls=False)
        assert plain.read(image) == "".join(found.txts)
    assert ours.read(Image.new("RGB", (64, 64), "white")) == ""


ASKED = """
the word 'tiger' in red -> tiger
a dog's sign that says "New York" and "no" -> New York
a dog's bowl isn't 'full' -> full
a 12" pizza box that says "Mario's" -> Mario's
a 1½" pipe, 3" wide, labelled "Hot" -> Hot
a 12 " pizza, a TV 42", a sign "Route 66" and "No" -> Route 66
a 6' man, a 10'x12" rug, 12'' tiles, 'Hi' -> Hi
a '90s diner's sign, rock 'n' roll, the dogs' 'Open' bowl -> Open
the year '42' on a ’90s wall -> 42
a 'vintage' ‘red’ sign "HI" -> HI
a sign "open, and «Hi» -> Hi
"" and "Hi" -> Hi
""Hi"" -> Hi
“Hi “you” ‘there’” and “no” -> Hi “you” ‘there’
‘Mario’s “best” pizza’ -> Mario’s “best” pizza
‘Mario’s’ pizza -> Mario’s
「a『b』c」 -> a『b』c
"""
QUOTED = """
„Hi“ „Hi" „Hi” ”Hi” “Hi“ »Hi« »Hi» ‹Hi› ‚Hi‘ ’Hi’ ″Hi″ 「Hi」 『Hi』 ｢Hi｣ 《Hi》 〝Hi〟 ＂Hi＂
写着'Hi'的牌子 写着‘Hi’的牌子 写着"Hi"的牌子 写着“Hi”的牌子 写着’Hi’的牌子 写着「Hi」的牌子
"""
WITHOUT = """
a dog's bowl isn't full
a 12" by 16" poster
the boys' and girls' room in '66
"""


@pytest.mark.parametrize(("prompt", "text"), rows(ASKED))
def test_the_asked_text(prompt, text):
    assert OCR.target(prompt) == text


def test_the_asked_text_by_any_quotes_or_by_metadata():
    assert {OCR.target(f"x {one}") for one in QUOTED.split()} == {"Hi"}
    assert {OCR.target(one) for (one,) in rows(WITHOUT)} == {None}
    own = [OCR.target(Prompt("a 'sign'", metadata={"text": text})) for text in ("stop", "", 0)]
    assert own == ["stop", "sign", "0"]
    assert OCR.target(Prompt("a sign", metadata={"text": "stop"})) == "stop"


@given(
    st.lists(st.text("aé12 '.-中", min_size=1).filter(str.strip), min_size=1, max_size=4),
    st.text("a '1"),
)
def test_in_ordinary_double_quotes_it_is_flow_grpos_rule(texts, rest):
    """Its prompts have the text between the first two double quotes (flow_grpo/ocr.py:
    `prompt.split('"')[1]`)."""
    prompt = rest + " says ".join(f' the sign "{text}"' for text in texts)
    assert OCR.target(prompt) == (prompt.split('"')[1])


def test_a_run_says_what_it_reads(tmp_path):
    """The prompts without a text, and three of the texts."""
    train, heldout = tmp_path / "a.txt", tmp_path / "b.txt"
    train.write_text("a \"tiger\"\na 'lion'\na red circle\n" + "a «wolf»\n" * 2 + "x\n")
    heldout.write_text('a "cat"\n')
    sources = [f"prompts.train={train}", f"evaluation.prompts={heldout}"]
    config, said = load_config("scenes", ["rewards.ocr=1", *sources]), []
    show_prompts(check(config), lambda event: said.append(event.title + event.text))
    assert said[2:] == [
        "rewards.ocr in training prompts: 2 of 6 name no text and get no score. Read are "
        "'tiger' from 'a \"tiger\"'; 'lion' from \"a 'lion'\"; 'wolf' from 'a «wolf»'",
        "rewards.ocr in held-out prompts: all 1 name a text. Read are 'cat' from 'a \"cat\"'",
    ]


def distance_by_definition(a, b):
    if not a or not b:
        return len(a) + len(b)
    less, more, other = map(distance_by_definition, (a[1:], a, a[1:]), (b, b[1:], b[1:]))
    return min(less + 1, more + 1, other + (a[0] != b[0]))


@pytest.mark.parametrize("text", ["CAFÉ", "커피"])
def test_a_letter_may_be_written_as_several_characters(text):
    """As names of files on a Mac, and prompts made of them, have accents and Korean syllables."""
    assert ocr.similarity(text, unicodedata.normalize("NFD", text).lower()) == 1


def test_edit_distance_is_levenshteins():
    words = ["".join(letters) for n in range(4) for letters in itertools.product("ab", repeat=n)]
    assert all(edit_distance(a, b) == distance_by_definition(a, b) for a in words for b in words)


def test_wrong_input_is_refused_before_anything_is_loaded(monkeypatch, tmp_path):
    assert "rewards.ocr: none of 2000 prompts" in refusal("rewards.ocr.options.detect=false")
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(UserError, match="pip install rapidocr onnxruntime"):
        OCR()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "p.txt").write_text("the word 'tiger'\n")
    said = refusal("rewards.ocr=1", f"prompts.train={tmp_path}/p.txt")
    assert "rewards.ocr: " in said and "pip install rapidocr onnxruntime" in said
