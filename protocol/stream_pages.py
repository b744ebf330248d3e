"""Reading a stream page by page, so that no reply is too long for its time-out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

Fields = Mapping[bytes, bytes]

#: Bytes at which a page is long enough: the next one has fewer entries. A page may be longer by as
#: much as its entries grew since the one before; the first, and any after long ones, has one entry.
PAGE_BYTES: Final = 2**20
#: Most entries of a page.
MAX_PAGE_ENTRIES: Final = 4096


async def read_pages(
    read: Callable[[str, int], Awaitable[Any]], *, after: str = "-"
) -> AsyncIterator[list[tuple[bytes, Fields]]]:
    """Read entries after id `after` (`-`: all), oldest first; `read(start, count)` is an XRANGE.

    Raises what `read` does.
    """
    start, count = after if after == "-" else f"({after}", 1
    while True:
        page: list[tuple[bytes, Fields]] = await read(start, count) or []
        if page:
            yield page
        if len(page) < count:
            return
        start = f"({page[-1][0].decode()}"
        size = sum(len(value) for _, fields in page for value in fields.values())
        fitting = PAGE_BYTES * len(page) // max(size, 1)
        count = max(1, min(fitting, 4 * count, MAX_PAGE_ENTRIES))
