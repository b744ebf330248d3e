"""Several outputs of one request: one prompt, forks, copy-on-write, ends and aborts of each."""

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import FinishReason
from inferq.worker.engine.requests.sequence import ResumedOutput

NO_END = {"ignore_eos": True}
PROMPT = list(range(3, 12))  # two full blocks of four, and one token


def test_the_prompt_is_computed_once_and_all_children_are_sampled_from_its_last_row(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, n=4, max_tokens=6, **NO_END)
    outputs = sim.step()
    assert sim.step_plans[0].scheduled[0].children == (0, 1, 2, 3)
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    sim.run()
    assert sim.runner.computed_tokens == 9 + 4 * 5
    sim.check_answer("a")
    assert len({tuple(sim.output("a", i).token_ids) for i in range(4)}) == 4
    sim.check_pool_is_whole()


def test_children_are_the_same_on_every_run_and_in_any_company(simulation):
    alone, crowd = simulation(64), simulation(14, max_num_seqs=9, max_num_batched_tokens=20)
    alone.add("a", PROMPT, n=4, max_tokens=12, **NO_END)
    for i in range(5):
        crowd.add(f"other{i}", [20 + i] * 7, n=2, max_tokens=9, priority=-1, **NO_END)
    crowd.add("a", PROMPT, n=4, max_tokens=12, **NO_END)
    alone.run()
    crowd.run()
    assert crowd.engine.stats().num_preemptions > 0
    for i in range(4):
        assert crowd.output("a", i).token_ids == alone.output("a", i).token_ids


def test_a_fork_allocates_nothing_and_the_first_write_copies_for_all_but_the_last(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, n=4, max_tokens=6, **NO_END)
    sim.step()
    assert sim.engine.stats().blocks_used == 3
    assert sim.step_plans[0].block_copies == []
    sim.step()
    copies = sim.step_plans[1].block_copies
    assert len(copies) == 3
    assert len({copy.source for copy in copies}) == 1
    assert sim.engine.stats().blocks_used == 2 + 4
    sim.step()
    assert sim.step_plans[2].block_copies == []
    sim.run()
    sim.check_answer("a")


def test_a_prompt_of_whole_blocks_needs_no_copy(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT[:8], n=3, max_tokens=4, **NO_END)
    sim.run()
    assert sim.runner.num_copies == 0
    sim.check_answer("a")


def test_the_last_holder_writes_in_place_when_the_others_have_gone(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, n=2, max_tokens=6, **NO_END)
    sim.step()
    assert sim.engine.abort("a", 0)
    sim.run()
    assert sim.runner.num_copies == 0
    sim.check_answer("a", 1)


def test_children_count_against_max_num_seqs_from_the_start(simulation):
    sim = simulation(64, max_num_seqs=5)
    sim.add("a", PROMPT, n=4, max_tokens=6, **NO_END)
    sim.add("b", [3] * 5, n=2, max_tokens=6, **NO_END)
    sim.add("c", [4] * 5, max_tokens=3, **NO_END)
    sim.run()
    assert max(len(plan) for plan in sim.plans) == 4
    order = list(dict.fromkeys(name for plan in sim.plans for name, _ in plan))
    assert order == ["a", "b", "c"], "one that fits does not overtake its equals"
    for name in "abc":
        sim.check_answer(name)


@pytest.mark.parametrize(
    ("params", "field"),
    [({"n": 6}, "n"), ({"best_of": 6}, "best_of"), ({"beam_width": 6}, "beam_width")],
)
def test_more_sequences_than_run_at_once_are_refused_with_the_numbers(simulation, params, field):
    sim = simulation(64, max_num_seqs=5)
    with pytest.raises(InvalidRequestError, match="6 sequences are more than the 5") as caught:
        sim.add("a", PROMPT, **params)
    assert caught.value.field == field


