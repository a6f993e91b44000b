"""Input pictures of prompts: read within limits, refused before training, part of every key."""

import json
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo import api
from g2rpo.config.resolve import resolve
from g2rpo.core import images
from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.images import digest_of_prompts, read_inputs
from g2rpo.core.rewards import Frames
from g2rpo.data.sources import read_prompts
from g2rpo.models.embeddings import CachedEncoder, EmbeddingStore, open_store
from g2rpo.models.load import find_pipeline
from g2rpo.models.options import PolicyConfig
from g2rpo.rewards.analytic import Similarity
from g2rpo.rollout.scoring import score
from tests.support.runs import PLAIN, Editing, Loaded, brightness, finished, picture, trainer
from tests.support.tables import rows
from tests.support.tolerances import near, rounding


def write_prompts(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_pictures_are_read_upright_in_rgb(tmp_path):
    Image.new("L", (3, 3), 9).save(tmp_path / "grey.webp", lossless=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    picture(tmp_path / "turned.jpg", exif=exif)
    grey, turned = read_inputs(Prompt("a", [f"{tmp_path}/grey.webp", f"{tmp_path}/turned.jpg"]))
    assert (grey.mode, grey.getpixel((0, 0)), turned.size) == ("RGB", (9, 9, 9), (4, 6))
    assert read_inputs("a") == read_inputs(Prompt("a")) == []


@pytest.mark.parametrize(
    ("order", "size"), [(b"MM\0*", (4, 6)), (b"MM\0\1", (6, 4))], ids=["entry", "header"]
)
def test_damaged_exif_is_no_damage_of_the_picture(tmp_path, order, size):
    """A quarter turn beside a resolution that is a text; and a header that is none."""
    entries = [(0x0112, 3, 1, b"\0\6\0\0"), (0x011A, 2, 2, b"x\0\0\0")]
    listed = b"".join(struct.pack(">HHI", *entry[:3]) + entry[3] for entry in entries)
    exif = b"Exif\0\0" + order + struct.pack(">IH", 8, 2) + listed + bytes(4)
    prompt = Prompt("a", [picture(tmp_path / "a.jpg", exif=exif, dpi=(72, 72))])
    images.check_inputs([prompt])
    assert [read.size for read in read_inputs(prompt)] == [size]


def png(depth, kind, row, transparent=b"", palette=b""):
    """A PNG of one row of two pixels, by the specification: `kind` 0 grey, 2 RGB, 3 palette, 4 grey
    and alpha, 6 RGBA."""

    def chunk(name, data):
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 2, 1, depth, kind, 0, 0, 0)
    pixels = zlib.compress(b"\0" + row)
    parts = {b"IHDR": header, b"PLTE": palette, b"tRNS": transparent, b"IDAT": pixels}
    written = b"".join(chunk(name, data) for name, data in parts.items() if data)
    return b"\x89PNG\r\n\x1a\n" + written + chunk(b"IEND", b"")


PNGS = """
16 0 -> 80 07 0a 07 ->  -> 128 10
16 0 -> 80 07 0a 07 -> 0a 07 -> 128 white
16 2 -> 01 07 02 07 03 07 04 07 05 07 06 07 ->  -> 1,2,3 4,5,6
16 2 -> 01 07 02 07 03 07 04 07 05 07 06 07 -> 04 07 05 07 06 07 -> 1,2,3 white
16 4 -> 80 07 ff 07 0a 07 00 07 ->  -> 128 white
16 6 -> 01 07 02 07 03 07 ff 07 04 07 05 07 06 07 00 07 ->  -> 1,2,3 white
8 0 -> 80 0a -> 00 0a -> 128 white
8 2 -> 01 02 03 04 05 06 -> 00 04 00 05 00 06 -> 1,2,3 white
8 4 -> 00 ff 00 7f ->  -> 0 128
8 6 -> 00 00 ff ff 00 00 ff 7f ->  -> 0,0,255 128,128,255
8 3 -> 00 01 -> ff 00 -> 1,2,3 white
1 3 -> 40 -> 00 -> white 4,5,6
4 0 -> 3a -> 00 0a -> 51 white
2 0 -> 60 -> 00 01 -> white 170
1 0 -> 40 -> 00 01 -> 0 white
"""
"""Depth and colour type; the row and what is transparent, in bytes; levels, one for a grey. The low
byte of 16 bits differs from the high one."""


@pytest.mark.parametrize(("form", "row", "transparent", "levels"), rows(PNGS))
def test_what_is_transparent_is_white_and_16_bits_become_8(
    tmp_path, form, row, transparent, levels
):
    """Every depth and colour type of PNG that has 16 bits or transparency, against levels by
    hand."""
    depth, kind = map(int, form.split())
    palette = bytes(range(1, 7)) if kind == 3 else b""
    content = png(depth, kind, bytes.fromhex(row), bytes.fromhex(transparent), palette)
    (tmp_path / "a.png").write_bytes(content)
    (read,) = read_inputs(Prompt("a", [str(tmp_path / "a.png")]))
    pixels = [[*map(int, one.replace("white", "255").split(","))] for one in levels.split()]
    assert [[*read.getpixel((x, 0))] for x in (0, 1)] == [(3 * one)[:3] for one in pixels]


def test_transparent_webp_and_cmyk_jpeg(tmp_path):
    """JPEG rounds."""
    Image.new("RGBA", (2, 2), (9, 9, 9, 0)).save(tmp_path / "a.webp", lossless=True, exact=True)
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "b.jpg", quality=100)
    clear, red = read_inputs(Prompt("a", [str(tmp_path / "a.webp"), str(tmp_path / "b.jpg")]))
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    assert red.getpixel((0, 0)) == pytest.approx((255, 0, 0), abs=3)


