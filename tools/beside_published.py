"""Runs functions of published code beside this package's on the same latents, scores and tiny FLUX,
and prints how far apart.

The published code is not part of this package. Clone the repositories of METHODS first, and name
the folders:

    git clone https://github.com/Bujiazi/GRPO-Series
    python -m tools.beside_published pave_grpo=GRPO-Series
    python -m tools.beside_published pave_grpo=GRPO-Series --write      # into studies/published.md, too

tests/published holds restatements of the same formulas, for a machine that has no clones.
"""

import ast
import math
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import CodeType
from typing import Any, Optional
from unittest import mock

import numpy as np
import torch
from torch.nn import functional

from examples.flow_dpo import loss
from g2rpo.algorithms.flow_grpo import FlowDPPO
from g2rpo.algorithms.policy_gradient import TakenSteps
from g2rpo.core.data import Example
from g2rpo.core.errors import UserError
from g2rpo.core.noise import Normal
from g2rpo.core.objectives import kernel_kl
from g2rpo.core.plans import Rollout, Transition
from g2rpo.train.trainer import Trainer
from tests.published.second_half import Beside, Models, Objective, Seen, tiny
from tests.published.sources import SOURCES
from tests.published.windows import spread, tilt
from tests.support.tiny import save_flux, save_sd3

GROUP, STEPS = 4, (0, 3)
FORWARD = (f"algorithm.group_size={GROUP}", "sampling.num_steps=5")


def pave_grpo(folder: Path, code: Path) -> Beside:
    """src/method_pavegrpo.py: compute_loss."""
    method = _module(code, "src.method_pavegrpo")
    options = (
        "algorithm.name=pave_grpo",
        f"algorithm.group_size={GROUP}",
        f"algorithm.branch_steps={list(STEPS)}",
    )
    trainer = tiny(folder, *options)
    args = Namespace(
        group_size=GROUP, sde_stepidx=list(STEPS), sde_eta=0.8, seg_list=[2, 3], adv_clip_max=5.0
    )
    return Beside(
        trainer,
        _groups(trainer, lambda models, *given: method.compute_loss(args, models.trained, *given)),
    )