@pytest.mark.parametrize(("n", "num_blocks"), [(2, 16), (4, 11)])
def test_chunked_prefill_with_several_outputs_under_memory_pressure_finishes(
    simulation, n, num_blocks
):
    sim = simulation(
        num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        num_swap_blocks=4,
        preemption_mode="swap",
    )
    for i in range(6):
        sim.add(str(i), [i + 3] * 21, n=n, max_tokens=12, **NO_END)
    sim.run()
    assert sim.engine.stats().num_preemptions > 0
    for i in range(6):
        sim.check_answer(str(i))
    sim.check_pool_is_whole()


def test_equal_priority_and_arrival_with_two_outputs_each_are_ordered_by_id(simulation):
    sim = simulation(9, max_num_seqs=8)
    for name in ("d", "b", "a", "c"):
        sim.add(name, [5] * 7, n=2, max_tokens=12, arrival=1.0, **NO_END)
    sim.run()
    assert sim.engine.stats().num_preemptions > 0
    assert sim.plans[0][0][0] == "a"
    for name in "abcd":
        sim.check_answer(name)


def test_preempted_siblings_compute_what_they_share_once(simulation):
    sim = simulation(64, max_num_batched_tokens=64)
    sim.add("a", [*range(3, 35)], n=4, max_tokens=6, **NO_END)
    for _ in range(3):
        sim.step()
    sim.engine.reset_prefix_cache()
    before = sim.runner.computed_tokens
    for index in range(4):
        sim.preempt("a", index)
    sim.run()
    recomputed = sim.runner.computed_tokens - before
    assert recomputed <= 32 + 4 * 6, "the prompt of 32 tokens is computed by one of them"
    sim.check_answer("a")


def test_each_child_has_its_own_end(simulation):
    sim = simulation(64)
    for i in range(12):
        sim.add(str(i), [3 + i, 4], n=3, max_tokens=25, stop_token_ids=[9, 10, 11, 12])
    sim.run()
    reasons = set()
    for i in range(12):
        sim.check_answer(str(i))
        reasons.add(tuple(sim.output(str(i), k).last.finish_reason for k in range(3)))
    assert any(len(set(each)) > 1 for each in reasons)


def test_the_last_output_alone_says_that_the_request_is_finished(simulation):
    sim = simulation(64)
    sim.add("a", [5, 4], n=3, max_tokens=25, stop_token_ids=[9, 10, 11, 12])
    finished = []
    while sim.engine.has_work():
        finished += [o.request_finished for o in sim.step() if o.finish_reason is not None]
    assert finished == [False, False, True]


def test_best_of_reports_every_candidate_with_the_sum_of_its_log_probabilities(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, n=1, best_of=3, max_tokens=6, **NO_END)
    sim.run()
    sim.check_answer("a")
    assert all(sim.output("a", i).last.cumulative_logprob < 0 for i in range(3))


def test_without_logprobs_the_sum_is_not_known(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, n=2, max_tokens=3, **NO_END)
    sim.run()
    assert sim.output("a").last.cumulative_logprob is None


def test_abort_of_one_child_frees_only_its_own_blocks(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, n=3, max_tokens=12, **NO_END)
    for _ in range(4):
        sim.step()
    used = sim.engine.stats().blocks_used
    assert sim.engine.abort("a", 1)
    sim.check_books()
    assert sim.engine.stats().blocks_used == used - 1
    assert not sim.engine.abort("a", 1)
    assert not sim.engine.abort("a", 7)
    sim.run()
    assert len(sim.output("a", 1).token_ids) == 4
    sim.check_answer("a", 0)
    sim.check_answer("a", 2)
    sim.check_pool_is_whole()


@pytest.mark.parametrize("dropped", [[0], [2], [0, 1], [0, 2], [1, 2]])
def test_children_aborted_before_they_are_forked_are_never_sampled(simulation, dropped):
    sim = simulation(64, max_num_seqs=4, max_num_batched_tokens=4)
    sim.add("a", PROMPT, n=3, max_tokens=5, **NO_END)
    sim.step()
    for index in dropped:
        assert sim.engine.abort("a", index)
        sim.check_books()
    sim.run()
    for index in range(3):
        if index in dropped:
            assert sim.output("a", index).token_ids == []
        else:
            sim.check_answer("a", index)