def damaged(path, how):
    """An unusable picture at `path`."""
    if how == "text":
        path.write_text("no picture")
    elif how == "loop":
        path.symlink_to(path)
    elif how == "gif":
        Image.new("RGB", (2, 2)).save(path, "GIF")
    elif how == "truncated":
        Image.effect_noise((8, 8), 90).save(path)
        path.write_bytes(path.read_bytes()[:-60])
    elif how == "large":
        picture(path, size=(9, 9), format="PNG")
    elif how == "bomb":
        content = bytearray((picture(path, format="PNG"), path.read_bytes())[1])
        content[16:24] = (2**30).to_bytes(4) * 2
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "message"),
    rows("""
absent -> there is no such file
loop -> there is no such file
gif -> cannot be read as PNG, JPEG, WEBP
truncated -> cannot be read as PNG, JPEG, WEBP .*truncated
large -> has more than 80 pixels
bomb -> (has more than 80 pixels|cannot be read)
"""),
)
def test_unusable_pictures_are_refused_by_file_and_line(tmp_path, monkeypatch, how, message):
    monkeypatch.setattr(images, "MAX_PIXELS", 80)
    damaged(tmp_path / "in.png", how)
    edit = {"prompt": "make it red", "image": "in.png"}
    file = write_prompts(tmp_path / "p.jsonl", {"prompt": "a"}, edit)
    with pytest.raises(UserError, match=rf"p\.jsonl, line 2: input picture .*in\.png: .*{message}"):
        read_prompts(file)


@pytest.mark.parametrize("path", ["../private.png", "{}/private.png", "linked/../../private.png"])
def test_a_record_reaches_no_picture_outside_its_folder(tmp_path, path):
    picture(tmp_path / "private.png", format="PNG")
    inside = tmp_path / "prompts"
    (inside / "deep").mkdir(parents=True)
    (inside / "linked").symlink_to(inside / "deep")
    file = write_prompts(inside / "p.jsonl", {"prompt": "a", "image": path.format(tmp_path)})
    outside = r"line 1: input picture .*private\.png is outside .*prompts"
    with pytest.raises(UserError, match=outside):
        read_prompts(file)
    above = write_prompts(tmp_path / "p.jsonl", {"prompt": "a", "image": f"{tmp_path}/private.png"})
    assert read_prompts(above)[0].images == (f"{tmp_path}/private.png",)


def test_prompts_given_as_objects_are_checked_before_anything_is_loaded(tmp_path):
    """Pictures that are not there, and prompts that lack the picture that a model needs."""
    gone = Prompt("make it red", [str(tmp_path / "gone.png")])
    own = Prompt("a", [picture(tmp_path / "a.png")])
    odd = Prompt("a", metadata={"count": np.int64(3)})  # as pandas has it
    absent = r"prompt 'make it red': input picture .*gone\.png: there is no such file"
    for prompts, heldout, message in (
        ([gone], ["0"], absent),
        (["0"], [gone], absent),
        ([odd], ["0"], r"prompt 'a': is no plain data \(Object of type int64 is not JSON"),
        (["0"], ["\ud800"], r"prompt '.ud800': is no plain data \(.*surrogates"),
        ([own], ["b"], "prompt 'b': has 0 input pictures, but this model takes 1"),
    ):
        given = {"policy": Editing(), "rewards": {"bright": brightness}, "judges": {}}
        with pytest.raises(UserError, match=message):
            api.trainer(resolve(PLAIN), prompts=prompts, heldout=heldout, **given)


class Counting:
    """An encoder that counts its prompts."""

    device = torch.device("cpu")

    def __init__(self):
        self.policy, self.count = Editing(), 0

    def encode(self, prompts):
        self.count += len(prompts)
        return self.policy.encode(prompts)


