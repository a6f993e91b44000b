"""Read what upstreams publish, state dicts and instructions, safely; refuse a file that is not the
requested model."""

from __future__ import annotations

import ast
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from g2rpo.core.errors import counted, placed, shown
from g2rpo.core.files import is_hub_id, local, refuse_pointer
from g2rpo.core.plain import read_text, refuse_hub_kernels

CLIP_FILES = ("open_clip_config.json", "config.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model")
"""Files of which a folder with a CLIP or a tokenizer has one."""


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """torch.float32, float16 or bfloat16, given itself or its name; ValueError for anything
    else."""
    if (name := str(dtype).removeprefix("torch.")) not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype must be one of float32, float16, bfloat16, got {shown(dtype)}")
    value: torch.dtype = getattr(torch, name)
    return value


def place_of(path: str | Path) -> str:
    """A folder, with ~ expanded, or a repository's id, as transformers takes either."""
    return str(local(path))


def check_config(path: str | Path) -> None:
    """Raises ValueError for a transformers model whose config.json could import code; OSError if
    there is none."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(place_of(path))
    refuse_hub_kernels(config, f"{path}: its config.json")


def pretrained(kind: Any, path: str | Path, **more: Any) -> Any:
    """The model that a class of transformers, `kind`, loads from a folder or repository, frozen and
    in eval mode.

    Raises ValueError if its weights are damaged or incomplete or its config.json could import code,
    OSError if it is not there.
    """
    check_config(path)
    for file in Path(place_of(path)).glob("*.safetensors"):
        refuse_pointer(file)
    with _whole(path):
        model, report = kind.from_pretrained(place_of(path), output_loading_info=True, **more)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{path} is not complete: {counted(len(missing), 'tensor')} missing, such as {missing[:3]}"
        )
    return model.requires_grad_(False).eval()


def read_config(path: str | Path) -> Any:
    """transformers' configuration in a folder or repository; errors as of `check_config`."""
    from transformers import AutoConfig

    check_config(path)
    return AutoConfig.from_pretrained(place_of(path))


def config_in(path: str | Path) -> Any:
    """The same in a folder; None for a repository, which is not asked."""
    return None if is_hub_id(str(path)) else read_config(path)


def fetch(path: str | Path, *names: str) -> Path:
    """The first of the files `names` that a local folder or a Hugging Face repository id holds;
    `path` itself if a file.

    Raises FileNotFoundError if it holds none of them, if there is no such place, or if the repository
    cannot be asked and is not in the cache.
    """
    place = local(path)
    if os.path.isfile(place):  # unlike Path.is_file, it does not raise for names that are too long
        return place
    if os.path.isdir(place):
        for name in names:
            if (place / name).is_file():
                return place / name
        held = ", ".join(sorted(p.name for p in place.iterdir())[:12]) or "nothing"
        raise FileNotFoundError(f"{place} has no {' or '.join(names)}; it holds {held}")
    if not is_hub_id(str(path)):
        raise FileNotFoundError(
            f"{path} is neither a file, a folder, nor a Hugging Face repository id (owner/name)"
        )
    return _download(str(path), names)


