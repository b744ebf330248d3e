"""What the engine tells of traced requests, and that it tells nothing of others."""

import pytest

PROMPT = [*range(3, 16)]


def kinds(sim, name):
    return [
        (event.index, event.kind.value)
        for event in sim.engine.take_events()
        if event.request_id == name
    ]


@pytest.mark.parametrize(("by_swap", "kind"), [(False, "dropped"), (True, "swapped")])
def test_a_preemption_and_the_way_back_are_told_in_their_order(simulation, by_swap, kind):
    sim = simulation(16, num_swap_blocks=16)
    sim.add("a", PROMPT, max_tokens=6, ignore_eos=True, traced=True)
    sim.step()
    sim.step()
    sim.preempt("a", by_swap=by_swap)
    sim.run()
    assert kinds(sim, "a") == [(0, "running"), (0, kind), (0, "running")]
    sim.check_answer("a")


def test_each_output_that_gives_way_is_named(simulation):
    sim = simulation(32, num_swap_blocks=32)
    sim.add("a", PROMPT, n=2, max_tokens=6, ignore_eos=True, traced=True)
    sim.step()
    sim.step()
    sim.preempt("a", by_swap=True)
    sim.run()
    told = kinds(sim, "a")
    assert sorted(told[1:3]) == [(0, "swapped"), (1, "swapped")]
    assert sorted(told[3:]) == [(0, "running"), (1, "running")]


def test_events_are_told_once_and_in_the_order_of_time(simulation):
    sim = simulation(16)
    sim.add("a", PROMPT, max_tokens=4, ignore_eos=True, traced=True)
    sim.step()
    sim.preempt("a")
    sim.run()
    times = [event.at for event in sim.engine.take_events()]
    assert times == sorted(times)
    assert sim.engine.take_events() == []


def test_of_a_request_that_nobody_traces_nothing_is_told(simulation):
    sim = simulation(16, num_swap_blocks=16)
    sim.add("a", PROMPT, max_tokens=6, ignore_eos=True)
    sim.step()
    sim.preempt("a", by_swap=True)
    sim.run()
    assert sim.engine.take_events() == []
