"""Extracts the part of a response that is compared with the answer."""

from collections.abc import Callable

import re2

from qwen35_trainer.rewards.reward import RewardError


def extractor(pattern: str | None) -> Callable[[str], str | None]:
    """Return a function that extracts the last match of a pattern from a response.

    The function returns the first group of the match, or the whole match if the pattern has no group. It returns None
    if nothing matches. Without a pattern it returns the whole response. The last match counts, because a model that
    reasons first answers at the end. RE2 matches in time that is linear in the length of the response. Raises
    RewardError for a pattern that RE2 does not accept.
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
