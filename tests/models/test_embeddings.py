"""The embedding cache: what is found is what was made, and nothing else is ever found."""

import json
import os
import shutil
from contextlib import nullcontext

import pytest
import torch

from g2rpo.core.data import Cond
from g2rpo.core.errors import UserError
from g2rpo.core.files import FileDigests
from g2rpo.models import embeddings, load
from g2rpo.models.embeddings import (
    CachedEncoder,
    DamagedEmbedding,
    EmbeddingStore,
    encode_ahead,
    open_store,
)
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.models.options import PolicyConfig
from g2rpo.train.ranks import prompts_to_come
from tests.support.commands import done, refused, small_files
from tests.support.runs import PROMPTS, trainer
from tests.support.tiny import save_flux
from tests.support.tolerances import BFLOAT16, network, rounding
from tests.support.variants import few

TEXTS = ["a red circle", "two blue square left of a circle", "a square"]
SIZE = {"height": 32, "width": 32, "max_sequence_length": 12}
ROW = Cond(
    {"a": torch.arange(6.0).reshape(1, 6), "b": torch.ones(1, 2, 3, dtype=torch.bfloat16)},
    {"of any length": (torch.arange(12.0).reshape(4, 3),)},
)


def complain(message):
    raise AssertionError(message)


def cached(path, cache="auto", **options):
    """The text encoders of the tiny FLUX in `path` behind the cache."""
    config = PolicyConfig(path=str(path), **{**SIZE, **options})
    return load.load_pipeline(config, tuning="frozen").cached(str(cache), complain)


class Parked(GaussianPolicy):
    """The Gaussian policy as its own text encoder, with a note of every time it was to leave its
    device."""

    def __init__(self):
        super().__init__()
        self.times = 0

    at_work = staticmethod(nullcontext)

    def park(self):
        self.times += 1


def gaussian(store, notify=complain):
    policy = GaussianPolicy()
    policy.stored = CachedEncoder(Parked(), store, notify=notify)
    policy.encode = policy.stored.encode
    return policy


def equal(a, b):
    """Equal to the bit."""
    one, other = (
        each.tensors | {name: rows[0] for name, rows in each.ragged.items()} for each in (a, b)
    )
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def store(tmp_path):
    return EmbeddingStore(tmp_path, {"model": "x"}, reserve=0)


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], "bfloat16".__eq__))
def test_what_is_found_is_what_was_made_bit_for_bit(flux_directory, dtype):
    """And a row of a batch is within what the order of sums leaves of the encoder's own."""
    cold, warm, off = (
        cached(flux_directory, cache, dtype=dtype) for cache in ("auto", "auto", "off")
    )
    made, found, without = cold.encode(TEXTS), warm.encode(TEXTS), off.encode(TEXTS)
    assert (cold.encoded, warm.encoded, off.encoded) == (3, 0, 3)
    assert equal(made, found) and equal(made, without)
    assert made.tensors["prompt_embeds"].dtype == getattr(torch, dtype)
    exact = cold.encoder.encode(TEXTS).tensors
    size = exact["prompt_embeds"].float().abs().max()
    # two layers of some sixteen operations, each rounded to bfloat16 once
    close = network(size) if dtype == "float32" else rounding(32, size, BFLOAT16)
    torch.testing.assert_close(made.tensors, exact, **close)


def test_a_row_depends_on_nothing_but_its_prompt(flux_directory):
    together, alone = (
        cached(flux_directory, "off").encode(texts) for texts in ([*TEXTS, TEXTS[0]], TEXTS[1:2])
    )
    assert equal(together.rows([1]), alone) and equal(together.rows([0]), together.rows([3]))


def test_without_a_store_rows_stay_in_memory_while_there_is_room(monkeypatch):
    size = Parked().encode(["1"]).nbytes
    monkeypatch.setattr(embeddings, "KEPT", 2 * size)
    encoder = CachedEncoder(Parked(), None, notify=complain)
    first = encoder.encode(["1", "2", "3"])
    assert equal(encoder.encode(["1", "2", "3"]), first)
    assert encoder.encoded == 4  # 3 again


def test_negative_prompts_are_kept_with_the_prompt(sd3_directory):
    """Stable Diffusion 3 with guidance is conditioned on two prompts, without on one; each finds
    its own."""
    for scale, names in ((4.5, 4), (1.0, 2)):
        made, found = (
            cached(sd3_directory, guidance_scale=scale).encode(TEXTS[:1]) for _ in range(2)
        )
        assert equal(made, found) and len(made.tensors) == names
    assert cached(sd3_directory, negative_prompt="blue").missing(TEXTS) == TEXTS


