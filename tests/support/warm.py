"""What every rank of a test would import and compute anew, once: imported by the process that ranks
are forked from."""

import gc
import tempfile
from pathlib import Path

import pytest  # noqa: F401
from diffusers import FluxPipeline, StableDiffusion3Pipeline

from tests.support import runs, tiny_pipelines  # noqa: F401
from tests.support.tiny import save_flux, save_sd3

# loading a model imports its classes and compiles patterns for its weights
with tempfile.TemporaryDirectory() as folder:
    FluxPipeline.from_pretrained(save_flux(Path(folder) / "flux"))
    StableDiffusion3Pipeline.from_pretrained(save_sd3(Path(folder) / "sd3"))
gc.collect()
gc.freeze()  # a rank's collections look at its own objects only