def _download(repository: str, names: tuple[str, ...]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unreachable: LocalEntryNotFoundError | None = None
    for name in names:
        try:
            return Path(hf_hub_download(repository, name))
        except (
            LocalEntryNotFoundError
        ) as error:  # not in the cache, and the hub cannot be reached: another name may be cached
            unreachable = unreachable or error
        except EntryNotFoundError:
            continue
    if unreachable is not None:
        raise unreachable
    raise FileNotFoundError(f"the repository {repository} has no {' or '.join(names)}")


def _whole(path: object) -> AbstractContextManager[None]:
    """ValueError if safetensors files that are read inside are not whole."""
    before = f"{path} is damaged, or no safetensors file ("
    return placed(before, SafetensorError, kind=ValueError, after=")")


def read_state_dict(path: Path, key: str | None = None) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or of a torch file (.pt, .pth, .bin), on CPU; nothing is
    unpickled but tensors.

    `key` names the entry that holds the state dict where the file wraps it in a dictionary. Raises
    ValueError if the file holds something else.
    """
    refuse_pointer(path)
    if path.suffix == ".safetensors":
        with _whole(path):
            return load_file(path)
    try:
        # Mapped if the format allows it, so that several processes on a machine share one copy in
        # memory.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # torch promises no particular ones for a file that is damaged
        # before it torch advises to turn its check off
        said = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        # other operands are no pickle's, but a page's that was saved for the file
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in said:
            raise ValueError(
                f"{path} holds more than tensors, and unpickling it could run any code. If you trust its source, load it "
                f"yourself once and save its state dict with safetensors. ({said})"
            ) from error
        raise ValueError(
            f"{path} is damaged, or no torch file ({type(error).__name__}: {said})"
        ) from error
    state = content.get(key) if key is not None and isinstance(content, Mapping) else content
    if not isinstance(state, Mapping) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        place = "" if key is None else f" under {key!r}"
        names = list(content)[:5] if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(
            f"{path} should hold a state dict (names to tensors){place}; it holds {names}"
        )
    return dict(state)


_MARKS = {
    "visual.class_embedding": "a CLIP in open_clip format",
    "vision_model.embeddings.class_embedding": "a CLIP in transformers format",
    "blip.visual_encoder.cls_token": "an ImageReward",
    "layers.0.weight": "an aesthetic predictor's head",
}
"""By a tensor that only this model has."""


def guess_model(state: Mapping[str, Tensor]) -> str:
    """A phrase for error messages that names the likely model of a state dict."""
    for name, model in _MARKS.items():
        if name in state:
            return f"{model}, of width {state[name].shape[-1]}"
    return f"something unknown, with {len(state)} tensors named like {', '.join(sorted(state)[:3])}"


def check_state(
    expected: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    what: str,
    path: object,
    published: Mapping[str, Tensor] | None = None,
) -> None:
    """Raise ValueError, naming a few keys and a guess, unless `state`, a part of the `published`
    state dict, has exactly the names and shapes of `expected`."""
    problems = []
    for title, keys in (
        ("missing", expected.keys() - state.keys()),
        ("unexpected", state.keys() - expected.keys()),
    ):
        if keys:
            problems.append(
                f"{len(keys)} {title} ({', '.join(sorted(keys)[:3])}{', ...' if len(keys) > 3 else ''})"
            )
    shapes = [
        k for k in sorted(expected.keys() & state.keys()) if expected[k].shape != state[k].shape
    ]
    if shapes:
        name = shapes[0]
        problems.append(
            f"{len(shapes)} of another shape ({name}: {list(state[name].shape)}, not {list(expected[name].shape)})"
        )
    if problems:
        guess = guess_model(published or state)
        raise ValueError(
            f"{path} does not fit {what}: {'; '.join(problems)}. It seems to be {guess}."
        )


def build_module(
    factory: Callable[[], nn.Module],
    state: Mapping[str, Tensor],
    what: str,
    path: object,
    published: Mapping[str, Tensor] | None = None,
) -> Any:
    """The module that `factory` makes, frozen and in eval mode, with the tensors of `state` only.

    The module is made on the meta device, so a model of billions of parameters is neither
    initialised nor copied. Raises ValueError (`check_state`) if `state` is not exactly its state
    dict.
    """
    with torch.device("meta"):
        module = factory()
    check_state(module.state_dict(), state, what, path, published)
    module.load_state_dict(state, assign=True)
    for child in module.modules():
        position_ids = getattr(child, "position_ids", None)
        # 0, 1, 2, ..., which no state dict holds
        if isinstance(position_ids, Tensor) and position_ids.is_meta:
            child.register_buffer(
                "position_ids", torch.arange(position_ids.shape[-1])[None], persistent=False
            )
    left = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.is_meta
    ]
    if left:
        raise ValueError(
            f"{what}: this version of transformers expects values that no state dict has: {left[:3]}"
        )
    return module.requires_grad_(False).eval()


def read_instruction(place: str) -> str:
    """An instruction that a judge was trained on: the text of a file, or with FILE.py:NAME the
    string that a Python file assigns to NAME; the file is read, not run.

    In an f-string every field must be a plain name, and stays as "{name}". Raises
    FileNotFoundError, or ValueError if the file assigns no such string.
    """
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    file = local(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"{path}: no such file (an instruction is read from FILE.txt, or from FILE.py:NAME)"
        )
    text = read_text(file)
    return _value_assigned(text, name, file) if name else text


def _value_assigned(source: str, name: str, file: Path) -> str:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no Python file ({error})") from None
    found = []
    for node in body:
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            found.append(node.value)
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == name:
            found.append(node.value)
    if not found:
        raise ValueError(f"{file} assigns nothing to {name}")
    if (text := _string(found[-1])) is None:
        raise ValueError(f"{file}: {name} is no plain string")
    return text


def _string(node: ast.expr) -> str | None:
    """The string that an expression of literals means; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.FormattedValue):
        return f"{{{node.value.id}}}" if isinstance(node.value, ast.Name) else None
    if isinstance(node, ast.JoinedStr):
        parts = [_string(part) for part in node.values]
        return None if None in parts else "".join(filter(None, parts))
    return None
