"""The records of a run reach the one process that follows it, each once, and the driver keeps none that have arrived."""

import pytest

from qwen35_trainer.progress.records import FinishRecord
from qwen35_trainer.runtime.driver import Broadcast


def records(count: int) -> list[FinishRecord]:
    return [FinishRecord(outcome="Succeeded", message="", time=float(number), wall_time=0.0) for number in range(count)]


def test_the_follower_gets_each_record_once_in_order_however_often_it_calls():
    broadcast, written, received = Broadcast(), records(10), []
    for number, record in enumerate(written):
        broadcast.write(record)
        if number % 3 == 0:
            received += broadcast.after(len(received))
    received += broadcast.after(len(received))
    assert received == written
    assert broadcast.after(len(received)) == ()


def test_an_answer_that_was_lost_is_repeated_with_what_came_since():
    broadcast, written = Broadcast(), records(5)
    broadcast.write(written[0])
    assert broadcast.after(0) == (written[0],)
    for record in written[1:]:
        broadcast.write(record)
    assert broadcast.after(0) == tuple(written), "the follower has not confirmed the first"


def test_records_that_have_arrived_take_no_memory():
    broadcast = Broadcast()
    for seen in range(1000):
        broadcast.write(records(1)[0])
        assert len(broadcast.after(seen)) == 1


def test_a_second_follower_is_refused_by_the_number_of_its_record():
    broadcast = Broadcast()
    for record in records(3):
        broadcast.write(record)
    broadcast.after(2)
    with pytest.raises(ValueError, match="record 1 was dropped"):
        broadcast.after(1)


def test_who_waits_for_records_is_woken_by_each_and_by_the_end():
    broadcast = Broadcast()
    assert not broadcast.changed.is_set()
    broadcast.write(records(1)[0])
    assert broadcast.changed.is_set()
    broadcast.changed.clear()
    broadcast.close()
    assert broadcast.changed.is_set()
