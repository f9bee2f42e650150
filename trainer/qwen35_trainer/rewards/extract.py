"""The part of a response that is compared."""

import re
from collections.abc import Callable


def extractor(pattern: str | None) -> Callable[[str], str | None]:
    """A function from a response to its last match: the first group, or the whole match where the pattern has none.

    The last one counts, since a model that thinks aloud answers at the end. None where nothing matches; without a
    pattern the whole response.
    """
    if pattern is None:
        return lambda response: response
    compiled = re.compile(pattern)

    def extract(response: str) -> str | None:
        last = None
        for last in compiled.finditer(response):  # noqa: B007  # the last match is the result
            pass
        return None if last is None else last[1 if compiled.groups else 0]

    return extract
