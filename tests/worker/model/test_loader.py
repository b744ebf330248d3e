"""Weights that fit, and files that do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferq.kernels.native.library import load_native
from inferq.protocol.errors import ModelError

Make = Callable[..., Any]
NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(make_model: Make, tmp_path: Path) -> Path:
    """A tiny untied model in a folder that the test may spoil."""
    return Path(shutil.copytree(make_model(), tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / NAME)
    change(tensors)
    save_file(tensors, folder / NAME)


def split_in_two(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tensors = load_file(folder / NAME)
    names = sorted(tensors)
    halves = tuple({name: tensors[name] for name in part} for part in (names[::2], names[1::2]))
    (folder / NAME).unlink()
    for index, half in enumerate(halves):
        save_file(half, folder / f"model-{index + 1:05}-of-00002.safetensors")
    return halves[0], halves[1]


def logits(driver_of: Make, folder: Path) -> Tensor:
    driver = driver_of(folder)
    (result,) = driver.step([(driver.sequence([5, 6, 7]), 3)])
    return Tensor(result)


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_load_like_one_file(driver_of: Make, folder: Path, with_index: bool) -> None:
    expected = logits(driver_of, folder)
    halves = split_in_two(folder)
    if with_index:
        files = {n: f"model-{i + 1:05}-of-00002.safetensors" for i in (0, 1) for n in halves[i]}
        (folder / INDEX).write_text(json.dumps({"weight_map": files}))
        save_file(halves[0], folder / "consolidated.safetensors")
    assert torch.equal(logits(driver_of, folder), expected)


def test_16_bit_weights_are_converted_on_the_way(driver_of: Make, folder: Path) -> None:
    expected = logits(driver_of, folder)
    rewrite(folder, lambda t: t.update({n: x.bfloat16() for n, x in t.items()}))
    result = logits(driver_of, folder)
    assert result.dtype == torch.float32
    assert 0 < (result - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.skipif(load_native() is None, reason="our own kernels multiply it")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_16_bit_head_stays_so_and_gives_the_same_logits_in_float32(
    make_model: Make, driver_of: Make, tmp_path: Path, tied: bool, narrow: torch.dtype
) -> None:
    folder = Path(shutil.copytree(make_model(tie_word_embeddings=tied), tmp_path / "copy"))
    rewrite(folder, lambda t: t.update({n: x.to(narrow).float() for n, x in t.items()}))
    expected = logits(driver_of, folder)
    rewrite(folder, lambda t: t.update({n: x.to(narrow) for n, x in t.items()}))
    driver = driver_of(folder)
    (result,) = driver.step([(driver.sequence([5, 6, 7]), 3)])
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    # 97 rows, in panels of at most 32.
    assert driver.decoder.head.nbytes <= 128 * 64 * 2


def test_tied_embeddings_load_alike_with_and_without_a_head(
    make_model: Make, driver_of: Make, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_model(tie_word_embeddings=True), tmp_path / "copy"))
    expected = logits(driver_of, folder)
    assert "lm_head.weight" not in load_file(folder / NAME)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(driver_of, folder), expected)


def test_exports_of_the_bare_model_load_alike(
    make_model: Make, driver_of: Make, tmp_path: Path
) -> None:
    """GPT-2's published file leaves `transformer.` out, and holds masks beside the weights."""
    settings = {"num_key_value_heads": 4, "n_embd": 64, "n_layer": 2, "n_head": 4}
    folder = Path(shutil.copytree(make_model("GPT2", **settings), tmp_path / "copy"))
    expected = logits(driver_of, folder)
    tensors = load_file(folder / NAME)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "h.0.attn.c_attn.bias" in bare
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, folder / NAME)
    assert torch.equal(logits(driver_of, folder), expected)


def test_rotary_frequencies_of_old_exports_are_ignored(driver_of: Make, folder: Path) -> None:
    expected = logits(driver_of, folder)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(folder, lambda tensors: tensors.update(buffer))
    assert torch.equal(logits(driver_of, folder), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), f"lacks {DOWN}$"),
        (lambda t: t.pop("lm_head.weight"), r"lacks lm_head\.weight$"),
        (
            lambda t: t.update({DOWN: t[DOWN].T.contiguous()}),
            r"shape \[96, 64\].* for \[64, 96",
        ),
        (lambda t: t.update(stray=torch.ones(1)), "holds stray, which this architecture does not"),
        (lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}), f"{DOWN} has dtype I8; supported: "),
        (lambda t: t.clear() or t.update(x=torch.ones(1)), "lacks .*, .* and 25 more"),
    ],
    ids=["missing", "untied head missing", "misshapen", "extra", "not floats", "nothing right"],
)
def test_tensors_that_do_not_fit_are_named(
    driver_of: Make, folder: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        driver_of(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_file_is_damaged(driver_of: Make, folder: Path, keep: float) -> None:
    content = (folder / NAME).read_bytes()
    size = keep if isinstance(keep, int) else int(len(content) * keep)
    (folder / NAME).write_bytes(content[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or incomplete"):
        driver_of(folder)


def test_a_truncated_shard_is_named(driver_of: Make, folder: Path) -> None:
    halves = split_in_two(folder)
    shards = [folder / f"model-{index}-of-00002.safetensors" for index in ("00001", "00002")]
    files = {name: path.name for half, path in zip(halves, shards, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is damaged or"):
        driver_of(folder)


def test_a_tensor_in_two_files_is_refused(driver_of: Make, folder: Path) -> None:
    first, second = split_in_two(folder)
    save_file({**second, DOWN: torch.ones(64, 96)}, folder / "model-00002-of-00002.safetensors")
    save_file({**first, DOWN: torch.ones(64, 96)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match=f"{DOWN} stands in another file too"):
        driver_of(folder)


def test_a_shard_that_the_index_names_must_be_there(driver_of: Make, folder: Path) -> None:
    first, _ = split_in_two(folder)
    files = dict.fromkeys(first, "model-00003-of-00003.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match=r"lacks model-00003-of-00003\.safetensors"):
        driver_of(folder)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_refused(driver_of: Make, folder: Path, index: str) -> None:
    (folder / INDEX).write_text(index)
    with pytest.raises(ModelError, match="is not a safetensors index"):
        driver_of(folder)


def test_pickles_are_refused(driver_of: Make, folder: Path) -> None:
    (folder / NAME).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"as pickles \(pytorch_model.bin\).*only safetensors"):
        driver_of(folder)


def test_a_folder_without_weights_is_refused(driver_of: Make, folder: Path) -> None:
    (folder / NAME).unlink()
    with pytest.raises(ModelError, match="has no safetensors files"):
        driver_of(folder)
