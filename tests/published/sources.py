"""Where the published code is that this package is run beside: the one place of repositories,
commits and lines, from which docs/reproduction.md has its table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """`files` are paths in the repository, with the lines of their functions at `commit`, or their
    names where no clone was at hand; `beside` is the test of this repository that holds the
    restatement, or the tool that runs both."""

    repository: str
    commit: str
    files: dict[str, str]
    beside: str


HERE, TESTS = "tests/published", "tests/algorithms"
SOURCES = {
    "G²RPO": Source(
        "bcmi/Granular-GRPO",
        "ef6ec9f",
        {"fastvideo/train_g2rpo_hps.py": "train_one_step"},
        f"{HERE}/test_g2rpo.py",
    ),
    "Pave-GRPO": Source(
        "Bujiazi/GRPO-Series",
        "c4028f9",
        {"src/method_pavegrpo.py": "66-90"},
        f"{HERE}/test_pave_grpo.py",
    ),
    "E-GRPO": Source(
        "shengjun-zhang/VisualGRPO",
        "ae619bf",
        {
            "fastvideo/workers/sampler/flux_sampler.py": "636-652",
            "fastvideo/workers/rollout_buffer.py": "87-130",
            "fastvideo/trainer/grpo_trainer.py": "220-258",
        },
        f"{HERE}/test_e_grpo.py",
    ),
    "DiffusionNFT": Source(
        "NVlabs/DiffusionNFT",
        "24af555",
        {"scripts/train_nft_sd3.py": "169-189, 908-981"},
        f"{HERE}/test_forward_process.py",
    ),
    "AWM": Source(
        "scxue/advantage_weighted_matching",
        "be51372",
        {"advantage_weighted_matching/scripts/train_sd3_awm.py": "210-252, 1292-1355"},
        f"{HERE}/test_forward_process.py",
    ),
    "DGPO": Source(
        "Luo-Yihong/DGPO",
        "01ceb4b",
        {"scripts/train_sd3_dgpo.py": "162-193, 1122-1163"},
        f"{TESTS}/test_forward_process.py",
    ),
    "EPG": Source(
        "jaemoo-choi/rethinking-diffusion-rl",
        "c257000",
        {"src/utils/__init__.py": "23-50", "src/utils/base.py": "compute_policy_loss"},
        f"{HERE}/test_forward_process.py",
    ),
    "FDFO": Source(
        "NVlabs/finite-difference-flow-optimization",
        "740e22f",
        {"fdfo/train_loop.py": "167-175, 281-297", "fdfo/sampling.py": "14-27"},
        f"{HERE}/test_fdfo.py",
    ),
    "ReFL": Source(
        "RuoyuWang-2077/FlowBP",
        "93b220a",
        {"flowbp/trainers/flux1/leapalign.py": "339-382"},
        f"{HERE}/test_forward_process.py",
    ),
    "DiffusionOPSD": Source(
        "worldbench/DiffusionOPSD",
        "2166584",
        {"scripts/train_opsd_ri_sd3.py": "_opa_tr_step"},
        f"{TESTS}/test_opsd.py",
    ),
    "Self-OPD": Source(
        "Shiy-Zhang/Self-OPD",
        "17c25d1",
        {"self_opd/branch_score.py": "sample_branches_and_score"},
        f"{TESTS}/test_self_opd.py",
    ),
    "Flow-DPPO": Source(
        "verl-project/verl-omni",
        "a1139baf",
        {"verl_omni/trainer/diffusion/diffusion_algos.py": "375-443"},
        f"{TESTS}/test_flow_dppo.py",
    ),
}


def table() -> str:
    """As docs/reproduction.md has it."""
    lines = ["| algorithm | repository@commit | path: lines | beside it |", "|---|---|---|---|"]
    for name, source in SOURCES.items():
        repository = f"https://github.com/{source.repository}"
        files = "; ".join(
            f"[{path}]({repository}/blob/{source.commit}/{path}): {where}"
            for path, where in source.files.items()
        )
        cells = (name, f"{source.repository}@{source.commit}", files, f"`{source.beside}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
