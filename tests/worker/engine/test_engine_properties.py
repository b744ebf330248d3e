"""Random work on tiny pools: the books balance after every step, every answer is the undisturbed
one, and the pools are whole at the end."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.protocol.messages import FinishReason
from inferq.worker.engine.requests.sequence import ResumedOutput
from inferq.worker.engine.scheduling.plan import RunnerSpeeds

_prompt = st.builds(
    lambda prefix, tail: [7] * prefix + tail,
    st.integers(0, 24),
    st.lists(st.integers(3, 5), min_size=1, max_size=12),
)
_outputs = st.sampled_from(
    [{}, {}, {"n": 2}, {"n": 4}, {"n": 1, "best_of": 3}]
    + [{"beam_width": width, "n": n} for width, n in ((2, 1), (3, 2), (4, 4))]
    + [{"beam_width": 3, "n": 3, "early_stopping": True}]
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
        "published": st.lists(st.integers(0, 6), max_size=4),
        "logprobs": st.sampled_from([None, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "outputs": _outputs,
    }
)
_target = st.tuples(st.integers(0, 40), st.integers(0, 4))
_operation = st.one_of(
    st.tuples(st.just("add"), _add),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), _target),
    st.tuples(st.just("abort output"), _target),
    st.tuples(st.just("recompute"), _target),
    st.tuples(st.just("swap"), _target),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("fail late"), st.none()),
    st.tuples(st.just("reset"), st.none()),
)


def drive(sim, operations):
    """Apply the operations, then run to the end; return what was aborted, as (name, index)."""
    aborted = set()
    for kind, argument in operations:
        if kind == "add":
            add(sim, argument)
        elif kind == "step":
            for _ in range(argument):
                sim.step()
        elif kind == "fail":
            sim.fail_one_step()
        elif kind == "fail late":
            sim.fail_one_step(late=True)
        elif kind == "reset":
            sim.engine.reset_prefix_cache()
        elif kind in ("recompute", "swap"):
            running = [s for s in sim.engine.live_sequences() if s.block_table]
            if running:
                victim = running[argument[0] % len(running)]
                sim.preempt(victim.request_id, victim.child_index, by_swap=kind == "swap")
        elif sim.requests:
            names = sorted(sim.requests)
            name = names[argument[0] % len(names)]
            abort(sim, name, argument[1] if kind == "abort output" else None, aborted)
        sim.check_books()
    sim.run()
    return aborted


def abort(sim, name, index, aborted):
    if sim.engine.abort(name, index):
        aborted.add((name, index))


def add(sim, options):
    """Queue a request, some as if an earlier run had published the beginnings of its outputs."""
    options = {**options, **options["outputs"]}
    name = f"r{len(sim.requests)}"
    published, prompt = options.pop("published"), options.pop("prompt")
    del options["outputs"]
    num_outputs = min(options.get("n", 1), sim.config.max_num_seqs)
    if max(num_outputs, options.get("best_of", 0), options.get("beam_width", 0)) > num_outputs:
        published = []  # published at the end only
    if "beam_width" in options:
        published = []
        options.pop("logprobs", None)
        options = options if options["beam_width"] <= sim.config.max_num_seqs else {"max_tokens": 3}
    elif "best_of" in options and options["best_of"] > sim.config.max_num_seqs:
        del options["best_of"]
    elif "n" in options:
        options["n"] = num_outputs
    if any(published):
        options["resumed"] = resumed_outputs(sim, name, prompt, options, published[:num_outputs])
    sim.add(name, prompt, **options)


def resumed_outputs(sim, name, prompt, options, published):
    scratch = type(sim)(len(sim.runner.cache), max_model_len=sim.engine.max_model_len)
    scratch.max_length = sim.max_length
    scratch.add(name, prompt, **options)
    wholes = [scratch.expected(name, index).token_ids for index in range(len(published))]
    return tuple(
        ResumedOutput(tuple(whole[:count]), is_finished=count >= len(whole) and count % 2 == 1)
        for whole, count in zip(wholes, published, strict=True)
    )


def check_all(sim, aborted):
    for name, request in sim.requests.items():
        if (name, None) in aborted:
            continue
        last = sim.output(name).last
        if last is not None and last.finish_reason is FinishReason.ERROR:
            check_does_not_fit(sim, request, last)
            continue
        gone = {index for each, index in aborted if each == name}
        if not gone:
            sim.check_answer(name)
        elif request.params.beam_width is None:
            for index in set(range(request.params.num_candidates)) - gone:
                if index >= len(request.resumed) or not request.resumed[index].is_finished:
                    sim.check_answer(name, index)
    sim.check_pool_is_whole()


def check_does_not_fit(sim, request, last):
    num_blocks, size = len(sim.runner.cache), sim.config.block_size
    assert last.error.limit == str(num_blocks * size)
    prompt = len(request.prompt_token_ids)
    beams = request.params.beam_width
    needed = -(-prompt // size) if beams is None else prompt // size + beams
    assert needed > num_blocks, request


@pytest.mark.parametrize("launches_ahead", [False, True])
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    operations=st.lists(_operation, max_size=40),
    num_blocks=st.integers(1, 14),
    num_swap_blocks=st.sampled_from([0, 3, 8, 40]),
    max_num_seqs=st.integers(1, 7),
    spare_budget=st.integers(0, 20),
    caching=st.booleans(),
    max_model_len=st.sampled_from([40, 200]),
    threshold=st.sampled_from([0, 0, 3]),
    mode=st.sampled_from(["auto", "recompute", "swap"]),
    max_prompt_tokens=st.sampled_from([None, None, 2]),
)
def test_any_history_ends_in_the_undisturbed_answers(
    simulation,
    operations,
    num_blocks,
    num_swap_blocks,
    max_num_seqs,
    spare_budget,
    caching,
    max_model_len,
    threshold,
    mode,
    launches_ahead,
    max_prompt_tokens,
):
    sim = simulation(
        num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare_budget,
        num_swap_blocks=num_swap_blocks,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold,
        preemption_mode=mode,
        speeds=RunnerSpeeds(1000.0, 80_000.0, 100),  # swap pays for what fills its blocks
        launches_ahead=launches_ahead,
        max_prompt_tokens=max_prompt_tokens,
    )
    check_all(sim, drive(sim, operations))


def random_operations(rng: random.Random, count: int):
    kinds = ["add", "step", "abort", "abort output", "recompute", "swap"]
    kinds += ["fail", "fail late", "reset"]
    for _ in range(count):
        kind = rng.choices(kinds, [30, 50, 3, 3, 6, 6, 1, 1, 1])[0]
        if kind == "step":
            yield kind, rng.randint(1, 4)
        elif kind != "add":
            yield kind, (rng.randrange(1000), rng.randrange(4))
        else:
            yield kind, random_request(rng)


def random_request(rng: random.Random):
    outputs = [{}, {}, {"n": 2}, {"n": 4}, {"best_of": 3}]
    outputs += [{"beam_width": 2}, {"beam_width": 4, "n": 3}]
    return {
        "prompt": [7] * rng.choice([0, 9, 20, 33])
        + [rng.randint(3, 5) for _ in range(rng.randint(1, 20))],
        "max_tokens": rng.randint(1, 40),
        "priority": rng.randint(-1, 1),
        "arrival": float(rng.randrange(5)),
        "ignore_eos": rng.random() < 0.5,
        "published": rng.choice([[], [], [], [5], [3, 0, 7]]),
        "outputs": rng.choice(outputs),
    }


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_long_busy_history_with_preemptions_and_shared_prefixes(
    simulation, seed: int, launches_ahead: bool
):
    rng = random.Random(seed)
    sim = simulation(
        rng.choice([16, 24, 40]),
        max_num_seqs=12,
        max_num_batched_tokens=rng.choice([12, 30, 64]),
        num_swap_blocks=rng.choice([10, 30]),
        preemption_mode=("swap", "auto", "recompute", "auto")[seed % 4],
        speeds=RunnerSpeeds(1000.0, 80_000.0, 100),
        launches_ahead=launches_ahead,
    )
    aborted = drive(sim, random_operations(rng, 400))
    check_all(sim, aborted)
    stats = sim.engine.stats()
    assert stats.num_steps > 300
    assert stats.num_preemptions > 20
    assert stats.num_swaps > 0
    assert stats.prefix_hit_tokens > 100
    assert sim.runner.num_copies > 10


def random_engine(simulation, rng: random.Random):
    """An engine of any shape: pools from one block up, blocks from one token up."""
    num_seqs = rng.randint(4, 14)
    return simulation(
        rng.randint(1, 30),
        block_size=rng.choice([1, 2, 4, 8]),
        max_model_len=rng.choice([60, 200]),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + rng.randint(0, 30),
        num_swap_blocks=rng.choice([0, 2, 5, 10, 30]),
        preemption_mode=rng.choice(["swap", "auto", "recompute"]),
        speeds=RunnerSpeeds(1000.0, 80_000.0, 100),
        long_prefill_token_threshold=rng.choice([0, 0, 3, 7]),
        enable_prefix_caching=rng.random() < 0.7,
        launches_ahead=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(5))
def test_short_histories_on_engines_of_all_shapes(simulation, seed: int):
    rng = random.Random(seed)
    for _ in range(16):
        sim = random_engine(simulation, rng)
        aborted = drive(sim, random_operations(rng, rng.randint(10, 120)))
        check_all(sim, aborted)
