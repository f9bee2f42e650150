"""Arrays in the memory of earlier arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.runtime.reused_memory import ReusedMemory


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_an_array_gets_the_memory_of_one_that_is_gone():
    memory = ReusedMemory()
    array = memory.empty(1000, np.int32)
    first = address(array)
    del array
    assert address(memory.empty(900, np.float32)) == first


def test_a_view_keeps_the_memory():
    memory = ReusedMemory()
    view = memory.empty(1000, np.int32)[10:20].reshape(2, 5)
    view[:] = 7
    memory.empty(1000, np.int32)[:] = 0
    assert (view == 7).all()


def test_an_array_of_nothing():
    assert ReusedMemory().empty(0, np.bool_).shape == (0,)


SIZES = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 3)), max_size=40)


@given(SIZES)
def test_no_two_arrays_share_memory_and_little_is_kept(steps):
    """Each step makes an array, and forgets an earlier one. There are at most four arrays, so four pieces of memory."""
    memory, held = ReusedMemory(), {}
    for number, (size, place) in enumerate(steps):
        held.pop(place, None)
        held[place] = memory.empty(size, np.int32)
        held[place][:] = number
        assert len({int(array[0]) for array in held.values()}) == len(held)
        assert all((array == array[0]).all() for array in held.values())
        assert len(memory._free) + len(held) <= 4
    held.clear()
    kept = sum(map(len, memory._free))
    assert kept <= 4 * 4 * max((size for size, _ in steps), default=0)
