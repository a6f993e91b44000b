"""Adapters that are nearly right: what trainers, conversions and damage make of names, shapes,
numbers and configs."""

import json

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from g2rpo.models.adapters import CONFIG

PARTS = """
transformer. diffusion_model. model. module. _orig_mod. unet. base_model.model. lora_unet_ odd.
"""
PREFIXES = st.lists(st.sampled_from(PARTS.split()), max_size=3).map("".join)
SOUND = [
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_down.weight", ".lora_up.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora_A", ".lora_B"),
]
OTHERS = [
    ("_lora1.down.weight", "_lora1.up.weight"),
    (".lokr_w1", ".lokr_w2"),
    (".diff", ".diff_b"),
    (".weight", ".bias"),
]
ENDS = st.sampled_from(4 * SOUND + OTHERS)
NUMBERS = st.sampled_from(
    [1.0, 0.0, -1.0, 6.0, 1e-45, 1e-30, 1e30, 3e38, float("nan"), float("inf")]
)
RARE = "float64 float16 bfloat16 float8_e4m3fn int8 bool int64"
DTYPES = st.sampled_from([torch.float32] * 8 + [getattr(torch, name) for name in RARE.split()])
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
VALUES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.integers(-3, 10**30)
    | st.text(max_size=5)
    | st.just([])
    | st.just({"x": 1})
)
KEYS = "r lora_alpha use_rslora init_lora_weights rank_pattern bias peft_type new task_type"
SETTINGS = st.dictionaries(st.sampled_from([*KEYS.split(), ""]), VALUES, max_size=3)
TAILS = st.sampled_from([".x", "999999", ".lora_A.weight", ".alpha", "\u2028", "." * 50])
NOTES = "0 3 nan -1 1e300 {} [] { null 0.5"
TEXTS = st.dictionaries(
    st.sampled_from(
        [CONFIG, "g2rpo.lora_alpha", "g2rpo.lora_above", "ss_network_dim", "format", ""]
    ),
    st.sampled_from([*NOTES.split(), "", "\u2028", '{"transformer.r": 3}']),
    max_size=3,
)


@st.composite
def odd(draw, folder, adapter):
    """Writes an adapter with a few things changed; returns the file, beside which a config of peft
    may be."""

    def rarely(most=9):
        return draw(st.integers(0, most)) == 0

    file = folder / "odd.safetensors"
    prefix, ends, mixed = draw(PREFIXES), draw(ENDS), rarely()
    tensors = {}
    for module, pair in adapter.layers.items():
        name = module.replace(".", "_") if rarely(30) or prefix.endswith("_") else module
        for end, value in zip(draw(ENDS) if mixed else ends, pair, strict=True):
            tensors[f"{prefix}{name}{end}"] = value
        if rarely():
            tensors[f"{prefix}{name}.alpha"] = torch.tensor(draw(NUMBERS)).to(draw(DTYPES))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(tensors)))
        how = draw(st.sampled_from(["drop", "number", "dtype", "shape", "rename", "copy"]))
        value = tensors[name]
        if how in ("drop", "rename"):
            del tensors[name]
        if how in ("rename", "copy"):
            tensors[name + draw(TAILS)] = value
        elif how == "number":
            tensors[name] = torch.full(value.shape, draw(NUMBERS))
        elif how == "dtype":
            tensors[name] = value.to(draw(DTYPES))
        elif how == "shape":
            tensors[name] = torch.ones(draw(SHAPES))
    save_file(
        {name: value.clone().contiguous() for name, value in tensors.items()}, file, draw(TEXTS)
    )
    beside = folder / "adapter_config.json"
    beside.unlink(missing_ok=True)
    if draw(st.booleans()):
        beside.write_text(
            draw(
                st.just("{")
                | st.builds(lambda more: json.dumps({"r": 3, "lora_alpha": 6, **more}), SETTINGS)
            )
        )
    return file
