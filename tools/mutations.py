"""Changes one formula or rule at a time in a copy of the repository, and runs the tests that should
fail then.

    python -m tools.mutations                # all: a minute or two on an idle core; exits with 1 if a change survives
    python -m tools.mutations flow updater   # those whose file has one of these words in its path

A change that survives is a behaviour that no named test guards. Each is tried in a process that is
forked before g2rpo is imported, so libraries are loaded once.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/g2rpo")
LIMIT = 600
"""Seconds after which a change counts as noticed: it may keep a loop from ending."""


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in `file`, becomes `new`; `tests` are arguments of pytest."""

    file: str
    old: str
    new: str
    tests: str

    def applied(self, text: str) -> str:
        """`text` with the change. White space and a comma before a closing bracket, which the
        formatter sets, do not count."""
        parts = [re.escape(part) for part in re.findall(r"\w+|[^\w\s]", self.old)]
        pattern = r"\s*".join(
            rf",?\s*{part}" if part in (r"\)", r"\]", r"\}") else part for part in parts
        )
        found = re.findall(pattern, text)
        if len(found) != 1:
            raise SystemExit(f"{self.file}: {len(found)} times, not once: {self.old}")
        return text.replace(found[0], self.new.strip())


FLOW, OBJECTIVES = "tests/core/test_flow.py", "tests/core/test_objectives.py"
NEIGHBOURS = "tests/algorithms/test_neighbours.py tests/algorithms/test_published_values.py"
FIELDS, SCHEDULE = "tests/algorithms/test_fields.py", "tests/algorithms/test_branch_schedule.py"
DPPO, FORWARD = "tests/algorithms/test_flow_dppo.py", "tests/algorithms/test_forward_process.py"
PAVE, NFT, E = (
    f"tests/published/test_{name}.py" for name in ("pave_grpo", "forward_process", "e_grpo")
)
FDFO, OPSD = "tests/published/test_fdfo.py", "tests/algorithms/test_opsd.py"
EPG = "tests/algorithms/test_epg.py"
BOUNDS = "tests/algorithms/test_bounds.py"
OPD = "tests/algorithms/test_self_opd.py"
LC = "tests/algorithms/test_lc_grpo.py"
ANY = "tests/models/test_any_pipeline.py"
ENGINE, TAILS = "tests/rollout/test_engine.py", "tests/rollout/test_tails.py"
TRAINER = "tests/train/test_trainer.py"
DROPPED, AVERAGE = (
    "tests/algorithms/test_dropped_members.py",
    "tests/train/test_moving_average.py",
)
SCORES = "tests/train/evaluation/test_scores.py"
CHECKPOINT, ALARMS = "tests/train/run/test_checkpoint.py", "tests/train/monitor/test_alarms.py"
QUANTIZED, STATISTICS = (
    "tests/models/test_quantized.py",
    "tests/core/test_statistics.py tests/train/test_rows.py",
)

