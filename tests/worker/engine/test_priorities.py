"""Who is evicted for whom at admission, and who never is."""

import pytest

NO_END = {"ignore_eos": True}


def names(plan):
    return [name for name, _ in plan]


@pytest.mark.parametrize("num_swap_blocks", [0, 16])
def test_a_waiting_request_of_better_priority_evicts_the_worst_running_one(
    simulation, num_swap_blocks
):
    sim = simulation(12, num_swap_blocks=num_swap_blocks, preemption_mode="swap")
    sim.add("middle", [3] * 16, max_tokens=6, priority=1, **NO_END)
    sim.add("low", [4] * 16, max_tokens=6, priority=2, **NO_END)
    sim.step()
    sim.add("urgent", [5] * 19, max_tokens=4, **NO_END)
    sim.step()
    assert sorted(names(sim.plans[-1])) == ["middle", "urgent"]
    assert sim.engine.stats().num_preemptions == 1
    sim.run()
    for name in ("middle", "low", "urgent"):
        sim.check_answer(name)


def test_as_many_give_way_as_it_takes_and_no_more(simulation):
    sim = simulation(12)
    for i in range(3):
        sim.add(str(i), [3 + i] * 13, max_tokens=3, priority=i + 1, **NO_END)
    sim.step()
    sim.add("urgent", [9] * 23, max_tokens=2, **NO_END)
    sim.step()
    assert sorted(names(sim.plans[-1])) == ["0", "urgent"]
    sim.run()
    for name in sim.requests:
        sim.check_answer(name)


def test_equal_priorities_never_evict(simulation):
    sim = simulation(8)
    sim.add("a", [3] * 25, max_tokens=4, arrival=5.0, **NO_END)
    sim.step()
    sim.add("b", [4] * 12, max_tokens=4, arrival=1.0, **NO_END)
    sim.run()
    assert sim.engine.stats().num_preemptions == 0
    assert [n for plan in sim.plans for n in names(plan)] == ["a"] * 4 + ["b"] * 4


def test_nobody_is_evicted_where_it_would_not_be_enough(simulation):
    sim = simulation(12)
    sim.add("equal", [3] * 24, max_tokens=5, **NO_END)
    sim.add("low", [4] * 8, max_tokens=5, priority=1, **NO_END)
    sim.step()
    sim.add("big", [5] * 30, max_tokens=2, **NO_END)
    sim.step()
    assert sorted(names(sim.plans[-1])) == ["equal", "low"]
    sim.run()
    assert sim.engine.stats().num_preemptions == 0
    for name in sim.requests:
        sim.check_answer(name)


def test_a_place_among_the_running_is_reason_enough(simulation):
    sim = simulation(64, max_num_seqs=3)
    for i in range(3):
        sim.add(str(i), [3 + i] * 4, max_tokens=9, priority=i, **NO_END)
    sim.step()
    sim.add("urgent", [9] * 4, n=2, max_tokens=3, priority=-1, **NO_END)
    sim.step()
    assert sorted(names(sim.plans[-1])) == ["0", "urgent"]
    sim.run()
    for name in sim.requests:
        sim.check_answer(name)


def test_blocks_that_victims_share_are_counted_when_the_last_of_them_goes(simulation):
    sim = simulation(12)
    sim.add("low", [*range(3, 27)], n=3, max_tokens=9, priority=1, **NO_END)
    for _ in range(2):
        sim.step()
    assert sim.engine.stats().blocks_used == 6 + 3
    sim.add("urgent", [9] * 20, max_tokens=3, **NO_END)
    sim.step()
    assert names(sim.plans[-1])[0] == "urgent"
    assert sim.engine.stats().num_preemptions == 3, "only without all three are there 6 blocks"
    sim.run()
    sim.check_answer("low")
    sim.check_answer("urgent")


def test_blocks_that_the_candidate_would_share_are_no_gain(simulation):
    sim = simulation(8)
    shared = [*range(3, 19)]
    sim.add("kept", [40], max_tokens=9, **NO_END)
    sim.add("low", shared, max_tokens=9, priority=1, **NO_END)
    sim.step()
    sim.step()
    sim.add("urgent", [*shared, *range(40, 54)], max_tokens=2, **NO_END)
    sim.step()
    assert sorted(names(sim.plans[-1])) == ["kept", "low"]
    assert sim.engine.stats().num_preemptions == 0
    sim.run()
    for name in sim.requests:
        sim.check_answer(name)


def test_an_evicted_search_gives_way_as_a_whole(simulation):
    sim = simulation(12)
    sim.add("low", [*range(3, 16)], beam_width=4, n=4, max_tokens=9, priority=1, **NO_END)
    for _ in range(3):
        sim.step()
    sim.add("urgent", [9] * 20, max_tokens=3, **NO_END)
    sim.step()
    assert names(sim.plans[-1])[0] == "urgent"
    assert sim.engine.stats().num_preemptions == 4
    sim.run()
    sim.check_answer("low")
    sim.check_answer("urgent")


def test_a_victim_that_was_already_planned_gives_its_budget_and_its_promised_blocks_back(
    simulation,
):
    sim = simulation(8, max_num_seqs=4, max_num_batched_tokens=8)
    sim.add("kept", [3] * 2, max_tokens=9, **NO_END)
    sim.add("low", [4] * 6, max_tokens=12, priority=5, **NO_END)
    sim.step()
    sim.step()
    sim.step()  # low's next token takes a third block
    sim.add("urgent", [5] * 20, max_tokens=3, **NO_END)
    sim.step()
    assert sim.plans[-1] == [("kept", 1), ("urgent", 7)]
    sim.run()
    for name in sim.requests:
        sim.check_answer(name)


def test_a_waiting_request_of_better_priority_goes_before_a_running_prompt(simulation):
    sim = simulation(64, max_num_seqs=4, max_num_batched_tokens=8)
    sim.add("low", [4] * 40, max_tokens=2, priority=5, **NO_END)
    sim.step()
    sim.add("urgent", [5] * 12, max_tokens=2, **NO_END)
    sim.step()
    sim.step()
    assert sim.plans[1:3] == [[("urgent", 8)], [("urgent", 4), ("low", 4)]]
    sim.run()
    sim.check_answer("low")
    sim.check_answer("urgent")


@pytest.mark.parametrize("by_swap", [False, True])
def test_a_preempted_request_resumes_before_later_arrivals(simulation, by_swap):
    sim = simulation(16, num_swap_blocks=16, max_num_seqs=1, max_num_batched_tokens=16)
    sim.add("a", [3] * 8, max_tokens=6, arrival=1.0, **NO_END)
    sim.step()
    sim.add("later", [4] * 8, max_tokens=2, arrival=2.0, **NO_END)
    sim.preempt("a", by_swap=by_swap)
    sim.run()
    order = [name for plan in sim.plans for name in names(plan)]
    assert order.index("later") > max(i for i, name in enumerate(order) if name == "a")
    sim.check_answer("a")


def test_a_big_head_is_served_although_small_ones_keep_coming(simulation):
    sim = simulation(10, max_num_seqs=8)
    sim.add("running", [3] * 12, max_tokens=12, **NO_END)
    sim.step()
    sim.add("big", [4] * 33, max_tokens=3, arrival=1.5, **NO_END)
    for i in range(60):
        sim.add(f"small{i}", [5], max_tokens=2, arrival=2.0 + i, **NO_END)
        sim.step()
        if "big" in sim.finished:
            break
    assert "big" in sim.finished
    sim.run()
    sim.check_answer("big")
