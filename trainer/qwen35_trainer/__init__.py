"""The trainer: the program that runs in the pods of a Qwen35Training, or without a cluster on one machine."""


def __getattr__(name: str) -> str:
    """Return `__version__`, which is read only when it is asked for.

    Reading it takes longer than starting Python. At import it would delay the handling of signals.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("qwen35")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
