"""Licences of published base models: a fine-tune is a derivative of its base, and so is an adapter."""

from __future__ import annotations

_APACHE = "Apache-2.0"
_FLUX1 = "FLUX.1 [dev] Non-Commercial License"
_FLUX2 = "FLUX Non-Commercial License"
_STABILITY = "Stability AI Community License: commercial use is free up to 1 M$ of revenue a year"
_NVIDIA = "NVIDIA License (NSCL v2-custom); Gemma's terms for the text encoder"
_LTX = "LTX-Video Open Weights License: commercial use is free up to 10 M$ of revenue a year"
_KREA = "Krea 2 Community License: commercial use is free up to 50 people"

LICENCES = {
    "black-forest-labs/FLUX.1-dev": _FLUX1,
    "black-forest-labs/FLUX.1-Kontext-dev": _FLUX1,
    "black-forest-labs/FLUX.1-schnell": _APACHE,
    "black-forest-labs/FLUX.2-dev": _FLUX2,
    "black-forest-labs/FLUX.2-klein-base-9B": _FLUX2,
    "black-forest-labs/FLUX.2-klein-9B": _FLUX2,
    "black-forest-labs/FLUX.2-klein-base-4B": _APACHE,
    "black-forest-labs/FLUX.2-klein-4B": _APACHE,
    "stabilityai/stable-diffusion-3-medium-diffusers": _STABILITY,
    "stabilityai/stable-diffusion-3.5-medium": _STABILITY,
    "stabilityai/stable-diffusion-3.5-large": _STABILITY,
    "Qwen/Qwen-Image": _APACHE,
    "Qwen/Qwen-Image-2512": _APACHE,
    "Qwen/Qwen-Image-Edit": _APACHE,
    "Tongyi-MAI/Z-Image": _APACHE,
    "Tongyi-MAI/Z-Image-Turbo": _APACHE,
    "Alpha-VLLM/Lumina-Image-2.0": _APACHE,
    "lodestones/Chroma1-HD": _APACHE,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _APACHE,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _APACHE,
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": _NVIDIA,
    "Lightricks/LTX-Video": _LTX,
    "krea/Krea-2-Raw": _KREA,
}
"""By hub id, as their model cards and makers said in 2026; the text on the hub is what counts."""


def licence_of(path: str) -> str | None:
    """The licence of a base model by its hub id; None where it is not known here."""
    return LICENCES.get(path)
