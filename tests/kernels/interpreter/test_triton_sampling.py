import pytest
import torch

from inferq.kernels import reference, triton_sampling

# One token, a slice that ends within a tile, several slices: `short_slices` makes them of 64.
SIZES = [1, 130]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    monkeypatch.setattr("inferq.kernels.triton_sampling.SLICE", 64)
    monkeypatch.setattr("inferq.kernels.triton_ranking.SLICE", 64)
    monkeypatch.setattr("inferq.kernels.triton_sampling._TILE", 32)
    monkeypatch.setattr("inferq.kernels.triton_ranking._TILE", 64)


def parameters(rows, *, temperature=(0.7,), top_k=(0,), top_p=(1.0,), min_p=(0.0,), seed=0):
    """Columns [rows] that repeat the given values."""

    def column(values, dtype):
        return torch.tensor([values[row % len(values)] for row in range(rows)], dtype=dtype)

    generator = torch.Generator().manual_seed(seed)
    return (
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        torch.arange(rows) % 3,
        torch.arange(rows) * 7,
    )


def random_logits(rows, size, *, scale=3.0, padding=3):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size + padding, generator=generator) * scale
    logits[:, size:] = 1e9  # beyond the vocabulary: never sampled
    return logits


def assert_same_tokens(logits, params, size, **options):
    before = logits.clone()
    tokens, highest = triton_sampling.sample_tokens(logits, *params, size, **options)
    expected = reference.sample_tokens(logits, *params, size, options.get("sources"))
    assert tokens.tolist() == expected[0].tolist()
    assert torch.equal(highest, expected[1])
    assert torch.equal(logits, before)
    return tokens


LIMITS = {
    "greedy": {"temperature": [0.0]},
    "none": {},
    "min_p": {"min_p": [0.05, 1.0, 0.5]},
    "top_k": {"top_k": [1, 2, 63, 1000]},
    "top_p": {"top_p": [0.9, 0.5, 0.01, 0.999]},
    "all": {"top_k": [3, 40], "top_p": [0.8, 1.0, 0.6], "min_p": [0.01, 0.0]},
    "mixed": {
        "temperature": [0.0, 1.0, 5.0, 0.7],
        "top_k": [4, 5, 0, 0],
        "top_p": [0.5, 0.7, 1.0, 0.9],
        "min_p": [0.0, 0.0, 0.1, 0.0],
    },
}
RANKED = ("top_k", "top_p", "all")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_tokens_are_the_references(size, limits):
    assert_same_tokens(random_logits(4, size), parameters(4, **limits), size)


@pytest.mark.parametrize("limits", RANKED)
def test_equal_logits_are_kept_lowest_ids_first(limits):
    """Few distinct values: every limit cuts through equals, over several slices."""
    rows, size = 3, 130
    logits = random_logits(rows, size).div(3).round()
    assert_same_tokens(logits, parameters(rows, **LIMITS[limits], seed=3), size)


def test_top_k_among_equals_draws_every_one_of_the_lowest_ids_and_no_other():
    rows, size = 6, 66
    logits = torch.zeros(rows, size)
    logits[:, :62] = -1.0
    tokens = assert_same_tokens(logits, parameters(rows, temperature=[1.0], top_k=[2]), size)
    assert set(tokens.tolist()) == {62, 63}


def test_half_of_the_mass_of_equals_is_half_of_them():
    rows, size = 5, 4
    params = parameters(rows, temperature=[1.0], top_p=[0.5])
    tokens = assert_same_tokens(torch.zeros(rows, size), params, size)
    assert set(tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("scale", [1e-6, 30.0, 3000.0])
def test_flat_and_steep_rows_agree(scale):
    rows, size = 2, 100
    limits = {"top_k": [0, 20], "top_p": [0.9, 0.7]}
    assert_same_tokens(random_logits(rows, size, scale=scale), parameters(rows, **limits), size)


def test_banned_tokens_are_never_drawn():
    rows, size = 2, 70
    logits = random_logits(rows, size)
    logits[:, :67] = -torch.inf
    limits = {"top_k": [0, 20], "top_p": [0.9, 1.0]}
    tokens = assert_same_tokens(logits, parameters(rows, **limits), size)
    assert set(tokens.tolist()) <= {67, 68, 69}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_that_are_not_finite_are_reported_and_harm_no_other():
    size = 70
    logits = random_logits(6, size)
    logits[1, 66] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, 0] = torch.nan
    limits = {"top_k": [0, 0, 0, 5], "top_p": [1.0, 0.9, 1.0, 1.0]}
    for temperature in (0.0, 0.7):
        params = parameters(6, **(limits | {"temperature": [temperature]}))
        tokens, highest = triton_sampling.sample_tokens(logits, *params, size)
        assert highest.isfinite().tolist() == [True, False, False, False, False, True]
        assert highest[3] == -torch.inf
        assert ((tokens >= 0) & (tokens < size)).all()
        good = [0, 5]
        expected = reference.sample_tokens(
            logits[good], *(column[good] for column in params), size
        )[0]
        assert tokens[good].tolist() == expected.tolist()


def test_several_samples_of_one_row_and_none_of_another_agree():
    size = 66
    sources = torch.tensor([0, 0, 2])
    params = parameters(3, top_k=[0, 7], top_p=[1.0, 1.0, 0.9])
    assert_same_tokens(random_logits(3, size), params, size, sources=sources)


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"temperature": [0.0]}, (False, False, False)),
        ({}, (True, False, False)),
        ({"top_k": [4]}, (True, True, False)),
        ({"top_p": [0.8]}, (True, False, True)),
    ],
)
def test_kernels_that_nobody_needs_may_be_left_out(limits, wanted):
    size = 66
    names = ("with_draws", "with_top_k", "with_top_p")
    options = dict(zip(names, wanted, strict=True))
    assert_same_tokens(random_logits(2, size), parameters(2, **limits), size, **options)


def test_no_samples_are_no_work():
    tokens, highest = triton_sampling.sample_tokens(torch.zeros(0, 9), *parameters(0), 9)
    assert tokens.shape == highest.shape == (0,)


def test_nothing_is_read_back_from_the_device():
    size = 70
    logits, params = random_logits(2, size), parameters(2, **LIMITS["all"])

    def read(*_):
        raise AssertionError("the host waits for the device")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__"):
            patch.setattr(torch.Tensor, name, read)
        tokens, _ = triton_sampling.sample_tokens(logits, *params, size)
    assert tokens.tolist() == reference.sample_tokens(logits, *params, size)[0].tolist()
