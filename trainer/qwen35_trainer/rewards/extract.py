"""The part of a response that is compared."""

from collections.abc import Callable

import re2

from qwen35_trainer.rewards.base import RewardError


def extractor(pattern: str | None) -> Callable[[str], str | None]:
    """A function from a response to its last match: the first group, or the whole match where the pattern has none.

    The last one counts, since a model that thinks aloud answers at the end. None where nothing matches; without a
    pattern the whole response. RE2 matches in time linear in the response, whatever a model writes.
    Raises RewardError for a pattern that RE2 does not take.
    """
    if pattern is None:
        return lambda response: response
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options=options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error.args[0]
        raise RewardError(
            f"extract {pattern!r} is not an RE2 expression: {reason}. RE2 has no look-around and no back-references."
        ) from error

    def extract(response: str) -> str | None:
        last = None
        for last in compiled.finditer(response):  # noqa: B007  # the last match is the result
            pass
        return None if last is None else last[1 if compiled.groups else 0]

    return extract
