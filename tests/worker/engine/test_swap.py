"""Preemption by swap: what moves, what stays shared, when it pays, and what it falls back to."""

import pytest

from inferq.worker.engine.blocks.host_pool import HostPool
from inferq.worker.engine.scheduling.plan import RunnerSpeeds

NO_END = {"ignore_eos": True}


def swapped(sim, name="a"):
    """Swap a request out and return the plan that did it."""
    sim.preempt(name, by_swap=True)
    sim.step()
    return next(plan for plan in reversed(sim.step_plans) if plan.swap_out)


def test_a_swapped_sequence_goes_on_without_computing_anything_again(simulation):
    sim = simulation(16, num_swap_blocks=16)
    sim.add("a", [*range(3, 16)], max_tokens=12, **NO_END)
    sim.step()
    sim.step()
    swapped(sim)
    stats = sim.engine.stats()
    assert (stats.num_swapped, stats.swap_blocks_used, stats.blocks_used) == (1, 4, 0)
    sim.run()
    assert sim.runner.computed_tokens == 13 + 11
    assert sim.engine.stats().num_swaps == 1
    sim.check_answer("a")
    sim.check_pool_is_whole()


def test_shared_blocks_move_once_and_come_back_shared(simulation):
    sim = simulation(32, num_swap_blocks=32)
    sim.add("a", [*range(3, 16)], n=4, max_tokens=12, **NO_END)
    for _ in range(3):
        sim.step()
    used = sim.engine.stats().blocks_used
    assert used == 3 + 4
    plan = swapped(sim)
    assert len(plan.swap_out) == used
    assert sim.engine.stats().swap_blocks_used == used
    sim.step()
    assert len(sim.step_plans[-1].swap_in) == used
    assert sim.engine.stats().blocks_used == used
    sim.run()
    sim.check_answer("a")


def test_blocks_shared_with_another_request_stay_with_that(simulation):
    sim = simulation(32, num_swap_blocks=32)
    sim.add("a", [*range(3, 16)], max_tokens=12, **NO_END)
    sim.step()
    sim.add("b", [*range(3, 15), 7], max_tokens=12, **NO_END)
    sim.step()
    swapped(sim, "b")
    sim.run()
    sim.check_answer("a")
    sim.check_answer("b")
    sim.check_pool_is_whole()


def test_the_last_in_order_is_swapped_when_a_running_sequence_needs_a_block(simulation):
    sim = simulation(6, num_swap_blocks=8, preemption_mode="swap")
    sim.add("first", [3] * 8, max_tokens=12, **NO_END)
    sim.add("second", [4] * 8, max_tokens=12, **NO_END)
    sim.run_until(lambda stats: stats.num_swapped == 1)
    sim.run()
    assert sim.runner.computed_tokens == 2 * (8 + 11), "nothing is computed twice"
    sim.check_answer("first")
    sim.check_answer("second")


def test_a_full_host_pool_falls_back_to_recompute(simulation):
    sim = simulation(6, num_swap_blocks=1, preemption_mode="swap")
    sim.add("first", [3] * 8, max_tokens=12, **NO_END)
    sim.add("second", [4] * 8, max_tokens=12, **NO_END)
    sim.run()
    stats = sim.engine.stats()
    assert (stats.num_preemptions, stats.num_swaps) == (1, 0)
    sim.check_answer("second")


def test_abort_of_a_swapped_request_frees_its_host_blocks_at_once(simulation):
    sim = simulation(16, num_swap_blocks=16)
    sim.add("a", [*range(3, 16)], n=3, max_tokens=12, **NO_END)
    sim.step()
    sim.step()
    swapped(sim)
    held = sim.engine.stats().swap_blocks_used
    assert held > 0
    assert sim.engine.abort("a", 1)
    sim.check_books()
    assert sim.engine.stats().swap_blocks_used < held
    assert sim.engine.abort("a")
    sim.check_pool_is_whole()


def test_swapped_requests_go_before_waiting_ones_of_their_priority(simulation):
    sim = simulation(6, num_swap_blocks=8, preemption_mode="swap")
    sim.add("first", [3] * 8, max_tokens=12, arrival=5.0, **NO_END)
    sim.add("second", [4] * 8, max_tokens=12, arrival=6.0, **NO_END)
    sim.run_until(lambda stats: stats.num_swapped == 1)
    sim.add("early", [5], max_tokens=2, arrival=0.0, **NO_END)
    sim.add("urgent", [6], max_tokens=2, arrival=9.0, priority=-1, **NO_END)
    at = len(sim.plans)
    sim.run()
    order = [name for plan in sim.plans[at:] for name, _ in plan]
    assert order.index("urgent") < order.index("second") < order.index("early")


