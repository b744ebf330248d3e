"""Models from the hub: which files are asked for, and what its refusals become."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from inferq.protocol.errors import ModelError
from inferq.worker.model.loading.hub import find_model_folder


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


#: Prints where a model is, or why it is nowhere; huggingface_hub reads its variables once.
FIND = """
import sys
from inferq.protocol.errors import ModelError
from inferq.worker.model.loading.hub import find_model_folder
try:
    print(find_model_folder(sys.argv[1], *sys.argv[2:]))
except ModelError as error:
    print(error)
"""


def find(*arguments: str, **variables: str) -> str:
    """Look a model up in a process of its own with these variables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", FIND, *arguments],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_offline_a_model_comes_from_the_hubs_cache_or_is_an_error(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "hub" / "models--owner--model"
    folder = model / "snapshots" / commit
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    (folder / "config.json").write_text("{}")
    variables = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert find("owner/model", **variables) == str(folder)
    assert find("owner/model", commit, **variables) == str(folder)
    found = find("owner/model", "v2", **variables)
    assert found.startswith(
        "model: owner/model at v2 is neither a local folder nor in the hub's cache"
    )
    assert "HF_HUB_OFFLINE is set" in found


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str | None]]]:
    """The address of a hub that lets nobody in, and the credentials that it was shown."""
    shown: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def answer(self) -> None:
            shown.append(self.headers["Authorization"])
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = answer  # noqa: N815 - the names that are called

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", shown
        server.shutdown()
        thread.join()


def test_the_token_is_shown_to_the_hub_and_its_refusal_names_it(
    hub: tuple[str, list[str | None]], tmp_path: Path
) -> None:
    address, shown = hub
    found = find("owner/model", HF_ENDPOINT=address, HF_TOKEN="hf_mine", HF_HOME=str(tmp_path))
    assert "Bearer hf_mine" in shown
    assert "owner/model is neither a local folder nor a model on the hub that HF_TOKEN" in found
