"""Requests in, tokens out: ends, checks, aborts, resumption, the prefix cache as users see it."""

import random

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import FinishReason, TokenLogprob
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.runner_errors import NonFiniteLogitsError
from inferq.worker.engine.scheduling.plan import SampledToken, SequenceResult

NO_END = {"ignore_eos": True}


def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(3, 60) for _ in range(rng.randint(shortest, longest))] for _ in range(count)
    ]


def test_nothing_to_do_returns_nothing(simulation):
    sim = simulation(8)
    assert not sim.engine.has_work()
    assert sim.engine.step() == []
    assert sim.engine.stats().num_steps == 0


def test_sixty_four_requests_at_once_equal_each_alone(simulation):
    crowd = simulation(64, block_size=16, max_num_batched_tokens=256)
    lengths = random.Random(1)
    for i, prompt in enumerate(prompts(64, 1, 200)):
        crowd.add(str(i), prompt, max_tokens=lengths.randint(1, 120), seed=i)
    crowd.run()
    assert crowd.engine.stats().num_preemptions > 0
    for name, request in crowd.requests.items():
        alone = simulation(64, block_size=16)
        alone.engine.add_request(request)
        tokens = []
        while alone.engine.has_work():
            tokens += [t for output in alone.engine.step() for t in output.token_ids]
        assert crowd.answers[name].token_ids == tokens
        crowd.check_answer(name)
    crowd.check_pool_is_whole()


@pytest.mark.parametrize("count", [256, 512])
def test_many_requests_through_a_pool_that_preempts_with_the_prefix_cache_on(simulation, count):
    sim = simulation(48, max_num_seqs=256, max_num_batched_tokens=256)
    shared = [7] * 10
    for i, prompt in enumerate(prompts(count, 1, 24, seed=5)):
        sim.add(str(i), shared + prompt if i % 3 else prompt, max_tokens=20)
    sim.run()
    stats = sim.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hit_tokens > 0
    for name in sim.answers:
        sim.check_answer(name)
    sim.check_pool_is_whole()


def test_cold_warm_and_preempted_give_the_same_tokens(simulation):
    sim = simulation(32)
    prompt = prompts(1, 21, 21)[0]
    sim.add("cold", prompt, max_tokens=15, **NO_END)
    sim.run()
    sim.add("warm", prompt, max_tokens=15, **NO_END)
    sim.run()
    sim.add("preempted", prompt, max_tokens=15, **NO_END)
    for _ in range(6):
        sim.step()
    sim.preempt("preempted")
    sim.run()
    for name in ("cold", "warm", "preempted"):
        sim.check_answer(name)
    assert sim.answers["cold"].token_ids == sim.answers["preempted"].token_ids
    cached = [sim.answers[n].last.num_cached_tokens for n in ("cold", "warm", "preempted")]
    assert cached == [0, 20, 20], "its own tokens, found after preemption, are not the user's hits"


def test_a_prompt_of_whole_blocks_sent_twice_still_computes_one_token(simulation):
    sim = simulation(16, block_size=16)
    prompt = prompts(1, 32, 32)[0]
    sim.add("cold", prompt, max_tokens=4, **NO_END)
    sim.run()
    before = sim.runner.computed_tokens
    sim.add("warm", prompt, max_tokens=4, **NO_END)
    sim.run()
    assert sim.answers["warm"].token_ids == sim.answers["cold"].token_ids
    assert sim.answers["warm"].last.num_cached_tokens == 16
    assert sim.runner.computed_tokens - before == 16 + 3


def test_a_prefix_is_shared_while_its_first_user_still_runs(simulation):
    sim = simulation(16)
    prompt = prompts(1, 12, 12)[0]
    sim.add("a", [*prompt, 3], max_tokens=8, **NO_END)
    sim.step()
    sim.add("b", [*prompt, 4], max_tokens=8, **NO_END)
    sim.step()
    a, b = sim.engine.live_sequences()
    assert a.block_table[:3] == b.block_table[:3]
    assert sim.engine.stats().blocks_used == 5
    sim.run()
    sim.check_answer("a")
    sim.check_answer("b")


def test_a_prefix_is_not_reusable_before_it_is_computed(simulation):
    sim = simulation(32, max_num_seqs=4, max_num_batched_tokens=4)
    prompt = prompts(1, 16, 16)[0]
    sim.add("a", [*prompt, 3], max_tokens=2, **NO_END)
    sim.add("b", [*prompt, 4], max_tokens=2, **NO_END)
    sim.run()
    sim.check_answer("a")
    sim.check_answer("b")
    assert sim.answers["b"].last.num_cached_tokens == 16


