"""The block map: every block once, in the state and with the holders that the books have for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.protocol.snapshots import BlockSnapshot, BlockState, short_id

NO_END = {"ignore_eos": True}
PROMPT = [*range(3, 16)]


class Cell(NamedTuple):
    state: BlockState
    holders: int
    first: tuple[str, int, int] | None


def cells_of(block_map: BlockSnapshot) -> list[Cell]:
    cells: list[Cell] = []
    runs = block_map.runs
    for start in range(0, len(runs), 4):
        count, state, holders, place = runs[start : start + 4]
        assert count > 0
        sequence = block_map.sequences[place] if holders else None
        first = sequence and (sequence.job, sequence.index, sequence.num_tokens)
        cells += [Cell(BlockState(state), holders, first)] * count
    return cells


def check_map(sim: Any) -> dict[BlockState, int]:
    """Check the map against the books and the block tables; return how many blocks are what."""
    block_map = sim.engine.block_map()
    stats, live = sim.engine.stats(), sim.engine.live_sequences()
    cells = cells_of(block_map)
    assert (block_map.num_blocks, block_map.num_host_blocks) == (
        stats.blocks_total,
        stats.swap_blocks_total,
    )
    assert len(cells) == stats.blocks_total + stats.swap_blocks_total
    count = {state: sum(cell.state is state for cell in cells) for state in BlockState}
    swap_blocks_free = stats.swap_blocks_total - stats.swap_blocks_used
    assert count[BlockState.FREE] == stats.blocks_free - stats.blocks_cached + swap_blocks_free
    assert count[BlockState.CACHED] == stats.blocks_cached
    assert count[BlockState.USED] + count[BlockState.SHARED] == stats.blocks_used
    assert count[BlockState.SWAPPED] == stats.swap_blocks_used

    tables = [*(s.block_table for s in live), *(offset(sim, s.host_table) for s in live)]
    served_first = sorted(live, key=lambda sequence: sequence.order)
    for block, cell in enumerate(cells):
        assert cell.holders == sum(table.count(block) for table in tables)
        expected = [
            (short_id(s.request_id), s.child_index, s.num_tokens)
            for s in served_first
            if block in s.block_table or block in offset(sim, s.host_table)
        ]
        assert cell.first == (expected[0] if expected else None)
        if block < stats.blocks_total:
            assert (cell.state is BlockState.SHARED) == (cell.holders > 1)
            assert (cell.state is BlockState.USED) == (cell.holders == 1)
        else:
            assert cell.state in (BlockState.FREE, BlockState.SWAPPED)
    return count


def offset(sim: Any, host_table: list[int]) -> list[int]:
    """Host blocks as cells: they come after the device's."""
    return [sim.engine.stats().blocks_total + block for block in host_table]


def test_an_idle_engine_has_free_blocks_only(simulation: Any) -> None:
    sim = simulation(10, num_swap_blocks=3)
    assert sim.engine.block_map().runs == [13, BlockState.FREE, 0, 0]
    check_map(sim)


def test_a_prefix_is_shared_until_its_outputs_write_copies_of_their_own(simulation: Any) -> None:
    sim = simulation(32)
    sim.add("a", PROMPT, n=4, max_tokens=12, **NO_END)
    sim.step()  # the prompt: three full blocks and a part, which the four outputs share
    assert check_map(sim)[BlockState.SHARED] == 4
    sim.step()  # each writes to the part: three copies
    count = check_map(sim)
    assert (count[BlockState.SHARED], count[BlockState.USED]) == (3, 4)
    sim.run()
    assert check_map(sim)[BlockState.CACHED] > 0


def test_swapped_sequences_stand_behind_host_blocks(simulation: Any) -> None:
    sim = simulation(32, num_swap_blocks=32)
    sim.add("a", PROMPT, n=2, max_tokens=12, **NO_END)
    sim.add("b", [*range(20, 30)], max_tokens=12, **NO_END)
    for _ in range(3):
        sim.step()
    sim.preempt("a", by_swap=True)
    sim.step()
    count = check_map(sim)
    assert count[BlockState.SWAPPED] == sim.engine.stats().swap_blocks_used > 0
    assert {c.first[0] for c in cells_of(sim.engine.block_map()) if c.first} == {"a", "b"}


def test_without_prefix_caching_nothing_counts_as_cached(simulation: Any) -> None:
    sim = simulation(32, enable_prefix_caching=False)
    sim.add("a", PROMPT, max_tokens=3, **NO_END)
    sim.run()
    assert check_map(sim) == dict.fromkeys(BlockState, 0) | {BlockState.FREE: 32}


_outputs = st.sampled_from([{}, {"n": 2}, {"n": 4}, {"beam_width": 3, "n": 2}])
_operation = st.one_of(
    st.tuples(st.just("add"), st.tuples(st.integers(0, 16), st.integers(1, 9), _outputs)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.sampled_from(["swap", "recompute", "abort"]), st.integers(0, 9)),
    st.tuples(st.just("reset"), st.none()),
)


@pytest.mark.parametrize("launches_ahead", [False, True])
@settings(max_examples=40)
@given(operations=st.lists(_operation, min_size=4, max_size=30))
def test_the_map_agrees_with_the_books_after_any_history(
    simulation: Any, launches_ahead: bool, operations: list[tuple[str, Any]]
) -> None:
    sim = simulation(20, num_swap_blocks=12, launches_ahead=launches_ahead)
    for kind, argument in operations:
        live = [s for s in sim.engine.live_sequences() if s.block_table or kind == "abort"]
        if kind == "add":
            prefix, max_tokens, outputs = argument
            prompt = [*[7] * prefix, 3, 4, 5]
            sim.add(f"r{len(sim.requests)}", prompt, max_tokens=max_tokens, **outputs)
        elif kind == "step":
            for _ in range(argument):
                sim.step()
                check_map(sim)
        elif kind == "reset":
            sim.engine.reset_prefix_cache()
        elif live and kind == "abort":
            sim.engine.abort(live[argument % len(live)].request_id)
        elif live:
            victim = live[argument % len(live)]
            sim.preempt(victim.request_id, victim.child_index, by_swap=kind == "swap")
        check_map(sim)
    sim.run()
    check_map(sim)


def test_a_map_tells_the_end_of_a_jobs_id_only(simulation: Any) -> None:
    job = "0190a1b2c3d4e5f60718293a4b5c6d7e-0:3"
    sim = simulation(num_blocks=12)
    sim.add(job, PROMPT, max_tokens=4)
    sim.step()
    block_map = sim.engine.block_map()
    assert [each.job for each in block_map.sequences] == ["5c6d7e"]
    assert job[:26].encode() not in block_map.encode()
