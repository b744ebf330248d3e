"""The outputs of one job and their events: every total can be resumed from, however it was cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.protocol import output_log
from inferq.protocol.messages import (
    MAX_EVENT_BYTES,
    Event,
    FinishReason,
    Terminal,
    TokenLogprob,
)
from inferq.protocol.output_log import MAX_EVENT_LOGPROBS, JobLog

END = Terminal(FinishReason.STOP)


def fill(log: JobLog, *tokens: tuple[int, int]) -> None:
    """Append tokens (index, id), each with its id and a space as text."""
    for index, token_id in tokens:
        log.append(token_id, f"{token_id} ", None, index)


def finish(log: JobLog, index: int, reason: FinishReason = FinishReason.STOP) -> None:
    log.outputs[index].finish_reason = reason
    log.closing = index


def shape(events: list[tuple[int, Event]]) -> list[tuple[int, int, int, tuple[int, ...]]]:
    return [(total, e.index, e.offset, e.token_ids) for total, e in events]


def test_outputs_take_turns_token_by_token_and_those_ahead_wait() -> None:
    log = JobLog(3)
    fill(log, (0, 1), (2, 3), (0, 4), (2, 5))
    assert shape(log.events(0, None)) == [(1, 0, 0, (1,))]
    fill(log, (1, 2))
    assert shape(log.events(1, None)) == [
        (2, 1, 0, (2,)),
        (3, 2, 0, (3,)),
        (4, 0, 1, (4,)),
    ]
    assert log.total == 4


def test_an_output_that_has_ended_is_passed_by() -> None:
    log = JobLog(3)
    fill(log, (0, 1), (1, 2), (2, 3), (2, 4), (2, 5))
    finish(log, 0)
    assert log.total == 3
    finish(log, 1)
    assert shape(log.events(2, None)) == [(5, 2, 0, (3, 4, 5))]


def test_the_order_does_not_depend_on_when_tokens_came() -> None:
    """Nor on who counts: a worker that took over has other steps than the one before."""
    tokens = [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (0, 6)]
    orders = []
    for arrival in (tokens, tokens[2:5] + tokens[:2] + tokens[5:], tokens[:1] + tokens[2:]):
        log = JobLog(2)
        for index, token_id in arrival:
            fill(log, (index, token_id))
            log.events(0, None)
        orders.append([(e.index, t) for _, e in log.events(0, None) for t in e.token_ids])
    assert orders[0] == orders[1] == [(0, 1), (1, 3), (0, 2), (1, 4), (0, 6), (1, 5)]
    assert orders[2][:2] == orders[0][:2]


def test_a_job_that_ends_early_publishes_what_its_outputs_have() -> None:
    log = JobLog(2)
    fill(log, (1, 1), (1, 2))
    assert log.events(0, None) == []
    log.close()
    assert shape(log.events(0, None)) == [(2, 1, 0, (1, 2))]


def test_what_was_sent_once_keeps_its_order_when_its_reply_was_lost() -> None:
    log = JobLog(2)
    fill(log, (1, 1), (0, 2))
    first = log.events(0, None)
    fill(log, (0, 3))
    # the server has the first event, or both, or none of them
    assert shape(log.events(0, None)) == [(1, 0, 0, (2,)), (2, 1, 0, (1,)), (3, 0, 1, (3,))]
    assert shape(log.events(1, None)) == [(2, 1, 0, (1,)), (3, 0, 1, (3,))]
    assert shape(log.events(2, None)) == [(3, 0, 1, (3,))]
    assert shape(first) == [(1, 0, 0, (2,)), (2, 1, 0, (1,))]


def test_an_outputs_end_travels_with_its_last_token() -> None:
    log = JobLog(2)
    fill(log, (0, 1), (1, 2))
    log.outputs[0].tail = "held"
    log.outputs[0].cumulative_logprob = -1.5
    finish(log, 0)
    [(_, first), (_, second)] = log.events(0, None)
    assert (first.finish_reason, first.text, first.text_ends) == (FinishReason.STOP, "1 held", (2,))
    assert first.cumulative_logprob == -1.5
    assert second.finish_reason is None
    fill(log, (1, 3))
    finish(log, 1, FinishReason.LENGTH)
    [(total, last)] = log.events(2, END)
    assert (total, last.index, last.finish_reason) == (3, 1, FinishReason.LENGTH)
    assert last.terminal == END


def test_an_end_that_comes_without_tokens_is_the_terminal_events() -> None:
    log = JobLog(3)
    fill(log, (0, 1), (1, 2), (2, 3))
    finish(log, 0)
    log.events(0, None)
    log.outputs[1].tail = "held"
    finish(log, 1, FinishReason.CANCELLED)
    log.close()
    [(total, event)] = log.events(3, END)
    assert (total, event.index, event.offset, event.token_ids) == (3, 1, 1, ())
    assert (event.text, event.finish_reason) == ("held", FinishReason.CANCELLED)


def test_an_early_end_with_unsent_tokens_of_other_outputs_still_closes_its_own() -> None:
    log = JobLog(2)
    fill(log, (0, 1), (1, 2))
    log.events(0, None)
    fill(log, (1, 3))
    finish(log, 0, FinishReason.CANCELLED)
    log.close()
    assert [(t, e.index, e.token_ids, e.terminal) for t, e in log.events(2, END)] == [
        (3, 1, (3,), None),
        (3, 0, (), END),
    ]


def test_a_job_may_end_before_this_worker_knew_its_tokens() -> None:
    [(total, event)] = JobLog().events(7, END)
    assert (total, event.token_ids, event.terminal) == (7, (), END)


def test_prompt_logprobs_travel_once_with_output_0s_first_token() -> None:
    log = JobLog(2)
    log.prompt_logprobs = (None, TokenLogprob(-0.5, ((7, -0.5),)))
    fill(log, (1, 1), (0, 2), (0, 3))
    events = [event for _, event in log.events(0, None)]
    assert [e.prompt_logprobs is not None for e in events] == [True, False, False]
    assert all(e.prompt_logprobs is None for _, e in log.events(1, None))
    copy = JobLog(2)
    for event in events:
        copy.replay(Event.decode(event.encode()))
    assert copy.prompt_logprobs == log.prompt_logprobs


def test_the_best_outputs_are_numbered_anew() -> None:
    log = JobLog(3)
    fill(log, (2, 1), (0, 2), (1, 3), (2, 4))
    for index in range(3):
        finish(log, index)
    events = log.best([2, 0]).events(0, END)
    assert [(t, e.index, e.token_ids) for t, e in events] == [(2, 0, (1, 4)), (3, 1, (2,))]
    assert [e.finish_reason for _, e in events] == [FinishReason.STOP] * 2
    assert [e.terminal for _, e in events] == [None, END]


@pytest.mark.parametrize(("vocabulary", "tokens"), [(50_000, 30), (200_000, 4), (300_000, 2)])
def test_events_with_all_logprobs_stay_below_the_limit(vocabulary: int, tokens: int) -> None:
    log = JobLog()
    top = tuple((i, -1.0 - i) for i in range(vocabulary))
    for i in range(tokens):
        log.append(i, "x", TokenLogprob(-1.0, top))
    if vocabulary < MAX_EVENT_LOGPROBS:
        log.prompt_logprobs = (None, *(TokenLogprob(-1.0, top[:99]),) * (MAX_EVENT_LOGPROBS // 100))
    events = log.events(0, END)
    assert all(len(event.encode()) <= MAX_EVENT_BYTES for _, event in events)
    assert [t for _, e in events for t in e.token_ids] == list(range(tokens))
    most = max(len(e.token_ids) for _, e in events)
    if log.prompt_logprobs is not None:
        assert len(events[0][1].token_ids) == 1
    assert most == max(1, MAX_EVENT_LOGPROBS // (vocabulary + 1))


@pytest.mark.parametrize(("vocabulary", "tokens"), [(150_000, 3), (1000, 300)])
def test_events_with_all_logprobs_and_texts_stay_below_the_limit(
    vocabulary: int, tokens: int
) -> None:
    log = JobLog()
    log.token_bytes = lambda _: b"x" * 8
    for i in range(tokens):
        log.append(i, "x", TokenLogprob(-1.0, tuple((t, -1.0 - t) for t in range(vocabulary))))
    events = [event for _, event in log.events(0, END)]
    assert all(len(event.encode()) <= MAX_EVENT_BYTES for event in events)
    assert all(len(event.token_texts) == vocabulary for event in events)


def test_events_have_the_bytes_of_the_tokens_that_they_name() -> None:
    log = JobLog(2)
    log.token_bytes = lambda token_id: b"<%d>" % token_id
    log.prompt_token_ids = (7, 8)
    log.prompt_logprobs = (None, TokenLogprob(-0.5, ((9, -0.5),)))
    log.append(1, "a", TokenLogprob(-1.0, ((2, -1.0), (1, -1.5))), 0)
    log.append(3, "b", None, 1)
    first, second = (event for _, event in log.events(0, None))
    assert first.token_texts == {i: b"<%d>" % i for i in (1, 2, 7, 8, 9)}
    assert first.prompt_token_ids == (7, 8)
    assert second.token_texts == {3: b"<3>"}
    assert second.prompt_token_ids is None
    [(_, alone)] = log.events(1, None)
    assert alone == second
    best = log.best([0]).events(0, END)
    assert best[0][1].token_texts == first.token_texts
    assert best[0][1].prompt_token_ids == (7, 8)


def test_prompt_ids_that_were_asked_for_alone_bring_no_texts() -> None:
    log = JobLog()
    log.prompt_token_ids = (7, 8)
    fill(log, (0, 1), (0, 2))
    [(_, event)] = log.events(0, END)
    assert (event.prompt_token_ids, event.token_texts) == ((7, 8), {})
    copy = JobLog()
    copy.replay(Event.decode(event.encode()))
    assert copy.prompt_token_ids == (7, 8)


@pytest.mark.parametrize(
    "events",
    [
        [Event(index=2, token_ids=(1,), text_ends=(0,))],
        [Event(offset=1, token_ids=(1,), text_ends=(0,))],
        [
            Event(token_ids=(1,), text_ends=(0,), finish_reason=FinishReason.STOP),
            Event(offset=1, token_ids=(1,), text_ends=(0,)),
        ],
    ],
    ids=["no-such-output", "gap", "after-the-end"],
)
def test_events_that_do_not_follow_each_other_are_refused(events: list[Event]) -> None:
    log = JobLog(2)
    for event in events[:-1]:
        log.replay(event)
    with pytest.raises(ValueError, match=r"no output|follow"):
        log.replay(events[-1])


steps = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=300)
@given(steps, st.integers(1, 3), st.data())
def test_however_a_job_was_published_any_total_resumes_it_and_a_replay_goes_on(
    script: list[tuple[int, bool]], most: int, data: st.DataObject
) -> None:
    """Tokens come in any order, publishes and lost tails anywhere: one stream results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_log, "MAX_EVENT_TOKENS", most)
        log, stream = JobLog(4), dict[int, Event]()
        last = {index: token_id for token_id, (index, _) in enumerate(script)}
        for token_id, (index, publishes) in enumerate(script):
            log.append(token_id, "ab"[: token_id % 3], TokenLogprob(-float(token_id)), index)
            if token_id == last[index]:
                log.outputs[index].tail = "."
                finish(log, index)
            if publishes and token_id < len(script) - 1:
                lost = data.draw(st.sampled_from([0, *stream]), label="server's offset")
                stream = {total: e for total, e in stream.items() if total <= lost}
                stream |= dict(log.events(lost, None))
        log.close()
        events = [*stream.items(), *log.events(max(stream, default=0), END)]
    check_every_resumption(log, events)
    check_replay(log, events, data.draw(st.sampled_from([0, *stream]), label="taken over at"))


