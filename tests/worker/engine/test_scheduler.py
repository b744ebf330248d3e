"""Which sequences run, with how many tokens, and who gives way: on the stand-in runner."""

import pytest

from inferq.protocol.messages import FinishReason

NO_END = {"ignore_eos": True}


def test_a_prompt_is_computed_in_chunks_of_the_token_budget(simulation):
    sim = simulation(64, max_num_seqs=8, max_num_batched_tokens=10)
    sim.add("a", [3] * 25, max_tokens=2, **NO_END)
    sim.run()
    assert sim.plans == [[("a", 10)], [("a", 10)], [("a", 5)], [("a", 1)]]
    sim.check_answer("a")


def test_decodes_come_first_in_the_plan_and_prefill_takes_what_is_left(simulation):
    sim = simulation(64, max_num_seqs=8, max_num_batched_tokens=10)
    sim.add("a", [3] * 4, max_tokens=6, **NO_END)
    sim.add("b", [4] * 5, max_tokens=6, **NO_END)
    sim.step()
    sim.add("c", [5] * 12, max_tokens=1, **NO_END)
    sim.run()
    assert sim.plans[:3] == [
        [("a", 4), ("b", 5)],
        [("a", 1), ("b", 1), ("c", 8)],
        [("a", 1), ("b", 1), ("c", 4)],
    ]


def test_a_long_prompt_of_high_priority_delays_no_running_sequence(simulation):
    sim = simulation(64, max_num_seqs=8, max_num_batched_tokens=8)
    sim.add("a", [3] * 4, max_tokens=10, **NO_END)
    sim.step()
    sim.add("urgent", [5] * 30, max_tokens=1, priority=-1, **NO_END)
    sim.run()
    assert all(plan[0] == ("a", 1) for plan in sim.plans[1:10])
    sim.check_answer("urgent")


def test_no_more_than_max_num_seqs_run_at_once(simulation):
    sim = simulation(64, max_num_seqs=3)
    for i in range(9):
        sim.add(str(i), [i + 3] * 3, max_tokens=5, **NO_END)
    sim.run()
    assert max(len(plan) for plan in sim.plans) == 3
    for i in range(9):
        sim.check_answer(str(i))


