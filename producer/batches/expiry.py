"""What is removed when its time is over: files, records, and what crashes left behind."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

import structlog

from inferq.producer.batches.records import is_batch_id, is_file_id
from inferq.producer.batches.storage import FileStorage, StoredName
from inferq.producer.batches.store import BatchStore
from inferq.protocol.errors import InvalidRequestError

logger = structlog.get_logger("inferq.batches")

#: Records looked at in one go.
_AT_ONCE: Final = 100
#: Seconds until a file is looked at again that a batch still reads.
_LATER_S: Final = 3600
#: Seconds after which a file that no record names is nobody's: an upload takes less.
LEFTOVER_S: Final = 86_400


async def remove_expired(store: BatchStore, storage: FileStorage) -> int:
    """Remove the files, and the records of ended batches, whose time is over; return how many."""
    removed = 0
    while ids := await store.expired(most=_AT_ONCE):
        for each in ids:
            if is_batch_id(each):
                await store.forget_batch(each)
                removed += 1
            else:
                removed += await _remove_file(store, storage, each)
    return removed


async def _remove_file(store: BatchStore, storage: FileStorage, file_id: str) -> bool:
    try:
        await store.delete_file(file_id)
    except InvalidRequestError:  # a batch reads it
        await store.keep_longer([file_id], seconds=_LATER_S)
        return False
    await storage.delete(file_id)
    return True


async def remove_leftovers(store: BatchStore, storage: FileStorage) -> int:
    """Remove what a crash left in the storage and no record names; return how many."""
    leftovers = await _leftovers(store, await storage.listing())
    for stored in leftovers:
        if stored.changed_at is None:
            await storage.delete_folder(stored.name)
        else:
            await storage.delete(stored.name)
    if leftovers:
        logger.info("leftovers removed", number=len(leftovers))
    return len(leftovers)


async def _leftovers(store: BatchStore, names: Collection[StoredName]) -> list[StoredName]:
    oldest = time.time() - LEFTOVER_S
    found = []
    for stored in names:
        if stored.changed_at is None:
            batch = await store.batch(stored.name) if is_batch_id(stored.name) else None
            is_left = is_batch_id(stored.name) and (batch is None or batch.status.is_final)
        else:
            # an unfinished upload has the file's name and more
            file_id = stored.name.partition(".")[0]
            is_left = is_file_id(file_id) and stored.changed_at < oldest
            if is_left and stored.name == file_id:
                is_left = await store.file(file_id) is None
        if is_left:
            found.append(stored)
    return found
