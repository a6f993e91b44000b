"""Text in pictures, read by RapidOCR with the PP-OCRv6 models inside its wheel; nothing is
downloaded.

The score is Flow-GRPO's (arXiv 2505.05470, section 4.1): 1 - edit distance / length of the text.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Annotated, Any

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from g2rpo.core.data import Prompt, spelling_apart
from g2rpo.core.errors import UserError
from g2rpo.core.images import to_pil
from g2rpo.core.plain import Count
from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.pixels import TargetReward

_LETTER = r"[^\W\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff]"
"""A letter or digit of a script with apostrophes and with spaces between words: not Chinese,
Japanese or Korean."""

KEPT = 4096
"""Pictures whose text is remembered."""

_DOUBLE = re.compile(
    r"""
      (?<![\d½¼¾⅓⅔⅛"＂″]) (?!(?<=\d\s)["＂″]\s)                      # after a number a first " is inches
      (?: ["＂″] | ["＂″]{2,}(?!\s) ) (?=[^"＂″]*[^\s"＂″]) ([^"＂″]+) ["＂″]     # "a", ""a""
    | „ ([^„“”"]+) [“”"]                                             # „a“, „a”
    | [“‟] ((?:[^“”‟]|“[^“”]*”)+) ["”]                               # “a”, “a “b””
    | “ ([^“”]+) “ (?!LETTER)                                            # “a“
    | ” ([^”]+) ”                                                    # ”a”
    | « ((?:[^«»]|«[^«»]*»)+) »                                      # «a»
    | » ([^«»]+) [«»]                                                # »a«, »a»
    | ‹ ([^‹›]+) › | › ([^‹›]+) [‹›]
    | 「 ((?:[^「」]|「[^「」]*」)+) 」 | 『 ((?:[^『』]|『[^『』]*』)+) 』
    | ｢ ([^｢｣]+) ｣ | 《 ([^《》]+) 》 | 〈 ([^〈〉]+) 〉 | 〝 ([^〝〞〟]+) [〞〟] | ❝ ([^❝❞]+) ❞
    | `` (.+?) ''
    | ‘ ((?:[^‘“”’]|(?<=LETTER)’(?=LETTER))*“[^“”]+”[^‘“”’]*) ’ (?!LETTER)         # ‘a “b” c’
    """.replace("LETTER", _LETTER),
    re.VERBOSE,
)
"""What double quotes of many languages enclose, one inner pair included."""

_SINGLE = re.compile(
    r"""
      (?<!LETTER)(['＇]) (?!\s|n['＇]|\d\ds?\b(?!['＇])) ((?:(?!(?<!LETTER)['＇]\w).)+?) (?<!\s)['＇] (?!LETTER)
    | ‘ (?!\s|n’) ((?:[^‘’]|’(?=LETTER))+) ’ (?!LETTER)
    | ‚ ([^‚‘’]+) [‘’]
    | (?<!LETTER)’ (?!\s|n’|\d\ds?\b(?!’)) ((?:(?!(?<!LETTER)’\w)[^‘])+?) (?<!\s)’ (?!LETTER)
    | ❛ ([^❛❜]+) ❜ | ` ([^`]+) [`']
    """.replace("LETTER", _LETTER),
    re.VERBOSE,
)
"""What single quotes enclose. An apostrophe inside a word, before a decade or in 'n' is none."""


def quoted(prompt: str) -> str:
    """The first text in quotes, "" if there is none. Double quotes come before single ones: where a
    prompt has straight double quotes, that is Flow-GRPO's rule, the text between the first two; but
    after a digit, a first one stands for inches."""
    for marks in (_DOUBLE, _SINGLE):
        for found in marks.finditer(prompt):
            text = next(part for part in reversed(found.groups()) if part is not None)
            if plain_letters(text):
                return text
    return ""


class OCR(TargetReward):
    """1 - edit distance / length, in [0, 1], of what is read and the text that the prompt asks for;
    1 is exact.

    The text is the prompt's metadata `text`, else the first quoted part; a prompt without either
    has no score. Case and spaces do not count, as in Flow-GRPO. Args: `detect`, whether text is
    looked for in the whole picture (about 0.3 s of a core at 512x512); without, the picture is read as
    one line (about 30 ms). `contains`, whether further text around it is allowed, as in Flow-GRPO; else
    it counts as errors. `exact`, whether a score below 1 becomes 0. `width`, the least width of a
    line at height 48, to which it is padded; a smaller one is faster for short lines. `squeeze`, the
    share of its width to which a picture is narrowed before it is read: a line of half the width
    takes half the time, and large letters are read as well (studies/LOG.md). Pictures are read
    in as many threads as torch uses, and each once: rewards with the same `detect` and `width` share
    what was read.
    """

    upstream, licence = "https://github.com/RapidAI/RapidOCR", "Apache-2.0"
    libraries = ("rapidocr", "onnxruntime")
    right = 1.0
    right_in_words = "Spells {} texts"
    wants = "a text to show: put it in quotes, or in the metadata as `text`"

    def __init__(
        self,
        *,
        detect: bool = True,
        contains: bool = False,
        exact: bool = False,
        width: Count = 320,
        squeeze: Annotated[float, Field(gt=0, le=1)] = 1.0,
    ) -> None:
        self.detect, self.contains, self.exact, self.squeeze = detect, contains, exact, squeeze
        self.engine = load_engine(width)
        self.known = _known(detect, width)

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel:
        # as many operations as other models do in its 0.3 s and 0.03 s of a core
        whole = 24e9 if options["detect"] else 2.4e9
        return RewardModel(flops=whole * options["squeeze"])

    @staticmethod
    def target(prompt: str) -> str | None:
        """The text that a picture of `prompt` should show, None if it names none."""
        given = prompt.metadata.get("text") if isinstance(prompt, Prompt) else None
        # a table's empty cell is none
        text = quoted(prompt) if given in (None, "") else str(given)
        return text if plain_letters(text) else None

    def score_pictures(self, images: Tensor, targets: list[str]) -> Tensor:
        texts = self.texts([self.narrowed(one) for one in to_pil(images)])
        scores = torch.tensor(
            [similarity(*pair, contains=self.contains) for pair in zip(texts, targets, strict=True)]
        )
        return (scores == 1).float() if self.exact else scores

    def narrowed(self, picture: Image.Image) -> Image.Image:
        """`picture`, or `squeeze` of its width."""
        return picture.resize((max(1, round(self.squeeze * picture.width)), picture.height))

    def texts(self, pictures: Sequence[Image.Image]) -> list[str]:
        """The texts of pictures of one size, by `read` or as they were read before."""
        keys = [
            hashlib.sha256(repr(one.size).encode() + one.tobytes()).digest() for one in pictures
        ]
        known = dict(self.known)  # other threads may add and remove
        new = {key: one for key, one in zip(keys, pictures, strict=True) if key not in known}
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            read = dict(zip(new, pool.map(self.read, new.values()), strict=True))
        self.known.update(read)
        for oldest in list(self.known)[:-KEPT]:
            self.known.pop(oldest, None)
        known |= read
        return [known[key] for key in keys]

    def read(self, picture: Image.Image) -> str:
        """The text that RapidOCR reads in a picture, line by line; one picture per call, so that
        scores are independent."""
        found = self.engine(picture, use_det=self.detect, use_cls=False)
        return "".join(found.txts or ())


@cache
def load_engine(width: int) -> Any:
    """RapidOCR with sessions of one thread and without log output; UserError if it is not
    installed."""
    for library in OCR.libraries:
        try:
            importlib.import_module(library)
        except ModuleNotFoundError as error:
            raise UserError(
                f"the reward ocr needs {library}: pip install {' '.join(OCR.libraries)}"
            ) from error
    from rapidocr import RapidOCR

    threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
    return RapidOCR(
        params={**threads, "Global.log_level": "critical", "Rec.rec_img_shape": [3, 48, width]}
    )


@cache
def _known(detect: bool, width: int) -> dict[bytes, str]:
    """Texts by picture, which equal readers share; the oldest first."""
    return {}


def plain_letters(text: str) -> str:
    """`text` without case and spaces, and with accents and syllables as single letters."""
    return spelling_apart(text).replace(" ", "")


def similarity(read: str, target: str, contains: bool = False) -> float:
    """1 - edit distance / length of `target`, at least 0, without case and spaces."""
    read, target = plain_letters(read), plain_letters(target)
    if contains and target in read:
        return 1.0
    return 1 - min(edit_distance(read, target), len(target)) / len(target)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: the least number of letters to insert, remove or replace."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
