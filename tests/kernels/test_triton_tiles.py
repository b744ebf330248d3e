from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from inferq.kernels.attention import HEAD_DIMS
from inferq.kernels.triton_decode import decode_tile
from inferq.kernels.triton_pages import architecture
from inferq.kernels.triton_prefill import prefill_tile, tile_tokens


@pytest.mark.parametrize(
    ("capability", "row"),
    [
        ((7, 5), 80),
        ((8, 0), 80),
        ((8, 6), 80),
        ((8, 9), 80),
        ((9, 0), 90),
        ((10, 0), 100),
        ((10, 3), 100),
        ((12, 0), 80),  # has an sm_8x consumer device's shared memory
    ],
)
def test_every_device_finds_the_tiles_that_fit_it(monkeypatch, capability, row):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert architecture(torch.device("cuda")) == row


@pytest.mark.parametrize(
    ("head_dim", "element_size", "row"), list(product(HEAD_DIMS, (2, 4), (80, 90, 100)))
)
def test_every_cache_has_tiles_on_every_architecture(head_dim, element_size, row):
    decode = decode_tile(head_dim, element_size, row)
    prefill = prefill_tile(head_dim, element_size, row)
    # Splits are multiples of 128 tokens: a tile that does not divide it reads beyond its split.
    assert 128 % decode.tokens == 0
    assert decode.tokens >= 16
    assert prefill.rows >= 16
    assert prefill.keys >= 16


@pytest.mark.parametrize(("group", "tokens"), [(1, 128), (4, 32), (7, 18), (71, 1), (200, 1)])
def test_a_tile_holds_the_heads_of_whole_tokens(group, tokens):
    assert tile_tokens(prefill_tile(128, 2, 90), group) == tokens
