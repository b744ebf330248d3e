"""Models from the hub: which files are asked for, and what its refusals become."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from inferq.protocol.errors import ModelError
from inferq.worker.model.hub import find_model_folder


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the hub's client was last called with; it answers with an empty folder."""
    calls: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        calls.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_revision_is_asked_for_and_pickles_are_not(asked: dict[str, Any]) -> None:
    find_model_folder("owner/model", "v2")
    assert (asked["repo"], asked["revision"]) == ("owner/model", "v2")
    assert not any(pattern.endswith(("bin", "pt", "py")) for pattern in asked["allow_patterns"])


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    assert find_model_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match=r"revision: .* is a folder, which has no revisions"):
        find_model_folder(str(tmp_path), "v2")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RevisionNotFoundError, "revision: owner/model has no branch, tag or commit v2"),
        (GatedRepoError, "owner/model is gated: accept its terms, and set HF_TOKEN"),
        (RepositoryNotFoundError, "neither a local folder nor a model on the hub"),
    ],
)
def test_refusals_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str
) -> None:
    response = SimpleNamespace(headers={}, request=None, status_code=404)

    def download(repo: str, **options: Any) -> str:
        raise error("no", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=message):
        find_model_folder("owner/model", "v2")
