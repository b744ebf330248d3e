"""Models of any other architecture: transformers computes them, with our paged attention inside.

transformers' models call attention through a registry of functions. We register one that writes
keys and values to the paged cache and attends there, and run the whole packed batch as one text
[1, T] with the positions of its sequences. That is right only for models in which tokens meet
nowhere but in attention; `_check` proves it on a few tokens before anything is served.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from inferq.kernels.attention import AttentionBatch, AttentionOps, AttentionPlan
from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.causal_model import ModelDescription, StepTensors
from inferq.worker.model.architecture.fallback_check import check_tokens_meet_in_attention_only
from inferq.worker.model.architecture.fallback_config import FallbackConfig
from inferq.worker.model.loading.loader import weight_files

#: Tensors that models hand to attention although it has no use for them.
_UNUSED_TENSORS: Final = ("position_ids", "cache_position")


@dataclass(slots=True)
class _Step:
    """The forward pass under way, and which layers have attended in it."""

    plan: AttentionPlan
    kv_cache: Tensor
    layers: list[int] = field(default_factory=list)


class PagedAttention:
    """The attention function of one model, as transformers calls it for each layer."""

    def __init__(self, config: FallbackConfig, ops: AttentionOps) -> None:
        self._config = config
        self.ops = ops
        self._step: _Step | None = None

    @contextmanager
    def step(self, batch: AttentionBatch, kv_cache: Tensor) -> Iterator[_Step]:
        """Serve the calls of one forward pass over `batch`."""
        self._step = _Step(self.ops.plan(batch), kv_cache)
        try:
            yield self._step
        finally:
            self._step = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend from query [1, heads, T, head_dim]; returns [1, T, heads, head_dim]."""
        step = self._step
        if step is None:
            raise RuntimeError("attention was called outside of a step")
        layer = self._layer(module, key, value)
        self._refuse(module, layer, attention_mask, sliding_window, others)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        kv_layer = step.kv_cache[:, layer]
        self.ops.write_kv(key, value, kv_layer, step.plan)
        attended = self.ops.attend(
            query,
            kv_layer,
            step.plan,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            soft_cap=softcap,
        )
        step.layers.append(layer)
        return attended[None], None

    def _layer(self, module: nn.Module, key: Tensor, value: Tensor) -> int:
        config = self._config
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= layer < config.num_layers:
            raise self._error(f"an attention layer is number {layer!r} of {config.num_layers}")
        expected = (config.num_kv_heads, config.head_dim)
        for name, x in (("keys", key), ("values", value)):
            if (shape := (x.shape[1], x.shape[3])) != expected:
                raise self._error(
                    f"layer {layer} has {shape[0]} heads of {shape[1]} for {name}; the cache "
                    f"would hold {expected[0]} of {expected[1]}"
                )
        return layer

    def _refuse(
        self,
        module: nn.Module,
        layer: int,
        mask: Tensor | None,
        window: int | None,
        others: dict[str, Any],
    ) -> None:
        """Raise for what would change the result and what we do not compute."""
        if mask is not None:
            raise self._error("it makes attention masks of its own")
        if getattr(module, "is_causal", True) is False:
            raise self._error("its attention is not causal")
        if self._config.has_window[layer] and window is None:
            raise self._error(f"layer {layer} sees a window that it does not tell to attention")
        for name, extra in others.items():
            if isinstance(extra, Tensor) and name not in _UNUSED_TENSORS:
                raise self._error(f"its attention depends on {name!r}")

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self._config.architecture} cannot be served: {reason}")


class _Given(nn.Module):
    """Stands in for a model without its head: gives the hidden states that it was told."""

    hidden: Tensor

    def forward(self, *_args: Any, **_others: Any) -> Any:
        """Return them as transformers' models do."""
        return _Output(last_hidden_state=self.hidden)


class _Output(SimpleNamespace):
    """A model's output: by name or by index."""

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class FallbackModel:
    """A model of transformers over the paged cache; a `CausalModel`."""

    def __init__(
        self, config: FallbackConfig, model: Any, attention: PagedAttention, max_positions: int
    ) -> None:
        self.config = config
        self.max_positions = max_positions
        self._attention = attention
        self._body = model.base_model
        # The head with all that a model does to its logits: its own class over given states.
        self._given = _Given()
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: self._given}  # noqa: SLF001

    @property
    def description(self) -> ModelDescription:
        """How it is computed."""
        tensors = [*self._head.parameters(), *self._body.parameters()]
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        return ModelDescription(
            path="transformers",
            quantization=None,
            weight_bytes=sum(sizes.values()),
            dtype=tensors[0].dtype,
            attention=self._attention.ops.describe(),
            products=("transformers' own",),
        )

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = next(self._body.parameters()).device
        return device

    def hidden(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Compute a step but for the head, writing the cache; return `rows` [R, hidden_size]."""
        if step.adapters is not None:
            raise ValueError("adapters are for our own decoder only")
        with self._attention.step(step.batch, kv_cache) as attended:
            output = self._body(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None],
                use_cache=False,
            )
        if sorted(attended.layers) != list(range(self.config.num_layers)):
            raise ModelError(
                f"{self.config.architecture} cannot be served: {len(set(attended.layers))} of its "
                f"{self.config.num_layers} layers attend through transformers' interface"
            )
        hidden: Tensor = output[0][0][step.rows]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of hidden rows [R, hidden_size]."""
        self._given.hidden = hidden[None]
        logits: Tensor = self._head(input_ids=None, inputs_embeds=hidden[None]).logits[0]
        return logits


def load_fallback(
    folder: Path,
    config: FallbackConfig,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionOps,
) -> FallbackModel:
    """Load a model through transformers and prove that it can be served.

    Raises `ModelError` naming what stands against it.
    """
    weight_files(folder)  # says what is wrong with them in our words
    paged = PagedAttention(config, attention)
    model = _from_pretrained(folder, paged, dtype).to(device)
    loaded = FallbackModel(config, model, paged, max_positions)
    try:
        check_tokens_meet_in_attention_only(loaded, dtype)
    except ModelError:
        raise
    except Exception as error:
        # The code of a model that we have not seen may raise anything.
        raise ModelError(
            f"{config.architecture} cannot be served: a forward pass fails: {error!r}"
        ) from error
    return loaded


def _from_pretrained(folder: Path, paged: PagedAttention, dtype: torch.dtype) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    # transformers looks functions up by name; one of its own for each model that is loaded.
    name = f"inferq_paged_{id(paged)}"
    AttentionInterface.register(name, paged)
    try:
        model, report = from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=name,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        # Whatever transformers raises while it loads, at the edge it is one error.
        raise ModelError(f"{folder}: transformers cannot load it: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := report.get(kind):
            raise ModelError(f"{folder}: {kind.replace('_keys', '')} tensors: {sorted(names)[:5]}")
    return model.eval()
