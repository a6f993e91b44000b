"""Hides what libraries print as they are imported and as they load models."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Before model libraries are imported: they show errors only, unless the environment says otherwise."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for library in ("torchao", "bitsandbytes", "torch.utils._pytree"):  # about kernels for other devices, at every import
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are wanted


def quiet_bars() -> None:
    """Without progress bars of model libraries, which this imports."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
