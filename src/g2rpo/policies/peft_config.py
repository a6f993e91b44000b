"""peft's config of a LoRA: what of it says how an adapter acts, and what may be ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

HARMLESS = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the file has the modules
        "lora_dropout",  # of their training
        *("megatron_core", "qalora_group_size"),  # say nothing without megatron_config and use_qalora
    }
)
"""Settings with which the change of the weights is (alpha / rank) up @ down, whatever their value."""
PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
"""The values of other settings with which it is so, beside empty ones. Other initialisations begin elsewhere: PiSSA, OLoRA,
CorDA, LoftQ and LoRA-GA change the base weights, EVA divides the ranks anew."""


class PeftConfig(BaseModel):
    """A LoRA's config. Whatever else it says must be empty or known to be harmless."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    r: Annotated[int, Field(ge=1, le=10**6)]
    lora_alpha: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _is_plain(self) -> PeftConfig:
        for key, value in (self.model_extra or {}).items():
            if value and key not in HARMLESS and value not in PLAIN_SETTINGS.get(key, ()):
                raise ValueError(f"has {key}, which is not supported ({value!r:.60}); a LoRA of one rank and alpha is")
        return self

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.lora_alpha / self.r
