"""Random work on tiny pools: the books balance after every step, every answer is the undisturbed
one, and the pool is whole at the end."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.protocol.messages import FinishReason

_prompt = st.builds(
    lambda prefix, tail: [7] * prefix + tail,
    st.integers(0, 24),
    st.lists(st.integers(3, 5), min_size=1, max_size=12),
)
_add = st.fixed_dictionaries(
    {
        "prompt": _prompt,
        "max_tokens": st.one_of(st.none(), st.integers(1, 30)),
        "priority": st.integers(-1, 1),
        "arrival": st.sampled_from([0.0, 1.0, 2.0]),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (9, 10, 11)]),
        "cache_salt": st.sampled_from(["", "", "other"]),
        "published": st.integers(0, 6),
    }
)
_operation = st.one_of(
    st.tuples(st.just("add"), _add),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 40)),
    st.tuples(st.just("preempt"), st.integers(0, 40)),
    st.tuples(st.just("fail"), st.none()),
)


def drive(sim, operations):
    """Apply the operations, then run to the end; return the names of the aborted."""
    aborted = set()
    for kind, argument in operations:
        if kind == "add":
            add(sim, argument)
        elif kind == "step":
            for _ in range(argument):
                sim.step()
        elif kind == "abort" and sim.requests:
            name = sorted(sim.requests)[argument % len(sim.requests)]
            if sim.engine.abort(name):
                aborted.add(name)
        elif kind == "preempt":
            running = [s for s in sim.engine.live_sequences() if s.block_table]
            if running:
                sim.engine._scheduler.preempt(running[argument % len(running)])
        elif kind == "fail" and any(s.num_tokens for s in sim.engine.live_sequences()):
            fail_one_step(sim)
        sim.check_books()
    sim.run()
    return aborted


def add(sim, options):
    """Queue a request, some as if an earlier run had published the first of its tokens."""
    options = dict(options)
    name = f"r{len(sim.requests)}"
    published, prompt = options.pop("published"), options.pop("prompt")
    if published:
        scratch = type(sim)(len(sim.runner.cache), max_model_len=sim.engine.max_model_len)
        scratch.max_length = sim.max_length
        scratch.add(name, prompt, **options)
        options["output_token_ids"] = tuple(scratch.expected(name)[0][:published])
    sim.add(name, prompt, **options)


def fail_one_step(sim):
    sim.runner.fail_next = True
    with contextlib.suppress(OSError):  # a step with nothing to compute does not reach the runner
        sim.step()
    sim.runner.fail_next = False


def check_all(sim, aborted):
    for name, request in sim.requests.items():
        if name in aborted:
            continue
        last = sim.answers[name].last
        capacity = len(sim.runner.cache) * sim.config.block_size
        if len(request.prompt_token_ids) > capacity and not request.output_token_ids:
            assert last.finish_reason is FinishReason.ERROR, name
            assert last.error.limit == str(capacity)
        else:
            sim.check_answer(name)
    sim.check_pool_is_whole()


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(
    operations=st.lists(_operation, max_size=40),
    num_blocks=st.integers(1, 14),
    max_num_seqs=st.integers(1, 5),
    spare_budget=st.integers(0, 20),
    caching=st.booleans(),
    max_model_len=st.sampled_from([40, 200]),
)
def test_any_history_ends_in_the_undisturbed_answers(
    simulation, operations, num_blocks, max_num_seqs, spare_budget, caching, max_model_len
):
    sim = simulation(
        num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare_budget,
        enable_prefix_caching=caching,
    )
    check_all(sim, drive(sim, operations))


def random_operations(rng: random.Random, count: int):
    for _ in range(count):
        kind = rng.choices(["add", "step", "abort", "preempt", "fail"], [30, 50, 5, 8, 2])[0]
        if kind != "add":
            yield kind, rng.randint(1, 4) if kind == "step" else rng.randrange(1000)
            continue
        yield (
            kind,
            {
                "prompt": [7] * rng.choice([0, 9, 20, 33])
                + [rng.randint(3, 5) for _ in range(rng.randint(1, 20))],
                "max_tokens": rng.randint(1, 40),
                "priority": rng.randint(-1, 1),
                "arrival": float(rng.randrange(5)),
                "ignore_eos": rng.random() < 0.5,
                "published": rng.choice([0, 0, 0, 5]),
            },
        )


@pytest.mark.parametrize("seed", range(6))
def test_a_long_busy_history_with_preemptions_and_shared_prefixes(simulation, seed: int):
    rng = random.Random(seed)
    sim = simulation(
        rng.choice([16, 24, 40]), max_num_seqs=12, max_num_batched_tokens=rng.choice([12, 30, 64])
    )
    aborted = drive(sim, random_operations(rng, 400))
    check_all(sim, aborted)
    stats = sim.engine.stats()
    assert stats.num_steps > 300
    assert stats.num_preemptions > 20
    assert stats.prefix_hit_tokens > 100
