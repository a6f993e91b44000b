"""What the tails of one member have in common.

Two tails that visit the same first steps pass through the same latents, so a velocity belongs to a *path*, not to a tail.
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

    def evaluations(self) -> int:
        """Velocities needed below and at this node, per member: the last node of a tail needs none."""
        return bool(self.children) + sum(child.evaluations() for child in self.children)


def prefix_tree(tails: Sequence[Sequence[int]]) -> Node:
    """The tree of `tails`, which all begin with the same step; `Node.tails` are indices into the argument."""
    root = Node(tails[0][0])
    for index, steps in enumerate(tails):
        node = root
        for step in steps[1:]:
            match = next((child for child in node.children if child.step == step), None)
            if match is None:
                match = Node(step)
                node.children.append(match)
            node = match
        node.tails.append(index)
    return root
