"""Overrides with which a run fits, if it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from g2rpo.assembly.rewards import declared_by, defaults_of, reward_kind
from g2rpo.config.given import is_mention
from g2rpo.config.schema import Config
from g2rpo.policies.quantized import installed

Change = tuple[str, ...]
"""Overrides that belong together."""


WHOLE_SAMPLES = ("trainer.sharding=training",)
PIECES = ("trainer.sharding=full",)


def same_result(config: Config, ranks: int) -> Iterator[Change]:
    """Changes that cost time or disk but keep the run's mathematics, from the most to the least expensive."""
    numbered = config.sampling.batch_size != "auto"
    if ranks > 1 and config.policy.tuning == "full" and config.trainer.sharding != "full" and numbered:
        yield PIECES
    if config.trainer.shard_group != "all":
        yield ("trainer.shard_group=all",)
    for table in ("rewards", "evaluation.rewards"):  # held-out rewards are called less often
        if on_device := [name for name, options in _options(config, table) if options.get("device", "cpu") != "cpu"]:
            yield tuple(f"{table}.{name}.options.device=cpu" for name in on_device)
    if config.trainer.micro_batch_size > 1:
        yield ("trainer.micro_batch_size=1",)
    if config.sampling.batch_size not in ("auto", *range(9)):
        yield ("sampling.batch_size=8",)
    if config.sampling.decode_batch_size not in ("auto", 1):
        yield ("sampling.decode_batch_size=1",)
    if not config.policy.gradient_checkpointing:
        yield ("policy.gradient_checkpointing=true",)
    if config.prompts.cache == "off":
        yield ("prompts.cache=auto",)


def _options(config: Config, table: str) -> list[tuple[str, dict[str, Any]]]:
    """All options of the rewards of one of the config's two tables; the device is the policy's unless it is named."""
    entries = config.rewards if table == "rewards" else config.evaluation.rewards
    kinds = {name: reward_kind(name, entry) for name, entry in entries.items() if not is_mention(entry.kind)}
    taken = {name: defaults_of(kind) for name, kind in kinds.items() if declared_by(kind) is kind}
    placed = {name: {**options, **({"device": "auto"} if "device" in options else {})} for name, options in taken.items()}
    return [(name, {**options, **entries[name].options}) for name, options in placed.items()]


def other_method(config: Config) -> Iterator[Change]:
    """Changes of precision or of the trained weights, the mildest first; the first changes nothing."""
    rewards = tuple(
        f"{table}.{name}.options.dtype=bfloat16"
        for table in ("rewards", "evaluation.rewards")
        for name, options in _options(config, table)
        if options.get("dtype") == "float32"
    )
    network = ("policy.dtype=bfloat16",) if config.policy.dtype == "float32" else ()
    whole = () if config.trainer.sharding == "none" else ("trainer.sharding=none", "trainer.shard_group=all")
    low_rank = ("policy.tuning=lora", "optim.learning_rate=1e-4", *whole) if config.policy.tuning == "full" else ()
    seen = set()
    fewer_bits = ("int8", "nf4") if installed("bitsandbytes") else ("int8",)
    stored = [()] if config.policy.quantize != "none" else [(), *((f"policy.quantize={how}",) for how in fewer_bits)]
    for parts in product(((), low_rank), ((), network), stored, ((), rewards)):
        if parts[2] and config.policy.tuning == "full" and not parts[0]:
            continue
        change = tuple(override for part in parts for override in part)
        if change not in seen:
            seen.add(change)
            yield change


def what_fits(config: Config, ranks: int, fits: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """The smallest set of the mildest overrides with which a run on `ranks` ranks fits; None if there is none.
    `fits(overrides)` is called a few times.
    """
    for method in other_method(config):
        neutral = [change for change in same_result(config, ranks) if change != PIECES or "policy.tuning=lora" not in method]
        if not fits([*method, *_flat(neutral)]):
            continue
        for change in list(neutral):
            without = [other for other in neutral if other != change]
            if (without or method) and fits([*method, *_flat(without)]):
                neutral = without
        milder = [WHOLE_SAMPLES if change == PIECES else change for change in neutral]
        if milder != neutral and config.trainer.sharding == "none" and fits([*method, *_flat(milder)]):
            neutral = milder
        return [*method, *_flat(neutral)]
    return None


def _flat(changes: Sequence[Change]) -> list[str]:
    return [override for change in changes for override in change]
