"""Train ranks follow nodes and devices, whatever devices Ray has chosen for the workers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.manifest import ParallelismSpec
from qwen35_trainer.runtime.site import WorkerLocation, neighbour_groups, rank_order

CHAINS = st.sampled_from([(), (2,), (3,), (4,), (2, 4), (2, 8), (4, 8), (2, 4, 16)])


def located(workers: list[int]) -> list[WorkerLocation]:
    """workers: the number of workers on each node."""
    return [
        WorkerLocation(f"train-{node}", f"{node:x}", str(device))
        for node, count in enumerate(workers)
        for device in range(count)
    ]


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[list[WorkerLocation], list[WorkerLocation]]:
    """Workers in the order of nodes and devices, and in any order."""
    ordered = located(draw(st.lists(st.integers(1, 12), min_size=1, max_size=12)))
    return ordered, draw(st.permutations(ordered))


@given(workers=shuffled(), groups=CHAINS)
def test_every_worker_gets_one_rank_and_the_order_in_which_they_started_does_not_matter(workers, groups):
    ordered, mixed = workers
    ranks = rank_order(mixed, groups)
    assert sorted(ranks) == list(range(len(mixed)))
    assert [mixed[worker] for worker in ranks] == [ordered[worker] for worker in rank_order(ordered, groups)]


@given(workers=shuffled())
def test_ranks_without_groups_are_in_the_order_of_nodes_and_devices(workers):
    ordered, mixed = workers
    assert [mixed[worker] for worker in rank_order(mixed, ())] == ordered


@given(nodes=st.lists(st.integers(1, 3), min_size=1, max_size=8), groups=CHAINS, data=st.data())
def test_nodes_of_complete_groups_keep_their_order(nodes, groups, data):
    largest = max(groups, default=1)
    ordered = located([count * largest for count in nodes])
    mixed = data.draw(st.permutations(ordered))
    assert [mixed[worker] for worker in rank_order(mixed, groups)] == ordered


@given(workers=shuffled(), groups=CHAINS)
def test_a_group_is_split_over_nodes_only_where_no_order_avoids_it(workers, groups):
    _, mixed = workers
    nodes = [mixed[worker].node for worker in rank_order(mixed, groups)]
    for size in groups:
        within = sum(len(set(nodes[at : at + size])) == 1 for at in range(0, len(nodes) - size + 1, size))
        assert within == sum(count // size for count in Counter(nodes).values())


@given(workers=shuffled(), groups=CHAINS)
def test_a_worker_with_the_next_device_of_its_node_has_a_higher_rank(workers, groups):
    _, mixed = workers
    last: dict[str, int] = {}
    for worker in rank_order(mixed, groups):
        location = mixed[worker]
        assert int(location.device) == last.get(location.node, -1) + 1
        last[location.node] = int(location.device)


def test_two_nodes_with_an_odd_number_of_workers_split_one_pair_of_ranks():
    places = located([3, 2, 1])
    pairs = [places[worker].host[-1] for worker in rank_order(places, (2,))]
    assert pairs == ["0", "0", "1", "1", "0", "2"]


def test_workers_without_a_device_keep_the_order_in_which_they_started():
    assert rank_order([WorkerLocation("here", "00", "")] * 3, (2,)) == (0, 1, 2)


def test_numbers_in_names_of_hosts_and_devices_are_compared_as_numbers():
    places = [WorkerLocation(host, host, device) for host, device in (("n-10", "0"), ("n-9", "10"), ("n-9", "9"))]
    assert rank_order(places, ()) == (2, 1, 0)


@pytest.mark.parametrize(
    ("parallelism", "ranks", "sizes"),
    [
        ({}, 8, ()),
        ({"context": 2}, 8, (2,)),
        ({"context": 2, "copies": 2}, 16, (2, 8)),
        ({"tensor": 4, "context": 2, "expert": 8}, 32, (8,)),
        ({"tensor": 2, "expert": 8, "expertTensor": 2}, 32, (2, 16)),
        ({"tensor": 2, "expert": 3}, 12, (2,)),
        ({"copies": 8}, 8, ()),
    ],
)
def test_groups_that_should_share_a_node_follow_the_degrees_of_parallelism(parallelism, ranks, sizes):
    assert neighbour_groups(ParallelismSpec(**parallelism), ranks) == sizes
