"""Ranks of train workers, by node and device. Pure.

    worker 0: node B, device 1                rank 0: node A, device 0
    worker 1: node A, device 0      ─►        rank 1: node A, device 1
    worker 2: node B, device 0                rank 2: node B, device 0
    worker 3: node A, device 1                rank 3: node B, device 1

Ray places the workers on any free device. The groups of ranks that exchange data in every layer are neighbouring ranks, so
ranks are numbered by node and device: otherwise these exchanges would leave the node, and take many times longer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from qwen35_trainer.manifest import ParallelismSpec


@dataclass(frozen=True)
class WorkerLocation:
    """The node and the device of a train worker."""

    host: str
    node: str
    """Ray's name of the node."""
    device: str
    """Index or UUID of the worker's accelerator; empty without one."""


def neighbour_groups(parallelism: ParallelismSpec, ranks: int) -> tuple[int, ...]:
    """Return the sizes of the groups of neighbouring ranks that should share a node, ascending; each is a multiple of the previous.

    They are the ranks that share a sequence (tensor × context), those that share the experts of a layer, and those over which
    one of several copies of the model is sharded. A size that does not divide by the previous one is left out.
    """
    wanted = (
        parallelism.tensor * parallelism.context,
        parallelism.expert * parallelism.expertTensor,
        ranks // parallelism.copies,
    )
    sizes: list[int] = []
    for size in wanted:
        if size % (sizes[-1] if sizes else 1) == 0 and 1 < size < ranks and ranks % size == 0 and size not in sizes:
            sizes.append(size)
    return tuple(sizes)


def rank_order(locations: Sequence[WorkerLocation], groups: Sequence[int]) -> tuple[int, ...]:
    """Return the workers in the order of their ranks, as indices of `locations`.

    groups: sizes of groups of neighbouring ranks, as `neighbour_groups` returns them. Nodes are in the order of their hosts'
    names, and the workers of a node in the order of their devices. A node whose number of workers does not divide by a group's size
    holds as many complete groups as it can, and its remaining workers come after the complete groups of all nodes. So the number
    of groups within a node is the maximum for each size.
    """
    on_node: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for worker in sorted(range(len(locations)), key=lambda worker: _natural(locations[worker].device)):
        on_node[locations[worker].host, locations[worker].node].append(worker)
    nodes = [on_node[key] for key in sorted(on_node, key=lambda key: (_natural(key[0]), key[1]))]
    order: list[int] = []
    for size in sorted(groups, reverse=True):
        for workers in nodes:
            complete = len(workers) // size * size
            order += workers[:complete]
            del workers[:complete]
    if groups:
        nodes.sort(key=len, reverse=True)  # larger remainders first, so that fewer nodes share a group
    for workers in nodes:
        order += workers
    return tuple(order)


def _natural(name: str) -> list[str | int]:
    """Return a sort key that compares numbers in names as numbers: device 10 comes after device 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
