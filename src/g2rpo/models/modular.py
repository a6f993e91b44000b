"""diffusers' modular pipelines as `replay` needs them: with a call, `encode_prompt` and
`prepare_latents`.

A modular pipeline is a list of blocks that read and write a state. Its text-to-image blocks run here
as they are, with two differences: gradients stay enabled, and methods of the pipeline compute what
the blocks in `REPLACED` write.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from g2rpo.models.pipeline_files import parts_in, read_index

WORKFLOW = "text2image"
REWRITES = "prompt_"
"""How the names of blocks begin that write other prompts than were given, by a language model."""
LOOP = "denoise.denoise"
TEXTS = ("prompt", "negative_prompt")
REPLACED = {"text_encoder": "encode_prompt", "denoise.prepare_latents": "prepare_latents"}
"""Blocks, each with the pipeline's method that computes what it writes."""


class _Replaced:
    """A block whose outputs a method of the pipeline computes, given a function that runs the block."""

    def __init__(self, block: Any, method: str) -> None:
        self._block, self._method = block, method

    def __call__(self, pipeline: Any, state: Any) -> tuple[Any, Any]:
        outputs = self._block.intermediate_outputs

        def run() -> tuple[Any, ...]:
            self._block(pipeline, state)
            return tuple(state.get(output.name) for output in outputs)

        values = getattr(pipeline, self._method)(run)
        for output, value in zip(outputs, values, strict=True):
            state.set(output.name, value, output.kwargs_type)
        return pipeline, state


class _Loop:
    """The loop over steps, which diffusers cannot run without steps."""

    def __init__(self, block: Any) -> None:
        block.set_progress_bar_config(disable=True)
        self._block = block

    def __call__(self, pipeline: Any, state: Any) -> tuple[Any, Any]:
        return self._block(pipeline, state) if state.get("timesteps") else (pipeline, state)


def _with_gradients(block: Any) -> Any:
    """A copy of a block, and of the blocks in it, whose calls do not turn gradients off."""
    kind, copied = type(block), copy.copy(block)
    call = inspect.unwrap(kind.__call__)
    copied.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    if inner := getattr(block, "sub_blocks", None):
        copied.sub_blocks = type(inner)(
            (name, _with_gradients(each)) for name, each in inner.items()
        )
    return copied


@functools.cache
def pipeline_class(name: str) -> Any:
    """diffusers' class of pipelines of that name; for a modular one a subclass that is constructed
    from parts and called as others are."""
    import diffusers

    kind = getattr(diffusers, name)
    return _of_blocks(kind) if issubclass(kind, diffusers.ModularPipeline) else kind


def _of_blocks(kind: Any) -> Any:
    import diffusers
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    whole = getattr(diffusers, kind.default_blocks_name)().get_workflow(WORKFLOW)
    own = {name: block for name, block in whole.sub_blocks.items() if not name.startswith(REWRITES)}
    blocks = diffusers.SequentialPipelineBlocks.from_blocks_dict(own)
    running = _with_gradients(blocks)
    for name, method in REPLACED.items():
        running.sub_blocks[name] = _Replaced(running.sub_blocks[name], method)
    running.sub_blocks[LOOP] = _Loop(running.sub_blocks[LOOP])
    defaults = {each.name: each.default for each in blocks.inputs if each.name}

    def alone(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """With the first prompt alone: such pipelines encode one at a time."""
        return {n: v[0] if n in TEXTS and v else v for n, v in arguments.items()}

    class OfBlocks(kind):
        def __init__(self, **parts: Any) -> None:
            super().__init__(blocks=blocks)
            self.register_components(**parts)

        @classmethod
        def from_pretrained(
            cls, path: str, dtype: Mapping[str, torch.dtype], **options: Any
        ) -> Any:
            """Of a folder or hub repository that has the parts in its index in folders of their names."""
            made, index = cls(), parts_in(read_index(path, download=True))
            read = {  # `load_components` would leave out what cannot be loaded
                name: part.load(
                    pretrained_model_name_or_path=path,
                    subfolder=name,
                    dtype=dtype.get(name, dtype["default"]),
                    **options,
                )
                for name, part in made._component_specs.items()
                if name in index
            }
            made.register_components(**read)
            return made

        def encode_prompt(self, run: Any) -> Any:
            return run()

        prepare_latents = encode_prompt

        def __call__(self, **arguments: Any) -> tuple[Any, ...]:
            """The pictures of a prompt, by diffusers' own call."""
            return (super().__call__(**alone(arguments), output="images"),)

        def replayed(self, **arguments: Any) -> tuple[Any, ...]:
            state = PipelineState()
            for name, value in (defaults | alone(arguments)).items():
                state.set(name, value)
            running(self, state)
            return (state.get("images"),)

    def signed(needed: Mapping[str, bool]) -> inspect.Signature:
        keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
        return inspect.Signature(
            [
                inspect.Parameter(name, keyword, default=empty if must else None)
                for name, must in needed.items()
            ]
        )

    OfBlocks.__name__ = kind.__name__
    made: Any = OfBlocks
    parts = blocks.expected_components
    made.__signature__ = signed(
        {each.name: each.default_creation_method == "from_pretrained" for each in parts}
    )
    made.__call__.__signature__ = signed(dict.fromkeys(defaults, False))
    return made
