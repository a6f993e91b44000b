"""The task words: prompts, drawings, judges, the shipped weights and their builder."""

import hashlib
import json
from functools import partial

import pytest
import torch

from g2rpo.data import testbed
from g2rpo.data.testbed.rewards import WordColour, WordDrawing, WordLetters, WordPaper, picture
from g2rpo.data.testbed.words import (
    INK_COLOURS,
    LETTERS,
    Word,
    heldout_words,
    parse_word,
    word_prompts,
)
from tests.support.tolerances import near, rounding
from tools.testbed.words import Words

ASSETS = testbed.assets_dir() / "words"
TIGER = Word("tiger", "red")
DIGESTS = {
    "text_encoder": "327c4ce4a5ce1b89",
    "text_encoder_2": "7bd161ab1aa19e01",
    "transformer": "085a1002a2e3fd72",
    "vae": "8287db165f0172e1",
}
"""The first 16 digits of the SHA-256 of the weights that the card's figures were measured on."""


def test_prompts_are_words_and_held_out_ones_are_in_no_other_list():
    train, heldout = (
        [parse_word(prompt) for prompt in word_prompts(split)] for split in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (2000, 262)
    for words, split in ((train, "train"), (heldout, "heldout")):
        assert tuple(map(str, words)) == tuple(word_prompts(split))
    assert {word.letters for word in heldout} == heldout_words() and "tiger" in heldout_words()
    assert not {word.letters for word in train} & heldout_words()
    assert set("".join(word.letters for word in train)) == set(LETTERS)
    assert testbed.prompts("heldout", "words") == list(word_prompts("heldout"))
    # bytes; the builder's MAX_TOKENS has room for the end as well
    assert len(max(map(str, (*train, *heldout)), key=len)) <= 18


OTHER = """
'tiger'
'Tiger' in red
'ab' in red
'tigress' in red
'tiger' in pink
tiger in red
"""
JUDGES = [WordColour(), WordPaper(), WordDrawing(), WordLetters()]


@pytest.mark.parametrize("prompt", OTHER.strip().splitlines())
def test_other_prompts_have_no_word_and_no_score(prompt):
    assert parse_word(prompt) is None
    assert all(judge(picture(TIGER)[None], [prompt]).isnan().all() for judge in JUDGES)


CLOSE = rounding(30)


def test_judges_of_clean_drawings():
    words = [
        Word(letters, colour) for letters in ("tiger", "cat", "quilts") for colour in INK_COLOURS
    ]
    images, texts = torch.stack([picture(word) for word in words]), [str(word) for word in words]
    colour, *others = (judge(images, texts) for judge in JUDGES)
    assert colour.sub(1).abs().max() <= CLOSE["rtol"]
    for scores, best in zip(others, (1, 60, 1), strict=True):
        assert scores.eq(best).all()


def test_judges_see_what_is_wrong():
    asked = str(TIGER)
    noise = torch.randn(3, 32, 96, generator=torch.Generator().manual_seed(0))
    clean, speckled = picture(TIGER), (picture(TIGER) + 0.15 * noise).clamp(0, 1)
    others = [Word("tiger", "blue"), Word("tigor", "red"), Word("tigers", "red")]
    images = torch.stack([*map(picture, others), speckled])
    colours = WordColour()(images, [asked] * 4)
    assert (
        colours[0] < 0.2 and colours[1:3].tolist() == near([1, 1], CLOSE) and 0.95 < colours[3] < 1
    )
    assert WordLetters()(images[1:2], [asked]).tolist() == near([4 / 5], CLOSE)
    paper = WordPaper()(images, [asked] * 4)
    assert paper[:2].tolist() == [1, 1] and paper[2] < 0.95 and paper[3] < 0.2
    drawing = WordDrawing()(torch.stack([clean, images[1], speckled]), [asked] * 3)
    assert drawing[0] == drawing[1] == 60  # a wrong letter may be drawn cleanly
    # 20 log10(1 / .15) = 16.5, and a little more: half of the paper's noise is cut at white
    assert 16 < drawing[2] < 19
    assert WordColour()(torch.ones(1, 3, 32, 96), [asked]).tolist() == [0]


def test_no_other_ink_passes_for_the_asked_one():
    pairs = [(asked, shown) for asked in INK_COLOURS for shown in INK_COLOURS if asked != shown]
    images = torch.stack([picture(Word("tiger", shown)) for _, shown in pairs])
    assert (
        WordColour()(images, [f"'tiger' in {asked}" for asked, _ in pairs]).max()
        < 0.72
        < WordColour.right
    )


def test_weights_are_those_that_were_measured():
    files = ASSETS.rglob("*.safetensors")
    assert {
        file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files
    } == DIGESTS
    figures = json.loads((ASSETS / "figures.json").read_text())
    assert (
        figures["r and n in the place of a and e, base"] > 0.6
        and figures["right letters among all others, base"] > 0.99
    )


@pytest.mark.slow
def test_the_pipeline_writes_words():
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(testbed.pipeline_dir("words"), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    texts = word_prompts("heldout")[:48]
    sample = partial(Words().sample, pipe)
    images = sample(texts)
    assert images.shape == (48, 3, 32, 96) and torch.equal(sample(texts[:4]), sample(texts[:4]))
    assert not pipe.transformer.config.guidance_embeds
    letters = WordLetters()(images, texts).mean()
    assert 0.6 <= letters <= 0.95  # misspelt, but not at random
    asked = map(parse_word, texts)
    backwards = [str(Word(word.letters[::-1], word.colour)) for word in asked]
    assert WordLetters()(images, backwards).mean() < 0.4
    assert WordColour()(images, texts).mean() >= 0.9 and WordPaper()(images, texts).mean() >= 0.9
