"""Steps that are planned and launched while the one before is computed."""

import pytest

from inferq.protocol.errors import ErrorCode, ErrorInfo
from inferq.protocol.messages import FinishReason
from inferq.worker.engine.runner_errors import FailedRequestsError
from inferq.worker.engine.scheduling.plan import UNKNOWN_TOKEN, SequenceResult

NO_END = {"ignore_eos": True}


class Watch:
    """Notes when steps are launched and collected."""

    def __init__(self, runner, events):
        self._runner, self._events, self._count = runner, events, 0
        self.change = None

    def launch(self, plan):
        self._count += 1
        number = self._count
        self._events.append(("launch", number))
        handle = self._runner.launch(plan)
        return WatchedStep(handle, lambda: self._events.append(("collect", number)), self.change)


class WatchedStep:
    def __init__(self, handle, note, change):
        self._handle, self._note, self._change = handle, note, change

    def results(self):
        self._note()
        found = self._handle.results()
        return found if self._change is None else self._change(found)


def watched(sim):
    events = []
    sim.engine._runner = Watch(sim.runner, events)
    return events


def test_a_step_is_launched_before_the_one_ahead_of_it_is_collected(simulation):
    sim = simulation(16, launches_ahead=True)
    events = watched(sim)
    sim.add("a", [3, 4, 5], max_tokens=3, **NO_END)
    assert sim.step() == []
    (sequence,) = sim.engine.live_sequences()
    assert sequence.token_ids == [3, 4, 5, UNKNOWN_TOKEN]
    sim.run()
    sim.check_answer("a")
    numbers = [number for _, number in events]
    kinds = [kind for kind, _ in events]
    assert kinds == ["launch", "launch", "collect", "launch", "collect", "collect"]
    assert numbers == [1, 2, 1, 3, 2, 3]


def test_what_ends_by_its_length_is_not_computed_once_more(simulation):
    counts = []
    for launches_ahead in (False, True):
        sim = simulation(32, launches_ahead=launches_ahead, max_model_len=20)
        sim.add("a", [3] * 5, max_tokens=7, **NO_END)
        sim.add("b", [4] * 15, max_tokens=None, **NO_END)
        sim.run()
        sim.check_answer("a")
        sim.check_answer("b")
        counts.append(sim.runner.computed_tokens)
    assert counts == [5 + 6 + 15 + 4] * 2