def check_every_resumption(log: JobLog, events: list[tuple[int, Event]]) -> None:
    everything = [(e.index, e.offset + i) for _, e in events for i in range(len(e.token_ids))]
    assert len(set(everything)) == len(everything) == log.total
    totals = [total for total, _ in events]
    assert totals == sorted(totals)
    for start in range(log.total + 1):
        seen, total = [], start
        for after, event in events:
            first = after - len(event.token_ids)
            rest = event.after(min(max(total - first, 0), len(event.token_ids)))
            seen += [(rest.index, rest.offset + i) for i in range(len(rest.token_ids))]
            total += len(rest.token_ids)
        assert seen == everything[start:]
    for index, output in enumerate(log.outputs):
        own = [e for _, e in events if e.index == index]
        assert [t for e in own for t in e.token_ids] == output.token_ids
        if output.token_ids:
            assert "".join(e.text for e in own) == output.text
            assert [e.finish_reason is not None for e in own].count(True) == 1


def check_replay(log: JobLog, events: list[tuple[int, Event]], upto: int) -> None:
    copy = JobLog(len(log.outputs))
    for total, event in events:
        if total <= upto and event.terminal is None:
            copy.replay(Event.decode(event.encode()))
    for mine, theirs in zip(copy.outputs, log.outputs, strict=True):
        count = len(mine.token_ids)
        assert mine.token_ids == theirs.token_ids[:count]
        assert mine.logprobs == theirs.logprobs[:count]
    assert copy.total == upto
    assert copy.events(upto, None) == []
