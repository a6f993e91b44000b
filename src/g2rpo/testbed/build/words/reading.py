"""Stage 2: the text encoders learn to read bytes, on text alone.

T5 must tell of every letter which one it is, its place in the word, the word's length and its colour; CLIP's pooled output
must tell length and colour.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import ByT5Tokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from g2rpo.testbed.build.common import Context, fit
from g2rpo.testbed.build.reading import IGNORED, questions
from g2rpo.testbed.words.language import COLOURS, LENGTHS, LETTERS, Word, random_word

WIDTH, POOLED_WIDTH = 128, 64
MAX_TOKENS = 20  # the longest prompt has 18 bytes and an end
BATCH = 128
OF_WORD = (len(LENGTHS), len(COLOURS))
OF_LETTER = (len(LETTERS), LENGTHS[-1], *OF_WORD)


class Readers(nn.Module):
    """The two text encoders, and the heads that are asked what was read; the heads are thrown away afterwards."""

    def __init__(self) -> None:
        super().__init__()
        tokens = tokenizer()
        self.t5 = T5EncoderModel(
            T5Config(
                vocab_size=len(tokens),
                d_model=WIDTH,
                d_kv=32,
                num_heads=4,
                d_ff=2 * WIDTH,
                num_layers=2,
                relative_attention_num_buckets=4 * MAX_TOKENS,  # every distance has its own
                relative_attention_max_distance=2 * MAX_TOKENS,
                feed_forward_proj="relu",
                dropout_rate=0.0,
                pad_token_id=tokens.pad_token_id,
                eos_token_id=tokens.eos_token_id,
                is_encoder_decoder=False,
            )
        )
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(tokens),
                hidden_size=POOLED_WIDTH,
                intermediate_size=2 * POOLED_WIDTH,
                num_attention_heads=4,
                num_hidden_layers=2,
                max_position_embeddings=MAX_TOKENS,
                pad_token_id=tokens.pad_token_id,
                bos_token_id=tokens.pad_token_id,
                eos_token_id=tokens.eos_token_id,
            )
        )
        self.letter_head = nn.Linear(WIDTH, sum(OF_LETTER))
        self.word_head = nn.Linear(POOLED_WIDTH, sum(OF_WORD))


def tokenizer() -> ByT5Tokenizer:
    """Bytes to ids, as ByT5 has them (arXiv 2105.13626)."""
    return ByT5Tokenizer(model_max_length=MAX_TOKENS)


def tokenize(words: list[Word]) -> Tensor:
    """Tokens [B, 20] of prompts, padded."""
    return tokenizer()(
        [str(word) for word in words], padding="max_length", max_length=MAX_TOKENS, return_tensors="pt"
    ).input_ids


def build_readers(ctx: Context) -> Readers:
    """Trains both text encoders to read."""
    file = ctx.work / "readers.safetensors"
    rng = ctx.rng("words reading")
    readers = Readers()
    if file.exists():
        load_model(readers, file)
        return readers.eval()

    def loss() -> Tensor:
        words = [random_word(rng) for _ in range(BATCH)]
        tokens = tokenize(words)
        told, gist = readers.letter_head(readers.t5(tokens)[0]), readers.word_head(readers.clip(tokens).pooler_output)
        of_word = torch.tensor([about(word) for word in words])
        return questions(told, of_letters(words), OF_LETTER) + questions(gist, of_word, OF_WORD)

    fit(ctx, "reading", readers, loss, steps=ctx.scaled(800, 4), lr=2e-3, matrix_lr=8e-3, ema=0.99)
    ctx.work.mkdir(parents=True, exist_ok=True)
    save_model(readers, str(file))
    return readers


def about(word: Word) -> tuple[int, int]:
    """A word's length and colour, as class indices."""
    return LENGTHS.index(len(word.letters)), COLOURS.index(word.colour)


def of_letters(words: list[Word]) -> Tensor:
    """What T5 is to tell of each token [B, 20, 4]: four classes of a letter of the word, `IGNORED` of what is none."""
    answers = torch.full((len(words), MAX_TOKENS, len(OF_LETTER)), IGNORED)
    for row, word in zip(answers, words, strict=True):
        for i, letter in enumerate(word.letters):
            row[1 + i] = torch.tensor((LETTERS.index(letter), i, *about(word)))
    return answers
