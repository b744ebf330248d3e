import pytest
import torch

from inferq.kernels import reference, triton_block_copy

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def cache(dtype, blocks=7, shape=(2, 2, 16, 1, 8)):
    return torch.randn(blocks, *shape).to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 2, 16, 1, 8), (1, 2, 1, 1, 4), (3, 2, 16, 3, 64)])
def test_copied_blocks_are_the_references(dtype, shape):
    blocks = cache(dtype, shape=shape)
    expected = blocks.clone()
    moves = [(0, 3), (0, 5), (6, 1)]
    reference.copy_blocks(expected, moves)
    triton_block_copy.copy_blocks(blocks, moves)
    assert torch.equal(blocks, expected)


@pytest.mark.parametrize(
    "moves",
    [
        [(0, 1), (1, 2), (2, 3)],  # what was just written is read
        [(0, 1), (2, 0), (3, 2)],  # what was just read is overwritten
        [(0, 1), (2, 1)],
        [(4, 4)],
    ],
)
def test_moves_act_one_after_the_other(moves):
    blocks = cache(torch.float32)
    expected = blocks.clone()
    reference.copy_blocks(expected, moves)
    triton_block_copy.copy_blocks(blocks, moves)
    assert torch.equal(blocks, expected)


def test_independent_moves_are_one_launch(monkeypatch):
    launches = []
    monkeypatch.setattr(
        triton_block_copy, "_launch", lambda *arguments: launches.append(arguments[3].tolist())
    )
    triton_block_copy.copy_blocks(cache(torch.float32), [(0, 3), (0, 4), (1, 5), (2, 6)])
    triton_block_copy.copy_blocks(cache(torch.float32), [(0, 3), (3, 4), (1, 5)])
    triton_block_copy.copy_blocks(cache(torch.float32), [])
    assert launches == [[0, 0, 1, 2], [0], [3, 1]]


@DTYPES
def test_blocks_go_to_a_staging_buffer_and_back(dtype):
    blocks = cache(dtype)
    index = torch.tensor([5, 0, 3])
    staging = cache(dtype, blocks=4)
    last = staging[3].clone()
    triton_block_copy.gather_blocks(blocks, index, staging)
    assert torch.equal(staging[:3], blocks[index])
    assert torch.equal(staging[3], last)
    other = cache(dtype)
    expected = other.clone()
    expected[index] = blocks[index]
    triton_block_copy.scatter_blocks(staging, index, other)
    assert torch.equal(other, expected)


def test_blocks_that_are_not_alike_are_refused():
    index = torch.tensor([0])
    with pytest.raises(ValueError, match="not alike"):
        triton_block_copy.gather_blocks(cache(torch.float32), index, cache(torch.float16))
    with pytest.raises(ValueError, match="multiple of 16 bytes, not 12"):
        triton_block_copy.copy_blocks(torch.zeros(2, 3), [(0, 1)])