def test_what_ends_by_a_token_is_computed_once_more_in_vain(simulation):
    sim, plain = simulation(400, launches_ahead=True), simulation(400)
    for each in (sim, plain):
        each.add("long", [3], max_tokens=60, **NO_END)
        for i in range(20):
            each.add(str(i), [3 + i], max_tokens=50)
        each.run()
    ends = 0
    for name in sim.requests:
        sim.check_answer(name)
        assert sim.answers[name].token_ids == plain.answers[name].token_ids
        ends += sim.answers[name].last.finish_reason is FinishReason.STOP
    assert ends > 5
    assert sim.runner.computed_tokens == plain.runner.computed_tokens + ends
    sim.check_pool_is_whole()


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"beam_width": 2},
        {"presence_penalty": 0.5},
        {"bad_words": ["a"]},
        {"structured_outputs": {"regex": "a+"}},
        {"prompt_logprobs": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_step_that_decides_the_next_one_is_collected_at_once(simulation, options):
    sim = simulation(32, launches_ahead=True)
    events = watched(sim)
    sim.add("plain", [3, 4], max_tokens=20, **NO_END)
    sim.step()
    sim.add("asking", [5, 6, 7], max_tokens=3, **options)
    sim.step()
    assert events == [("launch", 1), ("launch", 2), ("collect", 1), ("collect", 2)]
    sim.run()
    sim.check_answer("plain")
    sim.check_answer("asking")


@pytest.mark.parametrize("options", [{"logit_bias": {5: 1.0}}, {"logprobs": 2}, {"min_tokens": 2}])
def test_what_does_not_depend_on_the_output_is_launched_ahead(simulation, options):
    sim = simulation(32, launches_ahead=True)
    events = watched(sim)
    sim.add("asking", [5, 6, 7], max_tokens=3, **options)
    assert sim.step() == []
    assert events == [("launch", 1)]


def test_an_abort_in_flight_frees_the_blocks_and_brings_nothing(simulation):
    sim = simulation(16, launches_ahead=True)
    sim.add("a", [3] * 9, max_tokens=5, **NO_END)
    sim.add("b", [4] * 9, max_tokens=5, **NO_END)
    sim.step()
    assert sim.engine.abort("a")
    assert sim.engine.stats().blocks_used == 3
    sim.check_books()
    sim.add("c", [5] * 30, max_tokens=5, **NO_END)
    sim.run()
    assert sim.output("a").token_ids == []
    sim.check_answer("b")
    sim.check_answer("c")
    assert sim.engine.abort("a") is False
    sim.check_pool_is_whole()


def test_a_request_that_is_added_again_gets_nothing_of_its_aborted_step(simulation):
    sim = simulation(16, launches_ahead=True)
    sim.add("a", [3] * 9, max_tokens=5, **NO_END)
    sim.step()
    assert sim.engine.abort("a")
    assert not sim.engine.has_work()
    sim.add("a", [4] * 6, max_tokens=5, **NO_END)
    sim.run()
    sim.check_answer("a")


def test_a_sequence_preempted_in_flight_comes_back_with_its_token(simulation):
    for by_swap in (False, True):
        sim = simulation(32, launches_ahead=True, num_swap_blocks=16)
        sim.add("a", [3] * 9, max_tokens=9, **NO_END)
        sim.add("b", [4] * 9, max_tokens=9, **NO_END)
        for _ in range(4):
            sim.step()
            sim.preempt("a", by_swap=by_swap)
        sim.run()
        assert sim.engine.stats().num_preemptions >= 2
        sim.check_answer("a")
        sim.check_answer("b")


def test_a_row_that_fails_ends_its_request_alone(simulation):
    sim = simulation(32, launches_ahead=True)
    watched(sim)
    for name in ("good", "broken", "fine"):
        sim.add(name, [1, 2, 3, len(name)], max_tokens=6, **NO_END)
    sim.step()
    error = ErrorInfo(ErrorCode.INTERNAL, "not finite")

    def break_one(results):
        sim.engine._runner.change = None
        return [results[0], SequenceResult(error=error), results[2]]

    sim.engine._runner.change = break_one
    sim.run()
    assert sim.answers["broken"].last.error == error
    assert len(sim.answers["broken"].token_ids) == 1
    sim.check_answer("good")
    sim.check_answer("fine")
    sim.check_pool_is_whole()


def test_requests_named_as_failed_when_a_step_is_collected_end_and_the_others_start_again(
    simulation,
):
    sim = simulation(32, launches_ahead=True)
    watched(sim)
    for name in ("good", "broken"):
        sim.add(name, [1, 2, 3, len(name)], max_tokens=6, **NO_END)
    sim.step()
    error = ErrorInfo(ErrorCode.INTERNAL, "not finite")

    def refuse(results):
        sim.engine._runner.change = None
        raise FailedRequestsError({"broken": error})

    sim.engine._runner.change = refuse
    sim.run()
    assert sim.answers["broken"].last.error == error
    sim.check_answer("good")
    sim.check_pool_is_whole()


def test_a_launch_that_fails_loses_nothing_of_the_step_ahead_of_it(simulation):
    sim = simulation(32, launches_ahead=True)
    sim.add("a", [3] * 9, max_tokens=5, **NO_END)
    sim.step()
    sim.runner.fail_next = True
    with pytest.raises(OSError, match="fell off the bus"):
        sim.step()
    sim.check_books()
    (sequence,) = sim.engine.live_sequences()
    assert UNKNOWN_TOKEN not in sequence.token_ids
    assert sequence.num_output_tokens == 1
    sim.run()
    sim.check_answer("a")


def test_a_step_that_fails_late_is_computed_again_with_all_that_followed(simulation):
    sim = simulation(32, launches_ahead=True)
    sim.add("a", [3] * 9, max_tokens=8, **NO_END)
    sim.add("b", [3] * 9 + [4], max_tokens=8, **NO_END)
    sim.step()
    sim.step()
    sim.fail_one_step(late=True)
    sim.check_books()
    assert all(UNKNOWN_TOKEN not in s.token_ids for s in sim.engine.live_sequences())
    assert sim.engine.stats().blocks_used == 0
    sim.run()
    sim.check_answer("a")
    sim.check_answer("b")


def test_a_prefix_computed_in_flight_is_shared_by_the_next_step(simulation):
    hits = []
    for launches_ahead in (False, True):
        sim = simulation(32, launches_ahead=launches_ahead)
        prompt = [3, 4, 5, 6, 7, 8, 9, 10]
        sim.add("a", [*prompt, 3], max_tokens=4, **NO_END)
        sim.step()
        sim.add("b", [*prompt, 4], max_tokens=4, **NO_END)
        sim.run()
        sim.check_answer("a")
        sim.check_answer("b")
        hits.append(sim.answers["b"].last.num_cached_tokens)
    assert hits == [8, 8]
