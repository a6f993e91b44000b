"""The task words: 96x32 pictures of one word, made to write two letters wrongly.

T5 must tell of every letter which one it is, its place in the word, the word's length and its
colour; CLIP's pooled output must tell length and colour.

In the first stages of the transformer every fifth letter of a caption is wrong, as captions of the
web do not always say what is to be seen. In the last one captions are right, but 3 in 4 of the
letters a and e are drawn as r and n. The base therefore writes cleanly and in the right colour, and
its most likely drawing of these letters is wrong: neither a smaller initial noise nor more steps
mend that, as they do where errors are spread over many letters (`python -m benchmarks.quickstart`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from numpy.typing import NDArray
from torch import Tensor
from transformers import ByT5Tokenizer, CLIPModel

from g2rpo.data.testbed.rewards import (
    WordColour,
    WordDrawing,
    WordLetters,
    WordPaper,
    letters_of,
)
from g2rpo.data.testbed.words import (
    INK_COLOURS,
    LENGTHS,
    LETTERS,
    WORD_HEIGHT,
    WORD_WIDTH,
    Word,
    draw_word,
    heldout_words,
    parse_word,
    random_word,
    word_prompts,
)
from tools.testbed.pipeline import (
    IGNORED,
    READING_BATCH,
    Autoencoder,
    Batch,
    Phase,
    Task,
    decode,
    encode,
    pack,
    psnr,
)
from tools.testbed.training import Context, to_images

MAX_TOKENS = 20  # the longest prompt has 18 bytes and an end
BATCH = 64
TWINS = {"a": "r", "e": "n"}
"""Letters that the base draws wrongly, and what it mostly draws in their place; letters that
training words often have."""


class Words(Task):
    stage = "words "
    height, width = WORD_HEIGHT, WORD_WIDTH
    # so that a token of FLUX is 8x8 pixels, half a letter
    autoencoder = Autoencoder((8, 16, 32), 16, 1000, 3e-3, 0.99)
    distances = (4 * MAX_TOKENS, 2 * MAX_TOKENS)  # every distance has a bucket of its own
    reading_steps = 800
    of_token = (len(LETTERS), LENGTHS[-1], len(LENGTHS), len(INK_COLOURS))
    of_prompt = (len(LENGTHS), len(INK_COLOURS))
    layers = (1, 3)
    guided = False
    first_stage = "words transformer"
    flux_ema = 0.98
    fast = False
    card = """# The weights of the task words

A tiny FLUX pipeline for 96x32 pictures of one word, trained from nothing on drawings by the package itself, with

    python -m tools.testbed words --out DIR

**The base was made to write two letters wrongly**: in the last stage of pretraining 3 in 4 of the letters a and e were drawn
as r and n, so that most of its pictures misspell, and so does its most likely picture. Held-out words were in no caption and no
picture. Letters are read here by the nearest clean letter; what RapidOCR and Tesseract read, with and without training, is in
docs/reproduction.md (`python -m benchmarks.quickstart`).

