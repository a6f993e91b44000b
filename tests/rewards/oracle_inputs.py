"""Fixed weights, pictures and prompts, shared by the parity tests and by
tools/record_reward_oracles.py of commit 2328955a.

Nothing is stored: a weight is drawn from a seed made of its name and shape, with NumPy's legacy
RandomState, whose streams NumPy has frozen. So upstream's class (in its own environment) and ours
get the same numbers, and the committed fixtures are only the names and shapes of upstream's state
dict, and what upstream answered. Needs only NumPy.
"""

import zlib

import numpy as np

PROMPTS = (
    "two small red circles left of a blue star",
    "A photo of an ASTRONAUT riding a horse, 35mm, f/1.8",
    "it's a dog's breakfast -- they'll say 42 words!",
    "caf\u00e9 \u201cdel mar\u201d &amp; friends\n  at   sunset",
    "a very long prompt about a castle on a hill above a river with a bridge and many boats and birds in the evening light",
)

# Prompts for the tokenizers alone: quotes, entities, scripts, widths, ligatures, controls, white
# space, digits, length.
TOKEN_PROMPTS = (
    *PROMPTS,
    "don\u2019t stop, it\u2019s \u201cfine\u201d \u02bcmod it`s \u00b4acute\u00b4",
    "A cat's DOG'S 'quoted' they'RE I'M rock'n'roll o'clock 90's 1980s",
    "5,000.50 dollars & 20% off!!! ((masterpiece:1.2)), <lora:x:0.8>",
    "emoji \U0001f600\U0001f680 rocket\u2764\ufe0f",
    "\u4e2d\u6587\u63d0\u793a \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "na\u00efve fa\u00e7ade \u00fcber stra\u00dfe \u0130stanbul I\u0307",
    "combining e\u0301 accents o\u0308 \u00c5ngstr\u00f6m \u212b kelvin \u212a",
    "under_score file_name.png http://example.com/a?b=c&d=e",
    "tabs\tand\nnew\r\nlines\u00a0nbsp\u3000wide",
    "&lt;b&gt;bold&lt;/b&gt; &amp;amp; &quot;x&quot; &#39;y&#39; &eacute; it&rsquo;s a &nbsp; b",
    "\uff21\uff22\uff23 full width \uff11\uff12, \ufb01sh \ufb02ower",
    "zero\u200bwidth\u200djoin \ufeffmark control\x07char\x1b[31m red",
    "\u2014 em\u2013dash \u2026 ellipsis \u00bd \u00b2 \u2460 numbers \u0663",
    "\u03a3\u03a3\u03a3 \u041f\u0440\u0438\u0432\u0435\u0442 \u0623\u0647\u0644\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "1st 2nd 3D 4K 8k-resolution f/1.8 ISO100",
    "a" * 300,
    "...",
    "   ",
    "",
)

# What a tiny CLIP looks at is 32 pixels wide. height x width: square and not, larger and smaller
# than the input, with odd margins to cut or to pad on either side, and the input size itself.
SIZES = {
    "square": (64, 64),
    "wide": (40, 67),
    "tall": (91, 53),
    "small": (20, 27),
    "exact": (32, 32),
}


def fixed_weight(name, shape, gain=1.0):
    """A float32 array for the parameter `name`: scales near 1, biases near 0, matrices that keep
    their input's size."""
    seed = zlib.crc32(f"{name} {list(shape)}".encode())
    noise = np.random.RandomState(seed).standard_normal(tuple(shape))
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "logit_scale":
        value = np.full(shape, 2.5) + 0.1 * noise
    elif leaf == "bias":
        value = 0.2 * noise
    elif len(shape) == 1 and leaf == "weight":  # a norm's scale
        value = 1.0 + 0.2 * noise
    elif "embedding" in name or "pos_embed" in name or "cls_token" in name:
        value = 0.5 * noise
    else:
        value = gain * noise / np.sqrt(np.prod(shape[1:]) if len(shape) > 1 else shape[0])
    return value.astype(np.float32)


def fixed_state(shapes, gain=1.0):
    """Every entry of a state dict, given its names and shapes."""
    return {name: fixed_weight(name, shape, gain) for name, shape in shapes.items()}


def fixed_image(name):
    """A uint8 picture [H, W, 3]: slow colour ramps, a hard-edged disk and noise."""
    height, width = SIZES[name]
    y, x = np.mgrid[0:height, 0:width]
    ramps = np.stack([x * 255 // width, y * 255 // height, (x + 2 * y) * 5 % 256], axis=-1)
    disk = (y - height // 2) ** 2 + (x - width // 3) ** 2 < (min(height, width) // 4) ** 2
    noise = np.random.RandomState(zlib.crc32(name.encode())).randint(
        -40, 41, size=(height, width, 3)
    )
    picture = np.where(disk[..., None], np.array([230, 40, 60]), ramps) + noise
    return np.clip(picture, 0, 255).astype(np.uint8)