def test_only_settings_that_embeddings_depend_on_miss(flux_directory):
    cached(flux_directory).encode(TEXTS)
    for changes, missing in (
        ({"max_sequence_length": 8}, TEXTS),
        ({"dtype": "bfloat16"}, TEXTS),
        ({"guidance_scale": 1.0, "height": 48, "lora_above": 0.5}, []),
        ({"tuning": "full"}, []),
    ):
        assert cached(flux_directory, **changes).missing(TEXTS) == missing, changes


def test_other_text_encoders_and_tokenizers_miss_and_another_transformer_finds(
    flux_directory, tmp_path
):
    cached(flux_directory).encode(TEXTS)
    assert cached(flux_directory).missing([*TEXTS, "two"]) == ["two"]
    assert cached(save_flux(tmp_path / "other", seed=1)).missing(TEXTS) == TEXTS
    moved = shutil.copytree(flux_directory, tmp_path / "moved")
    shutil.copytree(tmp_path / "other/transformer", moved / "transformer", dirs_exist_ok=True)
    assert cached(moved).missing(TEXTS) == []
    # the same size: only its content tells
    encoder = "text_encoder_2/model.safetensors"
    shutil.copy(tmp_path / "other" / encoder, moved / encoder)
    assert cached(moved).missing(TEXTS) == TEXTS
    copy = shutil.copytree(flux_directory, tmp_path / "copy")
    words = copy / "tokenizer_2/tokenizer.json"
    words.write_text(words.read_text().replace('"red"', '"rot"'))
    assert cached(copy).missing(TEXTS) == TEXTS


@pytest.mark.parametrize("edits", [False, True])
def test_every_part_that_encodes_is_in_the_key_and_no_other(
    flux_directory, tmp_path, monkeypatch, edits
):
    """Models name what encodes beside text encoders in their own ways: Qwen-Image-2.1 and the edit
    models have a processor, LongCat-Image a text_processor, Krea-2 layers of its text encoder in
    the index. An edit model's VAE encodes its input pictures."""
    folder = shutil.copytree(flux_directory, tmp_path / "model")
    config = PolicyConfig(path=str(folder), **SIZE)
    index = json.loads((folder / "model_index.json").read_text())
    names = ("processor", "text_processor", "scheduler", "transformer", "vae")
    index |= {name: ["transformers", "Processor"] for name in names[:2]}

    def key(**more):
        (folder / "model_index.json").write_text(json.dumps({**index, **more}))
        content = load.find_pipeline(config).content
        return open_store("auto", config, content, edits=edits, guided=False).folder

    keys = [key(), key(text_encoder_select_layers=[2, 5]), key(_diffusers_version="0")]
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "more.json").write_text("{}")
        keys.append(key())
    for version in ("999.1.0", "999.1.1", "999.2.0"):  # libraries change how they encode
        monkeypatch.setattr("transformers.__version__", version)
        keys.append(key())
    new = [one not in keys[:place] for place, one in enumerate(keys)]
    assert new == [True, True, False, True, True, False, False, edits, True, False, True]


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda content, other, keep=keep: content[:keep] for keep in (0, 5, 100, -1)),
        lambda content, other: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content, other: other,
    ],
)
def test_a_damaged_file_or_one_that_the_disk_does_not_give_is_never_used(
    store, damage, monkeypatch
):
    assert store.read("p") is None and "p" not in store
    for prompt in "pq":
        store.write(prompt, ROW)
    assert "p" in store and equal(store.read("p"), ROW)
    path = store._path("p")
    path.write_bytes(damage(path.read_bytes(), store._path("q").read_bytes()))
    with pytest.raises(DamagedEmbedding):
        store.read("p")

    def broken(*args, **options):
        raise OSError("Input/output error (os error 5)")  # as safetensors says it

    monkeypatch.setattr(embeddings, "safe_open", broken)
    with pytest.raises(DamagedEmbedding, match="os error 5"):
        store.read("q")


def test_a_full_disk_is_said_once_and_training_goes_on_to_the_same_weights(tmp_path):
    def trained(policy):
        t = trainer(None, policy=policy)
        rows = [t.iterate()["reward/bright"] for _ in range(4)]
        return rows, t.learner.parameters[0].detach().clone()

    plain = trained(GaussianPolicy())
    warnings = []
    full = gaussian(EmbeddingStore(tmp_path, {}, reserve=0), warnings.append)
    with small_files(100):
        rows, weights = trained(full)
    assert rows == plain[0] and torch.equal(weights, plain[1])
    (warning,) = warnings
    assert "File too large" in warning and "prompts.cache" in warning
    assert full.stored.missing(PROMPTS) == PROMPTS and not encode_ahead(full.stored, PROMPTS)


