"""Beam search on the scheduler: beams step together, share blocks, and give way as one."""

from dataclasses import replace

import pytest

from inferq.protocol.messages import FinishReason
from inferq.worker.engine.scheduling.plan import BeamCandidates, RunnerSpeeds

NO_END = {"ignore_eos": True}
PROMPT = list(range(3, 12))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_a_search_gives_the_texts_of_the_search_alone(simulation, width, early_stopping):
    sim = simulation(64)
    sim.add("a", PROMPT, beam_width=width, n=width, max_tokens=20, early_stopping=early_stopping)
    sim.run()
    sim.check_answer("a")
    sim.check_pool_is_whole()


def test_results_come_at_the_end_all_at_once_best_first(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, beam_width=4, n=3, max_tokens=10, **NO_END)
    for _ in range(9):
        assert sim.step() == []
    outputs = sim.step()
    assert [o.index for o in outputs] == [0, 1, 2]
    assert [o.request_finished for o in outputs] == [False, False, True]
    assert all(o.finish_reason is FinishReason.LENGTH for o in outputs)
    scores = [o.score for o in outputs]
    assert scores == sorted(scores, reverse=True)
    assert all(o.score == o.cumulative_logprob / 10 for o in outputs)
    assert not sim.engine.has_work()


def test_beams_share_the_prompt_and_copy_what_they_write(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, beam_width=4, max_tokens=4, **NO_END)
    sim.step()
    assert sim.engine.stats().blocks_used == 3
    sim.step()
    assert len(sim.step_plans[1].block_copies) == 3
    assert sim.engine.stats().blocks_used <= 2 + 4
    sim.run()
    sim.check_answer("a")


def test_beams_step_all_or_none_when_the_budget_is_short(simulation):
    sim = simulation(64, max_num_seqs=6, max_num_batched_tokens=6)
    sim.add("a", PROMPT, beam_width=4, n=4, max_tokens=8, **NO_END)
    sim.add("b", [5] * 30, n=2, max_tokens=4, **NO_END)
    sim.run()
    sim.check_answer("a")
    sim.check_answer("b")