def test_requests_of_different_salts_share_no_blocks(simulation):
    sim = simulation(32)
    prompt = prompts(1, 17, 17)[0]
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        sim.add(name, prompt, max_tokens=2, cache_salt=salt, **NO_END)
        sim.run()
    assert [sim.answers[n].last.num_cached_tokens for n in "abc"] == [0, 0, 16]


def test_without_prefix_caching_everything_is_computed(simulation):
    sim = simulation(32, enable_prefix_caching=False)
    for name in ("a", "b"):
        sim.add(name, [5] * 20, max_tokens=2, **NO_END)
        sim.run()
    assert sim.runner.computed_tokens == 2 * 21
    assert sim.engine.stats().prefix_hit_tokens == 0


def test_without_prefix_caching_a_preempted_request_finds_its_own_blocks_and_nobody_elses(
    simulation,
):
    sim = simulation(32, enable_prefix_caching=False)
    for name in ("a", "b"):
        sim.add(name, [5] * 20, max_tokens=4, cache_salt="same", **NO_END)
        sim.step()
        sim.preempt(name)
        sim.run()
        sim.check_answer(name)
        assert sim.answers[name].last.num_cached_tokens == 0
    assert sim.runner.computed_tokens == 2 * 23, "nothing is computed twice, and nothing shared"
    stats = sim.engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.blocks_cached) == (40, 0, 0)


def test_after_a_reset_nothing_is_found_and_what_runs_goes_on(simulation):
    sim = simulation(32)
    sim.add("cold", [5] * 20, max_tokens=3, **NO_END)
    sim.run()
    assert sim.engine.stats().blocks_cached > 0
    assert sim.engine.reset_prefix_cache()
    assert sim.engine.stats().blocks_cached == 0
    sim.add("again", [5] * 20, max_tokens=8, **NO_END)
    sim.step()
    assert not sim.engine.reset_prefix_cache(), "blocks are in use"
    sim.check_books()
    sim.add("beside", [5] * 20, max_tokens=3, **NO_END)
    sim.run()
    for name in ("again", "beside"):
        sim.check_answer(name)
        assert sim.answers[name].last.num_cached_tokens == 0