def test_abort_of_the_last_child_ends_the_request(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, n=2, max_tokens=12, **NO_END)
    sim.step()
    assert sim.engine.abort("a", 0)
    assert sim.engine.has_work()
    assert sim.engine.abort("a", 1)
    assert not sim.engine.has_work()
    sim.check_pool_is_whole()


def test_outputs_go_on_after_what_was_published_of_each(simulation):
    whole = simulation(64)
    whole.add("a", PROMPT, n=4, max_tokens=8, logprobs=0, **NO_END)
    whole.run()
    tokens = [tuple(whole.output("a", i).token_ids) for i in range(4)]
    sim = simulation(64)
    resumed = (
        ResumedOutput(tokens[0][:3]),
        ResumedOutput(tokens[1], is_finished=True),
        ResumedOutput(),
    )
    sim.add("a", PROMPT, n=4, max_tokens=8, logprobs=0, resumed=resumed, **NO_END)
    sim.run()
    assert [tuple(sim.output("a", i).token_ids) for i in range(4)] == [
        tokens[0][3:],
        (),
        tokens[2],
        tokens[3],
    ]
    assert sim.output("a", 1).last is None, "its end was published"
    assert sim.output("a", 0).last.cumulative_logprob is None, "its beginning is not known"
    sim.check_answer("a")


def test_outputs_resumed_at_their_end_are_reported_without_a_step(simulation):
    sim = simulation(64)
    resumed = (ResumedOutput((5, 2)), ResumedOutput((5, 6, 2)), ResumedOutput((5,), True))
    sim.add("a", PROMPT, n=3, resumed=resumed)
    first, second = sim.step()
    assert (first.index, first.finish_reason, first.request_finished) == (
        0,
        FinishReason.STOP,
        False,
    )
    assert (second.index, second.request_finished) == (1, True)
    assert sim.plans == []
    sim.add("b", PROMPT, n=1, resumed=(ResumedOutput((5,), is_finished=True),))
    (only,) = sim.step()
    assert (only.finish_reason, only.token_ids, only.request_finished) == (None, (), True)


def test_abort_of_a_complete_output_leaves_the_others_reports(simulation):
    sim = simulation(64)
    resumed = (ResumedOutput((5, 2)), ResumedOutput((5, 6, 2)))
    sim.add("a", PROMPT, n=2, resumed=resumed)
    assert sim.engine.abort("a", 1)
    (only,) = sim.step()
    assert (only.index, only.request_finished) == (0, True)


@pytest.mark.parametrize("params", [{"best_of": 2}, {"beam_width": 2}])
def test_what_is_published_at_the_end_cannot_be_resumed(simulation, params):
    with pytest.raises(InvalidRequestError, match="can resume 0") as caught:
        simulation(64).add("a", PROMPT, resumed=(ResumedOutput((5,)),), **params)
    assert caught.value.field == "resumed"


@pytest.mark.parametrize("budget", [5, 64])
def test_prompt_logprobs_come_once_and_complete_also_after_preemption(simulation, budget):
    sim = simulation(32, max_num_seqs=4, max_num_batched_tokens=budget)
    sim.add("warm", PROMPT, max_tokens=2, **NO_END)
    sim.run()
    sim.add("a", PROMPT, n=2, max_tokens=4, prompt_logprobs=1, **NO_END)
    sim.step()
    sim.preempt("a")
    sim.run()
    sim.check_answer("a")
    assert sim.output("a").last.num_cached_tokens == 0, "cached positions have no logits"
    sim.add("b", [3], max_tokens=4, prompt_logprobs=1, **NO_END)
    sim.run()
    assert sim.output("b").prompt_logprobs == [(None,)]


def test_fifty_outputs_in_swap_mode_with_a_tiny_host_pool_finish(simulation):
    sim = simulation(12, num_swap_blocks=2, preemption_mode="swap")
    sim.add("a", PROMPT, n=50, max_tokens=9, **NO_END)
    sim.add("b", [7] * 11, n=3, max_tokens=9, **NO_END)
    sim.run()
    assert sim.engine.stats().num_preemptions > 0
    sim.check_answer("a")
    sim.check_answer("b")
    sim.check_pool_is_whole()
