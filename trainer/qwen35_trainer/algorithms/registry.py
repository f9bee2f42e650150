"""Functions by the name a manifest gives them."""

from collections.abc import Callable


class Registry[F]:
    """Named functions of one kind. Filled while its module is imported, read-only in use."""

    def __init__(self, kind: str) -> None:
        """kind: what the entries are, for error messages ("advantage")."""
        self._kind = kind
        self._entries: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that files a function under `name`. Raises ValueError when the name is taken."""

        def file(entry: F) -> F:
            if name in self._entries:
                raise ValueError(f"{self._kind} {name!r} is registered twice; choose another name.")
            self._entries[name] = entry
            return entry

        return file

    def get(self, name: str) -> F:
        """The function called `name`. Raises ValueError that lists the known names."""
        try:
            return self._entries[name]
        except KeyError:
            raise ValueError(f"unknown {self._kind} {name!r}. Use one of {', '.join(self._entries)}.") from None

    @property
    def names(self) -> tuple[str, ...]:
        """Known names, in the order of registration."""
        return tuple(self._entries)
