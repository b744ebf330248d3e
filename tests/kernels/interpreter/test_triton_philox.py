import torch
import triton
import triton.language as tl

from inferq.kernels.gumbel import philox


@triton.jit
def _philox_kernel(out_ptr, seed_ptr, counter_ptr, COUNT: tl.constexpr):  # noqa: N803
    index = tl.arange(0, COUNT)
    seed = tl.load(seed_ptr + index)
    c0 = tl.load(counter_ptr + index)
    c1 = tl.load(counter_ptr + COUNT + index)
    c2 = tl.load(counter_ptr + 2 * COUNT + index)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, tl.zeros([COUNT], tl.int32))
    tl.store(out_ptr + index, w0.to(tl.int64))
    tl.store(out_ptr + COUNT + index, w1.to(tl.int64))
    tl.store(out_ptr + 2 * COUNT + index, w2.to(tl.int64))
    tl.store(out_ptr + 3 * COUNT + index, w3.to(tl.int64))


def test_philox_gives_the_same_integers_as_triton():
    count = 256
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    counters = torch.randint(0, 2**31 - 1, (3, count), generator=generator)
    out = torch.zeros(4, count, dtype=torch.int64)
    _philox_kernel[(1,)](out, seeds, counters.int(), COUNT=count)
    assert torch.equal(torch.stack(philox(seeds, *counters)), out)
