"""The word-level tokenizer shared by all text encoders of the testbed."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from g2rpo.testbed.grammar import WORDS

# CLIPTextModel pools at the first end token, except that it treats the id 2 as a mark of old, broken configs.
PAD, END, UNKNOWN = 0, 1, 3
SPECIAL = ("<pad>", "</s>", "<reserved>", "<unk>")
VOCABULARY = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
MAX_TOKENS = 16


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Words to ids, an end token after the last word, padding on the right."""
    core = Tokenizer(WordLevel(VOCABULARY, unk_token=SPECIAL[UNKNOWN]))
    core.normalizer = Lowercase()
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[(SPECIAL[END], END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        unk_token=SPECIAL[UNKNOWN],
        model_max_length=MAX_TOKENS,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


def tokenize(texts: list[str]) -> Tensor:
    """Tokens [N, 16], padded."""
    return tokenizer()(texts, padding="max_length", max_length=MAX_TOKENS, return_tensors="pt").input_ids
