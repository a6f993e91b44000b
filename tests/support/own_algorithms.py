"""Algorithms as a user writes them: a built-in one with another of its class attributes or
methods."""

from g2rpo.algorithms.flow_grpo import FlowGRPO, TempFlowGRPO


class AllCount(TempFlowGRPO):
    """Members without an advantage count."""

    drop_zero_advantages = False


class PerStd(FlowGRPO):
    """The KL term of the paper."""

    def kl_penalty(self, kl, steps):
        return kl
