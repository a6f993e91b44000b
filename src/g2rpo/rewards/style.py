"""More like these: a head that tells a folder's pictures from the run's own, fitted again and again
as these change.

As the discriminator of Adv-GRPO (Mao et al. 2025, arXiv 2511.20256), with the head of
`rewards.taste` on frozen features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from PIL import ImageOps
from torch import Tensor

from g2rpo.core.errors import UserError, counted
from g2rpo.core.files import is_hub_id, local
from g2rpo.core.images import to_tensor
from g2rpo.core.input_pictures import check_pictures, open_picture
from g2rpo.core.plain import Count, read_as
from g2rpo.core.types import Reward, RewardModel
from g2rpo.rewards.clip_encoder import clip_model, load_clip
from g2rpo.rewards.dino import BASE, DINO_KINDS, Dino, dino_model
from g2rpo.rewards.picture_features import PictureEncoder, features_of
from g2rpo.rewards.taste import Choice, Head, fit
from g2rpo.rewards.weights import CLIP_FILES, fetch

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
FEWEST_PICTURES, MOST_PICTURES = 10, 200
RIVALS = 16
"""The most pictures of the run beside one of the folder."""


class Style(Reward):
    """How much a picture looks as if it were one of a folder's: the utility of a head that chooses
    the folder's pictures among the run's. 0 is the mean of the base model, a unit the standard
    deviation of what the head was fitted to; 0 for all as long as there is no head, or one that
    cannot tell left-out pictures apart.

    Args: `folder`, 10 to 200 pictures (PNG, JPEG, WebP), cut and resized to the run's size; `path`,
    a CLIP, DINOv2 or DINOv3 for features besides statistics of colour and layout and 8 x 8 pixels,
    of which the head takes one block; `every`, the iterations from one fit to the next; `device`
    and `dtype` of that model. Half of the run's pictures are those of the first fit, the base
    model's; block and prior are those under which left-out pictures are most likely
    (`rewards.taste`).
    """

    files: ClassVar[Mapping[str, tuple[str, ...]]] = {"path": CLIP_FILES}
    learns_every = 5

    def __init__(
        self,
        folder: str,
        *,
        path: str | None = None,
        every: Count = 5,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        self.pictures, self.learns_every = pictures_of(folder), every
        self.encoder = None if path is None else _encoder(path, device, dtype)
        self.device = None if path is None else torch.device(device)
        self.base: dict[str, Tensor] = {}
        self.head: Head | None = None
        self.offset = 0.0
        self._folder: dict[str, Tensor] = {}
        self._size = (0, 0)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        pictures_of(options["folder"])

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        if (path := options["path"]) is None:
            return RewardModel()
        # a repository is not asked
        dino = path == BASE if is_hub_id(path) else _is_dino(path)
        return dino_model({**options, "size": 224}) if dino else clip_model(path)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        if self.head is None or not self.head.trust:
            return torch.zeros(len(prompts))
        return self.head(self._features(images)) - self.offset

    def look(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self._size = (images.shape[-2], images.shape[-1])
        return torch.cat(list(self._features(images).values()), 1)

    def learn(self, iteration: int, seen: Tensor) -> dict[str, float]:
        """Fits the head. `agreement`: the share of pairs of a picture of the folder and one of the
        run that it orders so, in folds that it was not fitted to. `nearest`: the median distance
        from a picture of the run to the nearest one of the folder, as a multiple of that among the
        folder's own; far below 1 they are copies."""
        if not self._folder:
            height, width = self._size
            fitted = [
                ImageOps.fit(open_picture(path, "style"), (width, height)) for path in self.pictures
            ]
            self._folder = self._features(
                torch.cat([to_tensor([one]) for one in fitted]).float() / 255
            )
        widths = [values.shape[1] for values in self._folder.values()]
        seen = seen[seen.isfinite().all(1)]
        if not len(seen):
            return {}
        now = dict(zip(self._folder, seen.split(widths, 1), strict=True))
        self.base = self.base or now
        self.head = fit([self._choice(index, now) for index in range(len(self.pictures))])
        self._set_offset()
        agreement = 0.5 if self.head is None else self.head.agreement.mean
        return {"agreement": agreement, "nearest": _nearest(now, self._folder)}

    def _choice(self, index: int, now: Mapping[str, Tensor]) -> Choice:
        """A picture of the folder, liked among some of `now` and as many of the base's."""
        both = {block: self._folder[block][index : index + 1] for block in now}
        count = len(self.pictures)
        for rivals in (now, self.base):
            there = len(next(iter(rivals.values())))
            places = [
                (index + count * k) % there for k in range(max(1, min(RIVALS // 2, there // count)))
            ]
            both = {block: torch.cat([both[block], rivals[block][places]]) for block in both}
        return Choice(both, (0,))

    def _set_offset(self) -> None:
        self.offset = 0.0 if self.head is None else float(self.head(self.base).mean())

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        return features_of(images, [""] * len(images), self.encoder)

    @property
    def state(self) -> dict[str, Any]:
        return {"base": dict(self.base), "head": {} if self.head is None else self.head.state}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.base = dict(state["base"])
        self.head = Head.of(state["head"]) if state["head"] else None
        self._set_offset()


def pictures_of(folder: str) -> list[str]:
    """Paths of a folder's pictures; UserError if there are too few or too many, or one is none."""
    place = local(folder)
    if not place.is_dir():
        raise UserError(f"folder={folder}: there is no such folder")
    # a Mac adds ._NAME beside each file
    shown = [path for path in place.iterdir() if not path.name.startswith(".")]
    paths = sorted(str(path) for path in shown if path.suffix.lower() in PICTURE_SUFFIXES)
    if not FEWEST_PICTURES <= len(paths) <= MOST_PICTURES:
        raise UserError(
            f"folder={folder}: has {counted(len(paths), 'picture')} ({', '.join(PICTURE_SUFFIXES)}); "
            f"give it {FEWEST_PICTURES} to {MOST_PICTURES}"
        )
    check_pictures((path, f"folder={folder}") for path in paths)
    return paths


def _is_dino(path: str) -> bool:
    config = fetch(path, *CLIP_FILES)
    return (
        config.name == "config.json"
        and read_as(dict[str, Any], config).get("model_type") in DINO_KINDS
    )


def _encoder(path: str, device: str, dtype: str) -> PictureEncoder:
    if _is_dino(path):
        return Dino(path, device=device, dtype=dtype)
    return load_clip(path, device=device, dtype=dtype, text=False)


def _nearest(run: Mapping[str, Tensor], folder: Mapping[str, Tensor]) -> float:
    """`Style.learn`'s `nearest`: by the encoder's features, or by pixels if there is none."""
    block = "encoder" if "encoder" in folder else "pixels"
    among = torch.cdist(folder[block], folder[block]).fill_diagonal_(torch.inf).amin(1).median()
    return float(torch.cdist(run[block], folder[block]).amin(1).median() / among.clamp(min=1e-6))
