"""Records of files and batches as OpenAI's objects."""

from __future__ import annotations

from typing import Any

from inferq.producer.batches.records import BatchRecord, Counts, FileFault, FileRecord


def file_object(record: FileRecord) -> dict[str, Any]:
    """Return a record as OpenAI's File object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def listed(objects: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return one page as OpenAI's list object."""
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """Return a record as OpenAI's Batch object."""
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": _errors(record.errors),
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status.value,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_at,
        "in_progress_at": record.in_progress_at,
        "expires_at": record.expires_at,
        "finalizing_at": record.finalizing_at,
        "completed_at": record.completed_at,
        "failed_at": record.failed_at,
        "expired_at": record.expired_at,
        "cancelling_at": record.cancelling_at,
        "cancelled_at": record.cancelled_at,
        "request_counts": {
            "total": record.counts.total,
            "completed": record.counts.completed,
            "failed": record.counts.failed,
        },
        "usage": _usage(record.counts),
        "metadata": None if record.metadata is None else dict(record.metadata),
    }


def _errors(faults: tuple[FileFault, ...]) -> dict[str, Any] | None:
    if not faults:
        return None
    data = [
        {"code": each.code, "line": each.line, "message": each.message, "param": each.param}
        for each in faults
    ]
    return {"object": "list", "data": data}


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
