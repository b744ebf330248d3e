"""What is removed when its time is over: files, records, and what crashes left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from inferq.producer.batches.records import is_batch_id, is_file_id
from inferq.producer.batches.storage import FileStorage, StoredName
from inferq.producer.batches.upkeep import UpkeepStore
from inferq.protocol.errors import InferqError, InvalidRequestError

logger = structlog.get_logger("inferq.batches")

#: Records looked at in one go.
_AT_ONCE: Final = 100
#: Seconds until a file is looked at again that a batch still reads.
_LATER_S: Final = 3600
#: Seconds after which a file that no record names is nobody's: an upload takes less.
LEFTOVER_S: Final = 86_400
#: The file of a storage that names the server whose records tell what is left over in it.
SERVER_FILE: Final = "inferq-server"


class ForeignStorage(InferqError):
    """The storage is that of another server's batches: what has no record here is not left over."""


async def remove_expired(
    store: UpkeepStore, storage: FileStorage, is_stopping: Callable[[], bool] = lambda: False
) -> int:
    """Remove the files, and the records of ended batches, whose time is over; return how many.

    Ends early, with some left for the next time, once `is_stopping`.
    """
    removed = 0
    while not is_stopping() and (ids := await store.expired(most=_AT_ONCE)):
        for each in ids:
            if is_batch_id(each):
                await store.forget_batch(each)
                removed += 1
            else:
                removed += await _remove_file(store, storage, each)
    return removed


async def _remove_file(store: UpkeepStore, storage: FileStorage, file_id: str) -> bool:
    try:
        is_known = await store.delete_file(file_id)
    except InvalidRequestError:  # a batch reads it
        await store.keep_longer([file_id], seconds=_LATER_S)
        return False
    if is_file_id(file_id):
        await storage.delete(file_id)
    return is_known


async def remove_leftovers(store: UpkeepStore, storage: FileStorage) -> int:
    """Remove what a crash left in the storage and no record names; return how many.

    Takes a storage that is nobody's for this server first, and leaves it at that this time. Raises
    `ForeignStorage` for another server's, whose files and batches have no records here.
    """
    names = await storage.listing()
    if not names or not await _is_ours(store, storage, names):
        return 0
    leftovers = await _leftovers(store, storage, names)
    for stored in leftovers:
        if stored.changed_at is None:
            await storage.delete_folder(stored.name)
        else:
            await storage.delete(stored.name)
    if leftovers:
        logger.info("leftovers removed", number=len(leftovers))
    return len(leftovers)


async def _is_ours(store: UpkeepStore, storage: FileStorage, names: Sequence[StoredName]) -> bool:
    """Whether this server was told before to look after the storage; if nobody was, it is now."""
    ours = await store.server_id()
    if all(stored.name != SERVER_FILE for stored in names):
        # of two that come at once one is in the file in the end, which the next look tells
        async with storage.writer(SERVER_FILE) as writer:
            await writer.write(ours.encode())
            await writer.commit()
        return False
    theirs = b"".join([data async for data in storage.read(SERVER_FILE)]).decode(errors="replace")
    if theirs != ours:
        raise ForeignStorage(
            f"{storage.name} belongs to the batches of another Redis server ({theirs[:80]!r}; this "
            f"one is {ours!r}), so nothing is removed there. Give each server a storage of its "
            f"own; only if the other one is gone for good, remove {SERVER_FILE} from the storage."
        )
    return True


async def _leftovers(
    store: UpkeepStore, storage: FileStorage, names: Sequence[StoredName]
) -> list[StoredName]:
    oldest = time.time() - LEFTOVER_S
    folders = [each for each in names if each.changed_at is None and is_batch_id(each.name)]
    # an unfinished upload has the file's name and more
    files = [
        each
        for each in names
        if each.changed_at is not None
        and each.changed_at < oldest
        and is_file_id(each.name.partition(".")[0])
    ]
    known = await store.known_files([each.name for each in files])
    found = [each for each in files if each.name not in known]
    has_ended = await store.have_ended([each.name for each in folders])
    for folder in folders:
        if folder.name in has_ended:
            is_left = has_ended[folder.name]
        else:
            changed_at = await storage.folder_changed_at(folder.name)
            is_left = changed_at is None or changed_at < oldest
        if is_left:
            found.append(folder)
    return found