def test_an_end_token_ends_with_stop_and_is_part_of_the_output(simulation):
    sim = simulation(64)
    for i in range(40):
        sim.add(str(i), [3 + i], max_tokens=60)
    sim.run()
    for name in sim.answers:
        sim.check_answer(name)
    stopped = [a for a in sim.answers.values() if a.last.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(a.token_ids[-1] == 2 and a.last.stop_reason is None for a in stopped)


def test_a_stop_token_ends_with_its_id_as_the_reason_unless_it_comes_too_early(simulation):
    sim = simulation(64)
    sim.add("free", [5], max_tokens=20, **NO_END)
    sim.run()
    tokens = sim.answers["free"].token_ids
    at = next(i for i in range(5, 20) if tokens.index(tokens[i]) == i)
    stop, size = tokens[at], at + 1
    sim.add("stopped", [5], max_tokens=20, stop_token_ids=[stop], **NO_END)
    sim.add("barely", [5], max_tokens=20, stop_token_ids=[stop], min_tokens=size, **NO_END)
    sim.add("too-early", [5], max_tokens=20, stop_token_ids=[stop], min_tokens=size + 1, **NO_END)
    sim.run()
    for name in ("stopped", "barely"):
        assert sim.answers[name].token_ids == tokens[:size]
        assert sim.answers[name].last.finish_reason is FinishReason.STOP
        assert sim.answers[name].last.stop_reason == stop
    assert len(sim.answers["too-early"].token_ids) > size
    sim.check_answer("too-early")


def test_an_end_token_that_is_ignored_does_not_end(simulation):
    sim = simulation(64)
    for i in range(20):
        sim.add(str(i), [3 + i], max_tokens=40, **NO_END)
    sim.run()
    assert all(len(answer.token_ids) == 40 for answer in sim.answers.values())
    assert any(2 in answer.token_ids[:-1] for answer in sim.answers.values())


@pytest.mark.parametrize("max_tokens", [None, 500])
def test_the_end_of_the_context_ends_with_length(simulation, max_tokens):
    sim = simulation(64, max_model_len=32)
    sim.add("a", [3] * 20, max_tokens=max_tokens, **NO_END)
    sim.run()
    assert len(sim.answers["a"].token_ids) == 12
    assert sim.answers["a"].last.finish_reason is FinishReason.LENGTH


def test_a_resumed_request_goes_on_after_its_published_tokens(simulation):
    sim = simulation(64)
    sim.add("whole", [5] * 9, max_tokens=12, **NO_END)
    sim.run()
    tokens = sim.answers["whole"].token_ids
    for published in range(1, 12):
        name = f"after-{published}"
        sim.add(name, [5] * 9, max_tokens=12, published=tokens[:published], **NO_END)
        sim.run()
        assert sim.answers[name].token_ids == tokens[published:]
        sim.check_answer(name)
        assert sim.answers[name].last.num_cached_tokens <= 9


@pytest.mark.parametrize(
    ("options", "reason", "stop"),
    [
        pytest.param({"published": (5, 2)}, FinishReason.STOP, None, id="end token"),
        pytest.param({"published": (5, 9), "stop_token_ids": [9]}, FinishReason.STOP, 9, id="stop"),
        pytest.param(
            {"published": (5, 6, 7), "max_tokens": 3}, FinishReason.LENGTH, None, id="budget"
        ),
        pytest.param(
            {"published": (5,) * 30, "max_tokens": None},
            FinishReason.LENGTH,
            None,
            id="context",
        ),
    ],
)
def test_a_resumed_request_that_had_ended_finishes_without_a_forward_pass(
    simulation, options, reason, stop
):
    sim = simulation(64, max_model_len=32)
    sim.add("a", [3, 4], **options)
    assert sim.engine.has_work()
    (output,) = sim.step()
    assert (output.finish_reason, output.stop_reason, output.token_ids) == (reason, stop, ())
    assert not sim.engine.has_work()
    assert sim.plans == []


def test_an_end_token_published_before_min_tokens_does_not_end_the_resumed_request(simulation):
    sim = simulation(64)
    sim.add("a", [3, 4], published=(2,), min_tokens=4, max_tokens=6)
    sim.run()
    assert len(sim.answers["a"].token_ids) >= 3
    sim.check_answer("a")


def test_abort_frees_the_blocks_at_once_in_every_state(simulation):
    sim = simulation(64, max_num_seqs=2, max_num_batched_tokens=8)
    sim.add("decoding", [3] * 4, max_tokens=50, **NO_END)
    sim.step()
    sim.add("prefilling", [4] * 30, max_tokens=5, **NO_END)
    sim.add("waiting", [5] * 4, max_tokens=5, **NO_END)
    sim.add("ended", [5] * 4, max_tokens=1, published=(7,))
    sim.step()
    for name in ("prefilling", "waiting", "decoding"):
        used = sim.engine.stats().blocks_used
        held = sum(len(s.block_table) for s in sim.engine.live_sequences() if s.request_id == name)
        assert sim.engine.abort(name)
        assert sim.engine.stats().blocks_used == used - held
        sim.check_books()
        assert not sim.engine.abort(name)
    assert not sim.engine.has_work()
    assert sim.step() == []
    sim.check_pool_is_whole()


def test_abort_of_a_preempted_request_leaves_nothing_behind(simulation):
    sim = simulation(6)
    sim.add("first", [3] * 8, max_tokens=12, **NO_END)
    sim.add("second", [4] * 8, max_tokens=12, **NO_END)
    while not sim.engine.stats().num_preemptions:
        sim.step()
    assert sim.engine.abort("second")
    sim.run()
    sim.check_answer("first")
    sim.check_pool_is_whole()


def test_abort_of_what_had_ended_before_it_ran_takes_back_its_report(simulation):
    sim = simulation(8)
    sim.add("a", [3], max_tokens=1, published=(7,))
    assert sim.engine.abort("a")
    assert not sim.engine.has_work()
    assert sim.step() == []


def test_abort_of_an_unknown_request_says_so(simulation):
    assert not simulation(8).engine.abort("nobody")


def test_an_id_is_unique_while_it_lives_and_free_afterwards(simulation):
    sim = simulation(16)
    sim.add("a", [3], max_tokens=2, **NO_END)
    with pytest.raises(InvalidRequestError, match="'a' is in use") as caught:
        sim.add("a", [4], max_tokens=2)
    assert caught.value.field == "request_id"
    sim.run()
    sim.add("a", [4], max_tokens=1, published=(7,))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        sim.add("a", [4], max_tokens=2)


@pytest.mark.parametrize(
    ("prompt", "options", "field", "message"),
    [
        pytest.param([], {}, "prompt_token_ids", "is empty", id="empty"),
        pytest.param([3] * 32, {}, "prompt_token_ids", "32 tokens .* 32 tokens", id="fills"),
        pytest.param([3] * 40, {}, "prompt_token_ids", "40 tokens .* 32 tokens", id="too long"),
        pytest.param([3, 61], {}, "prompt_token_ids", "61 is not in the vocabulary of 61", id="id"),
        pytest.param([3, -1], {}, "prompt_token_ids", "-1 is not in the vocabulary", id="negative"),
        pytest.param([3], {"published": (99,)}, "resumed", "99 is not in", id="output id"),
        pytest.param(
            [3],
            {"stop_token_ids": [5, 999999], "min_tokens": 4},
            "stop_token_ids",
            "999999 is not in the vocabulary of 61",
            id="stop id",
        ),
        pytest.param(
            [3] * 2,
            {"min_tokens": 500, "max_tokens": 500},
            "min_tokens",
            "500 is more than the 30 tokens .* prompt of 2 .* context of 32",
            id="min equals max",
        ),
        pytest.param([3], {"seed": None}, "seed", "must be set", id="seed"),
        pytest.param([3], {"arrival": float("nan")}, "arrival", "nan is not a time", id="arrival"),
    ],
)
def test_what_can_never_be_served_is_refused_with_field_and_numbers(
    simulation, prompt, options, field, message
):
    sim = simulation(16, max_model_len=32)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        sim.add("a", prompt, **options)
    assert caught.value.field == field
    assert not sim.engine.has_work()
    sim.add("b", [3], max_tokens=3)
    sim.run()
    sim.check_answer("b")


def test_min_equal_to_max_that_fits_runs_to_the_limit(simulation):
    sim = simulation(64, max_model_len=32)
    sim.add("a", [3] * 2, min_tokens=30, max_tokens=30)
    sim.run()
    assert len(sim.answers["a"].token_ids) == 30
    assert sim.answers["a"].last.finish_reason is FinishReason.LENGTH


def test_a_runner_that_fails_leaves_the_step_as_not_run(simulation):
    sim = simulation(12, max_model_len=60)
    sim.add("a", [3] * 5, max_tokens=8)
    sim.step()
    sim.add("b", [4] * 9, max_tokens=8)
    sim.add("too-big", [4] * 50, max_tokens=8)
    sim.add("ended", [4], max_tokens=1, published=(7,))
    sim.runner.fail_next = True
    with pytest.raises(OSError, match="fell off the bus"):
        sim.step()
    sim.check_books()
    sim.run()
    for name in ("a", "b", "ended"):
        sim.check_answer(name)
    assert sim.answers["too-big"].last.finish_reason is FinishReason.ERROR


def test_stats_count_what_happened(simulation):
    sim = simulation(16)
    sim.add("a", [3] * 9, max_tokens=3, **NO_END)
    sim.add("b", [4] * 5, max_tokens=3, **NO_END)
    stats = sim.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 2, 0)
    sim.step()
    stats = sim.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 0, 1)
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_free) == (16, 5, 11)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (14, 0)
    sim.run()
    sim.add("c", [3] * 9, max_tokens=3, **NO_END)
    sim.step()
    stats = sim.engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (23, 8)
    assert stats.blocks_cached > 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", ""),
        ("dtype", "float8"),
        ("device", "tpu"),
        ("block_size", 0),
        ("block_size", 24),
        ("max_model_len", 1),
        ("kv_cache_memory", 0),
        ("num_kv_blocks", -1),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 255),
        ("enable_prefix_caching", 1),
        ("long_prefill_token_threshold", -1),
        ("preemption_mode", "drop"),
        ("swap_space", -1.0),
        ("swap_space", float("nan")),
        ("swap_space", True),
        ("num_swap_blocks", -1),
        ("enforce_eager", 0),
        ("async_scheduling", 1),
        ("seed", -1),
    ],
)
def test_an_option_out_of_range_is_named(option, value):
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig(**{"model": "m", option: value})
    assert caught.value.field == option


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_known_devices_are_accepted(device):
    assert EngineConfig(model="m", device=device).device == device


