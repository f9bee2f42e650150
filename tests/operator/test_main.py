"""The start of the operator's process."""

import gc
import resource
import weakref

from qwen35_operator.main import allow_open_files, exempt_imports_from_collection


def test_the_operator_may_open_as_many_files_as_its_hard_limit_allows() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_imported_modules_are_exempt_from_garbage_collection_and_later_objects_are_not() -> None:
    before = gc.get_freeze_count()
    try:
        exempt_imports_from_collection()
        assert gc.get_freeze_count() - before > 10_000
        assert len(gc.get_objects()) < 1000
        later = weakref.ref(Cycle())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