REACHED = "tests/lab/plan/test_cost.py -k reached_by"
MUTATIONS = [
    Mutation(
        "models/spec.py",
        "return scale > (self.unguided or 0.0)",
        "return scale > 1",
        "tests/train/test_guidance.py -k begins",
    ),
    Mutation(
        "train/trainer.py",
        "self.config.sampling.guidance_scale):\n            stats",
        "None):\n            stats",
        "tests/train/test_guidance.py -k losses",
    ),
    Mutation(
        "train/learner.py",
        "{name: tensors[name][index] for",
        '{name: tensors["exp_avg"][index] for',
        TRAINER,
    ),
    Mutation(
        "train/evaluation/heldout.py",
        "for row in rows]) for name",
        "for row in rows[::-1]]) for name",
        SCORES,
    ),
    Mutation("core/flow.py", "of_x = 1 + g**2", "of_x = 1 - g**2", FLOW),
    Mutation("core/flow.py", "of_v = 1 + g**2", "of_v = 1 - g**2", FLOW),
    Mutation(
        "core/flow.py",
        "Normal(mean, g * (sigma - sigma_next).sqrt())",
        "Normal(mean, g * (sigma - sigma_next))",
        FLOW,
    ),
    Mutation(
        "core/flow.py",
        "eta * (sigma / (1 - clamped)).sqrt()",
        "eta * (sigma / (1 - clamped))",
        FLOW,
    ),
    Mutation("core/flow.py", "below_one = sigmas[1]", "below_one = sigmas[2]", FLOW),
    Mutation(
        "core/flow.py",
        "    sigmas = shift * u / (1 + (shift - 1) * u)\n",
        "    sigmas = shift * u / (1 + shift * u)\n",
        FLOW,
    ),
    Mutation(
        "core/flow.py", "lowest = shift * 0.001 / (1 + (shift - 1) * 0.001)", "lowest = 0.001", FLOW
    ),
    Mutation(
        "core/flow.py",
        "dsigma = sigma_next - sigma\n    narrow",
        "dsigma = sigma - sigma_next\n    narrow",
        FLOW,
    ),
    Mutation("core/flow.py", "strided[:-1] if end", "strided[:] if end", FLOW),
    Mutation(
        "core/flow.py", "share = math.sin(eta * math.pi / 2)", "share = math.sin(eta)", NEIGHBOURS
    ),
    Mutation("core/flow.py", "math.sqrt(1 - share**2)", "(1 - share)", NEIGHBOURS),
    Mutation(
        "core/flow.py",
        "precise(self.mean)) ** 2).flatten(1).mean(1)",
        "precise(self.mean)) ** 2).flatten(1).sum(1)",
        NEIGHBOURS,
    ),
    Mutation(
        "core/objectives.py",
        "(n - unbiased).clamp(min=1)).sqrt()",
        "n.clamp(min=1)).sqrt()",
        OBJECTIVES,
    ),
    Mutation(
        "core/objectives.py", "lowest, deviation / (std", "lowest, (r - mean) / (std", OBJECTIVES
    ),
    Mutation(
        "core/objectives.py",
        "torch.where(highest > lowest, ",
        "torch.where(highest >= lowest, ",
        OBJECTIVES,
    ),
    Mutation("core/objectives.py", "return torch.maximum(", "return torch.minimum(", OBJECTIVES),
    Mutation("core/objectives.py", "1 + clip_range)", "1 + 2 * clip_range)", OBJECTIVES),
    Mutation(
        "core/flow.py",
        "torch.full_like(sigma, eta)",
        "eta * sigma.sqrt()",
        f"{NEIGHBOURS} -k dance",
    ),
    Mutation(
        "core/flow.py",
        "x, velocity = precise(x), precise(velocity)",
        "x = precise(x)",
        f"{NEIGHBOURS} -k cps",
    ),
    Mutation(
        "algorithms/policy_gradient.py",
        "(off > self.clip_range)",
        "(off > 2 * self.clip_range)",
        BOUNDS,
    ),
    Mutation(
        "algorithms/forward_process.py",
        "network.old_velocity(*at)",
        "network.base_velocity(*at)",
        FORWARD,
    ),
    Mutation(
        "core/objectives.py",
        "in sorted(by_step)",
        "in sorted(by_step)[::-1]",
        f"{NEIGHBOURS} -k branch",
    ),
    Mutation(
        "train/updater.py",
        "(), self.max_grad_norm",
        "(), 2 * self.max_grad_norm",
        "tests/train/test_learner.py",
    ),
    Mutation("core/objectives.py", "1 - clip_range,", "1 - 1.04 * clip_range,", BOUNDS),
    Mutation("core/objectives.py", "0.5 * difference", "difference", OBJECTIVES),
    Mutation("core/objectives.py", 'if mix == "gdpo"', 'if mix == "advantages"', OBJECTIVES),
    Mutation(
        "core/objectives.py",
        "weighted(normalize(rewards), weights).sum(-3)",
        "normalize(weighted(rewards, weights).sum(-3))",
        OBJECTIVES,
    ),
    Mutation(
        "core/objectives.py", "(all_n - unbiased).clamp(min=1)", "all_n.clamp(min=1)", NEIGHBOURS
    ),
    Mutation("core/plain.py", "Field(ge=2, le=10_000)", "Field(ge=1, le=10_000)", FIELDS),
    Mutation("core/plain.py", "len(set(values)) < len(values)", "False", FIELDS),
    Mutation(
        "algorithms/g2rpo.py",
        "num_steps, size, self.tail",
        "num_steps, 1, self.tail",
        f"{ENGINE} {SCHEDULE}",
    ),
    Mutation("algorithms/g2rpo.py", "turn % len(plans)", "0", SCHEDULE),
    Mutation(
        "algorithms/g2rpo.py", ".clamp(-self.advantage_clip, self.advantage_clip)", "", OBJECTIVES
    ),
    Mutation(
        "algorithms/policy_gradient.py",
        "steps.log_prob - steps.old_log_prob",
        "steps.old_log_prob - steps.log_prob",
        TRAINER,
    ),
    Mutation(
        "algorithms/policy_gradient.py",
        "values + self.kl_weight * self",
        "values + self",
        NEIGHBOURS,
    ),
    Mutation(
        "algorithms/flow_grpo.py", ".clamp(-self.advantage_clip, self.advantage_clip)", "", BOUNDS
    ),
    Mutation(
        "algorithms/forward_process.py",
        ".clamp(-self.advantage_clip, self.advantage_clip)",
        "",
        BOUNDS,
    ),
    Mutation(
        "algorithms/forward_process.py",
        "1 - self.clip_range)",
        "1 - 1.04 * self.clip_range)",
        BOUNDS,
    ),
    Mutation("algorithms/epg.py", ".clamp(-self.advantage_clip, self.advantage_clip)", "", EPG),
    Mutation(
        "algorithms/flow_grpo.py",
        "kl * steps.dsigma",
        "kl / steps.dsigma",
        NEIGHBOURS,
    ),
    Mutation("algorithms/flow_grpo.py", "weights / total", "weights", NEIGHBOURS),
    Mutation(
        "algorithms/flow_grpo.py",
        "self.window_size, num_steps - 2)",
        "self.window_size, num_steps - 1)",
        NEIGHBOURS,
    ),
    Mutation(
        "algorithms/flow_grpo.py",
        "round(way * jump / jumps)",
        "int(way * jump / jumps)",
        NEIGHBOURS,
    ),
    Mutation("algorithms/flow_grpo.py", "noisy * self.trained_fraction", "noisy", NEIGHBOURS),
    Mutation(
        "algorithms/flow_grpo.py", "tuple(range(last))", "tuple(range(num_steps))", NEIGHBOURS
    ),
    Mutation(
        "algorithms/flow_grpo.py", "log_ratio(steps) + bias", "log_ratio(steps) - bias", NEIGHBOURS
    ),
    Mutation(
        "algorithms/flow_grpo.py",
        "policy_loss(steps) / steps.dsigma",
        "policy_loss(steps)",
        NEIGHBOURS,
    ),
    Mutation(
        "algorithms/flow_grpo.py",
        "self.noise_weight * steps.std *",
        "self.noise_weight *",
        NEIGHBOURS,
    ),
    Mutation(
        "algorithms/flow_grpo.py", ">= self.divergence_limit", "< self.divergence_limit", DPPO
    ),
    Mutation(
        "algorithms/flow_grpo.py",
        "(ratio > 1) & (advantages > 0)",
        "(ratio < 1) & (advantages > 0)",
        DPPO,
    ),
    Mutation(
        "algorithms/g2rpo_variants.py", "(after - here) / n", "(after - here) / (n + 1)", PAVE
    ),
    Mutation(
        "algorithms/g2rpo_variants.py",
        "return step + self.merged",
        "return step + 1 + 0 * self.merged",
        E,
    ),
    Mutation(
        "rollout/engine.py", "self.sigmas[group.plan.after(step)]", "self.sigmas[step + 1]", E
    ),
    Mutation("algorithms/forward_process.py", "(1 + b) * old - b", "(1 - b) * old - b", NFT),
    Mutation("algorithms/forward_process.py", "-noised.advantages /", "noised.advantages /", NFT),
    Mutation(
        "algorithms/reward_gradient.py", "walked(-per_row(length", "walked(per_row(length", OPSD
    ),
    Mutation("algorithms/reward_gradient.py", " / self.target_steps\n", "\n", OPSD),
    Mutation("algorithms/reward_gradient.py", "(1 - r) * negative", "negative", OPSD),
    Mutation("core/plans.py", "self.tails[0][1:-1]", "self.tails[0][:-1]", OPSD),
    Mutation("algorithms/epg.py", "(-weight * elbo)", "(weight * elbo)", EPG),
    Mutation(
        "algorithms/epg.py",
        "noised.advantages - difference if",
        "noised.advantages + difference if",
        EPG,
    ),
    Mutation(
        "algorithms/epg.py", "precise - precise.nanmean(", "precise - 0 * precise.nanmean(", EPG
    ),
    Mutation("algorithms/epg.py", "-error * (1 - sigma)", "-error * sigma", EPG),
    Mutation("algorithms/self_opd.py", "(1 - cosines) / 2", "(1 + cosines) / 2", OPD),
    Mutation("algorithms/self_opd.py", "-steps.log_prob - 0.5", "steps.log_prob - 0.5", OPD),
    Mutation("algorithms/self_opd.py", "gains / std[:, None]", "gains", OPD),
    Mutation("rollout/engine.py", "with unguided(self.policy):", "if True:", LC),
    Mutation("rollout/planning.py", "second * plan.corrected", "0 * plan.corrected", ENGINE),
    Mutation("models/anyflow.py", "min(before, largest)", "before", f"{ANY} -k without_guidance"),
    Mutation("rollout/scoring.py", "rewards - baseline if", "rewards if", OPD),
    Mutation("rollout/planning.py", "range(last + 1, num_steps", "range(last, num_steps", ENGINE),
    Mutation("algorithms/reward_gradient.py", "velocity - old + d)", "velocity - old - d)", FDFO),
    Mutation("algorithms/reward_gradient.py", "noise * (1 - s))", "noise * (1 + s))", FDFO),
    Mutation(
        "rollout/engine.py", "math.sqrt(1 - plan.common**2)", "math.sqrt(1 - plan.common)", FDFO
    ),
    Mutation(
        "algorithms/forward_process.py",
        "((1 - per_row(sigma, image)) * image",
        "(per_row(sigma, image) * image",
        FORWARD,
    ),
    Mutation("algorithms/forward_process.py", "(updates - flat)", "updates", FORWARD),
    Mutation(
        "rollout/engine.py",
        "landing.log_prob(x_next)",
        "landing.log_prob(landing.mean)",
        f"{ENGINE} {TRAINER}",
    ),
    Mutation("rollout/engine.py", "max(branch_steps) + 1)", "max(branch_steps))", ENGINE),
    Mutation("rollout/tails.py", "/ (2 * (_log_snr(now)", "/ (1 * (_log_snr(now)", TAILS),
    Mutation("rollout/tails.py", "velocity + (sigma - near)", "velocity - (sigma - near)", TAILS),
    Mutation(
        "core/rewards.py",
        "values.where(values.isfinite(), torch.nan)",
        "values",
        "tests/train/test_faults.py::test_scores_that_are_no_numbers_teach_nothing_and_are_counted",
    ),
    Mutation(
        "rollout/scoring.py", "clips[:, :: frames.every]", "clips", "tests/rollout/test_frames.py"
    ),
    Mutation(
        "lab/plan/models.py",
        "* parse_dtype(dtype).itemsize",
        "* 4",
        "tests/rewards/test_declarations.py",
    ),
    Mutation("core/noise.py", "repr(key)", "repr(key[:2])", "tests/core/test_seeding.py"),
    Mutation(
        "data/prompts.py",
        "self._shuffle(place // len(self.prompts))",
        "self._shuffle(0)",
        "tests/data/test_prompts.py",
    ),
    Mutation("train/updater.py", "max(1, members_that_count)", "max(1, len(counts))", TRAINER),
    Mutation("core/statistics.py", "rest / (count - 2)", "rest / (count - 1)", STATISTICS),
    Mutation(
        "core/statistics.py", "half_width(error, count - 1)", "half_width(error, count)", STATISTICS
    ),
    Mutation("lab/plan/seconds.py", "spent <= within else []", "True else []", REACHED),
    Mutation(
        "train/updater.py",
        "memory self.optimizer.zero_grad(set_to_none=True)",
        "memory",
        TRAINER,
    ),
    Mutation(
        "train/updater.py",
        "stats = UpdateStats() self.optimizer.zero_grad(set_to_none=True)",
        "stats = UpdateStats()",
        "tests/rollout/test_memory.py",
    ),
    Mutation("train/updater.py", "torch.where(counts, loss.values, 0)", "loss.values", DROPPED),
    Mutation(
        "train/updater.py",
        "if math.isfinite(norm)",
        "if True",
        "tests/train/test_faults.py::test_gradients_that_stay_non_finite_end_the_run_with_the_last_good_weights",
    ),
    Mutation("core/objectives.py", "item.mask & whole", "item.mask", DROPPED),
    Mutation("train/updater.py", "examples = without_broken(examples)", "pass", DROPPED),
    Mutation(
        "core/objectives.py", "counted=alive[item.prompt]", "counted=item.advantages != 0", DROPPED
    ),
    Mutation(
        "train/learner.py",
        "get_ema_multi_avg_fn(self.ema_decay)",
        "get_ema_multi_avg_fn(1 - self.ema_decay)",
        AVERAGE,
    ),
    Mutation("train/learner.py", "(1 + self.steps) / (10", "(2 + self.steps) / (10", AVERAGE),
    Mutation("train/learner.py", "(self.steps + 1) % every", "self.steps % every", AVERAGE),
    Mutation(
        "train/learner.py",
        "math.cos(math.pi * iteration / iterations)",
        "math.cos(math.pi * iteration)",
        "tests/train/test_learner.py",
    ),
    Mutation(
        "train/learner.py",
        "(iteration + 1) / (self.config.warmup",
        "iteration / (self.config.warmup",
        "tests/train/test_learner.py",
    ),
    Mutation(
        "train/learner.py",
        "decay * old + (1 - decay) * parameter",
        "(1 - decay) * old + decay * parameter",
        "tests/train/test_learner.py",
    ),
    Mutation("train/run/checkpoint.py", "if _digest(file) != digest:", "if False:", CHECKPOINT),
    Mutation(
        "train/run/checkpoint.py", "kept < keep and _is_intact(path)", "kept < keep", CHECKPOINT
    ),
    Mutation(
        "train/collector.py",
        "spec.first + rows[prompt]",
        "spec.first + prompt",
        "tests/rollout/test_prompts_at_once.py",
    ),
    Mutation(
        "core/data.py",
        "(self.network, self.anchor, self.sample, self.step))",
        "(self.network, self.anchor, self.sample))",
        ALARMS,
    ),
    Mutation(
        "train/monitor/alarms.py", "SILENT, MASKED = 0.5, 0.1", "SILENT, MASKED = 0.6, 0.1", ALARMS
    ),
    Mutation("train/monitor/alarms.py", "or value <= limit", "or not value > limit", ALARMS),
    Mutation(
        "train/monitor/alarms.py",
        "LEVEL / (len(now) * looks * looks * (looks + 1))",
        "LEVEL",
        ALARMS,
    ),
    Mutation(
        "core/statistics.py",
        "stdtr(self.count - 1, change",
        "stdtr(self.count - 1, -change",
        ALARMS,
    ),
    Mutation("train/monitor/alarms.py", "crowd(count) - 0.5", "crowd(count) + 0.5", ALARMS),
    Mutation("models/quantized.py", "/ 127.5)", "/ 255)", QUANTIZED),
    Mutation(
        "models/replay.py",
        "[without.detach(), toward]",
        "[without, toward]",
        "tests/models/test_sd3.py",
    ),
    Mutation(
        "models/anyflow.py",
        "if not self.truncates:",
        "if True:",
        f"{ANY} -k whole",
    ),
    Mutation(
        "models/spec.py",
        "mask.long()",
        "1 - mask.long()",
        f"{ANY} -k same_seed",
    ),
    Mutation(
        "models/quantized.py",
        "grad @ ctx.layer.dense()",
        "2 * grad @ ctx.layer.dense()",
        QUANTIZED,
    ),
    Mutation(
        "core/statistics.py",
        "square().sum(-1) / (count - 1)",
        "square().sum(-1) / count",
        STATISTICS,
    ),
    Mutation(
        "core/statistics.py",
        "((other == one).sum(-1) + 1) / 2",
        "((other == one).sum(-1) + 0) / 2",
        STATISTICS,
    ),
    Mutation(
        "rollout/memory.py",
        "setattr(self, kind, size // 2)",
        "setattr(self, kind, size - 1)",
        "tests/rollout/test_memory.py",
    ),
    Mutation(
        "rewards/head.py",
        "meant @ (z[:, 0] - (p",
        "meant @ (z[:, 1] - (p",
        "tests/rewards/test_head.py",
    ),
    Mutation(
        "rewards/head.py",
        "self.agreement.low > TRUSTED",
        "self.agreement.mean > TRUSTED",
        "tests/rewards/test_head.py",
    ),
    Mutation(
        "lab/teach/session.py",
        "one.change.mean < -ALLOWED_FALL",
        "one.change.mean > ALLOWED_FALL",
        "tests/lab/teach/test_session.py -k judge",
    ),
    Mutation(
        "lab/teach/session.py",
        "            self.trainer.restore(weights)\n",
        "",
        "tests/lab/teach/test_session.py -k undo",
    ),
    Mutation(
        "lab/teach/session.py",
        "rise - deviation >= AIMED_RISE",
        "rise + deviation >= AIMED_RISE",
        "tests/lab/teach/test_session.py -k pauses",
    ),
    Mutation(
        "rewards/head.py",
        "np.linalg.solve(lower, own.axes.T).T / spread",
        "np.linalg.solve(lower, own.axes.T).T",
        "tests/rewards/test_head.py -k rise",
    ),
    Mutation(
        "config/work.py",
        "TRAINED_LATENT * trained + base",
        "trained + base",
        "tests/lab/compare/test_compare.py -k work",
    ),
    Mutation(
        "rollout/planning.py",
        "in updates_of(algorithm, examples)",
        "in [examples]",
        "tests/lab/compare/test_compare.py -k work",
    ),
]


