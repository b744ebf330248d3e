"""The native kernels are compiled once, cached safely, and missed quietly."""

import ctypes
import logging
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inferq.kernels import reference
from inferq.kernels.activation import silu_and_mul
from inferq.kernels.cpu_attention_native import NativeAttention
from inferq.kernels.native import compiler, library
from inferq.kernels.native.compiler import NativeBuildError, Toolchain
from inferq.kernels.native.library import load_native
from inferq.kernels.norm import rms_norm

TINY = """
#include "export.h"
#include "threads.h"
extern "C" void inferq_double(std::int64_t* x) { *x *= 2; }
INFERQ_EXPORT(inferq_double)
"""


def has_compiler() -> bool:
    try:
        Toolchain.find(Path("unused"))
    except NativeBuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def tiny_sources(monkeypatch, tmp_path):
    """One small source instead of all kernels, and a cache of its own."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(TINY)
    for header in compiler.SOURCES.glob("*.h"):
        (sources / header.name).write_bytes(header.read_bytes())
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setenv("INFERQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INFERQ_NATIVE_KERNELS", raising=False)
    return sources


def load() -> library.NativeLibrary | None:
    """Load as a new process would."""
    return load_native.__wrapped__()


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "native").glob("*.so"))


def doubles(loaded: library.NativeLibrary | None) -> bool:
    assert loaded is not None
    number = ctypes.c_int64(21)
    loaded.function("inferq_double", "p")(ctypes.addressof(number))
    return number.value == 42


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_the_second_process_loads_what_the_first_compiled(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert doubles(load())
        assert doubles(load())
    assert len(cached(tmp_path)) == 1
    assert len([r for r in caplog.records if "compiled" in r.message]) == 1
    assert (tmp_path / "cache" / "native").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "cache" / "native").glob("build-*")) == []


@needs_compiler
def test_changed_sources_are_compiled_anew(tmp_path, tiny_sources):
    assert doubles(load())
    (tiny_sources / "tiny.cpp").write_text(TINY.replace("*= 2", "+= 21"))
    assert doubles(load())
    assert len(cached(tmp_path)) == 2


@needs_compiler
def test_a_broken_library_in_the_cache_is_compiled_anew(caplog):
    toolchain = Toolchain.find(library._openmp_runtime())
    path = library._private_folder() / f"{toolchain.fingerprint()}.so"
    path.write_bytes(b"not a library")
    assert doubles(load())
    assert f"compiled anew, {path} is broken" in caplog.text


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_cache_that_others_may_write_is_not_trusted(tmp_path, caplog, mode):
    folder = tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert doubles(load())
    assert "compiled for this process only" in caplog.text
    assert "writable by others" in caplog.text
    assert list(folder.iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert doubles(load())
    assert "compiled for this process only" in caplog.text


@needs_compiler
def test_processes_that_compile_at_once_do_not_disturb_each_other(tmp_path, tiny_sources):
    program = (
        "import sys, pathlib, torch\n"
        "from inferq.kernels.native import compiler, library\n"
        f"compiler.SOURCES = pathlib.Path({str(tiny_sources)!r})\n"
        "library.load_native().function('inferq_double', 'p')\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait(timeout=100) for process in running] == [0, 0]
    assert len(cached(tmp_path)) == 1


def test_without_a_compiler_there_is_one_line_and_no_library(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert load() is None
    [record] = caplog.records
    assert "No native kernels, the slower torch forms run: no C++ compiler" in record.message


@needs_compiler
def test_sources_that_do_not_compile_are_reported_in_the_compilers_words(tiny_sources, caplog):
    (tiny_sources / "tiny.cpp").write_text("this is no C++")
    assert load() is None
    assert "tiny.cpp:1:1: error:" in caplog.text


@needs_compiler
def test_a_function_that_is_nowhere_fails_the_build_and_not_the_call(tiny_sources, caplog):
    missing = 'void nowhere();\nextern "C" void calls() { nowhere(); }\n'
    (tiny_sources / "tiny.cpp").write_text(missing)
    assert load() is None
    assert "nowhere" in caplog.text


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 1", "failed: no message"),
        ('[ "$1" = --version ] && exit 0; echo "out of cheese" >&2; exit 4', "out of cheese"),
    ],
)
def test_a_compiler_that_fails_is_reported(monkeypatch, tmp_path, caplog, script, words):
    monkeypatch.setenv("CXX", executable(tmp_path / "cxx", script))
    assert load() is None
    assert words in caplog.text


def test_a_cxx_that_does_not_exist_is_not_replaced_by_another(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    assert load() is None
    assert "nowhere" in caplog.text


def test_a_compiler_that_does_not_end_is_given_up(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(compiler, "_TIME_LIMIT", 0.3)
    monkeypatch.setenv("CXX", executable(tmp_path / "cxx", "exec sleep 60"))
    assert load() is None
    assert "timed out" in caplog.text


def test_off_means_off_without_asking_a_compiler(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", "off")
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    with caplog.at_level(logging.INFO):
        assert load() is None
    assert "Native kernels are off" in caplog.text


def test_require_fails_where_there_is_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", "require")
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match=r"native kernels: .*nowhere"):
        load()


def test_another_mode_is_refused(monkeypatch):
    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", "yes")
    with pytest.raises(ValueError, match="'yes': choose auto, off, require"):
        load()


@needs_compiler
def test_an_empty_mode_is_none(monkeypatch):
    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", "")
    assert doubles(load())


@needs_compiler
def test_a_call_with_another_signature_is_refused():
    loaded = load()
    assert loaded is not None
    with pytest.raises(RuntimeError, match=r"inferq_double takes \(p\), not \(pl\)"):
        loaded.function("inferq_double", "pl")


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernels_threads_are_torchs(monkeypatch, threads):
    monkeypatch.undo()  # the real sources
    loaded = load_native()
    if loaded is None:
        pytest.skip("native kernels are off")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    count = ctypes.c_int64()
    loaded.function("inferq_thread_count", "p")(ctypes.addressof(count))
    torch.set_num_threads(before)
    assert count.value == threads
    runtimes = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "gomp" in line or "libomp" in line or "iomp5" in line
    }
    assert len(runtimes) == 1


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
def test_processors_without_wide_vectors_get_the_same_numbers(
    monkeypatch, tmp_path, tiny_sources, make_case
):
    flags = [*compiler._FLAGS, "-O1", "-march=x86-64", "-Wall", "-Werror"]
    monkeypatch.setattr(compiler, "_flags", lambda: flags)
    names = ("attention.cpp", "shared_prefix.cpp", "kv_write.cpp", "norm.cpp", "activation.cpp")
    for name in names:
        (tiny_sources / name).write_bytes((Path(compiler.__file__).parent / name).read_bytes())
    path = tmp_path / "narrow.so"
    Toolchain.find(library._openmp_runtime()).build(path)
    narrow = library.NativeLibrary(path)
    for dtype, atol in ((torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        case = make_case([(70, 1), (3, 40)], heads=6, kv_heads=2, head_dim=72, dtype=dtype)
        case.assert_agrees(NativeAttention(narrow), atol=atol, window=50, soft_cap=5.0)
        case = make_case([(70, 1)] * 9, heads=6, kv_heads=2, head_dim=72, dtype=dtype)
        case.batch.block_tables[:, :4] = case.batch.block_tables[0, :4].clone()
        case.assert_agrees(NativeAttention(narrow), atol=atol, soft_cap=5.0)
    monkeypatch.setattr("inferq.kernels.dispatch.native_function", narrow.function)
    x, weight = torch.randn(3, 100), torch.randn(100)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(silu_and_mul(x), reference.silu_and_mul(x))
