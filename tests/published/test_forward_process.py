"""DiffusionNFT's, AWM's, EPG's and guided ReFL's training steps against restatements of their formulas, on
the tiny FLUX.

The old weights are made to trail by a third to a half after each iteration, so that they differ
from the trained ones.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.published.neighbours import Flux, batch_normalised
from tests.published.second_half import Beside, agree, tiny
from tests.support.tolerances import network
from tests.support.variants import few

ROUNDED = network(1.0, passes=3)["atol"]
"""Of a loss, and of a gradient in units of its length: a call, the loss and the way back."""
COMMON = (
    "algorithm.group_size=3",
    "sampling.num_steps=5",
    "algorithm.kl_weight=0.05",
    "algorithm.old_schedule=[0,0.3,0.5]",
)


def mean_square(x):
    return (x**2).mean()


def noised(models, example, g, sigma):
    """Of one member at one time the image, the noise, x, and the velocities there: trained, old and
    of the base."""
    image, noise = example.x[g : g + 1], example.data["noise"][g : g + 1]
    x = (1 - sigma) * image + sigma * noise
    with torch.no_grad():
        old, base = (models.velocity(which, x, sigma, example.prompt) for which in ("old", "base"))
    return image, noise, x, models.velocity("trained", x, sigma, example.prompt), old, base


def nft(models, example, g, advantage, sigma):
    """5 (r |x0(v+) - x0|^2 / w+ + (1 - r) |x0(v-) - x0|^2 / w-) / b + kl |v - v_ref|^2, one member
    at one time; b = 0.5."""
    image, _, x, v, old, base = noised(models, example, g, sigma)
    b = 0.5

    def error(mixed):
        off = x - sigma * mixed - image
        return mean_square(off) / off.detach().double().abs().mean().clip(min=1e-5)

    r = ((advantage / 5) / 2 + 0.5).clip(0, 1)
    policy = r * error(b * v + (1 - b) * old) / b + (1 - r) * error((1 + b) * old - b * v) / b
    return 5 * policy + 0.05 * mean_square(v - base)


def awm(models, example, g, advantage, sigma):
    """-A/5 exp(log p - its own value) + kl |v - v_ref|^2 + |v - v_old|^2, log p = -4 sigma ((e +
    1e-10)^1/4 - 1e-10^1/4)."""
    image, noise, _, v, old, base = noised(models, example, g, sigma)
    e = mean_square(v.double() - (noise.double() - image.double()))
    log_prob = -4 * sigma * ((e + 1e-10) ** 0.25 - 1e-10**0.25)
    return (
        -advantage / 5 * (log_prob - log_prob.detach()).exp()
        + 0.05 * mean_square(v - base)
        + mean_square(v - old)
    )


def epg(models, example, g, advantage, sigma, proximal=False):
    """-exp(D) W L + kl |v - v_ref|^2, D = L - L_old; L = -|x0(v) - x0|^2 / mean |x0(v) - x0|, and W
    is the advantage, or that minus D."""
    image, _, x, v, old, base = noised(models, example, g, sigma)

    def bound(velocity):
        off = (x - sigma * velocity - image).double()
        return -mean_square(off) / off.detach().abs().mean().clip(min=1e-5)

    moved = (bound(v) - bound(old)).detach()
    weight = moved.exp() * (advantage - moved if proximal else advantage)
    return -weight * bound(v) + 0.05 * mean_square(v - base)


def far_from_the_mean(rewards):
    """Scores are 0.02 apart. Beside a tenth of that, the default, the KL term's rounding would
    count: velocities are subtracted in it that are equal at first."""
    return 10 * (rewards - rewards.mean(1, keepdim=True))


def objective(term, sigmas, models, seen, advantages_of=batch_normalised):
    advantages = advantages_of(seen.rewards[:, 0, 0]).clamp(-5, 5)  # a row a prompt
    share = 1 / sum(len(example.advantages) for example in seen.examples)
    return [
        lambda example=example, g=g: (
            share
            * term(
                models, example, g, advantages[example.prompt, g], sigmas[example.data["step"][g]]
            )
        )
        for example in seen.examples
        for g in range(len(example.advantages))
    ]


def trail(models, updates):
    decay = min(0.3 * updates, 0.5)
    with torch.no_grad():
        for old, new in zip(models.old.parameters(), models.trained.parameters(), strict=True):
            old.copy_(old * decay + new * (1 - decay))


def walked(t, models, prompt):
    """The group of a prompt as DiffusionNFT's sampler walks it: the network sees int(1000 sigma),
    the step sigma."""
    network = Flux(models.old, models.text, side=8, truncate=True)
    x = t.policy.noise([t.collector.noise(0, prompt, "initial", member) for member in range(3)])
    for sigma, after in pairwise(t.sigmas):
        x = x + (after - sigma) * torch.cat([network(row[None], sigma, prompt) for row in x])
    return x.detach()


@pytest.mark.slow
def test_diffusion_nft_samples_at_whole_thousandths_and_learns_at_exact_times(flux_directory):
    """Finals by a walk of our own, loss and gradient by the formula at sigma itself; truncated in
    both they are others."""
    small, apart = ("algorithm.mixing=0.5", "algorithm.share=0.4"), []
    # a walk of eight steps, of latents up to 4
    far = network(4.0, passes=8)["atol"]
    for truncated in ("rollout", True):
        ours = tiny(
            flux_directory,
            "algorithm.name=diffusion_nft",
            *COMMON,
            *small,
            options={"truncate_timesteps": truncated},
        )
        finals = []

        def terms(models, seen, ours=ours, finals=finals):
            finals += [
                (example.x, walked(ours, models, example.prompt)) for example in seen.examples
            ]
            return objective(nft, ours.sigmas, models, seen)

        beside = Beside(ours, terms, iterations=1)
        assert (
            len(finals) == 4
            and max(float((one - other).abs().max()) for one, other in finals) < far
        )
        apart.append(beside.differences())
    exact, both = apart
    assert exact["loss"] < ROUNDED and exact["gradient"] < ROUNDED < 1e-4 < both["gradient"]


def guided(models, x, sigma, prompt):
    """FlowBP's guidance of 3.5: the prediction without the prompt has no gradient."""
    given = models.text[prompt]

    def velocity(which):
        said = {
            "encoder_hidden_states": given[f"{which}prompt_embeds"],
            "pooled_projections": given[f"{which}pooled_prompt_embeds"],
        }
        return models.trained(
            hidden_states=x, timestep=1000 * sigma.reshape(1), **said, return_dict=False
        )[0]

    with torch.no_grad():
        without = velocity("negative_")
    return without + 3.5 * (velocity("") - without)


