"""The regular expressions of failure rules, in RE2's syntax.

The operator matches them for all tenants in one process. RE2 matches in time that is linear in the length of the text, whatever
the expression is; the expressions of Python's `re` can take longer than any deadline.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

MAX_PATTERN_BYTES: Final = 1 << 20
"""Maximum memory of one compiled expression. RE2 refuses an expression that needs more."""


class PatternRefused(ValueError):
    """RE2 does not accept an expression. The message is the reason."""


@lru_cache(maxsize=32)
def rule_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that says whether the expression of a rule is found in a text. Raises PatternRefused."""
    import re2  # here, because most manifests have no expression

    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_BYTES
    try:
        compiled = re2.compile(pattern, options=options)
    except re2.error as error:
        reason = error.args[0]
        raise PatternRefused(reason.decode() if isinstance(reason, bytes) else str(reason)) from error
    return lambda text: compiled.search(text) is not None
