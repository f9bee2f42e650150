"""Keys that wait: those of one namespace in the order of their arrival, and the namespaces in turns."""

from collections import OrderedDict
from collections.abc import Container

from qwen35_operator.kube.store import TrainingKey


class Line:
    """A line of trainings. A namespace with many of them keeps those of the others waiting for one of its own at a time."""

    def __init__(self) -> None:
        """Create an empty line."""
        self._namespaces: OrderedDict[str, OrderedDict[TrainingKey, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: TrainingKey) -> bool:
        return key in self._namespaces.get(key[0], ())

    def add(self, key: TrainingKey) -> None:
        """Add the key at the end of its namespace, unless it is in the line."""
        if key not in self:
            self._namespaces.setdefault(key[0], OrderedDict())[key] = None
            self._count += 1

    def discard(self, key: TrainingKey) -> None:
        """Remove the key if it is in the line."""
        if key in self:
            del self._namespaces[key[0]][key]
            self._count -= 1
            self._forget_if_empty(key[0])

    def pop(self, blocked: Container[str] = ()) -> TrainingKey | None:
        """Remove and return the key whose turn it is; None if there is none. blocked: namespaces that have to wait."""
        namespace = next((each for each in self._namespaces if each not in blocked), None)
        if namespace is None:
            return None
        key, _ = self._namespaces[namespace].popitem(last=False)
        self._count -= 1
        self._namespaces.move_to_end(namespace)
        self._forget_if_empty(namespace)
        return key

    def clear(self) -> None:
        """Remove all keys."""
        self._namespaces.clear()
        self._count = 0

    def _forget_if_empty(self, namespace: str) -> None:
        if not self._namespaces[namespace]:
            del self._namespaces[namespace]
