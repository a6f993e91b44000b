"""Random GenEval tasks, pictures and detections, and a small CLIP that knows colours: for
tools/record_geneval_oracle.py of commit 2328955a, which ran upstream's scoring on them, and for the
tests, which run ours. Needs only NumPy and Pillow."""

import zlib
from functools import cache

import numpy as np
from PIL import Image

CASES = 200
SIZE = (72, 96)  # height, width
CLASSES = ("cat", "dog", "computer mouse", "bench")
RGB = {
    "red": (220, 30, 30),
    "orange": (240, 140, 20),
    "yellow": (240, 230, 40),
    "green": (30, 160, 50),
    "blue": (40, 60, 220),
    "purple": (130, 40, 160),
    "pink": (250, 150, 190),
    "brown": (120, 70, 30),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
}
RELATIONS = ("left of", "right of", "above", "below")


def task(random):
    """Metadata of one of GenEval's six kinds, or of a mixture that GenEval's prompts do not
    have."""
    tag = random.choice(
        ["single_object", "two_object", "counting", "colors", "position", "color_attr", "mixed"]
    )
    a, b = random.choice(CLASSES, 2, replace=False).tolist()
    colours = random.choice(list(RGB), 2, replace=False).tolist()
    first, second = {"class": a, "count": 1}, {"class": b, "count": 1}
    position, exclude = [str(random.choice(RELATIONS)), 0], []
    if tag == "counting":
        first["count"] = int(random.randint(2, 5))
        exclude = [{"class": a, "count": first["count"] + 1}]
    if tag == "mixed":
        first["count"], second["count"] = int(random.randint(1, 3)), int(random.randint(1, 3))
        exclude = [{"class": str(random.choice(CLASSES)), "count": 4}]
    if tag in ("colors", "color_attr", "mixed"):
        first["color"], second["color"] = colours
    if tag in ("position", "mixed"):
        second["position"] = position
    alone = tag in ("single_object", "counting", "colors")
    include = [first] if alone else [first, second]
    return {"tag": str(tag), "include": include, "exclude": exclude, "prompt": "x"}


def case(seed):
    """A uint8 picture [H, W, 3], metadata, boxes [n, 5] with confidence by class, and perhaps masks
    [n, H, W] by class.

    Objects are drawn in colours, often those that are asked for, so that right and wrong answers
    are both common.
    """
    random = np.random.RandomState(seed)
    metadata = task(random)
    picture = random.randint(90, 110, (*SIZE, 3)).astype(np.uint8)
    asked = {clause["class"]: clause for clause in metadata["include"]}
    boxes, masks = {}, {}
    for name in CLASSES:
        usual = asked[name]["count"] if name in asked else 0
        number = int(random.choice([usual, usual, usual, random.randint(0, 5), 17]))
        left, top = random.uniform(0, SIZE[1] - 30, number), random.uniform(0, SIZE[0] - 30, number)
        confident = random.uniform(0.85 if random.rand() < 0.7 else 0.2, 1.0, number)
        width, height = random.uniform(5, 29, (2, number))
        boxes[name] = np.stack([left, top, left + width, top + height, confident], 1)
        masks[name] = np.zeros((number, *SIZE), bool)
        for box, mask in zip(boxes[name], masks[name], strict=True):
            wanted = asked.get(name, {}).get("color")
            colour = wanted if wanted and random.rand() < 0.7 else random.choice(list(RGB))
            x0, y0, x1, y1 = box[:4].astype(int)
            picture[y0 : y1 + 1, x0 : x1 + 1] = RGB[colour]
            mask[y0 : y1 + 1, x0 : (x0 + x1) // 2 + 1] = True
    return picture, metadata, boxes, masks if random.rand() < 0.5 else None


def see(picture):
    """What the small CLIP sees: the mean colour of a picture of 8 x 8 pixels, less grey."""
    return (
        np.asarray(picture.resize((8, 8), Image.Resampling.BICUBIC)).reshape(-1, 3).mean(0) - 128.0
    )


@cache
def read(text):
    """A colour's direction, a little different in every text."""
    named = next(colour for name, colour in RGB.items() if name in text)
    noise = np.random.RandomState(zlib.crc32(text.encode())).standard_normal(3)
    return np.array(named) - 128.0 + 20 * noise
