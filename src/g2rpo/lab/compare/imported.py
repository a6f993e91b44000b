"""Imports, quietly, what takes long: in the process that a study's jobs are forked from
(`lab.compare.jobs`)."""

from g2rpo.core.process import quiet_libraries

quiet_libraries()

import diffusers  # noqa: E402
import matplotlib.figure  # noqa: E402, F401
import peft  # noqa: E402, F401
import torch.utils.tensorboard  # noqa: E402, F401

import g2rpo.lab.evaluate  # noqa: E402
import g2rpo.train.command  # noqa: E402, F401

diffusers.FluxPipeline  # noqa: B018  of the embedded models; diffusers imports a class when it is asked for