def test_blocks_follow_the_tokens_and_are_free_at_once_after_the_end(simulation):
    sim = simulation(8, block_size=16)
    sim.add("a", [3] * 30, max_tokens=20, **NO_END)
    used = []
    while sim.engine.has_work():
        sim.step()
        used.append(sim.engine.stats().blocks_used)
    # 30 to 49 tokens are in the cache before the last one is sampled, which is never computed
    assert used == [-(-tokens // 16) for tokens in range(30, 49)] + [0]
    sim.check_pool_is_whole()


def test_priority_goes_before_arrival_and_arrival_before_name(simulation):
    sim = simulation(64, max_num_seqs=1)
    sim.add("running", [3] * 4, max_tokens=3, priority=-9, **NO_END)
    sim.step()
    sim.add("z-late", [4] * 4, max_tokens=1, arrival=9.0, **NO_END)
    sim.add("y-early", [4] * 4, max_tokens=1, arrival=1.0, **NO_END)
    sim.add("x-urgent", [4] * 4, max_tokens=1, arrival=10.0, priority=-1, **NO_END)
    sim.add("a-later", [4] * 4, max_tokens=1, arrival=9.0, **NO_END)
    sim.run()
    first_seen = list(dict.fromkeys(name for plan in sim.plans for name, _ in plan))
    assert first_seen == ["running", "x-urgent", "y-early", "a-later", "z-late"]


def test_equal_priority_and_arrival_are_ordered_by_id_without_a_comparison_error(simulation):
    sim = simulation(6, max_num_seqs=8)
    for name in ("d", "b", "a", "c"):
        sim.add(name, [5] * 7, max_tokens=12, arrival=1.0, **NO_END)
    sim.run()
    assert sim.engine.stats().num_preemptions > 0
    finished = [name for name in sim.answers if sim.answers[name].last.finish_reason]
    assert sorted(finished) == ["a", "b", "c", "d"]
    assert sim.plans[0][0][0] == "a"
    for name in "abcd":
        sim.check_answer(name)


def test_the_last_in_order_gives_way_when_a_running_sequence_needs_a_block(simulation):
    sim = simulation(6, enable_prefix_caching=False)
    sim.add("first", [3] * 8, max_tokens=12, **NO_END)
    sim.add("second", [4] * 8, max_tokens=12, **NO_END)
    while not sim.engine.stats().num_preemptions:
        sim.step()
    (waiting,) = [s for s in sim.engine.live_sequences() if not s.block_table]
    assert waiting.request_id == "second"
    sim.run()
    assert sim.engine.stats().num_preemptions == 1
    for name in ("first", "second"):
        sim.check_answer(name)
    sim.check_pool_is_whole()


def test_the_last_in_order_keeps_its_blocks_and_sits_out_when_it_finds_none_itself(simulation):
    sim = simulation(5)
    sim.add("first", [3] * 9, max_tokens=4, **NO_END)  # 3 blocks to its end
    sim.add("second", [4] * 7, max_tokens=5, **NO_END)  # 2 blocks, then a third
    sim.run()
    assert any([name for name, _ in plan] == ["first"] for plan in sim.plans)
    assert sim.engine.stats().num_preemptions == 0
    sim.check_answer("second")


def test_a_victim_already_planned_in_this_step_leaves_the_plan(simulation):
    """Decodes are planned before the urgent prompt, which then takes the blocks of one of them."""
    sim = simulation(8, max_num_seqs=4, max_num_batched_tokens=8)
    sim.add("low", [4] * 7, max_tokens=12, priority=5, **NO_END)
    sim.step()
    sim.add("urgent", [5] * 22, max_tokens=3, priority=0, **NO_END)
    sim.run()
    assert sim.plans[:5] == [
        [("low", 7)],
        [("low", 1), ("urgent", 7)],
        [("low", 1), ("urgent", 7)],
        [("urgent", 7)],
        [("urgent", 1)],
    ]
    assert sim.engine.stats().num_preemptions == 1
    sim.check_answer("low")
    sim.check_answer("urgent")


def test_a_preempted_request_keeps_its_place_before_later_arrivals(simulation):
    sim = simulation(6, max_num_seqs=8)
    sim.add("first", [3] * 8, max_tokens=12, arrival=1.0, **NO_END)
    sim.add("second", [4] * 8, max_tokens=12, arrival=2.0, **NO_END)
    sim.add("later", [5] * 4, max_tokens=4, arrival=3.0, **NO_END)
    while not sim.engine.stats().num_preemptions:
        sim.step()
    preempted_at = len(sim.plans)
    sim.run()
    order = [name for plan in sim.plans[preempted_at:] for name, _ in plan]
    assert order.index("second") < order.index("later")
    for name in ("first", "second", "later"):
        sim.check_answer(name)


def test_a_head_that_does_not_fit_yet_is_not_overtaken_by_its_equals(simulation):
    sim = simulation(6)
    sim.add("a", [3] * 12, max_tokens=6, **NO_END)
    sim.step()
    sim.add("big", [4] * 16, max_tokens=2, **NO_END)
    sim.add("small", [5] * 2, max_tokens=1, **NO_END)
    sim.run()
    order = list(dict.fromkeys(name for plan in sim.plans for name, _ in plan))
    assert order == ["a", "big", "small"]


def test_a_prompt_larger_than_the_whole_pool_ends_with_the_numbers_and_the_queue_goes_on(
    simulation,
):
    sim = simulation(4, max_model_len=100)
    sim.add("too-big", [3] * 17, max_tokens=2)
    sim.add("next", [4] * 5, max_tokens=3)
    sim.run()
    last = sim.answers["too-big"].last
    assert last.finish_reason is FinishReason.ERROR
    assert last.error.field == "prompt_token_ids"
    assert last.error.limit == "16"
    assert "17 tokens" in last.error.message
    assert "16 tokens (4 blocks of 4)" in last.error.message
    sim.check_answer("next")
    sim.check_pool_is_whole()


def test_a_prompt_that_fills_the_whole_pool_runs_alone(simulation):
    sim = simulation(4, max_model_len=100)
    sim.add("whole", [3] * 16, max_tokens=5, **NO_END)
    sim.add("next", [4] * 5, max_tokens=3, **NO_END)
    sim.run()
    last = sim.answers["whole"].last
    assert (len(sim.answers["whole"].token_ids), last.finish_reason) == (1, FinishReason.LENGTH)
    sim.check_answer("next")


def test_a_sequence_that_outgrows_the_whole_pool_ends_with_length(simulation):
    sim = simulation(4, max_model_len=100)
    sim.add("grows", [3] * 5, max_tokens=None, **NO_END)
    sim.run()
    assert len(sim.answers["grows"].token_ids) == 12  # 16 in the cache, and one never computed
    sim.check_answer("grows")
    sim.check_pool_is_whole()


def test_admission_leaves_one_per_cent_of_the_blocks_free(simulation):
    sim = simulation(200, max_num_batched_tokens=800, max_num_seqs=4)
    sim.add("a", [3] * 400, max_tokens=2, **NO_END)  # 100 blocks, and one to grow into
    sim.add("b", [4] * 391, max_tokens=2, **NO_END)  # 98 blocks with its next token: leaves 2
    sim.add("c", [5], max_tokens=2, **NO_END)
    sim.step()
    assert sim.plans == [[("a", 400), ("b", 391)]]
    assert sim.engine.stats().blocks_free == 2
    sim.step()
    assert "c" not in dict(sim.plans[1])
    sim.run()
    sim.check_answer("c")


def test_admission_counts_the_block_of_the_next_token(simulation):
    """Else a prompt of whole blocks would be computed, find no block, and be in the way."""
    sim = simulation(5)
    sim.add("a", [3] * 9, max_tokens=3, **NO_END)
    sim.add("b", [4] * 8, max_tokens=3, **NO_END)
    sim.step()
    assert sim.plans == [[("a", 9)]]
    sim.run()
    sim.check_answer("b")


def test_nobody_is_admitted_while_a_running_sequence_lacks_blocks(simulation):
    sim = simulation(12, max_num_seqs=4, max_num_batched_tokens=9)
    sim.add("grows", [3] * 4, max_tokens=8, **NO_END)
    sim.step()
    sim.add("long", [4] * 39, max_tokens=2, **NO_END)  # 10 blocks, 2 more in each step
    sim.step()
    sim.add("small", [5], max_tokens=2, **NO_END)
    sim.run()
    assert sim.plans[4:6] == [[("grows", 1), ("long", 8)], [("grows", 1)]]
    order = list(dict.fromkeys(name for plan in sim.plans for name, _ in plan))
    assert order == ["grows", "long", "small"]
    assert sim.engine.stats().num_preemptions == 0
    for name in order:
        sim.check_answer(name)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_the_tiniest_pools_serve_whatever_fits_alone(simulation, num_blocks):
    sim = simulation(num_blocks)
    for i in range(6):
        sim.add(str(i), [3 + i] * (4 * num_blocks - i % 3), max_tokens=6, **NO_END)
    sim.run()
    for i in range(6):
        sim.check_answer(str(i))
    sim.check_pool_is_whole()


def test_a_wrong_number_of_tokens_from_the_runner_is_an_error(simulation, monkeypatch):
    sim = simulation(8)
    sim.add("a", [3] * 4, max_tokens=4)
    monkeypatch.setattr(sim.runner, "execute", lambda plan: [])
    with pytest.raises(ValueError, match="shorter than argument"):
        sim.step()


def test_a_long_prompt_gets_no_more_than_the_threshold_in_one_step(simulation):
    sim = simulation(64, max_num_seqs=8, max_num_batched_tokens=20, long_prefill_token_threshold=6)
    sim.add("long", [3] * 15, max_tokens=2, **NO_END)
    sim.add("short", [4] * 5, max_tokens=2, **NO_END)
    sim.add("other", [5] * 30, max_tokens=1, **NO_END)
    sim.run()
    assert sim.plans[:3] == [
        [("long", 6), ("short", 5), ("other", 6)],
        [("short", 1), ("long", 6), ("other", 6)],
        [("long", 3), ("other", 6)],
    ]
    for name in sim.requests:
        sim.check_answer(name)


def test_running_prompts_beyond_the_budget_sit_the_step_out(simulation):
    sim = simulation(64, max_num_seqs=4, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    sim.add("a", [3] * 20, max_tokens=9, **NO_END)
    sim.add("b", [4] * 20, max_tokens=9, **NO_END)
    sim.step()
    sim.add("c", [5] * 20, max_tokens=9, priority=-1, **NO_END)
    sim.run()
    assert sim.plans[1] == [("c", 4), ("a", 4)], "b runs, and there is no budget left for it"
    for name in "abc":
        sim.check_answer(name)


def test_blocks_that_a_running_prompt_still_needs_are_not_given_to_others(simulation):
    sim = simulation(12, max_num_seqs=4, max_num_batched_tokens=40, long_prefill_token_threshold=8)
    sim.add("long", [3] * 39, max_tokens=1, **NO_END)  # 10 blocks, 2 in each step
    sim.step()
    sim.add("small", [5] * 9, max_tokens=2, **NO_END)
    sim.run()
    order = list(dict.fromkeys(name for plan in sim.plans for name, _ in plan))
    assert order == ["long", "small"]
    assert sim.engine.stats().num_preemptions == 0
    assert not any("small" in dict(plan) for plan in sim.plans[:5])
    sim.check_answer("small")


def test_prompts_beside_running_sequences_get_no_more_than_their_share(simulation):
    sim = simulation(64, max_num_batched_tokens=64, max_prompt_tokens=5)
    sim.add("first", [3] * 12, max_tokens=6, **NO_END)
    sim.step()
    sim.add("a", [4] * 8, max_tokens=2, **NO_END)
    sim.add("b", [5] * 4, max_tokens=2, **NO_END)
    sim.run()
    assert sim.plans[:4] == [
        [("first", 12)],  # delays nobody, so it is computed at once
        [("first", 1), ("a", 5)],
        [("first", 1), ("a", 3), ("b", 2)],
        [("first", 1), ("a", 1), ("b", 2)],
    ]
    for name in sim.requests:
        sim.check_answer(name)


def test_many_prompts_get_more_than_one_share_of_a_step(simulation):
    sim = simulation(64, max_num_batched_tokens=64, max_prompt_tokens=5)
    sim.add("first", [3] * 4, max_tokens=9, **NO_END)
    sim.step()
    for token, name in enumerate("abcdef", start=4):
        sim.add(name, [token] * 8, max_tokens=1, **NO_END)
    sim.run()
    beside = [sum(tokens for name, tokens in plan if name != "first") for plan in sim.plans[1:5]]
    # 6, 4, 3 and 2 prompts; the last token of another one counts as a single token
    assert beside == [15, 10 + 1, 5, 5 + 1]
    for name in sim.requests:
        sim.check_answer(name)