def test_logprobs_are_passed_on_with_their_tokens(simulation, monkeypatch):
    sim = simulation(8)
    logprob = TokenLogprob(-0.5, ((7, -0.5), (9, -1.5)))
    result = SequenceResult((SampledToken(7, logprob),))
    monkeypatch.setattr(sim.runner, "execute", lambda plan: [result])
    sim.engine.add_request(
        EngineRequest(
            request_id="a", prompt_token_ids=(3,), params=SamplingParams(seed=0, logprobs=2)
        )
    )
    (output,) = sim.engine.step()
    assert (output.token_ids, output.logprobs) == ((7,), (logprob,))


def test_a_request_with_non_finite_logits_ends_alone_and_the_others_go_on(simulation):
    sim = simulation(32)
    for name in ("good", "broken", "fine"):
        sim.add(name, [1, 2, 3, len(name)], max_tokens=6, **NO_END)
    execute = sim.runner.execute

    def break_one(plan):
        ids = [item.sequence.request_id for item in plan.scheduled]
        if "broken" in ids and sim.engine.stats().num_steps == 2:
            raise NonFiniteLogitsError(("broken",))
        return execute(plan)

    sim.runner.execute = break_one
    sim.run()
    assert sim.answers["broken"].last.finish_reason is FinishReason.ERROR
    assert sim.answers["broken"].last.error.code == "internal_error"
    for name in ("good", "fine"):
        sim.check_answer(name)
    sim.check_pool_is_whole()
