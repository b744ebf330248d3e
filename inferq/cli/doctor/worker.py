"""What a worker needs: a device, kernels, memory, disk, and a model's folder that is whole."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from inferq.cli.doctor.findings import Area, Finding
from inferq.protocol.errors import InvalidRequestError, MissingExtraError
from inferq.worker.insight.facts import Facts, GpuFacts, MachineFacts, ModelFacts
from inferq.worker.kernel_choice import native_kernels

_DEVICE: Final = Area("device")
_MODEL: Final = Area("model")
#: The check whose failure leaves nothing to be known of the device, nor of the model.
PROCESS: Final = "worker"
_PROGRAM: Final = "inferq.worker.insight.diagnosis"
#: Longest wait in seconds for torch and the driver.
TIMEOUT_S: Final = 120.0
#: Compute capability that our kernels are compiled for.
_LEAST_CAPABILITY: Final = (8, 0)
_GIB: Final = 2**30
#: What a worker takes beside its weights at least, for torch and a small cache.
_OVERHEAD: Final = _GIB
_LITTLE_DISK: Final = 2 * _GIB


def examine(
    model: str | None, device: str, *, ranks: int = 1, timeout_s: float = TIMEOUT_S
) -> list[Finding]:
    """Let a process of its own look, which may hang with its driver, and judge what it says."""
    if importlib.util.find_spec("torch") is None:
        return [_DEVICE.skipped(PROCESS, str(MissingExtraError("worker", "torch")))]
    program = [sys.executable, "-P", "-m", _PROGRAM, *([] if model is None else ["--model", model])]
    try:
        run = subprocess.run(
            program,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # libraries in C print what they like
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            _DEVICE.failure(
                PROCESS,
                f"torch, or the driver, has not answered within {timeout_s:g} s",
                "does nvidia-smi answer? A hung GPU needs a reset, a slow disk time",
            )
        ]
    facts = _facts(run.stdout) if run.returncode == 0 else None
    if facts is None:
        told = run.stderr.strip() or run.stdout.strip() or "no message"
        return [
            _DEVICE.failure(
                PROCESS,
                f"the worker's libraries do not load: {told.splitlines()[-1]}",
                "pip install --force-reinstall 'inferq[worker]'",
            )
        ]
    return judge(facts, model, device, ranks=ranks)


def _facts(output: str) -> Facts | None:
    """Return what the process told in its last line; None where that tells nothing."""
    try:
        return Facts.from_json(output.strip().splitlines()[-1])
    except (ValueError, LookupError, TypeError):
        return None


def judge(facts: Facts, model: str | None, device: str, *, ranks: int = 1) -> list[Finding]:
    """Say what follows from the facts for a worker of `model` on `device` (auto, cpu or cuda).

    `ranks` is among how many devices the model is divided.
    """
    machine = facts.machine
    findings = [_gpu(machine, device)]
    if device != "cpu":
        findings += map(_capability, machine.gpus)
    findings += [*_kernels(machine, device), _disk(machine)]
    if facts.model is None:
        findings.append(_MODEL.skipped("folder", "none given: --model FOLDER, or INFERQ_MODEL"))
    else:
        findings += _model(facts.model, model or "", machine, device, ranks)
    return findings


def _gpu(machine: MachineFacts, device: str) -> Finding:
    if device == "cpu":
        return _DEVICE.ok("gpu", f"none is asked for (torch {machine.torch})")
    if machine.gpus:
        shown = ", ".join(
            f"{gpu.name} ({gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free)"
            for gpu in machine.gpus
        )
        return _DEVICE.ok("gpu", f"{shown}; torch {machine.torch}")
    if machine.driver_problem is not None:
        return _DEVICE.failure(
            "gpu",
            f"torch {machine.torch} sees none: {machine.driver_problem}",
            f"does nvidia-smi answer? The driver must be one for CUDA {machine.cuda}; a container "
            "needs --gpus all, a pod nvidia.com/gpu",
        )
    if device == "cuda":
        return _DEVICE.failure(
            "gpu",
            f"none, and cuda is asked for (torch {machine.torch})",
            "install a torch that was built for CUDA, or take --device cpu",
        )
    return _DEVICE.ok("gpu", f"none: a worker runs on the CPU (torch {machine.torch})")


def _capability(gpu: GpuFacts) -> Finding:
    shown = f"{gpu.name}: compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.capability < _LEAST_CAPABILITY:
        return _DEVICE.failure(
            "compute capability", shown, "take a GPU of 8.0 or newer (Ampere), or --device cpu"
        )
    return _DEVICE.ok("compute capability", shown)


def _kernels(machine: MachineFacts, device: str) -> Iterator[Finding]:
    try:
        mode = native_kernels()
    except InvalidRequestError as error:  # no worker starts with it, on a GPU neither
        yield _DEVICE.failure("native kernels", str(error), "mend or unset it")
        return
    if machine.gpus and device != "cpu":
        if machine.has_triton:
            yield _DEVICE.ok("triton", "installed")
        else:
            yield _DEVICE.failure(
                "triton", "not installed: no kernel runs on the GPU", "pip install triton"
            )
        return
    if mode == "off":
        yield _DEVICE.ok("native kernels", "switched off by INFERQ_NATIVE_KERNELS")
    elif machine.compiler is not None:
        yield _DEVICE.ok("native kernels", f"{machine.compiler} ({mode})")
    else:
        make, so = _DEVICE.warning, "torch's slower forms run"
        if mode == "require":
            make, so = _DEVICE.failure, "no worker starts (INFERQ_NATIVE_KERNELS=require)"
        yield make(
            "native kernels",
            f"{machine.compiler_problem}: {so}",
            "install a C++ compiler (apt install g++), or name one by CXX",
        )


def _disk(machine: MachineFacts) -> Finding:
    shown = f"{machine.cache_free_bytes / _GIB:.1f} GiB free for {machine.cache_folder}"
    if machine.cache_free_bytes < _LITTLE_DISK:
        return _DEVICE.warning(
            "disk",
            shown,
            "free some, or point INFERQ_CACHE (and HF_HOME, for models of the hub) elsewhere",
        )
    return _DEVICE.ok("disk", shown)


def _model(
    found: ModelFacts, model: str, machine: MachineFacts, device: str, ranks: int
) -> Iterator[Finding]:
    if found.folder is None:
        if found.name_problem is not None:
            yield _MODEL.warning(
                "folder",
                f"{model}: {found.name_problem}",
                "correct the name; else a worker looks for it on the hub",
            )
        elif found.config_problem is None:
            yield _MODEL.skipped("folder", f"{model} is a hub id: its worker fetches it")
        else:
            yield _MODEL.failure(
                "folder", found.config_problem, "give a folder in Hugging Face form, or a hub id"
            )
        return
    if found.config_problem is not None:
        yield _MODEL.failure(
            "config",
            found.config_problem,
            "docs/models.md lists what is served; a folder needs the config.json of its checkpoint",
        )
    else:
        path = "our decoder" if found.is_native else "transformers"
        yield _MODEL.ok(
            "config", f"{found.architecture} by {path}, {found.max_model_len} tokens of context"
        )
    yield _weights(found)
    if found.weight_bytes is not None:
        yield _room(found.weight_bytes, machine, device, ranks)
    yield from _tokenizer(found)


def _weights(found: ModelFacts) -> Finding:
    problem = found.weights_problem
    if problem is None:
        assert found.weight_bytes is not None
        return _MODEL.ok("weights", f"{found.weight_bytes / _GIB:.2f} GiB of safetensors, whole")
    if found.are_pickles:
        advice = (
            "convert them where they are trusted: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER), or take another revision of the model"
        )
    else:
        advice = f"fetch the files again, for example: hf download MODEL --local-dir {found.folder}"
    return _MODEL.failure("weights", problem, advice)


def _room(weight_bytes: int, machine: MachineFacts, device: str, ranks: int) -> Finding:
    needed = weight_bytes / ranks + _OVERHEAD
    on_gpu = bool(machine.gpus) and device != "cpu"
    room = max(gpu.free_bytes for gpu in machine.gpus) if on_gpu else machine.memory_bytes
    shown = (
        f"{room / _GIB:.1f} GiB are free {'on a GPU' if on_gpu else 'here'}; weights as they are "
    )
    shown += f"stored, and little else, take {needed / _GIB:.1f} GiB"
    if ranks > 1:
        shown += f" on each of {ranks} ranks"
    if room >= needed:
        return _MODEL.ok("memory", shown)
    if on_gpu:
        return _MODEL.failure(
            "memory",
            shown,
            "end what else uses the GPU, divide the model (--tensor-parallel-size), or take a "
            "smaller or quantized one",
        )
    return _MODEL.warning(
        "memory",
        shown,
        "end other programs, raise the container's limit, or take a smaller model (with "
        "--quantization int8 a float32 model takes a quarter)",
    )


def _tokenizer(found: ModelFacts) -> Iterator[Finding]:
    if found.tokenizer_problem is not None:
        yield _MODEL.failure(
            "tokenizer",
            found.tokenizer_problem,
            "copy tokenizer.json and tokenizer_config.json of the same checkpoint into the folder",
        )
    elif not found.has_chat_template:
        yield _MODEL.warning(
            "tokenizer",
            "whole, but without a chat template: chats are refused",
            "take the instruct variant of the model, or add its chat_template.jinja",
        )
    else:
        yield _MODEL.ok("tokenizer", "whole, with a chat template")
