"""The common steps of a member's tails.

Two tails that visit the same first steps have the same latents there.
The tails of a member form a prefix tree; each node is evaluated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Node:
    """A step at which all tails in this part of the tree have the same latent."""

    step: int
    tails: list[int] = field(default_factory=list)  # tails that end here
    children: list[Node] = field(default_factory=list)
    forecast: bool = False  # its velocity is not evaluated

    def evaluations(self) -> int:
        """Velocities needed below and at this node, per member: the last node of a tail needs none."""
        return bool(self.children and not self.forecast) + sum(child.evaluations() for child in self.children)


def prefix_tree(tails: Sequence[Sequence[int]], forecast: bool = False) -> Node:
    """The tree of `tails`, which all begin with the same step; `Node.tails` are indices into the argument.

    With `forecast`, nodes at the places 2, 4, 6, ... of their tails are marked as forecast.
    """
    root = Node(tails[0][0])
    for index, steps in enumerate(tails):
        node = root
        for place, step in enumerate(steps[1:], 1):
            match = next((child for child in node.children if child.step == step), None)
            if match is None:
                match = Node(step, forecast=forecast and place % 2 == 0)
                node.children.append(match)
            node = match
        node.tails.append(index)
    return root
