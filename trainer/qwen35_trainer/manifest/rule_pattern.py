"""The regular expressions of failure rules, in RE2's syntax.

The operator matches the expressions of all tenants in one process. RE2 needs time linear in the length of the text for
every expression. Python's `re` can need exponential time for some expressions, which would block the process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

MAX_PATTERN_BYTES: Final = 1 << 18
"""Maximum memory of one compiled expression, in bytes. RE2 refuses an expression that needs more. An expression of this
size takes about 1 ms to compile."""


class PatternRefused(ValueError):
    """Raised for an expression that RE2 does not accept. The message is RE2's reason."""


@dataclass(frozen=True)
class RulePattern:
    """A compiled expression."""

    is_found: Callable[[str], bool]
    """Returns whether a text contains a match."""
    size: int
    """Number of instructions of the compiled expression. A search takes at most `size` steps per character."""


@lru_cache(maxsize=32)
def rule_pattern(pattern: str) -> RulePattern:
    """Compile the expression of a rule. Raises PatternRefused if RE2 does not accept the expression."""
    import re2  # here, because most manifests have no expression

    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_BYTES
    try:
        compiled = re2.compile(pattern, options=options)
    except re2.error as error:
        reason = error.args[0]
        raise PatternRefused(reason.decode() if isinstance(reason, bytes) else str(reason)) from error
    return RulePattern(lambda text: compiled.search(text) is not None, max(1, compiled.programsize))