@pytest.mark.parametrize("by_swap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_search_goes_on_with_the_same_texts(simulation, by_swap, caching):
    sim = simulation(64, num_swap_blocks=64, enable_prefix_caching=caching)
    sim.add("a", PROMPT, beam_width=4, n=4, max_tokens=20, **NO_END)
    for _ in range(6):
        for _ in range(3):
            sim.step()
        for sequence in sim.engine.live_sequences():
            sim.preempt(sequence.request_id, sequence.child_index, by_swap=by_swap)
    sim.run()
    stats = sim.engine.stats()
    assert (stats.num_swaps > 0) is by_swap
    assert stats.num_preemptions > 0
    sim.check_answer("a")


def test_a_search_that_is_computed_again_computes_what_its_beams_share_once(simulation):
    sim = simulation(64, enable_prefix_caching=False)
    sim.add("a", [*range(3, 43)], beam_width=4, max_tokens=8, **NO_END)
    for _ in range(4):
        sim.step()
    # as if other requests had taken the blocks meanwhile
    sim.engine.reset_prefix_cache()
    first, *_ = sim.engine.live_sequences()
    sim.preempt("a", first.child_index)
    before = sim.runner.computed_tokens
    sim.run()
    assert sim.runner.computed_tokens - before <= 40 + 4 * 8
    sim.check_answer("a")


@pytest.mark.parametrize("num_blocks", range(7, 12))
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_pool_that_holds_a_search_shared_but_not_unshared_does_not_deadlock(
    simulation, num_blocks, caching, mode
):
    """Three blocks of prompt, one for each of four beams: unshared they would take 16."""
    sim = simulation(
        num_blocks,
        num_swap_blocks=6,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        max_num_seqs=8,
        max_num_batched_tokens=16,
    )
    sim.add("a", [*range(3, 15)], beam_width=4, n=4, max_tokens=12, **NO_END)
    sim.step()
    for i in range(3):
        sim.add(f"urgent{i}", [*range(3, 10), i], max_tokens=9, priority=-1, **NO_END)
        sim.step()
        sim.step()
    sim.run()
    assert sim.engine.stats().num_preemptions > 0
    for name in sim.requests:
        sim.check_answer(name)
    sim.check_pool_is_whole()


def test_a_search_whose_beams_outgrow_the_pool_ends_there_with_length(simulation):
    sim = simulation(8)
    sim.add("a", PROMPT, beam_width=4, n=4, max_tokens=60, **NO_END)
    sim.run()
    sim.check_answer("a")
    last = sim.output("a").last
    assert last.finish_reason is FinishReason.LENGTH
    assert 1 <= len(sim.output("a").token_ids) < 24


def test_a_search_that_can_never_step_is_an_error_with_the_numbers(simulation):
    sim = simulation(5)
    sim.add("a", PROMPT, beam_width=4, max_tokens=9)
    sim.add("b", PROMPT, max_tokens=3)
    sim.run()
    error = sim.output("a").last.error
    assert "9 tokens and a block for each of 4 beams" in error.message
    assert error.limit == "20"
    sim.check_answer("b")


def test_two_searches_and_others_through_a_tiny_pool(simulation):
    speeds = RunnerSpeeds(1000.0, 80_000.0, 100)
    sim = simulation(12, num_swap_blocks=10, max_num_seqs=9, speeds=speeds)
    for i in range(4):
        sim.add(f"search{i}", [*range(3 + i, 12 + i)], beam_width=3, n=2, max_tokens=10)
        sim.add(f"plain{i}", [20 + i] * 9, n=2, max_tokens=10)
    sim.run()
    assert sim.engine.stats().num_preemptions > 0
    for name in sim.requests:
        sim.check_answer(name)
    sim.check_pool_is_whole()


def test_only_the_whole_of_a_search_can_be_aborted(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, beam_width=4, n=4, max_tokens=20, **NO_END)
    sim.step()
    sim.step()
    assert not sim.engine.abort("a", 0)
    assert sim.engine.abort("a")
    assert not sim.engine.has_work()
    sim.check_pool_is_whole()


def test_beams_count_against_max_num_seqs_even_while_fewer_live(simulation, monkeypatch):
    sim = simulation(64, max_num_seqs=5)
    execute = sim.runner.execute

    def find_one_candidate(plan):
        return [replace(result, candidates=first_of(result)) for result in execute(plan)]

    def first_of(result):
        found = result.candidates
        return found and BeamCandidates(found.token_ids[:1], found.logprobs[:1])

    monkeypatch.setattr(sim.runner, "execute", find_one_candidate)
    sim.add("a", PROMPT, beam_width=4, max_tokens=6, **NO_END)
    sim.add("b", [5] * 4, n=2, max_tokens=3, **NO_END)
    for _ in range(6):
        assert {s.request_id for s in sim.engine.live_sequences() if s.block_table} <= {"a"}
        sim.step()
    assert len(sim.output("a").token_ids) == 6
    sim.run()
    sim.check_answer("b")


def test_prompt_logprobs_come_with_the_best_text(simulation):
    sim = simulation(64)
    sim.add("a", PROMPT, beam_width=2, n=2, max_tokens=6, prompt_logprobs=1, **NO_END)
    sim.run()
    sim.check_answer("a")


def test_beams_that_hold_equal_blocks_twice_in_a_full_pool_are_computed_once_more(simulation):
    sim = simulation(8, max_num_seqs=4, max_num_batched_tokens=4)
    sim.add("a", [*range(3, 15)], beam_width=4, n=4, max_tokens=7, **NO_END)
    for _ in range(5):
        sim.step()
    sim.engine.reset_prefix_cache()
    sim.preempt("a", sim.engine.live_sequences()[0].child_index)
    for _ in range(3):
        sim.step()  # one beam computes what all of them share
        sim.engine.reset_prefix_cache()
    sim.run()
    assert sim.engine.stats().num_preemptions == 8
    sim.check_answer("a")


def test_cached_blocks_are_taken_only_if_no_running_sequence_was_promised_them(simulation):
    """Found by a random history: two searches, of which one finds its blocks again late."""
    sim = simulation(
        14,
        block_size=8,
        max_model_len=60,
        max_num_seqs=4,
        max_num_batched_tokens=28,
        num_swap_blocks=30,
        preemption_mode="swap",
        enable_prefix_caching=False,
    )
    options = {"max_tokens": 25, "arrival": 1.0, **NO_END}
    sim.add("r0", [3, 3], beam_width=4, n=3, **options)
    for _ in range(4):
        sim.step()
    shared = [7] * 33
    sim.add("r1", [*shared, 3, 3, 5], priority=-1, **options)
    sim.add("r2", [*shared[:9], 3, 3, 4, 3, 3, 4, 5, 4, 5, 4], **options)
    tail = [4, 5, 3, 5, 4, 3, 5, 4, 4, 4, 5, 4, 4, 3, 3, 3, 5, 5, 3]
    options["arrival"] = 0.0
    sim.add("r3", [*shared, *tail], beam_width=2, priority=-1, **options)
    sim.preempt("r0", sim.engine.live_sequences()[0].child_index)
    sim.step()
    sim.engine.reset_prefix_cache()
    for _ in range(4):
        sim.step()
    sim.fail_one_step()
    sim.run()
    for name in sim.requests:
        sim.check_answer(name)
