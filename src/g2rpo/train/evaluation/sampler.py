"""Pictures of fixed prompts from fixed noise, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from g2rpo.config.schema import Config, Shift, grid_of
from g2rpo.core.contracts import finite_rows, not_finite, real_tensors
from g2rpo.core.errors import Stopped, shown
from g2rpo.core.events import doing
from g2rpo.core.flow import ode_step
from g2rpo.core.noise import generator_for, seed_for
from g2rpo.core.plain import Count, Section
from g2rpo.core.rewards import Scorer, as_rewards
from g2rpo.core.statistics import group_std
from g2rpo.core.types import Policy
from g2rpo.models.options import PolicyConfig
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.guidance import GuidedEngine, guided_by, sized
from g2rpo.rollout.scoring import decode, score
from g2rpo.train.evaluation.controls import NO_CONTROL, Control, Offer
from g2rpo.train.evaluation.heldout import Evaluation, verdicts
from g2rpo.train.monitor.pictures import reduced


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A policy with its weights, and how it is sampled by the plain ODE. Picture i starts from
    noise (`seed`, i), whatever the batch size or rank. Memory is bounded by `batch_size` latents of
    a network call and `decode_batch_size` pictures, which rewards see at once, as in training."""

    policy: Policy
    shift: Shift
    num_steps: int
    seed: int = 0
    batch_size: int = 16
    decode_batch_size: int = 16
    size: tuple[int, int] | None = None
    """Height and width; None: the policy's."""
    on_rows: Callable[[int], None] = lambda rows: None
    """Called with the rows of every call of the network; an exception from it ends the sampling."""

    @property
    def sigmas(self) -> Tensor:
        """The sigma grid."""
        with sized(self.policy, self.size):
            return grid_of(self.shift, self.policy, self.num_steps)

    def pictures(
        self, prompts: Sequence[str], first: int = 0, control: Control = NO_CONTROL
    ) -> Tensor:
        """One picture [3, H, W] in [0, 1], or clip, per prompt; `first` is the index of the first
        one if they are part of a longer list. `Stopped`, which names the part of the model, if one
        is not finite."""
        images = []
        for start, latents, drawn in self._batches(prompts, first, control):
            images.append(drawn)
            if not (finite := finite_rows(images[-1], latents)).all():
                place = start + int(finite.int().argmin())
                raise self._stopped(prompts[place], first + place)
        return torch.cat(images)

    def evaluate(
        self,
        prompts: Sequence[str],
        rewards: Mapping[str, Scorer],
        *,
        first: int = 0,
        control: Control = NO_CONTROL,
        kept: Callable[[Tensor], Tensor] = reduced,
    ) -> Evaluation:
        """Samples and scores `prompts`, under a `control` with its steps. What is `kept` of pictures
        or clips, in 8 bit, is in the result: by default pictures as they are, and clips reduced.
        Pictures that are not finite have no score. `Stopped`, which names the part of the model, if
        the first one and all others are not."""
        pictures, scores, finite, scored = [], [], False, as_rewards(rewards)
        for start, latents, images in self._batches(prompts, first, control):
            part = prompts[start : start + self.batch_size]
            scores.append(score(scored, images, part, latents, self.decode_batch_size))
            finite |= bool(finite_rows(images, latents).any())
            pictures.append(kept(images))
        # of a longer list, a single one may fail
        if control == NO_CONTROL and not finite and (len(prompts) > 1 or not first):
            raise self._stopped(prompts[0], first)
        by_reward = dict(zip(scored, torch.cat(scores, 1), strict=True))
        return Evaluation(
            tuple(prompts), torch.cat(pictures), by_reward, verdicts(scored, by_reward)
        )

    def _batches(
        self, prompts: Sequence[str], first: int, control: Control
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Where in `prompts` each batch starts, with its latents and its pictures."""
        for start in range(0, len(prompts), self.batch_size):
            part = prompts[start : start + self.batch_size]
            with doing(f"drawing pictures {start + 1} to {start + len(part)} of {len(prompts)}"):
                latents = self._latents(part, first + start, control)
                with sized(self.policy, self.size):
                    images = decode(self.policy, latents, self.decode_batch_size)
            yield start, latents, images

    def best(
        self,
        prompts: Sequence[str],
        rewards: Mapping[str, Scorer],
        weights: Mapping[str, float],
        *,
        first: int = 0,
        control: Control = NO_CONTROL,
        kept: Callable[[Tensor], Tensor] = reduced,
    ) -> Evaluation:
        """`evaluate` with the best of `control.best_of` pictures of each prompt, by the rewards
        that `weights` names; the first of equally good ones."""
        if control.best_of == 1:  # the control's own draw
            return self.evaluate(prompts, rewards, first=first, control=control, kept=kept)
        draws = [
            control.model_copy(update={"draw": draw, "best_of": 1})
            for draw in range(control.best_of)
        ]
        several = [
            self.evaluate(prompts, rewards, first=first, control=draw, kept=kept) for draw in draws
        ]
        scores = {name: torch.stack([one.scores[name] for one in several], -1) for name in weights}
        # by itself, so that a prompt's picture does not depend on the others
        rows, place = range(len(prompts)), []
        for row in rows:
            own = {name: of[row, None] for name, of in scores.items()}
            place.append(int(utility(own, weights).argmax()))

        def chosen(values: Sequence[Tensor]) -> Tensor:
            return torch.stack([values[place[row]][row] for row in rows])

        by_reward = {
            name: chosen([one.scores[name] for one in several]) for name in several[0].scores
        }
        right = [one.right for one in several if one.right is not None]
        images = chosen([one.images for one in several])
        return Evaluation(tuple(prompts), images, by_reward, chosen(right) if right else None)

    def _stopped(self, prompt: str, index: int) -> Stopped:
        """The error about the picture `index`, which is not finite."""
        with sized(self.policy, self.size):
            noise = self.policy.noise([generator_for(self.seed, "picture", index)])
            fault = first_not_finite(self.policy, prompt, noise, self.sigmas)
        return Stopped(
            fault
            or f"the picture of {shown(prompt)} has NaN or infinity, though it had none when drawn again"
        )

    @torch.no_grad()
    def _latents(self, prompts: Sequence[str], first: int, control: Control = NO_CONTROL) -> Tensor:
        """Final latents of one batch of prompts, the first of which has the index `first`."""
        policy, count, guidance = self.policy, len(prompts), control.guiding
        seed = seed_for(self.seed, "draw", control.draw) if control.draw else self.seed
        with sized(policy, self.size):
            sigmas = grid_of(self.shift, policy, control.steps or self.num_steps)
            with guided_by(policy, control.guidance):
                cond = policy.encode(guidance.encoded(prompts))
            engine = GuidedEngine(
                policy=policy,
                cond=cond,
                sigmas=sigmas,
                batch_size=count,
                on_rows=self.on_rows,
                guidance=guidance,
            )
            noise = policy.noise([generator_for(seed, "picture", first + i) for i in range(count)])
            return control.sample(engine, noise, seed, first)


def utility(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """What pictures [N, S] are chosen by: the weighted sum of their trained rewards, each as its
    deviation from the prompt's mean in units of its standard deviation within a prompt. A missing
    score counts as the mean."""
    total = torch.zeros_like(next(iter(scores.values())), dtype=torch.float64)
    for name, weight in weights.items():
        values = scores[name].double()
        deviation = (values - values.nanmean(-1, keepdim=True)).nan_to_num()
        spread = group_std(values).square().nanmean().sqrt()
        total += weight * deviation / (spread if spread > 0 else 1.0)
    return total


def sampler_of(config: Config, policy: Policy, **options: Any) -> Sampler:
    """The sampler of the evaluations of a run of `config`."""
    steps, seed, size = config.judged_steps, config.trainer.seed, config.judged_size
    given = {"num_steps": steps, "seed": seed, "size": size, **options}
    return Sampler(policy=policy, shift=config.sampling.shift, **given)


class Drawing(Section):
    """A model with its weights, and how it draws."""

    policy: PolicyConfig
    weights: str | None = None
    """A folder or a .safetensors file of tuned weights; None: the base model's."""
    strength: Annotated[
        float, Offer("Strength of the adapter", "0: the base model.", (0, 2, 0.05), "adapter")
    ] = 1.0
    shift: Shift = "model"
    seed: Annotated[int, Field(ge=0)] = 0
    batch_size: Count = 16

    def sampler(self, policy: Policy, steps: int) -> Sampler:
        """The sampler of the policy, which has the weights."""
        size = self.batch_size
        return Sampler(
            policy=policy,
            shift=self.shift,
            num_steps=steps,
            seed=self.seed,
            batch_size=size,
            decode_batch_size=size,
        )


@torch.no_grad()
def first_not_finite(policy: Policy, prompt: str, noise: Tensor, sigmas: Tensor) -> str | None:
    """A message about the first part that is not finite when `prompt` is drawn by Euler's ODE from
    `noise` [1, ...]; None if the picture is finite. All steps are always walked, so that the ranks
    of a sharded model make equally many calls."""
    found = [
        name for name, values in _walk(policy, prompt, noise, sigmas) if not values.isfinite().all()
    ]
    return not_finite(found[0], getattr(policy, "dtype", None)) if found else None


def _walk(policy: Policy, prompt: str, x: Tensor, sigmas: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What is computed for a picture, in order, with names."""
    cond, steps = policy.encode([prompt]), len(sigmas) - 1
    for name, values in real_tensors(cond):
        yield f"the text encoder's {name} of {shown(prompt)}", values
    engine = Engine(policy=policy, cond=cond, sigmas=sigmas)
    for step in range(steps):
        v = engine.velocity(x, [step], [0])
        yield f"the transformer's velocity at step {step + 1} of {steps}", v
        x = ode_step(x, v, sigmas[step], sigmas[step + 1])
        yield f"the latents after step {step + 1} of {steps}", x
    yield "the VAE's picture of finite latents", policy.decode(x)
