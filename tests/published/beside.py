"""The restated step beside the trainer's under the published recipes, on the tiny FLUX with the
same noise.

python -m tests.published.beside             # a table; test_g2rpo.py bounds what is in it
python -m tests.published.beside --undone    # what each rounding of the published code is worth, by leaving it out
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel

from g2rpo.config.read import load_config
from g2rpo.core.images import to_uint8
from g2rpo.core.noise import generator_for
from g2rpo.models.load import build_policy
from g2rpo.train.trainer import Trainer
from tests.published import g2rpo as published
from tests.support.runs import with_precision
from tests.support.tiny import save_flux
from tests.support.watched import Watched, flat

PROMPTS = ["a red circle", "two blue square left of a circle"]
SIDE, LATENT = 32, (4, 16, 16)  # a picture's pixels, and the tiny VAE's latent
TINY = (
    f"policy.height={SIDE}",
    f"policy.width={SIDE}",
    "policy.max_sequence_length=12",
    "policy.device=cpu",
    "trainer.prompts_per_iteration=2",
)
FLOAT32 = ("policy.dtype=float32", "sampling.precision=float32")
UNDONE = (
    "Precision.step=float32",
    "Precision.anchor=float32",
    "policy.truncate_timesteps=false",
    "policy.published_pictures=false",
)
ONE_BY_ONE = ("sampling.batch_size=1", "sampling.decode_batch_size=1")


def judge(levels, which):
    """Scores of 8-bit pictures [B, 3, H, W], in float16 as the published ones are: how like the
    pattern `which` they are.

    Their spread in a group is some ten float16 steps.
    """
    pattern = torch.randn(
        levels.shape[1:], generator=generator_for("pattern", which), dtype=torch.float64
    )
    return (0.3 + 5 * (levels.double() / 255 * pattern).flatten(1).mean(1)).half().float()


def differences(folder, recipe, setting, *overrides):
    """One iteration of the trainer under `recipe` with `overrides`, and of the restatement under
    `setting`: the largest difference of each quantity. Gradients and weights are relative: of the
    worst tensor, and of the way that all went."""
    seen, graded = _trainer(folder, recipe, overrides)
    trainer = seen.t
    start = flat(trainer.learner.parameters)
    row = trainer.iterate()

    pipeline = FluxPipeline.from_pretrained(folder, transformer=None, dtype=setting.dtype)
    model = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    vae = AutoencoderKL.from_pretrained(folder, subfolder="vae", torch_dtype=setting.dtype)
    # as the policy has it: another layout adds in another order
    vae.to(memory_format=torch.channels_last)
    group, height = trainer.algorithm.group_size, LATENT[1]
    texts, rollouts, pictures, scores = [], [], [], []
    for place, prompt in enumerate(trainer.prompts_of(0)):
        texts.append(published.encode(pipeline, prompt))
        noise = torch.randn(LATENT, generator=trainer.collector.noise(0, place, "initial"))
        draws = [
            torch.randn(
                group,
                *published.pack(noise).shape[1:],
                generator=trainer.collector.noise(0, place, "branch", k, k),
            )
            for k in setting.branches
        ]
        rollouts.append(published.rollout(model, texts[-1], noise, draws, height, setting))
        levels = [
            torch.stack(
                [
                    published.picture(vae, final, height, setting)
                    for tail in branch.finals
                    for final in tail
                ]
            )
            for branch in rollouts[-1]
        ]
        pictures += levels
        scores.append(
            [
                torch.stack([judge(own, which) for which in range(len(trainer.rewards))])
                for own in levels
            ]
        )
    weighed = [
        [
            published.advantages(own.unflatten(1, (len(setting.strides), group)), setting)
            for own in of_prompt
        ]
        for of_prompt in scores
    ]
    updated = published.update(model, texts, rollouts, weighed, height, setting)

    (_, sampled), (examples,) = seen.collected[0], seen.examples
    ours = [rollout.transitions[0] for rollout in sampled.rollouts]
    theirs = [branch for branches in rollouts for branch in branches]
    finals = [torch.stack([torch.cat(tail) for tail in branch.finals]) for branch in theirs]
    weights = flat(model.parameters())
    moved, apart = weights - start, flat(trainer.learner.parameters) - weights
    return {
        "grid": _most([trainer.sigmas], [setting.sigmas]),
        "floor(1000 sigma)": _most(
            [torch.floor(trainer.sigmas * 1000)],
            [torch.tensor([int(s * 1000) for s in setting.sigmas])],
        ),
        "anchors": _most([own.x for own in ours], [branch.x.float() for branch in theirs]),
        "branch latents": _most(
            [own.x_next for own in ours], [torch.cat(branch.landed) for branch in theirs]
        ),
        "log-probs": _most(
            [own.old_log_prob for own in ours], [torch.cat(branch.log_probs) for branch in theirs]
        ),
        "finals": _most([rollout.finals for rollout in sampled.rollouts], finals),
        "share of grey levels": float((torch.cat(graded) != torch.cat(pictures)).float().mean()),
        "scores": _most(
            list(sampled.rewards.flatten(2)), [own for of_prompt in scores for own in of_prompt]
        ),
        "advantages": _most(
            [item.advantages for item in examples],
            [own for of_prompt in weighed for own in of_prompt],
        ),
        "mean loss": abs(row["loss"] - sum(updated.losses) / len(setting.branches)),
        "gradients": max(
            _relative(mine, yours)
            for step in zip(seen.gradients, updated.gradients, strict=False)
            for mine, yours in zip(*step, strict=True)
        ),
        "optimizer steps": abs(len(seen.gradients) - len(updated.norms)),
        "weights": float(apart.norm() / moved.norm()),
    }


def _trainer(folder, recipe, overrides):
    """A trainer on the pipeline in `folder` with judges in the place of the recipe's rewards, and
    what passes through it."""
    dtypes = [override for override in overrides if override.startswith("Precision.")]
    config = load_config(
        recipe,
        [f"policy.path={folder}", *TINY, *(each for each in overrides if each not in dtypes)],
    )
    pictures = []

    def scoring(which):
        def score(images, prompts):
            levels = to_uint8(images)
            pictures.extend([levels] if which == 0 else [])
            return judge(levels, which)

        return score

    rewards = {name: scoring(which) for which, name in enumerate(config.rewards)}
    trainer = Trainer(
        config=config,
        policy=build_policy(config.policy),
        rewards=rewards,
        prompts=PROMPTS,
        heldout=PROMPTS,
    )
    undone = {
        override.removeprefix("Precision.").partition("=")[0]: torch.float32 for override in dtypes
    }
    with_precision(trainer, replace(config.precision, **undone))
    return Watched(trainer), pictures


def _most(ours, theirs):
    return max(float((mine - yours).abs().max()) for mine, yours in zip(ours, theirs, strict=True))


def _relative(ours, theirs):
    """|ours - theirs| / |theirs|, 0 where both are nothing."""
    difference = float((ours - theirs).norm())
    return difference and difference / float(theirs.norm())


def main():
    args = arguments()
    exact, rounded = (
        published.Setting(strides=(1, 2, 3), dtype=torch.float32),
        published.Setting(strides=(1, 2, 3)),
    )
    cells = {
        "float32, one by one": (exact, (*FLOAT32, *ONE_BY_ONE)),
        "float32, in batches": (exact, FLOAT32),
        "bfloat16, one by one": (rounded, ONE_BY_ONE),
        "bfloat16, in batches": (rounded, ()),
    }
    if args.undone:
        cells = {override: (rounded, (*ONE_BY_ONE, override)) for override in UNDONE}
    with tempfile.TemporaryDirectory() as folder:
        save_flux(Path(folder))
        columns = {
            name: differences(Path(folder), "reference-hps-clip", setting, *own, *args.overrides)
            for name, (setting, own) in cells.items()
        }
    print("| largest difference |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for quantity in next(iter(columns.values())):
        found = (column[quantity] for column in columns.values())
        print(
            f"| {quantity} |", " | ".join(f"{value:.1e}" if value else "0" for value in found), "|"
        )


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--undone", action="store_true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
