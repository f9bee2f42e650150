"""The trainer: what runs inside a Qwen35Training's pods, and on a laptop."""


def __getattr__(name: str) -> str:
    """`__version__`, read when it is asked for: that takes longer than starting Python, and signals wait for no import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("qwen35")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
