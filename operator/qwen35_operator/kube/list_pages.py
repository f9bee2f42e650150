"""Lists the objects of a kind in pages, which get smaller where objects are large, and larger again after them."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from qwen35_operator.kube.answers import ListPage, list_page
from qwen35_operator.kube.api_errors import TooLarge
from qwen35_operator.kube.client import MAX_ANSWER_BYTES, Query, RestClient

PAGE_SIZE: Final = 100
"""Objects of a page, unless they are so large that the page has more than MAX_PAGE_BYTES."""
MAX_PAGE_BYTES: Final = 4 * 2**20
"""Maximum size of a page of several objects. A page is parsed without a pause: this size takes 0.1 s, and a second if tenants make it expensive."""


async def pages(
    client: RestClient, path: str, query: Query, each: Callable[[object], Any], *, accept: str
) -> AsyncIterator[ListPage]:
    """Yield the pages of a list, at least one, with each(item) in place of every item.

    path: that of the kind. query: selectors. accept: media type. Raises ApiError if a request fails, and TooLarge if a single
    object is too large.
    """
    token, size = "", PAGE_SIZE
    while True:
        limits: dict[str, str | int] = {"limit": size, **({"continue": token} if token else {})}
        most = MAX_ANSWER_BYTES if size == 1 else MAX_PAGE_BYTES
        try:
            answer = await client.get_list(path, {**query, **limits}, each, accept=accept, max_bytes=most)
        except TooLarge:
            if size == 1:
                raise
            size = max(1, size // 4)
            continue
        page = list_page(path, answer, parsed=True)
        size = min(2 * size, PAGE_SIZE)
        yield page
        if not (token := page.token):
            return
