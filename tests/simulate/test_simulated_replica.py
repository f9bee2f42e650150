"""A replica in virtual time, against what can be computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.simulate.cost_model import ReplicaSpeed
from qwen35_trainer.simulate.simulated_replica import SimulatedReplica, SimulatedSequence

KIND = ReplicaSpeed(slots=64, base=1.0, per_sequence=0.004)


def make_replica(version: int = 0) -> SimulatedReplica:
    return SimulatedReplica(0, KIND, lane=False, version=version, now=0.0)


def join(where: SimulatedReplica, length: int, extra: float = 0.0) -> SimulatedSequence:
    sequence = SimulatedSequence((0, len(where.held)), length)
    where.held[sequence.name] = sequence
    sequence.replica = where
    where.begin_decoding(sequence, length, extra)
    return sequence


def run_to_next_stop(where: SimulatedReplica) -> tuple[float, SimulatedSequence]:
    """(time, sequence) of the stop; the sequence leaves."""
    time = where.next_stop_time()
    where.advance(time)
    sequence = where.next_stopped()
    assert sequence is not None
    where.end_decoding(sequence)
    del where.held[sequence.name]
    return time, sequence


def test_a_sequence_alone_takes_its_length_in_steps() -> None:
    replica = make_replica()
    join(replica, 100)
    assert run_to_next_stop(replica)[0] == pytest.approx(100 * 1.004)


def test_a_short_sequence_slows_a_long_one_for_as_long_as_it_runs() -> None:
    replica = make_replica()
    long, short = join(replica, 100), join(replica, 50)
    assert run_to_next_stop(replica) == (pytest.approx(50 * 1.008), short)
    assert run_to_next_stop(replica) == (pytest.approx(50 * 1.008 + 50 * 1.004), long)


def test_speed_divides_the_part_of_a_step_that_reads_the_weights() -> None:
    assert ReplicaSpeed(8, base=1.0, per_sequence=0.01, speed=2.0).step(5) == pytest.approx(0.5 + 0.05)


def test_a_replica_that_stops_decodes_later() -> None:
    replica = make_replica()
    join(replica, 100)
    replica.advance(20.0)
    replica.pause(5.0)
    replica.pause(2.0)
    assert run_to_next_stop(replica)[0] == pytest.approx(100 * 1.004 + 7)
    assert replica.busy == pytest.approx(100 * 1.004)


def test_steps_on_arrival_give_no_tokens() -> None:
    replica = make_replica()
    sequence = join(replica, 100, extra=200)
    assert run_to_next_stop(replica)[0] == pytest.approx(300 * 1.004)
    assert sequence.tokens == pytest.approx(100)


def test_tokens_belong_to_the_weights_of_their_time() -> None:
    replica = make_replica(version=3)
    sequence = join(replica, 100)
    replica.advance(30 * 1.004)
    replica.load(4)
    replica.load(5)
    run_to_next_stop(replica)
    assert [version for version, _ in sequence.spans] == [3, 5]
    assert [tokens for _, tokens in sequence.spans] == pytest.approx([30, 70])


@given(st.lists(st.floats(0.01, 3), min_size=1, max_size=200))
def test_however_many_versions_a_sequence_sees_none_of_its_tokens_is_lost(gaps: list[float]) -> None:
    replica = make_replica()
    replica.advance(1.0)
    sequence, now = join(replica, 1_000_000), 1.0
    for version, gap in enumerate(gaps, start=1):
        now += gap
        replica.advance(now)
        replica.load(version)
    replica.end_decoding(sequence)
    assert [version for version, _ in sequence.spans] == list(range(len(gaps)))
    assert [tokens for _, tokens in sequence.spans] == pytest.approx([gap / 1.004 for gap in gaps])
    assert sequence.tokens == pytest.approx(sum(gaps) / 1.004)


def test_what_is_not_kept_is_forgotten_from_the_end() -> None:
    sequence = SimulatedSequence((0, 0), 100)
    sequence.spans, sequence.tokens = [(0, 30.0), (1, 20.5)], 50.5
    sequence.keep(40)
    assert (sequence.spans, sequence.tokens) == ([(0, 30.0), (1, 10.0)], 40)
    sequence.keep(0)
    assert (sequence.spans, sequence.tokens) == ([], 0)


def test_time_so_late_that_the_clock_cannot_tell_two_moments_apart_still_ends() -> None:
    replica = SimulatedReplica(0, ReplicaSpeed(base=1e-6, per_sequence=1e-9), lane=False, version=0, now=1e12)
    replica.advance(1e12)
    join(replica, 10)
    assert replica.next_stop_time() == 1e12
    assert replica.next_stopped() is not None
