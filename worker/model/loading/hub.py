"""From the name of a model to a local folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from inferq.protocol.errors import ModelError

#: What is fetched: settings, safetensors weights and tokenizer files, never pickles or code.
_PATTERNS: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
#: What is not: subfolders, and Mistral's second copy of the weights.
_LEFT_OUT: Final = ("*/*", "consolidated*.safetensors")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: Seconds to wait for the hub's first answer.
_HUB_TIMEOUT_S: Final = 5


def find_model_folder(model: str, revision: str | None = None) -> Path:
    """Return the folder of `model`: a local path, or a hub id, fetched into the hub's cache.

    `revision` is a branch, tag or commit of a hub id.

    `HF_HUB_OFFLINE`, `HF_TOKEN` and the other variables of huggingface_hub count. Raises
    `ModelError` where there is no such model, or no way to it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"{model} is a folder, which has no revisions", field="revision")
        return path
    if path.is_file():
        hint = ""
        if path.suffix == ".gguf":
            hint = f"; import it first: inferq model import {model} FOLDER"
        raise ModelError(f"{model} is a file, not a model folder{hint}")
    if not _HUB_ID.fullmatch(model) or path.is_absolute():
        raise ModelError(f"there is no folder {model}")
    return _fetch(model, revision)


def _fetch(hub_id: str, revision: str | None) -> Path:
    # Imported here: the hub's client is slow to import, and a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(_PATTERNS),
            ignore_patterns=list(_LEFT_OUT),
            etag_timeout=_HUB_TIMEOUT_S,
        )
    except GatedRepoError:
        raise ModelError(f"{hub_id} is gated: accept its terms, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{hub_id} is neither a local folder nor a model on the hub that HF_TOKEN may read"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(
            f"{hub_id} has no branch, tag or commit {revision}", field="revision"
        ) from None
    except LocalEntryNotFoundError:
        at = "" if revision is None else f" at {revision}"
        raise ModelError(
            f"{hub_id}{at} is neither a local folder nor in the hub's cache, and the hub cannot be "
            "reached (or HF_HUB_OFFLINE is set)"
        ) from None
    except Exception as error:
        # Whatever the client and its transport raise, at the edge it is one error.
        raise ModelError(f"{hub_id} cannot be fetched from the hub: {error}") from error
    return Path(folder)