def test_embeddings_are_kept_by_the_content_of_pictures(tmp_path):
    """The same text with another picture is another row, the same picture elsewhere is not; a
    changed one is encoded anew."""
    red, blue = picture(tmp_path / "red.png"), picture(tmp_path / "blue.png", (0, 0, 99))
    shutil.copy(red, tmp_path / "copy.png")
    encoder, store = Counting(), EmbeddingStore(tmp_path / "store", {}, reserve=0)
    cached = CachedEncoder(encoder, store, notify=pytest.fail)
    first = cached.encode([Prompt("a", [red]), Prompt("a", [blue])]).tensors["shift"]
    assert encoder.count == 2 and first[0] != first[1]
    again = cached.encode([Prompt("a", [str(tmp_path / "copy.png")])]).tensors["shift"]
    assert encoder.count == 2 and again[0] == first[0]
    picture(tmp_path / "red.png", (0, 255, 255))
    assert cached.encode([Prompt("a", [red])]).tensors["shift"] != first[0] and encoder.count == 3


def test_a_run_is_held_to_the_content_of_its_pictures(tmp_path):
    red = picture(tmp_path / "red.png")
    moved = shutil.copy(red, tmp_path / "moved.png")
    before = digest_of_prompts([Prompt("a", [red]), "b"])
    assert digest_of_prompts([Prompt("a", [str(moved)]), "b"]) == before
    picture(tmp_path / "red.png", (1, 2, 3))
    assert digest_of_prompts([Prompt("a", [red]), "b"]) != before
    assert digest_of_prompts([Prompt("a"), "b"]) == digest_of_prompts(["a", "b"]) != before


def test_similarity_is_one_for_the_input_picture_itself(tmp_path):
    white = picture(tmp_path / "white.png", "white", (9, 5))
    grey = picture(tmp_path / "grey.png", (51, 51, 51))
    images = torch.tensor([1.0, 0, 0, 1]).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    prompts = [Prompt("a", own) for own in ([white], [white], [grey, white])] + ["a"]
    scores = Similarity()(images, prompts)
    assert scores[:3].tolist() == near([1, 0, 0.8], rounding(20)) and scores[3].isnan()
    whole = Similarity()
    whole.frames = Frames(every=1)
    assert score({"same": whole}, images[None, :2], prompts[:1]).item() == near(0.5, rounding(20))


@pytest.mark.slow
def test_a_run_keeps_input_pictures_beside_what_was_made_of_them(tmp_path):
    colours, run = [(255, 0, 0), (128, 128, 128), (0, 0, 255)], tmp_path / "run"
    prompts = [
        Prompt(f"{place}", [picture(tmp_path / f"{place}.png", colour, (30, 60))])
        for place, colour in enumerate(colours)
    ]
    same = {"bright": Similarity()}
    finished(trainer(run, policy=Editing(), prompts=prompts, rewards=same))
    kept = [Image.open(run / f"samples/iteration_000000/{i:06d}_input.png") for i in range(3)]
    assert [each.size for each in kept] == [(128, 256)] * 3
    assert [each.getpixel((60, 120)) for each in kept] == colours
    card = (run / "adapter" / "README.md").read_text()
    assert "pipeline_tag: image-to-image" in card and 'image=load_image("in.png")' in card


def test_sample_takes_an_input_picture(tmp_path, says, monkeypatch):
    loaded = Loaded(Editing())
    monkeypatch.setattr("g2rpo.lab.sample.load_pipeline", lambda *args, **more: loaded)
    picture(tmp_path / "a.png")
    says("sample darker --image a.png --model testbed --steps 2 --out out")
    (line,) = (tmp_path / "out/prompts.jsonl").read_text().splitlines()
    assert json.loads(line)["images"] == ["0000_input0.png"]
    (prompt,) = read_prompts(tmp_path / "out/prompts.jsonl")
    assert read_inputs(prompt)[0].getpixel((0, 0)) == (255, 0, 0)
    assert Image.open(tmp_path / "out/grid.png").getpixel((66, 48)) == (255, 0, 0)


def test_embeddings_of_edits_depend_on_the_size_and_the_vae(tmp_path):
    """The VAE encodes input pictures, some models at the size of the output; text does not depend
    on either."""

    def folder(edits, height=64):
        policy = PolicyConfig(path="testbed", height=height, width=64)
        content = find_pipeline(policy).content
        return open_store(str(tmp_path), policy, content, edits=edits, guided=False).folder

    assert folder(False) == folder(False, height=32)
    assert len({folder(False), folder(True), folder(True, height=32)}) == 3
    contents = [json.loads(file.read_text())["content"] for file in tmp_path.rglob("identity.json")]
    assert len(set(contents)) == 2  # with the VAE, and without