def test_blocks_never_move_in_both_directions_in_one_step(simulation):
    """The stand-in runner checks it; here both would be due in one step."""
    sim = simulation(12, num_swap_blocks=24, preemption_mode="swap")
    sim.add("a", [3] * 9, max_tokens=20, **NO_END)
    sim.add("b", [4] * 9, max_tokens=20, **NO_END)
    sim.step()
    swapped(sim, "a")
    sim.preempt("b", by_swap=True)
    sim.step()
    assert sim.step_plans[-1].swap_out
    assert not sim.step_plans[-1].swap_in
    sim.run()
    sim.check_answer("a")
    sim.check_answer("b")


def test_who_gives_way_while_another_comes_back_is_computed_again(simulation):
    sim = simulation(
        11,
        num_swap_blocks=16,
        preemption_mode="swap",
        long_prefill_token_threshold=4,
        max_num_seqs=4,
    )
    sim.add("low", [5] * 12, max_tokens=30, priority=1, **NO_END)
    sim.add("high", [3] * 8, max_tokens=30, priority=-1, **NO_END)
    sim.step()
    sim.add("prompt", [4] * 24, max_tokens=5, **NO_END)
    for _ in range(3):
        sim.step()
    swapped(sim, "high")
    sim.step()
    assert sim.step_plans[-1].swap_in
    stats = sim.engine.stats()
    assert (stats.num_preemptions, stats.num_swaps) == (2, 1)
    sim.run()
    for name in sim.requests:
        sim.check_answer(name)


def test_blocks_that_come_back_are_found_by_others_again(simulation):
    sim = simulation(32, num_swap_blocks=32)
    sim.add("a", [*range(3, 16)], max_tokens=12, **NO_END)
    sim.step()
    swapped(sim)
    sim.engine.reset_prefix_cache()
    sim.step()
    sim.add("b", [*range(3, 16)], max_tokens=2, **NO_END)
    sim.run()
    assert sim.output("b").last.num_cached_tokens == 12
    sim.check_answer("a")
    sim.check_answer("b")


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        pytest.param(RunnerSpeeds(1000.0, 1e6, 100), True, id="copies are fast"),
        pytest.param(RunnerSpeeds(1e6, 80_000.0, 100), False, id="computing is fast"),
        pytest.param(None, False, id="nothing measured"),
    ],
)
def test_auto_does_what_costs_less(simulation, speeds, expected):
    sim = simulation(6, num_swap_blocks=8, speeds=speeds)
    sim.add("first", [3] * 8, max_tokens=12, **NO_END)
    sim.add("second", [4] * 8, max_tokens=12, **NO_END)
    sim.run()
    stats = sim.engine.stats()
    assert stats.num_preemptions == 1
    assert (stats.num_swaps == 1) is expected
    sim.check_answer("second")


@pytest.mark.parametrize("kind", ["swap out", "swap in", "copy"])
def test_a_step_that_fails_while_blocks_move_costs_only_time(simulation, kind):
    sim = simulation(32, num_swap_blocks=32)
    sim.add("a", [*range(3, 16)], n=3, max_tokens=12, **NO_END)
    sim.add("b", [*range(3, 12)], beam_width=3, n=3, max_tokens=12, **NO_END)
    sim.step()
    if kind != "copy":
        sim.step()
        sim.preempt("a", by_swap=True)
        sim.preempt("b", by_swap=True)
    if kind == "swap in":
        sim.step()
    sim.fail_one_step()
    # what was to move may hold anything now
    held = {block for s in sim.engine.live_sequences() for block in s.block_table}
    lost = [block for i, block in enumerate(sim.runner.cache) if i not in held]
    for block in (*lost, *sim.runner.host):
        block[:] = [0] * len(block)
    sim.engine.reset_prefix_cache()
    sim.check_books()
    sim.run()
    sim.check_answer("a")
    sim.check_answer("b")
    sim.check_pool_is_whole()


def test_the_host_pool_stores_shared_blocks_once():
    pool = HostPool(4)
    tables, moves = pool.store([[7, 8], [7, 9]])
    assert tables == [[moves[7], moves[8]], [moves[7], moves[9]]]
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.check_integrity(tables)
    with pytest.raises(LookupError, match="2 host blocks wanted, 1 of 4 free"):
        pool.store([[1, 2]])
    pool.release(tables[0])
    assert pool.num_free == 2
    pool.check_integrity(tables[1:])
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(tables[0])


def test_the_host_pools_check_sees_a_leak_and_an_unknown_reference():
    pool = HostPool(4)
    tables, _ = pool.store([[7, 8]])
    with pytest.raises(RuntimeError, match="host pool"):
        pool.check_integrity([])
    with pytest.raises(RuntimeError, match="host pool"):
        pool.check_integrity([*tables, [0]])
