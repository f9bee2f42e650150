"""The trainer: the program that runs in the pods of a Qwen35Training, or without a cluster on one machine."""


def __getattr__(name: str) -> str:
    """Return `__version__`, read from the metadata of the installed package. Raises AttributeError for other names.

    The version is read at each access. Reading it while this package is imported would take longer than starting
    Python, and delay the handling of signals.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("qwen35")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
