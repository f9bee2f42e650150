"""A journal recovers what was recorded, a torn tail is cut, and the first damaged line is reported."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.pipeline.commands import SchedulingSnapshot, TrainGroups
from qwen35_trainer.pipeline.journal import JournalBase, JournalDamaged, compact, encode, recover
from qwen35_trainer.pipeline.notices import GroupDispatched, GroupLeft, LeaveReason

NUMBER = st.integers(0, 2**53)
NUMBERS = st.lists(NUMBER, max_size=5).map(tuple)

GOLDEN = b"""\
98f01502 {"v":1,"b":8,"p":21,"w":[19,20],"g":23,"h":[21,22]}
be0686e4 {"d":23,"p":21}
005fd3d2 {"l":22,"p":20,"r":"filtered"}
7f68b0e1 {"t":8,"v":4,"g":[21,23]}
f14ab8ee {"d":24,"p":22}
"""
GOLDEN_RECORDS = (
    JournalBase(SchedulingSnapshot(8, 21, (19, 20), 23), held=(21, 22)),
    GroupDispatched(23, 21),
    GroupLeft(22, 20, LeaveReason.FILTERED),
    TrainGroups(8, 4, (21, 23)),
    GroupDispatched(24, 22),
)

RUN = (
    JournalBase(SchedulingSnapshot(2, 6, (3, 5), 7)),
    GroupDispatched(7, 3),
    GroupDispatched(8, 5),
    GroupDispatched(9, 6),
    GroupDispatched(10, 7),
    GroupLeft(9, 6, LeaveReason.FAILED),
    TrainGroups(2, 2, (8, 10)),
    GroupLeft(7, 3, LeaveReason.DISCARDED),
    GroupDispatched(11, 3),
    GroupDispatched(12, 8),
    GroupDispatched(13, 9),
    TrainGroups(3, 3, (12, 11)),
    GroupLeft(13, 9, LeaveReason.FILTERED),
    GroupDispatched(14, 10),
    GroupDispatched(15, 11),
)


def journal(*records):
    return b"".join(encode(record) for record in records)


def lines(*records):
    return [encode(record) for record in records]


def damage_of(data, batch):
    with pytest.raises(JournalDamaged) as caught:
        recover(data, batch)
    return caught.value


# What is recorded.


def test_the_format_is_what_earlier_releases_wrote():
    assert journal(*GOLDEN_RECORDS) == GOLDEN


def test_weights_continue_before_the_batch_that_they_have_not_trained():
    assert recover(GOLDEN, 8) == SchedulingSnapshot(8, 22, pending=(19, 21), group=24)
    assert recover(GOLDEN, 9) == SchedulingSnapshot(9, 23, pending=(22,), group=25)


@given(batch=NUMBER, position=NUMBER, pending=NUMBERS, group=NUMBER)
def test_a_base_alone_gives_its_snapshot_back(batch, position, pending, group):
    start = SchedulingSnapshot(batch, position, pending, group)
    assert recover(encode(JournalBase(start)), batch) == start


@given(groups=st.lists(st.integers(0, 9), unique=True, min_size=1).map(tuple), version=NUMBER)
def test_what_a_batch_trains_is_no_longer_pending(groups, version):
    data = journal(
        JournalBase(SchedulingSnapshot()),
        *(GroupDispatched(each, each) for each in range(10)),
        TrainGroups(0, version, groups),
    )
    assert recover(data, 1).pending == tuple(each for each in range(10) if each not in groups)
    assert recover(data, 0).pending == tuple(range(10))


@pytest.mark.parametrize(
    ("reason", "pending"), [(LeaveReason.FILTERED, (1,)), (LeaveReason.FAILED, (1,)), (LeaveReason.DISCARDED, (1, 0))]
)
def test_only_a_discarded_prompt_comes_again(reason, pending):
    data = journal(
        JournalBase(SchedulingSnapshot()), GroupDispatched(0, 0), GroupDispatched(1, 1), GroupLeft(0, 0, reason)
    )
    assert recover(data, 0) == SchedulingSnapshot(0, 2, pending, 2)


def test_prompts_that_were_pending_before_the_journal_began_stay_so_until_dispatched():
    data = journal(
        JournalBase(SchedulingSnapshot(4, 9, (2, 5, 7), 30)),
        GroupDispatched(30, 2),
        GroupDispatched(31, 5),
        TrainGroups(4, 4, (31,)),
    )
    assert recover(data, 5) == SchedulingSnapshot(5, 9, (2, 7), 32)


# The tail.


def test_whatever_is_left_of_the_last_line_is_cut():
    whole = journal(*RUN[:-1])
    for batch in (2, 3, 4):
        expected = recover(whole, batch)
        for cut in range(len(encode(RUN[-1]))):
            assert recover(whole + encode(RUN[-1])[:cut], batch) == expected


@given(garbage=st.binary(max_size=60))
def test_what_the_disk_made_of_lines_that_never_arrived_is_cut(garbage):
    assert recover(journal(*RUN) + garbage, 4) == recover(journal(*RUN), 4)


@pytest.mark.parametrize("data", [b"", encode(RUN[0])[:-1], b"\0" * 64, b"\n"])
def test_a_journal_without_its_first_record_is_refused(data):
    damage = damage_of(data, 0)
    assert (damage.line, damage.problem) == (1, "no base record, which all others build on")


def test_weights_that_have_trained_what_the_journal_does_not_know_are_refused():
    damage = damage_of(journal(*RUN), 6)
    assert damage.line == len(RUN) + 1
    assert damage.problem == "it ends before batch 4, and the weights have trained 6 batches"


def test_weights_from_before_the_journal_are_refused():
    with pytest.raises(JournalDamaged, match=r"begins at batch 2, and the weights have trained 1 batches"):
        recover(journal(*RUN), 1)


def test_another_format_is_refused_by_its_number():
    import zlib

    text = b'{"v":2,"snapshot":"elsewhere"}'
    with pytest.raises(JournalDamaged, match="format 2, and this release reads 1"):
        recover(b"%08x %s\n" % (zlib.crc32(text), text), 0)


# The middle.


def test_every_flipped_bit_of_a_middle_line_is_found():
    encoded = lines(*RUN)
    for number, line in enumerate(encoded[:-1]):
        for at in range(len(line)):
            if at == len(line) - 1 and number == len(encoded) - 2:
                continue  # without its newline it is joined with the last line, and both are the tail
            for bit in range(8):
                bad = bytearray(line)
                bad[at] ^= 1 << bit
                assert (
                    damage_of(b"".join([*encoded[:number], bytes(bad), *encoded[number + 1 :]]), 4).line == number + 1
                )


def test_every_other_byte_in_a_line_is_found():
    encoded = lines(*RUN)
    for at, value in itertools.product(range(len(encoded[5])), range(256)):
        bad = bytearray(encoded[5])
        bad[at] = value
        if bad != encoded[5]:
            assert damage_of(b"".join([*encoded[:5], bytes(bad), *encoded[6:]]), 4).line == 6, (at, value)


def test_of_several_damaged_lines_the_first_is_reported():
    encoded = lines(*RUN)
    for number in (3, 8, 9, 12):
        encoded[number] = b"?\n"
    damage = damage_of(b"".join(encoded), 4)
    assert (damage.line, damage.problem) == (4, "it cannot be read")


def test_damage_after_the_point_to_continue_from_does_not_matter():
    encoded = lines(*RUN)
    encoded[12] = b"?\n"
    assert recover(b"".join(encoded), 3) == recover(journal(*RUN), 3)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (GroupDispatched(18, 12), "group 18 is dispatched, and 16 comes next"),
        (GroupDispatched(12, 12), "group 12 is dispatched, and 16 comes next"),
        (GroupDispatched(16, 14), "prompt 14 is dispatched, and 12 comes next"),
        (GroupDispatched(16, 3), "prompt 3 is dispatched, and 12 comes next"),
        (TrainGroups(6, 6, (14,)), "batch 6 trains, and 4 comes next"),
        (TrainGroups(3, 3, (14,)), "batch 3 trains, and 4 comes next"),
        (TrainGroups(4, 4, (14, 13, 99)), "batch 4 trains groups that are not held: 13, 99"),
        (TrainGroups(4, 4, (14, 14)), "batch 4 trains groups that are not held: 14"),
        (GroupLeft(13, 9, LeaveReason.FAILED), "group 13 of prompt 9 leaves, and is not held"),
        (GroupLeft(14, 9, LeaveReason.FAILED), "group 14 of prompt 9 leaves, and is not held"),
        (GroupLeft(40, 9, LeaveReason.FAILED), "group 40 of prompt 9 leaves, and is not held"),
    ],
)
def test_a_record_that_cannot_follow_is_damage(record, problem):
    damage = damage_of(journal(*RUN, record), 9)
    assert (damage.line, damage.problem) == (len(RUN) + 1, problem)


def test_a_second_beginning_is_damage():
    damage = damage_of(journal(*RUN, JournalBase(SchedulingSnapshot(4, 12, (), 16)), GroupDispatched(16, 12)), 4)
    assert (damage.line, damage.problem) == (len(RUN) + 1, "a second base record")


@given(number=st.integers(1, len(RUN) - 2))
def test_a_line_that_was_taken_out_is_never_mistaken_for_a_whole_journal_when_its_numbers_are_missed(number):
    """A group left untrained on a line of which nothing remains is the one exception: no number shows it."""
    data = journal(*RUN[:number], *RUN[number + 1 :])
    if isinstance(RUN[number], GroupLeft) and RUN[number].reason is not LeaveReason.DISCARDED:
        assert recover(data, 4).pending != recover(journal(*RUN), 4).pending
    else:
        assert damage_of(data, 4)


def test_the_message_has_the_place_the_fault_and_the_fix():
    encoded = lines(*RUN)
    encoded[6] = b"?\n"
    assert str(damage_of(b"".join(encoded), 4)) == (
        "line 7 of the journal: it cannot be read. The journal does not tell which prompts have trained. "
        "Continue with --resume auto: the newest checkpoint has its own position, and the batches "
        "after it train again."
    )


# Compaction.


def test_a_compacted_journal_keeps_the_groups_that_later_batches_train():
    assert compact(GOLDEN, 9) == journal(JournalBase(SchedulingSnapshot(9, 23, (22,), 25), held=(24,)))
    assert compact(journal(*RUN), 3) == journal(
        JournalBase(SchedulingSnapshot(3, 10, (3, 8, 9), 14), held=(11, 12, 13)), *RUN[11:]
    )


def test_compacting_twice_is_compacting_once():
    assert compact(compact(journal(*RUN), 3), 4) == compact(journal(*RUN), 4)


def test_a_torn_tail_does_not_survive_compaction():
    assert compact(journal(*RUN) + b"1234", 3) == compact(journal(*RUN), 3)


def test_a_damaged_journal_is_not_compacted():
    encoded = lines(*RUN)
    encoded[4] = b"?\n"
    with pytest.raises(JournalDamaged, match="line 5"):
        compact(b"".join(encoded), 4)
