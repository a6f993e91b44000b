"""The trained weights of a run: its final ones, or a checkpoint's, and how a plain pipeline loads
them. The base model is read only where a format needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError, loading
from g2rpo.models import hub
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.adapters import ADAPTER_FILE, CLASS, DOWN, UP, Adapter, own_header
from g2rpo.models.blueprint import read_blueprint, trained_on_meta
from g2rpo.models.load import location_of
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipeline_files import has_weights, read_file, weight_files
from g2rpo.models.pipelines import cast, loader_of
from g2rpo.models.sharding import Pieces
from g2rpo.train.model_card import header_of
from g2rpo.train.run.checkpoint import checkpoints, latest_checkpoint, load_checkpoint
from g2rpo.train.run.folder import Run


@dataclass(frozen=True)
class TunedWeights:
    """An `adapter`, or the trained tensors of a transformer, `whole`, by name; of a transformer of
    the class `kind`."""

    kind: str
    adapter: Adapter | None = None
    whole: Mapping[str, Tensor] = field(default_factory=dict)

    def change(self, name: str, before: Tensor) -> Tensor:
        """A tensor of the base model as it is after training, in the dtype that it was trained
        in."""
        module = name.removesuffix(".weight")
        if self.adapter is None:
            return self.whole.get(name, before)
        return (
            before.float() + self.adapter.delta(module).view_as(before)
            if module in self.adapter.layers
            else before
        )

    @property
    def names(self) -> list[str]:
        """The trained tensors of the model."""
        return (
            list(self.whole)
            if self.adapter is None
            else [f"{module}.weight" for module in self.adapter.layers]
        )


def final(run: Path, config: Config) -> TunedWeights:
    """The weights that a finished run has written."""
    try:
        folder = Run(run).weights
    except UserError:
        if found := checkpoints(Run(run).checkpoints):
            kept = ", ".join(str(int(path.name.removeprefix("iteration_"))) for path in found)
            raise UserError(
                f"{run} has not finished; {Run(run).command} goes on, --checkpoint last exports what it has (kept: {kept})"
            ) from None
        raise
    if (folder / ADAPTER_FILE).is_file():
        adapter = read_adapter(folder / ADAPTER_FILE)
        return TunedWeights(
            adapter.metadata.get(CLASS) or class_of(transformer_folder(config.policy)), adapter
        )
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: holds neither {ADAPTER_FILE} nor a transformer's config.json; its policy has a format of its own"
        )
    return TunedWeights(class_of(folder), whole=_tensors_of_folder(folder))


def from_checkpoint(run: Path, config: Config, which: str) -> TunedWeights:
    """The weights, or their average where the run keeps one, of the checkpoint "last", "best" or of
    an iteration."""
    iteration, tensors = _checkpoint(run, which)
    transformer, trained = trained_on_meta(read_blueprint(config.policy), config.policy)
    values = tensors.get("average", tensors["weights"])
    if [value.shape for value in values] != [parameter.shape for parameter in trained.values()]:
        raise UserError(
            f"{run}: the checkpoint of iteration {iteration} does not fit {config.policy.path}"
        )
    named = dict(zip(trained, values, strict=True))
    kind, c = type(transformer).__name__, config.policy
    if c.tuning == "full":
        return TunedWeights(kind, whole=named)
    down, up = (f".{end.split('.')[1]}.default.weight" for end in (DOWN, UP))
    modules = [name.removesuffix(down) for name in named if name.endswith(down)]
    scale = c.lora_alpha / c.lora_rank
    pairs = {m: (named[m + down].float(), named[m + up].float() * scale) for m in modules}
    header = own_header(kind, c.lora_rank, c.lora_alpha) | header_of(config, iteration)
    with loading(f"{run}: the checkpoint of iteration {iteration}"):
        return TunedWeights(kind, Adapter(pairs, header))


def _checkpoint(run: Path, which: str) -> tuple[int, Mapping[str, list[Tensor]]]:
    root = Run(run).best if which == "best" else Run(run).checkpoints
    if which in ("best", "last"):
        found, _ = latest_checkpoint(root)
        if found is None:
            kept = "; no evaluation was better than the base's" if which == "best" else ""
            raise UserError(f"--checkpoint {which}: {root} holds no checkpoint{kept}")
        return found[0], _whole(found[1])
    known = {str(int(path.name.removeprefix("iteration_"))): path for path in checkpoints(root)}
    if which not in known:
        raise UserError(
            f"--checkpoint {which}: {run} keeps {', '.join(known) or 'none'}; or say last or best"
        )
    iteration, tensors, _ = load_checkpoint(known[which])
    return iteration, _whole(tensors)


def _whole(tensors: Mapping[str, Sequence[Tensor | Pieces]]) -> dict[str, list[Tensor]]:
    return {
        name: [v.whole() if isinstance(v, Pieces) else v for v in values]
        for name, values in tensors.items()
    }


def transformer_folder(config: PolicyConfig) -> Path:
    """Where the base model's trained transformer lies on this machine; of a hub id it is downloaded
    if need be."""
    path, _ = location_of(config.path)
    if Path(path).is_dir():
        return Path(path) / "transformer"
    config_file = hub.cached(path, "transformer/config.json")
    # plans and checkpoints need no more than config.json, and may have fetched that alone
    if config_file is not None and has_weights(config_file.parent):
        return config_file.parent
    if (why := hub.obstacle(path)) is not None:
        raise UserError(f"policy.path={path}: its transformer is needed, and it {why}")
    with loading(f"policy.path={path}: cannot be downloaded"):
        return Path(snapshot_download(path, allow_patterns="transformer/*")) / "transformer"


def class_of(transformer: Path) -> str:
    """The class in diffusers of a transformer's folder."""
    kind = read_file(str(transformer), "config.json").get("_class_name")
    if not isinstance(kind, str):
        raise UserError(f"{transformer / 'config.json'}: names no class")
    return kind


def _tensors_of_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model's folder, read from disk when they are used."""
    with loading(f"{folder}: cannot be read"):
        tensors = {
            name: value for path in weight_files(folder) for name, value in load_file(path).items()
        }
    if wrong := [name for name, value in tensors.items() if not value.isfinite().all()]:
        raise UserError(f"{folder}: {wrong[0]} has values that are not finite (NaN or infinity)")
    return tensors


def load_saved(pipeline: Any, folder: Path, tuning: str) -> None:
    """Loads saved weights into a plain pipeline, as the model card says."""
    if tuning == "full":
        tuned = type(pipeline.transformer).from_pretrained(folder)
        cast(tuned, pipeline.transformer.dtype)
        pipeline.transformer = tuned
        return
    if (loader := loader_of(pipeline)) is not None:
        attrgetter(loader)(pipeline)(folder, weight_name=ADAPTER_FILE)
        return
    adapter = read_adapter(folder / ADAPTER_FILE)
    for module in adapter.layers:  # as `g2rpo export --format merged`
        weight = pipeline.transformer.get_submodule(module).weight
        weight.data += adapter.delta(module).view_as(weight).to(weight)