def e_grpo(folder: Path, code: Path) -> Beside:
    """fastvideo: FluxSampler.compute_log_prob, RolloutBuffer.compute_advantages,
    GRPOTrainer._compute_grpo_loss."""
    merged = {0: 1, 3: 3}
    options = (
        f"algorithm.branch_steps={list(merged)}",
        f"algorithm.merged_steps={list(merged.values())}",
    )
    trainer = tiny(folder, "algorithm.name=e_grpo", f"algorithm.group_size={GROUP}", *options)
    typing = {
        "Dict": dict,
        "List": list,
        "Tuple": tuple,
        "Iterator": Any,
        "Any": Any,
        "Optional": Optional,
    }
    stubs = dict.fromkeys(("BaseSampler", "BaseTrainer", "DataLoader", "RewardManager"), object) | {
        "math": math,
        **typing,
    }
    buffer = _functions(
        code / "fastvideo/workers/rollout_buffer.py", "RolloutBuffer", dataclass=dataclass, **typing
    )
    stubs |= {"RolloutBuffer": buffer["RolloutBuffer"]}
    sampler = _functions(
        code / "fastvideo/workers/sampler/flux_sampler.py", "FluxSampler", **stubs
    )["FluxSampler"]
    stubs |= {"FluxSampler": sampler}
    method = _functions(code / "fastvideo/trainer/grpo_trainer.py", "GRPOTrainer", **stubs)[
        "GRPOTrainer"
    ]
    sampling = sampler.__new__(sampler)
    sampling.eta = 0.7
    lists = {"eta_step_list": list(merged), "eta_step_merge_list": list(merged.values())}
    given = Namespace(sampler=sampling, adv_clip_max=5.0, clip_range=1e-4, **lists)

    def term(models: Models, rollout: Rollout, rewards: torch.Tensor) -> torch.Tensor:
        (taken,) = rollout.transitions

        # its tensors are [members, steps, ...]
        def at_every_step(values: torch.Tensor) -> torch.Tensor:
            return values[:, None].expand(GROUP, len(merged), *values.shape[1:])

        made = buffer["RolloutBuffer"](
            rewards=[at_every_step(rewards[0, 0])], sigma_schedule=trainer.sigmas
        )
        made.compute_advantages(num_generations=GROUP)
        made.latents, made.next_latents = at_every_step(taken.x), at_every_step(taken.x_next)
        made.log_probs = at_every_step(taken.old_log_prob)
        velocity = models.velocity("trained", taken.x, trainer.sigmas[taken.step], rollout.prompt)
        return method._compute_grpo_loss(
            given, velocity.repeat(GROUP, 1, 1), made, list(merged).index(taken.step)
        )[0]

    def terms(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        pairs = zip(seen.rollouts, seen.rewards, strict=True)
        return [lambda pair=pair: term(models, *pair) / len(seen.rollouts) for pair in pairs]

    return Beside(trainer, terms)


def diffusion_nft(folder: Path, code: Path) -> Beside:
    """scripts/train_nft_sd3.py: policy and KL loss, return_decay; flow_grpo/stat_tracking.py."""
    script = code / "scripts/train_nft_sd3.py"
    block = _between(script, "loss_terms = {}", "# Scale loss for gradient")
    return_decay = _functions(script, "return_decay")["return_decay"]
    config = Namespace(beta=1.0, train=Namespace(adv_clip_max=5.0, beta=1e-4))

    def term(models: Models, given: dict[str, Any]) -> torch.Tensor:
        names = {"torch": torch, "config": config, "j_idx": 0, **given}
        names["train_sample_batch"] = {"advantages": given["advantages"][:, None]}
        names.update(
            forward_prediction=given["v"],
            old_prediction=given["old"],
            ref_forward_prediction=given["base"],
        )
        exec(block, names)
        return names["loss"]

    def trail(models: Models, updates: int) -> None:
        # late in the published schedule, where old and trained weights differ
        _trail(models, return_decay(400 * updates, 1))

    trainer = tiny(
        folder, "algorithm.name=diffusion_nft", "algorithm.old_schedule=[0,0.4,0.5]", *FORWARD
    )
    return Beside(trainer, _forward(trainer, partial(_tracked, code), term), trail)


def awm(folder: Path, code: Path) -> Beside:
    """scripts/train_sd3_awm.py: compute_log_prob_awm, loss; DiffusionNFT's statistics of rewards,
    which are Flow-GRPO's."""
    script = code / "advantage_weighted_matching/scripts/train_sd3_awm.py"
    block = _between(script, "# grpo logic", 'info["clipfrac"]')
    log_prob_of = _functions(script, "compute_log_prob_awm")["compute_log_prob_awm"]
    train = Namespace(
        cfg=False,
        ghuber_power=0.25,
        adv_clip_max=5.0,
        advantage_max=1,
        loss_type="exp_first",
        clip_range=1,
    )
    train.train_timesteps, train.beta, train.ema_beta, train.kl_weight, train.kl_ema_weight = (
        1,
        0.003,
        1,
        "Uniform",
        "Uniform",
    )
    config = Namespace(train=train)

    def term(models: Models, given: dict[str, Any]) -> torch.Tensor:
        transformer = lambda **named: [given["v"]]  # noqa: E731
        sigma, x, image, noise = given["t_expanded"], given["xt"], given["x0"], given["noise"]
        log_prob, output, std = log_prob_of(
            transformer, None, None, sigma, None, None, config, x, image, noise, "ghuber"
        )
        sample = {
            "advantages": given["advantages"][:, None],
            "log_probs": log_prob[None],
            "std_dev_t": std,
        }
        sample["old_log_probs"] = log_prob[None].detach()
        for name, value in (
            ("model_output", output),
            ("model_output_ref", given["base"]),
            ("model_output_ema", given["old"]),
        ):
            sample[name] = value.double()[None, ..., None]
        names = {
            "torch": torch,
            "config": config,
            "sample": sample,
            "accelerator": Namespace(is_main_process=False),
        }
        exec(block, names)
        return names["loss"]

    trainer = tiny(
        folder,
        "algorithm.name=awm",
        "algorithm.times=2",
        "algorithm.old_schedule=[0,0.2,0.3]",
        *FORWARD,
    )
    return Beside(
        trainer,
        _forward(trainer, partial(_tracked, code), term),
        lambda models, updates: _trail(models, min(0.3, 0.2 * updates)),
    )


def dgpo(folder: Path, code: Path) -> Beside:
    """scripts/train_sd3_dgpo.py: its loss, compute_group_dgpo_loss_allreduce;
    flow_grpo/stat_tracking.py."""
    script = code / "scripts/train_sd3_dgpo.py"
    block = _between(script, "ref_dgpo_v = ref_old_v", 'info["policy_loss"]')
    alone = Namespace(all_reduce=lambda *given, **named: None, ReduceOp=Namespace(SUM=None))
    summed = _functions(script, "compute_group_dgpo_loss_allreduce", dist=alone)
    train, sample = (
        Namespace(adv_clip_max=5.0, beta=0.02, beta_dpo=100.0),
        Namespace(num_image_per_prompt=GROUP),
    )
    config = Namespace(
        clip_dsm=True, clip_kl=False, clip_range=1e-5, use_ema_ref=False, train=train, sample=sample
    )
    whole = {"local_group_indices": torch.zeros(GROUP).long(), "num_groups": 1}

    def objective(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        advantages = _tracked(code, seen.rewards[:, 0, 0])
        return [
            partial(one, models, example, advantages[example.prompt], 1 / len(seen.examples))
            for example in seen.examples
        ]

    def one(
        models: Models, example: Example, advantages: torch.Tensor, share: float
    ) -> torch.Tensor:
        image, noise = example.x, example.data["noise"]
        sigma = trainer.sigmas[example.data["step"]].reshape(-1, 1, 1)
        x = (1 - sigma) * image + sigma * noise

        def velocity(which: str) -> torch.Tensor:
            return torch.cat(
                [
                    models.velocity(which, x[g : g + 1], sigma[g], example.prompt)
                    for g in range(GROUP)
                ]
            )

        names = {
            **summed,
            "torch": torch,
            "config": config,
            "use_old": True,
            "j": 0,
            "x0": image,
            "group_info": whole,
        }
        names |= {
            "sample": {"advantages": advantages[:, None]},
            "target_v": noise - image,
            "accelerator": None,
        }
        with torch.no_grad():
            names |= {"ref_old_v": velocity("base"), "old_v": velocity("old")}
        names |= {"model_v": velocity("trained"), "info": defaultdict(list)}
        exec(block, names)
        return share * names["loss"]

    small = (f"algorithm.group_size={GROUP}", "algorithm.times=2", "algorithm.clip_range=1e-5")
    trainer = tiny(
        folder,
        "algorithm.name=dgpo",
        *small,
        "algorithm.old_schedule=[1,0.2,0.3]",
        "sampling.num_steps=5",
    )
    return Beside(
        trainer, objective, lambda models, updates: _trail(models, min(0.3, 0.2 * (updates - 1)))
    )


def epg(
    folder: Path,
    code: Path,
    objective: str = "epg",
    likelihood: str = "adaptive",
    adv: str = "exact",
) -> Beside:
    """src/utils/__init__.py: compute_elbo, PerPromptStatTracker, return_decay; src/utils/base.py:
    compute_policy_loss, compute_kl_loss."""
    shared = _functions(
        code / "src/utils/__init__.py",
        "compute_elbo",
        "PerPromptStatTracker",
        "return_decay",
        np=np,
    )
    base = {"ABC": object, "abstractmethod": lambda method: method}
    kind = _functions(code / "src/utils/base.py", "BaseTrainingUtils", **base)["BaseTrainingUtils"]
    train = Namespace(method=objective, elbo=likelihood, kl_method="girsanov", adv=adv)
    train.beta, train.alpha, train.scale = 1e-4, 1e-3, 0.1
    utils, elbo_of = kind.__new__(kind), shared["compute_elbo"]
    utils.config = Namespace(train=train)

    def term(models: Models, given: dict[str, Any]) -> torch.Tensor:
        places = [given[name] for name in ("xt", "x0", "noise")]
        new, old = (
            elbo_of(given["t_expanded"], given[which], *places, likelihood)
            for which in ("v", "old")
        )
        policy = utils.compute_policy_loss(new, old, given["advantages"])
        kl = utils.compute_kl_loss(
            given["v"], given["base"], new, old, given["t_expanded"], *places
        )
        return policy + train.beta * torch.mean(kl)

    def tracked(scores: torch.Tensor) -> torch.Tensor:
        prompts = [str(prompt) for prompt in range(len(scores)) for _ in scores[0]]
        tracker = shared["PerPromptStatTracker"](global_std=True)
        return torch.from_numpy(tracker.update(prompts, scores.flatten().numpy(), train)).view_as(
            scores
        )

    trainer = tiny(
        folder,
        "algorithm.name=epg",
        f"algorithm.objective={'epg' if objective == 'epg' else 'pepg'}",
        f"algorithm.likelihood={likelihood}",
        f"algorithm.normalized={adv == 'standard'}",
        "algorithm.old_schedule=[0,0.4,0.5]",
        *FORWARD,
    )
    return Beside(
        trainer,
        _forward(trainer, tracked, term),
        lambda models, updates: _trail(models, shared["return_decay"](400 * updates, 1)),
    )


def pepg(folder: Path, code: Path) -> Beside:
    """the same functions, with the likelihood \"exact\" and normalised advantages."""
    return epg(folder, code, objective="pepg", likelihood="exact", adv="standard")


def fdfo(folder: Path, code: Path) -> Beside:
    """fdfo/train_loop.py: its differences and its loss; fdfo/sampling.py: edm_step, whose latents
    have to be ours."""
    script = code / "fdfo/train_loop.py"
    differences = _between(script, "rewards_branch_1, rewards_branch_2 =", "repeat = lambda")
    blocks = (
        _between(script, "v_ref, dx_dR =", "if config.train"),
        _between(script, 'dR = sample["dR"]', "loss = torch.mean"),
    )
    edm_step = _functions(
        code / "fdfo/sampling.py", "edm_step", FlowMatchEulerDiscreteScheduler=Any
    )["edm_step"]
    trainer = tiny(folder, "algorithm.name=fdfo", "algorithm.update_every=rollout")
    schedule = Namespace(index_for_timestep=lambda step: step, sigmas=trainer.sigmas)

    def terms(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        made = []
        for rollout, rewards in zip(seen.rollouts, seen.rewards, strict=True):
            xs = torch.stack([*(taken.x for taken in rollout.transitions), rollout.finals[0]], 1)
            pair = {"torch": torch, "rewards": rewards[0, 0], "xs": xs}
            exec(differences, pair)
            share = 1 / (len(seen.rollouts) * len(rollout.transitions))
            made += [
                partial(one, models, rollout.prompt, taken, pair, share)
                for taken in rollout.transitions
            ]
        return made

    def one(
        models: Models, prompt: int, taken: Transition, pair: dict[str, Any], share: float
    ) -> torch.Tensor:
        sigma, after = trainer.sigmas[taken.step : taken.step + 2]
        v = torch.cat([models.velocity("trained", x[None], sigma, prompt) for x in taken.x])
        x, still = taken.x[..., None], v.detach()[..., None]  # its latents have four dimensions
        torch.manual_seed(0)
        landed = edm_step(
            schedule, still, taken.step, x, torch.full([2], 0.0025 if after > 0 else 0.0)
        )
        torch.manual_seed(0)
        torch.testing.assert_close(
            landed,
            trainer.algorithm.kernel(trainer.sigmas)(x, still, sigma, after).sample(
                torch.randn_like(x)
            ),
        )
        sample = {"velocities": v.detach(), "dx_dR": pair["dx_dR"], "dR": pair["dR"]}
        names = {
            "torch": torch,
            "config": Namespace(train=Namespace(clip_range=0.03)),
            "sample": sample,
            "v": v,
        }
        for block in blocks:
            exec(block, names)
        return share * names["policy_loss"].mean()

    return Beside(trainer, terms)


def refl(folder: Path, code: Path) -> Beside:
    """flowbp/trainers/flux1/leapalign.py: get_reward_loss, on x - sigma v as its scheduler predicts
    it."""
    found = _functions(
        code / "flowbp/trainers/flux1/leapalign.py",
        "get_reward_loss",
        "unpack_latents",
        F=functional,
    )
    small = ("algorithm.name=refl", f"algorithm.group_size={GROUP}")
    trainer = tiny(
        folder, *small, "algorithm.ceiling=2", "rewards={bright: 1.0}", rewards=(bright,)
    )
    vae, args = (
        trainer.policy.pipeline.vae,
        Namespace(w=128, h=128, use_hpsv2=True, loss_relu_clip=2.0, loss_grad_scale=1.0),
    )

    def decode(latents: torch.Tensor, return_dict: bool) -> Any:
        """The tiny VAE has other numbers than FLUX.1's, which the published code contains."""
        own = (latents - 0.1159) * 0.3611 / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(own, return_dict=return_dict)

    def features(images: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"image_features": bright(images, ())[:, None], "text_features": text}

    def objective(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        return [partial(one, models, example, 1 / len(seen.examples)) for example in seen.examples]

    def one(models: Models, example: Example, share: float) -> torch.Tensor:
        sigma = trainer.sigmas[example.step]
        v = torch.cat(
            [
                models.velocity("trained", example.x[g : g + 1], sigma, example.prompt)
                for g in range(GROUP)
            ]
        )
        given = (
            Namespace(decode=decode),
            features,
            lambda caption: torch.ones(GROUP, 1),
            "",
            lambda images: images,
            None,
        )
        return share * found["get_reward_loss"](args, example.x - sigma * v, *given)[0]

    return Beside(trainer, objective)


def opsd(folder: Path, code: Path) -> Beside:
    """scripts/train_opsd_ri_sd3.py: the targets with _opa_tr_step, the loss, return_decay;
    src/stat_tracking.py."""
    script = code / "scripts/train_opsd_ri_sd3.py"
    known = {
        "profiling": Namespace(reward_bwd_inc=lambda: None),
        "_reward_scores_grad": lambda scorer, kind, images, prompts: bright(images, prompts),
    }
    names = ("_decode01", "_reward_of_latents_grad", "_opa_tr_step", "return_decay")
    found = _functions(script, *names, **known)
    targets = _between(script, "opa_g0 = None", "if ri_opa_cert:")
    loss = _between(script, "v_old_q = v_old_q.float()", "scaled_loss = loss")
    trainer = tiny(
        save_sd3(folder / "sd3"),
        *("algorithm.name=opsd", f"algorithm.group_size={GROUP}"),
        *("algorithm.old_schedule=[0,0.4,0.5]", "rewards={bright: 1.0}"),
        rewards=(bright,),
        options={"guidance_scale": 1.0, "truncate_timesteps": True},
    )
    settings = {
        "config": Namespace(beta=1.0, train=Namespace(adv_clip_max=5.0)),
        "pipeline": trainer.policy.pipeline,
        **dict.fromkeys(("ri_scorer", "opa_kind", "prm", "xi")),
        **{"opa_dir_mode": "grad", "opa_target_mode": "replace", "ri_opa_dual_neg": True},
        **{"opa_rho": 0.1, "opa_n_ascent": 2, "opa_eta": 1.0},
        **{"acc_p": torch.ones(GROUP), "acc_m": torch.ones(GROUP)},
    }

    def velocity(models: Models, which: str, x: torch.Tensor, sigma: float, prompt: int) -> Any:
        said = models.text[prompt]
        given = {
            "timestep": torch.full([1], 1000 * sigma, dtype=torch.long),
            "encoder_hidden_states": said["prompt_embeds"],
            "pooled_projections": said["pooled_prompt_embeds"],
        }
        network = getattr(models, which)
        return torch.cat(
            [network(hidden_states=row, **given, return_dict=False)[0] for row in x.split(1)]
        )

    def objective(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        advantages = _tracked(code, seen.rewards[:, 0, 0], "src.stat_tracking")
        share = 1 / len(seen.examples)
        return [
            partial(one, models, example, advantages[example.prompt], share)
            for example in seen.examples
        ]

    def one(
        models: Models, example: Example, advantages: torch.Tensor, share: float
    ) -> torch.Tensor:
        sigma = float(trainer.sigmas[example.step])
        at = example.x, sigma, example.prompt
        with torch.no_grad():
            old = velocity(models, "old", *at)
        given = {"zq": example.x, "sig_q": sigma, "y0": example.x - sigma * old, "v_old_q": old}
        made = {**found, **settings, **given, "adv": advantages}
        exec(targets, made)
        made["v_theta_q"] = velocity(models, "trained", *at)
        exec(loss, made)
        return share * made["loss"]

    return Beside(
        trainer,
        objective,
        lambda models, updates: _trail(models, found["return_decay"](400 * updates, 1)),
    )


def self_opd(folder: Path, code: Path) -> Beside:
    """self_opd/branch_score.py: sample_branches_and_score, whose latents and scores have to be ours,
    and select_all_branches; scripts/train.py: its loss."""
    method = _module(code, "self_opd.branch_score")
    block = _between(code / "scripts/train.py", "branch_noise_level = float", "- Logging -")
    weights, rewards = {"tilt": 1.0, "spread": 0.5}, {"tilt": tilt, "spread": spread}
    options = (f"algorithm.group_size={GROUP}", "rewards={tilt: 1.0, spread: 0.5}")
    trainer = tiny(folder, "algorithm.name=self_opd", *options, rewards=tuple(rewards.values()))
    device, steps = trainer.policy.device, trainer.config.sampling.num_steps
    schedule = Namespace(
        index_for_timestep=int, sigmas=trainer.sigmas, timesteps=torch.arange(steps)
    )
    same = Namespace(scaling_factor=1.0, shift_factor=0.0)
    vae = Namespace(
        config=same,
        dtype=torch.float32,
        decode=lambda x, return_dict: [trainer.policy.decode(x[..., 0])],
    )
    processor = Namespace(postprocess=lambda images, output_type: images)
    pipeline = Namespace(scheduler=schedule, vae=vae, image_processor=processor)
    config = method.BranchSamplingConfig(num_branches=GROUP, score_weights=weights, do_cfg=False)

    def scored(images: torch.Tensor, *given: Any, only_strict: bool) -> Any:
        return {name: reward(images, ()) for name, reward in rewards.items()}, None

    def objective(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        pairs = zip(seen.rollouts, seen.scores, strict=True)
        share = 1 / len(seen.rollouts)
        return [partial(one, models, rollout, scores, share) for rollout, scores in pairs]

    def one(models: Models, rollout: Rollout, scores: torch.Tensor, share: float) -> torch.Tensor:
        def network(hidden_states: torch.Tensor, timestep: torch.Tensor, **_: Any) -> Any:
            rows = zip(
                hidden_states[..., 0], timestep, strict=True
            )  # its latents have four dimensions
            each = [
                models.velocity("trained", x[None], trainer.sigmas[step], rollout.prompt)
                for x, step in rows
            ]
            return [torch.cat(each)[..., None]]

        (taken,) = rollout.transitions
        x, step = taken.x[..., None], torch.tensor([taken.step])
        std = trainer.algorithm.kernel(trainer.sigmas)(
            taken.x, taken.x, *trainer.sigmas[taken.step : taken.step + 2]
        ).std
        noises = ((taken.x_next - taken.old_mean) / std)[:, None, ..., None]
        names = {
            "torch": torch, "so": Namespace(branch_noise_level=0.7), "sde_step": method.sde_step,
            "select_all_branches": method.select_all_branches, "pipeline": pipeline, "j": taken.step,
            "sample_branches_and_score": method.sample_branches_and_score, "transformer": network,
            "accelerator": Namespace(device=device), "unwrap_model": lambda model, _: model,
            "noise_pred": network(x, step)[0], "x_j_cur": x, "t_j_cur": step,
            "sample": {"latents": torch.stack([x] * steps, 1)}, "embeds": torch.zeros(1),
            "pooled_embeds": torch.zeros(1), "batch_prompts": [""], "batch_metadata": [{}],
            "reward_fn": scored, "branch_config": config, "autocast": nullcontext,
        }  # fmt: skip
        drawn = {**vars(torch), "randn": mock.Mock(side_effect=list(noises))}
        with mock.patch.object(method, "torch", Namespace(**drawn)):
            exec(block, names)
        theirs = names["branch_pkg"]
        torch.testing.assert_close(theirs["branch_x_jp1"][0, ..., 0], taken.x_next)
        for place, name in enumerate(weights):
            found = torch.cat([theirs["per_scorer"][name][0], theirs["ode_per_scorer"][name]])
            torch.testing.assert_close(found, scores[place, 0], atol=1e-5, rtol=0)
        return share * names["loss"]

    return Beside(trainer, objective)


def bright(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return images.flatten(1).mean(1)


bright.differentiable = True  # type: ignore[attr-defined]


@dataclass
class Function:
    """A published loss and ours on the same numbers."""

    ours: Callable[[torch.Tensor], torch.Tensor]
    published: Callable[[torch.Tensor], torch.Tensor]
    at: torch.Tensor

    def differences(self) -> dict[str, float]:
        losses = [of(self.at) for of in (self.ours, self.published)]
        one, other = (torch.autograd.grad(loss, self.at)[0] for loss in losses)
        found = {
            "loss": abs(float((losses[0] - losses[1]).detach())),
            "gradient": float((one - other).norm() / other.norm()),
        }
        return {**found, "weights": math.nan}


def flow_dpo(folder: Path, code: Path) -> Function:
    """scripts/train_sd3_dpo.py: its loss, of six pairs, beside examples/flow_dpo.py."""
    block = _between(
        code / "scripts/train_sd3_dpo.py", "target = noise - model_input", 'info["loss"].append'
    )
    generator = torch.Generator().manual_seed(0)
    image, noise, base, velocity = torch.randn(4, 12, 16, 64, generator=generator)

    def ours(v: torch.Tensor) -> torch.Tensor:
        errors = [(each - (noise - image)).square().flatten(1).mean(1) for each in (base, v)]
        chosen, rejected = (errors[0] - errors[1]).chunk(2)
        return loss(chosen, rejected, 100)

    def published(v: torch.Tensor) -> torch.Tensor:
        names: dict[str, Any] = {
            "torch": torch, "F": functional, "bsz": 6, "noise": noise, "model_input": image,
            "config": Namespace(train=Namespace(beta=100)), "model_pred": v, "model_pred_ref": base,
        }  # fmt: skip
        exec(block, names)
        return names["loss"]

    return Function(ours, published, velocity.requires_grad_())


def flow_dppo(folder: Path, code: Path) -> Function:
    """verl_omni/trainer/diffusion/diffusion_algos.py: FlowDPPOLoss.compute_loss, by log-probs of
    4096 members."""
    stubs = dict.fromkeys(
        ("Optional", "TensorDict", "DiffusionActorConfig", "DiffusionLossResult"), Any
    )
    stubs |= {
        "Optional": Optional,
        "Any": Any,
        "DiffusionLossFn": object,
        "register_diffusion_loss": lambda _: lambda it: it,
    }
    found = _functions(
        code / "verl_omni/trainer/diffusion/diffusion_algos.py", "FlowDPPOLoss", **stubs
    )["FlowDPPOLoss"]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    log_prob = (1e-3 * normal(4096)).requires_grad_()
    old, advantages, std, dsigma = (
        1e-3 * normal(4096),
        normal(4096),
        normal(4096).abs() + 0.1,
        normal(4096).abs() + 0.1,
    )
    old_mean = normal(4096, 16)
    mean = old_mean + 4e-3 * std[:, None] * normal(4096, 1).abs()

    def published(log_prob: torch.Tensor) -> torch.Tensor:
        config = Namespace(
            diffusion_loss=Namespace(kl_mask_threshold=1e-5, add_kl_coefficient=True)
        )
        given = {
            "old_prev_sample_mean": old_mean,
            "prev_sample_mean": mean,
            "std_dev_t": (std / dsigma.sqrt())[:, None],
        }
        given |= {
            "old_log_prob": old,
            "log_prob": log_prob,
            "advantages": advantages,
            "sqrt_dt": dsigma.sqrt(),
        }
        return found.compute_loss(config=config, **given)[0]

    def ours(log_prob: torch.Tensor) -> torch.Tensor:
        kl = kernel_kl(Normal(mean, std), Normal(old_mean, std))
        given = {"log_prob": log_prob, "old_log_prob": old, "old_kl": kl, "advantages": advantages}
        return (
            FlowDPPO()
            .policy_loss(TakenSteps(**given, std=std, dsigma=dsigma, step=torch.zeros(4096).long()))
            .mean()
        )

    return Function(ours, published, log_prob)


def _forward(
    trainer: Trainer,
    tracked: Callable[[torch.Tensor], torch.Tensor],
    term: Callable[[Models, dict[str, Any]], torch.Tensor],
) -> Objective:
    """An objective of a published loss on finished latents, one member at one time after the
    other; `tracked` makes advantages of scores [N, G]."""

    def terms(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        advantages = tracked(seen.rewards[:, 0, 0])
        share = 1 / sum(len(example.advantages) for example in seen.examples)
        members = [
            (example, g) for example in seen.examples for g in range(len(example.advantages))
        ]
        return [partial(one, models, *member, advantages, share) for member in members]

    def one(
        models: Models, example: Example, g: int, advantages: torch.Tensor, share: float
    ) -> torch.Tensor:
        image, noise = example.x[g : g + 1], example.data["noise"][g : g + 1]
        sigma = trainer.sigmas[example.data["step"][g]].reshape(1, 1, 1)
        x = (1 - sigma) * image + sigma * noise
        given = {
            "x0": image,
            "noise": noise,
            "xt": x,
            "t_expanded": sigma,
            "advantages": advantages[example.prompt, g : g + 1],
        }
        with torch.no_grad():
            given |= {
                which: models.velocity(which, x, sigma, example.prompt) for which in ("old", "base")
            }
        return share * term(
            models, {**given, "v": models.velocity("trained", x, sigma, example.prompt)}
        )

    return terms


def _tracked(
    code: Path, scores: torch.Tensor, module: str = "flow_grpo.stat_tracking"
) -> torch.Tensor:
    """Advantages of scores [N, G] by the published tracker of statistics, where a clone has it."""
    if not (code / Path(*module.split("."))).with_suffix(".py").is_file():
        return (scores - scores.mean(1, keepdim=True)) / (scores.std(correction=0) + 1e-4)
    prompts = [str(prompt) for prompt in range(len(scores)) for _ in scores[0]]
    tracker = _module(code, module).PerPromptStatTracker(global_std=True)
    return (
        torch.from_numpy(tracker.update(prompts, scores.flatten().numpy())).view_as(scores).float()
    )


def _trail(models: Models, decay: float) -> None:
    """The update that ends the published iterations."""
    for old, new in zip(models.old.parameters(), models.trained.parameters(), strict=True):
        old.data.copy_(old.detach().data * decay + new.detach().clone().data * (1.0 - decay))


def _between(script: Path, first: str, last: str) -> CodeType:
    """The lines of a published loop from the one that holds `first` to the one before `last`."""
    lines = script.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if first in line)
    stop = next(number for number, line in enumerate(lines) if last in line and number > start)
    return compile(dedent("\n".join(lines[start:stop])), str(script), "exec")


def _functions(script: Path, *names: str, **known: Any) -> dict[str, Any]:
    """Functions and classes of a script that cannot be imported here; `known` is what they need of
    it."""
    tree = ast.parse(script.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    found: dict[str, Any] = {"torch": torch, **known}
    exec(compile(tree, str(script), "exec"), found)
    return found


def _groups(trainer: Trainer, loss: Callable) -> Objective:
    """An objective of GRPO-Series: a loss for each prompt and branch step, with the published
    code's own arguments."""

    def terms(models: Models, seen: Seen) -> list[Callable[[], torch.Tensor]]:
        made = []
        for prompt, text in enumerate(models.text):
            own = [index for index, rollout in enumerate(seen.rollouts) if rollout.prompt == prompt]
            # the anchor's comes first
            rewards = torch.cat([torch.zeros(1), *(seen.rewards[index, 0, 0] for index in own)])
            latents: list = [None] * (max(STEPS) + 1)
            landed = {}
            for index in own:
                (taken,) = seen.rollouts[index].transitions
                latents[taken.step], landed[str(taken.step)] = taken.x, [taken.x_next]
            places = torch.cartesian_prod(torch.arange(1), torch.arange(8), torch.arange(8)).float()
            given = (
                rewards,
                text["prompt_embeds"],
                text["pooled_prompt_embeds"],
                torch.full([1], 3.5),
                trainer.sigmas,
            )
            made += [
                lambda step=step, anchor=[latents, places], landed=landed, given=given: (
                    loss(models, anchor, landed, *given, step) / len(seen.rollouts)
                )
                for step in STEPS
            ]
        return made

    return terms


def _module(code: Path, name: str):
    """A module of a clone; only what was named at the command line is imported."""
    if not (code / Path(*name.split("."))).with_suffix(".py").is_file():
        raise UserError(
            f"{code}: has no {name.replace('.', '/')}.py; clone the repository that this tool's help names"
        )
    sys.path.insert(0, str(code))
    try:
        return __import__(name, fromlist=["_"])
    finally:
        sys.path.remove(str(code))


@dataclass
class Method:
    """What is compared, under the name that the page has; `compare` is documented by what it runs
    of the repository."""

    label: str
    compare: Callable[[Path, Path], Beside | Function]

    @property
    def repository(self) -> str:
        return SOURCES["EPG" if self.label == "PEPG" else self.label].repository

    def row(self, folder: Path, code: Path) -> str:
        found = self.compare(folder, code).differences().values()
        figures = " | ".join("" if math.isnan(value) else f"{value:.1e}" for value in found)
        asked = ["git", "-C", str(code), "log", "-1", "--format=%h"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        ran = " ".join(str(self.compare.__doc__).split()).rstrip(".")
        return f"| {self.label} | {self.repository} {commit}, {ran} | {date.today()} | {figures} |"


METHODS = {
    "pave_grpo": Method("Pave-GRPO", pave_grpo),
    "e_grpo": Method("E-GRPO", e_grpo),
    "diffusion_nft": Method("DiffusionNFT", diffusion_nft),
    "awm": Method("AWM", awm),
    "dgpo": Method("DGPO", dgpo),
    "epg": Method("EPG", epg),
    "pepg": Method("PEPG", pepg),
    "fdfo": Method("FDFO", fdfo),
    "refl": Method("ReFL", refl),
    "opsd": Method("DiffusionOPSD", opsd),
    "self_opd": Method("Self-OPD", self_opd),
    "flow_dppo": Method("Flow-DPPO", flow_dppo),
    "flow_dpo": Method("Flow-DPO", flow_dpo),
}
HEAD = "| algorithm | published code and its functions | run on | loss | gradient | weights |"
PAGE = Path(__file__).parents[1] / "studies/published.md"


def with_rows(page: str, rows: dict[str, str]) -> str:
    """The page with these rows, by label, in the place of those that its table has; those of others
    stay."""
    before, _, rest = page.partition(HEAD)
    table, _, after = rest.partition("\n\n")
    old = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[2:]}
    lines = [{**old, **rows}.get(method.label) for method in METHODS.values()]
    return "\n".join([before + HEAD, "|---|---|---|---|---|---|", *filter(None, lines), "", after])


def main(words: list[str]) -> None:
    given = [word for word in words if word != "--write"]
    if not given or any(word.partition("=")[0] not in METHODS for word in given):
        repositories = "\n".join(
            f"{name}: https://github.com/{method.repository}" for name, method in METHODS.items()
        )
        raise SystemExit(f"{__doc__}\n{repositories}")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        save_flux(Path(folder))
        for name, code in (word.split("=", 1) for word in given):
            rows[METHODS[name].label] = METHODS[name].row(Path(folder), Path(code))
            print(rows[METHODS[name].label], flush=True)
    if "--write" in words:
        PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
