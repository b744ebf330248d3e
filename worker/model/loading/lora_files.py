"""Adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.config import read_json
from inferq.worker.model.architecture.fields import Fields
from inferq.worker.model.loading.refusals import listed, refuse_pickles

_FIELD: Final = "lora_adapters"
_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_PREFIX: Final = "base_model.model."
_TENSOR: Final = re.compile(r"(?P<module>.+)\.(?P<kind>lora_[AB])\.weight")
#: Settings that change what an adapter computes in a way that we do not follow, unless empty.
_MUST_BE_EMPTY: Final = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "megatron_config",
    "use_qalora",
)
#: Ways to begin the training that leave the base model's weights as they are.
_INITS: Final = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: by module, A [rank, inputs] and B [outputs, rank], to be scaled."""

    name: str
    rank: int
    scaling: float
    weights: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        return sum(a.nbytes + b.nbytes for a, b in self.weights.values())


def read_adapter(
    name: str, folder: Path, modules: Mapping[str, tuple[int, int]], *, max_rank: int
) -> Adapter:
    """Read an adapter of a model, given its projections' names and (inputs, outputs).

    Raises `ModelError` that names the file and what is wrong in it.
    """
    if not folder.is_dir():
        raise _error(f"{name}: {folder} is not a folder")
    config = _AdapterConfig.read(folder, max_rank)
    path = folder / _WEIGHTS
    if not path.is_file():
        refuse_pickles(folder, f"{_WEIGHTS} is", field=_FIELD)
        raise _error(f"{folder} has no {_WEIGHTS}")
    expected = config.targets(modules)
    try:
        with safe_open(path, framework="pt") as file:
            _check_names(path, set(file.keys()), expected)
            weights = {
                module: (
                    _read(file, path, module, "lora_A", (config.rank, modules[module][0])),
                    _read(file, path, module, "lora_B", (modules[module][1], config.rank)),
                )
                for module in expected
            }
    except (SafetensorError, OSError) as error:
        raise _error(f"{path} is damaged or incomplete: {error}") from None
    return Adapter(name, config.rank, config.scaling, weights)


@dataclass(frozen=True, slots=True)
class _AdapterConfig:
    fields: Fields
    path: Path
    rank: int
    scaling: float
    layers: frozenset[int] | None

    @classmethod
    def read(cls, folder: Path, max_rank: int) -> _AdapterConfig:
        path = folder / _CONFIG
        if not path.is_file():
            raise _error(f"{folder} has no {_CONFIG}: it is no adapter in the form of PEFT")
        fields = Fields(read_json(path), str(path))
        if (kind := fields.get("peft_type")) != "LORA":
            raise fields.error("peft_type", f"{kind!r} is not supported; supported: 'LORA'")
        _refuse_unsupported(fields)
        rank = fields.integer("r")
        if rank > max_rank:
            raise fields.error("r", f"{rank} is more than max_lora_rank ({max_rank})")
        root = rank**0.5 if fields.boolean("use_rslora", False) else rank
        return cls(fields, path, rank, fields.number("lora_alpha") / root, _layers(fields))

    def targets(self, modules: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return which of the model's projections the adapter has, as target_modules says."""
        wanted, excluded = self.fields.get("target_modules"), self.fields.get("exclude_modules")
        if not wanted or not isinstance(wanted, (str, list)):
            raise self.fields.error("target_modules", f"must name modules, not {wanted!r}")
        if isinstance(wanted, list):
            for each in wanted:
                if not any(_matches([each], module) for module in modules):
                    known = sorted({module.rpartition(".")[2] for module in modules})
                    raise self.fields.error(
                        "target_modules",
                        f"{each!r} is not a projection of the model's layers: {', '.join(known)}",
                    )
        found = [
            module
            for module in modules
            if (wanted == "all-linear" or self._matches("target_modules", wanted, module))
            and not (excluded and self._matches("exclude_modules", excluded, module))
            and (self.layers is None or _layer_of(module) in self.layers)
        ]
        if not found:
            raise self.fields.error("target_modules", f"{wanted!r} matches no projection")
        return found

    def _matches(self, field: str, spec: Any, module: str) -> bool:
        try:
            return _matches(spec, module)
        except re.error as error:
            raise self.fields.error(field, f"{spec!r} is not a pattern: {error}") from None


def _matches(spec: Any, module: str) -> bool:
    """Whether PEFT's rule takes `module`: a pattern for all of it, or a list of ends."""
    if isinstance(spec, str):
        return re.fullmatch(spec, module) is not None
    return any(module == each or module.endswith(f".{each}") for each in spec)


def _layer_of(module: str) -> int:
    """Return the number in a projection's name."""
    return int(next(part for part in module.split(".") if part.isdecimal()))


def _layers(fields: Fields) -> frozenset[int] | None:
    value = fields.get("layers_to_transform")
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in layers):
        raise fields.error("layers_to_transform", f"must be numbers of layers, not {value!r}")
    return frozenset(layers)


def _refuse_unsupported(fields: Fields) -> None:
    if (bias := fields.get("bias", "none")) != "none":
        raise fields.error("bias", f"{bias!r} is not supported; supported: 'none'")
    for name in _MUST_BE_EMPTY:
        if value := fields.get(name):
            raise fields.error(name, f"{value!r} is not supported")
    if (init := fields.get("init_lora_weights", True)) not in _INITS:
        raise fields.error(
            "init_lora_weights",
            f"{init!r} changes the base model too: save the adapter as one of the unchanged model",
        )
    if (task := fields.get("task_type", "CAUSAL_LM")) != "CAUSAL_LM":
        raise fields.error("task_type", f"{task!r} is not supported; supported: 'CAUSAL_LM'")


def _check_names(path: Path, stored: set[str], modules: list[str]) -> None:
    """Raise unless a file holds A and B of the modules, and nothing else."""
    expected = {
        f"{_PREFIX}{module}.{kind}.weight" for module in modules for kind in ("lora_A", "lora_B")
    }
    if missing := sorted(expected - stored):
        raise _error(f"{path} lacks {listed(missing)}, which {_CONFIG} asks for")
    if unknown := sorted(stored - expected):
        known = "" if all(map(_TENSOR.fullmatch, unknown)) else ": only lora_A and lora_B are read"
        raise _error(f"{path} holds {listed(unknown)}, which {_CONFIG} does not ask for{known}")


def _read(file: Any, path: Path, module: str, kind: str, shape: tuple[int, int]) -> Tensor:
    name = f"{_PREFIX}{module}.{kind}.weight"
    stored = file.get_slice(name)
    if (found := list(stored.get_shape())) != list(shape):
        raise _error(
            f"{path}: {name} has shape {found}; the base model and r ask for {list(shape)}"
        )
    if (dtype := stored.get_dtype()) not in _FLOATS:
        raise _error(f"{path}: {name} has dtype {dtype}; supported: {', '.join(_FLOATS)}")
    tensor: Tensor = file.get_tensor(name)
    return tensor


def _error(message: str) -> ModelError:
    return ModelError(message, field=_FIELD)