def test_embeddings_that_will_not_fit_are_not_begun(tmp_path, monkeypatch):
    warnings = []
    encoder = CachedEncoder(
        Parked(), EmbeddingStore(tmp_path, {}, reserve=0), notify=warnings.append
    )
    monkeypatch.setattr(EmbeddingStore, "fits", lambda store, prompts, like: prompts < 4)
    assert not encode_ahead(encoder, PROMPTS)
    assert encoder.encoded == 1 and not encoder.encoder.times and "5 prompts need" in warnings[0]
    assert encode_ahead(encoder, PROMPTS[:4])
    assert encoder.encoded == 4 and encoder.encoder.times == 1


def test_a_run_asks_for_the_prompts_it_was_said_to_ask_for():
    asked = set()

    class Listening(GaussianPolicy):
        def encode(self, prompts):
            asked.update(prompts)
            return super().encode(prompts)

    prompts = [str(number) for number in range(20)]
    t = trainer(None, "trainer.iterations=2", policy=Listening(), prompts=prompts)
    announced = prompts_to_come(t.config, prompts, t.heldout)
    for _ in range(2):
        t.iterate()
    t.evaluate()
    assert asked == set(announced) and 4 <= len(announced) <= 7


def test_parked_encoders_come_back_for_a_new_prompt_only(flux_directory, tmp_path):
    """On "cpu:0", which is the CPU by another name, so that moves can be told apart."""
    text = cached(flux_directory, "off").encoder
    text.device, moves = torch.device("cpu:0"), []
    for module in text.modules:
        module.to = lambda device, *more: moves.append(str(device))
    encoder = CachedEncoder(text, EmbeddingStore(tmp_path, {}), notify=complain)
    assert moves == []  # a run whose prompts are all stored never moves them
    encoder.encode(["red"])
    assert moves == ["cpu:0"] * 2
    encoder.park()
    encoder.encode(["red"])
    assert moves[2:] == ["cpu"] * 2
    encoder.encode(["red", "blue"])
    assert moves[4:] == ["cpu:0"] * 2 + ["cpu"] * 2
    moves.clear()
    assert encode_ahead(encoder, ["red", "two", "circle"])  # many at once; they stay parked
    assert moves[-4:] == ["cpu"] * moves.count("cpu") == ["cpu"] * 4
    moves.clear()
    assert encode_ahead(encoder, ["red", "two", "circle"]) and "cpu:0" not in moves


def test_text_encoders_and_nothing_else_leave_the_device(sd3_directory):
    config = PolicyConfig(path=str(sd3_directory), **SIZE)
    loaded = load.load_pipeline(config, tuning="frozen")
    parts, text = loaded.policy().pipeline.components, loaded.text

    def weights():
        return [[weight.data_ptr() for weight in part.parameters()] for part in text.modules]

    before = weights()
    text._move(torch.device("meta"))
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            assert (part.device.type == "meta") == name.startswith("text_encoder"), name
    # what was loaded, not a copy of what was on the device, and shared embeddings once
    text.park()
    assert weights() == before


def test_digests_are_remembered_until_a_file_changes(tmp_path):
    file, memo = tmp_path / "weights", tmp_path / "memo.json"
    file.write_bytes(b"one")
    first = FileDigests(memo).of(file)
    known = memo.read_text()
    assert first in known
    memo.write_text(known.replace(first, "remembered"))
    assert FileDigests(memo).of(file) == "remembered"
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))  # a clock that ticks too slowly for this test must not decide it
    assert FileDigests(memo).of(file) not in (first, "remembered")
    memo.write_text(known[:10])
    assert FileDigests(memo).of(file) != first


def test_encoders_that_do_not_fit_their_tokenizer_are_one_message(monkeypatch):
    beyond = torch.nn.Embedding(2, 2)
    monkeypatch.setattr(Parked, "encode", lambda self, prompts: beyond(torch.tensor([2])))
    with pytest.raises(UserError, match="cannot encode 'a': IndexError: index out of range"):
        gaussian(None).encode(["a"])


def test_a_folder_that_cannot_be_written_is_refused(flux_directory, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written \(.*set prompts\.cache"):
        cached(flux_directory, tmp_path / "file")


@pytest.mark.slow
def test_encode_fills_the_cache_and_training_then_encodes_nothing(
    tiny_config, capsys, monkeypatch, tmp_path
):
    # a training and a held-out one
    assert "2 prompts stored, 2 of them new" in done(capsys, "encode", tiny_config)
    assert "0 of them new" in done(capsys, "encode", tiny_config)

    def refuse(*args, **kwargs):
        raise AssertionError("the text encoders were asked")

    monkeypatch.setattr("diffusers.FluxPipeline.encode_prompt", refuse)
    done(capsys, "train", tiny_config, "--run-dir", tmp_path / "run")
    for wrong, fact in (
        ("prompts.cache=off", "no cache to fill"),
        ("prompts.train=missing.txt", "missing.txt"),
    ):
        assert fact in refused(capsys, "encode", tiny_config, wrong)
