"""Registries, which map the names in the manifest to functions."""

from collections.abc import Callable


class Registry[F]:
    """A mapping from names to functions of one kind, such as losses.

    The module that defines the functions registers them when it is imported. The mapping does not change after that.
    """

    def __init__(self, kind: str) -> None:
        """Create an empty registry. kind: the word for one entry in error messages ("advantage")."""
        self._kind = kind
        self._entries: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that registers a function as `name`. The decorator raises ValueError if the name
        is already registered.
        """

        def add(entry: F) -> F:
            if name in self._entries:
                raise ValueError(f"{self._kind} {name!r} is registered twice; choose another name.")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> F:
        """Return the function registered as `name`. Raises ValueError, which lists the registered names, if
        the name is unknown.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise ValueError(f"unknown {self._kind} {name!r}. Use one of {', '.join(self._entries)}.") from None

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, in the order of registration."""
        return tuple(self._entries)
