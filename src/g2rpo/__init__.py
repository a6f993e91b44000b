"""Granular-GRPO (G2RPO, arXiv 2510.01982): online RL fine-tuning of flow-matching image
generators."""

__version__ = "0.5.0"