def bright(images, prompts):
    return images.flatten(1).mean(1)


bright.differentiable = True


@pytest.mark.slow
def test_refl_with_guidance_is_flowbps(sd3_directory):
    """One picture of each prompt: relu(ceiling - r(decode(x - sigma v))), v with a detached
    negative prediction; gradients that go through both predictions are far off."""
    small = (
        "algorithm.name=refl",
        "algorithm.group_size=1",
        "algorithm.ceiling=2",
        "rewards={bright: 1.0}",
    )
    apart = []
    for detached in (True, False):
        options = {"guidance_scale": 3.5, "detach_negative": detached}
        ours = tiny(
            sd3_directory,
            *small,
            "trainer.prompts_per_iteration=3",
            options=options,
            rewards=(bright,),
        )
        vae = ours.policy.pipeline.vae

        def terms(models, seen, ours=ours, vae=vae):
            def one(example):
                sigma = ours.sigmas[example.step]
                latent = example.x - sigma * guided(models, example.x, sigma, example.prompt)
                picture = (
                    vae.decode(latent / vae.config.scaling_factor + vae.config.shift_factor).sample
                    / 2
                    + 0.5
                )
                return torch.relu(2 - picture.clamp(0, 1).mean()) / len(seen.examples)

            return [partial(one, example) for example in seen.examples]

        apart.append(Beside(ours, terms, iterations=1).differences())
    published, through_both = apart
    assert published["loss"] < ROUNDED and published["gradient"] < ROUNDED
    assert through_both["loss"] < ROUNDED and through_both["gradient"] > 0.1


PEPG = ("algorithm.objective=pepg", "algorithm.normalized=true", "algorithm.advantage_scale=1")
FAR = ("algorithm.advantage_scale=10",)
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "objective", "more"),
    [
        ("diffusion_nft", partial(objective, nft), ("algorithm.mixing=0.5",)),
        ("awm", partial(objective, awm), ("algorithm.times=2",)),
        pytest.param(
            "epg", partial(objective, epg, advantages_of=far_from_the_mean), FAR, marks=slow
        ),
        pytest.param("epg", partial(objective, partial(epg, proximal=True)), PEPG, marks=slow),
    ],
    ids=["diffusion_nft", "awm", "epg", "pepg"],
)
@pytest.mark.parametrize("iterations", few([3, 1], (1).__eq__))
def test_losses_gradients_and_weights_are_the_published_ones(
    flux_directory, name, objective, more, iterations
):
    ours = tiny(flux_directory, f"algorithm.name={name}", *COMMON, *more)
    beside, share = agree(ours, partial(objective, ours.sigmas), trail, iterations=iterations)
    old, other = (
        torch.cat([p.detach().flatten() for p in own])
        for own in (ours.learner.old, beside.models.old.parameters())
    )
    assert float((old - other).norm()) < share * float((other - beside.start).norm())
