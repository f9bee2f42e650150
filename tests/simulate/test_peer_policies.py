"""Other projects' rules, as they are compared with: which groups a batch takes."""

from qwen35_trainer.pipeline.buffer import Batch, Blocked
from qwen35_trainer.pipeline.window import Window
from qwen35_trainer.simulate.peer_policies import CompletionOrder, PeerBuffer, WindowedFifo, buffer_of
from qwen35_trainer.simulate.workload import BatchPolicy, Workload


def window(batch: int = 2) -> Window:
    return Window(batch, 1, 4, 4)


def with_finished(buffer: PeerBuffer, dispatched: int, *finished: int) -> PeerBuffer:
    for group in range(dispatched):
        buffer.dispatch(group, 0)
    for group in finished:
        buffer.finish(group)
    return buffer


def test_completion_order_takes_what_finished_first() -> None:
    buffer = with_finished(CompletionOrder(window()), 6, 5, 1, 3)
    assert buffer.take() == Batch((5, 1))
    assert buffer.take() is None
    assert buffer.missing() == Blocked(finished=1, needed=2)


def test_strict_fifo_waits_for_the_first_that_was_dispatched() -> None:
    buffer = with_finished(WindowedFifo(window(), 1), 6, 1, 2, 3, 4, 5)
    assert buffer.take() is None
    assert buffer.missing() == Blocked(finished=5, needed=2)
    buffer.finish(0)
    assert buffer.take() == Batch((0, 1))


def test_windowed_fifo_reaches_past_the_first_that_still_runs() -> None:
    buffer = with_finished(WindowedFifo(window(), 3), 8, 1, 3, 4, 5)
    assert buffer.take() is None, "3 was dispatched three groups after 0"
    assert buffer.missing() == Blocked(finished=4, needed=2)
    buffer.finish(2)
    assert buffer.take() == Batch((1, 2))
    assert buffer.take() is None
    assert buffer.missing() == Blocked(finished=3, needed=2)


def test_a_group_that_failed_is_waited_for_no_longer() -> None:
    buffer = with_finished(WindowedFifo(window(), 1), 4, 1, 2)
    buffer.leave(0)
    assert buffer.take() == Batch((1, 2))
    assert (buffer.held, buffer.pending, buffer.finished, buffer.counted) == (1, (3,), 0, 3)


def test_the_reach_is_a_share_of_what_the_window_holds() -> None:
    workload = Workload(
        policy=BatchPolicy.WINDOWED_FIFO, staleness_threshold=4, prompts_per_batch=2, window_fraction=0.3
    )
    buffer = buffer_of(workload)
    assert isinstance(buffer, WindowedFifo)
    with_finished(buffer, 8, 2, 3, 4)
    assert buffer.take() is None, "3 of 10: 2 may leave, 3 and 4 may not"
    assert buffer.missing() == Blocked(finished=3, needed=2)
    buffer.finish(1)
    assert buffer.take() == Batch((1, 2))


def test_ours_is_the_coordinators_own() -> None:
    assert buffer_of(Workload()) is None
