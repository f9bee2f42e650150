import gc
import weakref
from collections.abc import Iterator

import pytest

from qwen35_trainer.runtime.process import starting


class Knot:
    """Refers to itself, so that only a collection ends it."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_nothing_is_collected_while_a_process_starts():
    with starting():
        knot = weakref.ref(Knot())
        held = [[] for _ in range(10 * gc.get_threshold()[0])]
        assert knot() is not None
    assert held
    assert gc.isenabled()


def test_what_is_there_by_then_is_never_looked_at_again_and_what_comes_after_is():
    before = gc.get_freeze_count()
    with starting():
        held = [[] for _ in range(5000)]
    assert held
    assert gc.get_freeze_count() >= before + 5000
    knot = weakref.ref(Knot())
    gc.collect()
    assert knot() is None


def test_the_start_of_a_base_class_is_part_of_the_whole():
    with starting():
        with starting():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_start_that_fails_leaves_collection_on():
    with pytest.raises(ImportError), starting():
        raise ImportError("no such library")
    assert gc.isenabled()