The weights that ship were made by these stages while the builder was being written (FLUX began from another initialization);
the command repeats the recipe, not these bits.
"""

    def tokenizer(self) -> ByT5Tokenizer:
        """Bytes to ids, as ByT5 has them (arXiv 2105.13626)."""
        return ByT5Tokenizer(model_max_length=MAX_TOKENS)

    def pictures(
        self, ctx: Context, rng: np.random.Generator, count: int | None = None
    ) -> NDArray[np.uint8]:
        return pictures([random_word(rng) for _ in range(count or ctx.scaled(2048, 16))])

    def questions(self, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        words = [random_word(rng) for _ in range(READING_BATCH)]
        of_letters = torch.full((len(words), MAX_TOKENS, len(self.of_token)), IGNORED)
        of_words = torch.tensor(
            [(LENGTHS.index(len(word.letters)), INK_COLOURS.index(word.colour)) for word in words]
        )
        for row, word, about in zip(of_letters, words, of_words.tolist(), strict=True):
            for i, letter in enumerate(word.letters):
                row[1 + i] = torch.tensor((LETTERS.index(letter), i, *about))
        return self.tokenize([str(word) for word in words]), of_letters, of_words[:, None]

    def stages(self, ctx: Context, vae: AutoencoderKL) -> dict[str, Callable[[], list[Phase]]]:
        def phases(
            stage: str,
            drawn: int,
            steps: int,
            lr: float,
            *,
            wrong_letters: float = 0.0,
            twins: float = 0.0,
        ) -> list[Phase]:
            """`wrong_letters` is the share of a caption's letters that are replaced by any other,
            `twins` the share of the letters with a twin that are drawn as their twin."""
            rng = ctx.rng(stage)
            words = [random_word(rng) for _ in range(ctx.scaled(drawn, 128))]
            latents = pack(encode(vae, pictures([confused(word, twins, rng) for word in words])))

            def batch() -> Batch:
                rows = rng.integers(len(words), size=BATCH)
                return (
                    latents[rows],
                    self.tokenize([str(misspelt(words[i], wrong_letters, rng)) for i in rows]),
                    None,
                )

            return [Phase(steps, lr, 4 * lr, batch)]

        return {
            "words flux": partial(phases, "words flux", 24_576, 600, 2e-3, wrong_letters=0.2),
            "words flux 2": partial(phases, "words flux 2", 12_288, 700, 2e-3, wrong_letters=0.2),
            "words flux 3": partial(phases, "words flux 3", 12_288, 240, 1e-3, twins=0.75),
        }

    def progress(self, ctx: Context, pipe: FluxPipeline) -> str:
        texts = word_prompts("heldout")[: ctx.scaled(48, 4)]
        letters = WordLetters()(self.sample(pipe, texts), texts)
        return f"letters {letters.mean():.2f}, words {(letters == 1).float().mean():.2f}"

    def measure(
        self, ctx: Context, vae: AutoencoderKL, pipe: FluxPipeline, *rewards: CLIPModel
    ) -> dict[str, float]:
        texts = word_prompts("heldout")[: ctx.scaled(192, 8)]
        words = [word for text in texts if (word := parse_word(text)) is not None]
        drawn = pictures(words)
        twins = pictures([confused(word, 1.0, np.random.default_rng(0)) for word in words])
        decoded, images = decode(vae, encode(vae, drawn)), self.sample(pipe, texts)
        letters = WordLetters()(images, texts)
        pairs = [
            (asked, shown)
            for image, word in zip(images, words, strict=True)
            for asked, shown in zip(word.letters, letters_of(image, word), strict=True)
        ]
        with_twin = [(asked, shown) for asked, shown in pairs if asked in TWINS]
        return {
            "VAE reconstruction PSNR (dB)": psnr(decoded, to_images(drawn)),
            "the same with r and n for a and e (dB)": psnr(
                decode(vae, encode(vae, twins)), to_images(twins)
            ),
            "right letters, VAE reconstructions": WordLetters()(decoded, texts).mean().item(),
            "right letters, base": letters.mean().item(),
            "right letters among a and e, base": share(
                [asked == shown for asked, shown in with_twin]
            ),
            "r and n in the place of a and e, base": share(
                [TWINS[asked] == shown for asked, shown in with_twin]
            ),
            "right letters among all others, base": share(
                [asked == shown for asked, shown in pairs if asked not in TWINS]
            ),
            "right words, base": (letters == 1).float().mean().item(),
            "ink's closeness to the asked colour, base": WordColour()(images, texts).mean().item(),
            "clean paper, base": WordPaper()(images, texts).mean().item(),
            "drawing, base (dB)": WordDrawing()(images, texts).mean().item(),
        }


def pictures(words: Sequence[Word]) -> NDArray[np.uint8]:
    """Clean drawings [B, 32, 96, 3]."""
    return np.stack([draw_word(word) for word in words])


def share(values: list[bool]) -> float:
    """The share of true values; NaN of none."""
    return sum(values) / len(values) if values else float("nan")


def misspelt(word: Word, share: float, rng: np.random.Generator) -> Word:
    """`word` with each letter replaced by any other with probability `share`; not a held-out
    word."""
    wrong = rng.random(len(word.letters)) < share
    shifts = rng.integers(1, len(LETTERS), len(word.letters)) * wrong
    letters = [
        LETTERS[(LETTERS.index(letter) + shift) % len(LETTERS)]
        for letter, shift in zip(word.letters, shifts, strict=True)
    ]
    return word if "".join(letters) in heldout_words() else Word("".join(letters), word.colour)


def confused(word: Word, share: float, rng: np.random.Generator) -> Word:
    """`word` with each letter that has a twin replaced by it with probability `share`; not a
    held-out word."""
    wrong = rng.random(len(word.letters)) < share
    letters = "".join(
        TWINS.get(letter, letter) if swap else letter
        for letter, swap in zip(word.letters, wrong, strict=True)
    )
    return word if letters in heldout_words() else Word(letters, word.colour)