def copied(folder: Path) -> Path:
    """The repository at `folder`, but for what tests do not read."""
    made = {"runs", "build", "dist", "site"}

    def unread(place: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if name[0] == "." or name == "__pycache__" or (Path(place) == ROOT and name in made)
        }

    return Path(shutil.copytree(ROOT, folder / "copy", ignore=unread))


def outcome(copy: Path, tests: str) -> int:
    """The exit code of pytest in `copy`: 0 passed, 1 failed; anything else is no verdict."""
    child = os.fork()
    if child == 0:
        os._exit(_tested(copy, tests))
    ends = time.monotonic() + LIMIT
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 1


def _tested(copy: Path, tests: str) -> int:
    import pytest

    said = os.open(copy / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(copy)
    sys.path[:] = [
        str(copy),
        str(copy / "src"),
        *(place for place in sys.path if Path(place or ".").resolve() not in (ROOT, ROOT / "src")),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    quick = int(
        pytest.main(["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests.split()])
    )
    none_is_quick = quick == pytest.ExitCode.NO_TESTS_COLLECTED
    return (
        int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests.split()]))
        if none_is_quick
        else quick
    )


def main(words: list[str]) -> int:
    # a change within a second has the modification time of what it replaces
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    import diffusers.pipelines.flux  # noqa: F401
    import peft  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    chosen = [
        mutation
        for mutation in MUTATIONS
        if not words or any(word in mutation.file for word in words)
    ]
    if not chosen:
        raise SystemExit(f"no file that is changed has {' or '.join(words)} in its path")
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for tests in dict.fromkeys(mutation.tests for mutation in chosen):
            if code := outcome(copy, tests):
                raise SystemExit(
                    f"without any change, {tests} ends with {code}:\n{(copy / 'said.txt').read_text()[-2000:]}"
                )
        for mutation in chosen:
            file = copy / PACKAGE / mutation.file
            text = file.read_text(encoding="utf-8")
            file.write_text(mutation.applied(text), encoding="utf-8")
            code = outcome(copy, mutation.tests)
            file.write_text(text, encoding="utf-8")
            verdict = {0: "SURVIVED", 1: "killed"}.get(code, f"BROKEN ({code})")
            if code != 1:
                survived.append(mutation)
            print(
                f"{verdict:9} {mutation.file}: {mutation.old.strip()}  ->  {mutation.new.strip()}",
                flush=True,
            )
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
