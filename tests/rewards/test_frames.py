import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.rewards.child_process import ALIVE, FrameReader, FrameTooLongError, packed, read_frame

FRAMES = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=40)), max_size=8)


@given(FRAMES, st.data())
def test_messages_are_the_same_however_the_stream_is_cut(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(packed(number, content) for number, content in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader, received = FrameReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == frames


def test_a_message_that_is_too_long_is_refused_before_it_has_arrived() -> None:
    reader = FrameReader(max_bytes=10)
    assert reader.feed(packed(1, b"x" * 10)) == [(1, b"x" * 10)]
    with pytest.raises(FrameTooLongError, match="a message of 11 bytes; at most 10 are accepted"):
        reader.feed(packed(2, b"x" * 11)[:12])


@given(FRAMES)
def test_a_blocking_stream_gives_the_same_messages_and_then_its_end(frames: list[tuple[int, bytes]]) -> None:
    stream = io.BytesIO(b"".join(packed(number, content) for number, content in frames) + b"\0\0\0")
    assert [read_frame(stream) for _ in frames] == frames
    with pytest.raises(EOFError):
        read_frame(stream)


def test_the_message_that_shows_life_has_no_content() -> None:
    assert FrameReader().feed(ALIVE) == [(0, b"")]
