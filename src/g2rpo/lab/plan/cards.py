"""Accelerators by their datasheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from g2rpo.core.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Card:
    """Memory in GiB; dense TFLOP/s with float32 accumulation, in bfloat16 and float32; GB/s of
    its memory; the watts of the board; MB of its L2 cache; whether its memory is HBM, not GDDR;
    torch's name; whether it is a Hopper, or a newer one of that line; GB/s from pinned host
    memory, four fifths of PCIe's 16 lanes of generation 4 (assumed), unless it has others."""

    name: str
    memory_gib: float
    bfloat16: float
    float32: float
    bandwidth: float
    watts: float
    cache: float
    hbm: bool
    pattern: str
    hopper: bool = False
    link: float = 25.0

    def tflops(self, dtype: str) -> float:
        return self.float32 if dtype == "float32" else self.bfloat16


CARDS = {
    "b200": Card("NVIDIA B200", 178.3, 2250, 75, 8000, 1000, 126, True, "B200", hopper=True),
    "mi300x": Card("AMD Instinct MI300X", 191.9, 1307.4, 163.4, 5300, 750, 256, True, "MI300X"),
    "h200": Card("NVIDIA H200", 139.7, 989, 67, 4800, 700, 50, True, r"\bH200", hopper=True),
    "gh200": Card(
        "NVIDIA GH200 96 GB", 94.5, 989, 67, 4000, 700, 50, True, "GH200 480GB", hopper=True
    ),
    "h20": Card("NVIDIA H20", 95.0, 148, 44, 4000, 400, 60, True, "H20$", hopper=True),
    "h100": Card(
        "NVIDIA H100 SXM 80 GB", 79.1, 989, 67, 3350, 700, 50, True, "H100 80GB HBM3", hopper=True
    ),
    "h100-pcie": Card(
        "NVIDIA H100 PCIe 80 GB", 79.1, 756, 51, 2000, 350, 50, True, "H100 PCIe", hopper=True
    ),
    "a100": Card("NVIDIA A100 80 GB", 79.1, 312, 19.5, 2039, 400, 40, True, "A100.*80GB"),
    "a100-40": Card("NVIDIA A100 40 GB", 39.2, 312, 19.5, 1555, 400, 40, True, "A100.*40GB"),
    "rtxpro6000": Card(
        "NVIDIA RTX PRO 6000 Blackwell",
        94.9,
        503.8,
        126,
        1792,
        600,
        128,
        False,
        "RTX PRO 6000 Blackwell",
    ),
    "l40": Card("NVIDIA L40", 44.3, 181, 90.5, 864, 300, 96, False, "L40$"),
    "l40s": Card("NVIDIA L40S", 44.3, 362, 91.6, 864, 350, 96, False, "L40S"),
    "rtx6000ada": Card("NVIDIA RTX 6000 Ada", 47.3, 364, 91.1, 960, 300, 96, False, "RTX 6000 Ada"),
    "a6000": Card("NVIDIA RTX A6000", 47.3, 155, 38.7, 768, 300, 6, False, "RTX A6000"),
    "l4": Card("NVIDIA L4", 22.0, 121, 30.3, 300, 72, 48, False, "L4$"),
    "a10g": Card("NVIDIA A10G", 22.0, 70, 35, 600, 150, 6, False, "A10G"),
    "rtx5090": Card("NVIDIA RTX 5090", 31.3, 209.5, 104.8, 1792, 575, 96, False, "RTX 5090"),
    "rtx4090": Card("NVIDIA RTX 4090", 23.5, 165.2, 82.6, 1008, 450, 72, False, "RTX 4090"),
    "rtx3090": Card("NVIDIA RTX 3090", 23.5, 71, 35.6, 936, 350, 6, False, "RTX 3090$"),
    "rtx5080": Card("NVIDIA RTX 5080", 15.4, 112.6, 56.3, 960, 360, 64, False, "RTX 5080$"),
    "rtx4080": Card("NVIDIA RTX 4080", 15.5, 97.5, 48.7, 717, 320, 64, False, "RTX 4080$"),
    "rtx4070tisuper": Card(
        "NVIDIA RTX 4070 Ti SUPER", 15.5, 88.2, 44.1, 672, 285, 48, False, "RTX 4070 Ti SUPER"
    ),
    "rtx4060ti": Card(
        "NVIDIA RTX 4060 Ti 16 GB", 15.5, 44.1, 22.1, 288, 165, 32, False, "RTX 4060 Ti$", link=12.5
    ),
    "rtx4070": Card("NVIDIA RTX 4070", 11.5, 58.3, 29.1, 504, 200, 36, False, "RTX 4070$"),
    "rtx3060": Card("NVIDIA RTX 3060 12 GB", 11.7, 25.5, 12.7, 360, 170, 3, False, "RTX 3060$"),
}
"""Rates by public datasheets (dense, not "with sparsity"), and watts of the board that has most.

The RTX PRO 6000 is the workstation edition of NVIDIA's "RTX Blackwell PRO GPU Architecture"; Max-Q
and server editions are slower. The A10G's sheet is that for AWS G5. NVIDIA publishes no
datasheet of the H20: its rates are those that sellers give.

Memory is what the driver gives to programs ("GPU 0 has a total capacity of ..." in torch's
messages): the least of several reports, for drivers differ by .1 or .2 GiB. With ECC on, an RTX
6000 Ada or A6000 has 3 GiB less. Among the reports are, on GitHub, pytorch/ao#4002 (B200: 178.35),
vllm-project/vllm#27508 (H100: 79.11), levihsu/OOTDiffusion#235 (A100: 79.25), TianheWu/CoSeR#10
(A100 40 GB: 39.50), QwenLM/Qwen3-VL#2097 (L40: 44.40), google-research/semivl#18 (A6000: 47.54),
Wan-Video/Wan2.1#465 (5090: 31.37), Soul-AILab/SoulX-FlashTalk#5 and ali-vilab/VGen#104 (4090:
23.52, 23.64), boson-ai/higgs-audio#48 (4060 Ti: 15.55), Kunhao-Liu/StyleGaussian#12 (3060: 11.75).
A T4 is left out: it has no bfloat16.
"""


def find_card(name: str) -> Card:
    """The card called `name`; UserError with near matches if there is none."""
    key = name.lower().replace(" ", "").replace("_", "-")
    if key not in CARDS:
        raise UserError(
            f"--device {name}: unknown device.{did_you_mean(key, [*CARDS, 'cpu', 'cuda'])}"
        )
    return CARDS[key]


def card_of(device_name: str) -> Card | None:
    """The card that torch calls `device_name`, such as "NVIDIA H100 80GB HBM3"; None if no
    datasheet is known."""
    return next((card for card in CARDS.values() if re.search(card.pattern, device_name)), None)
