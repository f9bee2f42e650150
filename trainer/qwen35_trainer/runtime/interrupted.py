"""The end of a run that had no time to save."""


class Interrupted(Exception):
    """A signal, or the operator, ended the run without a last checkpoint; says what is left."""
