"""Histograms: values at their bounds, many at once."""

from __future__ import annotations

import math
import random

from inferq.runtime.histogram import Histogram


def test_a_value_at_a_bound_is_below_it_and_one_beyond_all_is_counted() -> None:
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 1.5, 10, 11):
        histogram.observe(value)
    assert histogram.cumulative() == [(1, 2), (10, 4), (math.inf, 5)]
    assert (histogram.count, histogram.total) == (5, 24)


def test_many_equal_values_are_one_call() -> None:
    rng = random.Random(0)
    single, many = Histogram((0.1, 0.2, 0.5)), Histogram((0.1, 0.2, 0.5))
    for _ in range(100):
        value, times = rng.random(), rng.randrange(5)
        many.observe(value, times)
        for _ in range(times):
            single.observe(value)
    assert many.cumulative() == single.cumulative()
    assert math.isclose(many.total, single.total)


def test_nothing_observed_is_zero_everywhere() -> None:
    histogram = Histogram((1,))
    assert histogram.cumulative() == [(1, 0), (math.inf, 0)]
    assert (histogram.count, histogram.total) == (0, 0)
