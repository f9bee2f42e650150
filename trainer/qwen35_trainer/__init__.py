"""The trainer: the program that runs in the pods of a Qwen35Training, or without a cluster on one machine."""


def __getattr__(name: str) -> str:
    """Return `__version__`, which is read from the installed package at each access.

    Reading it when this package is imported would take longer than starting Python, and delay the handling of signals.
    Raises AttributeError for every other name.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("qwen35")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
