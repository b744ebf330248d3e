import random

import pytest

from inferq.worker.engine.blocks.block_pool import BlockPool
from inferq.worker.engine.blocks.prefix_chain import PrefixChain

SIZE = 4


def make_pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, SIZE)


def fill(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """Allocate and register the blocks of `token_ids`, as a computed sequence would."""
    table = pool.allocate(pool.blocks_for(len(token_ids)))
    chain = PrefixChain(SIZE, salt)
    chain.extend(token_ids, len(token_ids) // SIZE)
    for block, link in zip(table, chain.links, strict=False):
        pool.register(block, link)
    return table


def match(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    return pool.match_prefix(PrefixChain(SIZE, salt), token_ids).block_ids


def test_every_block_can_be_used_and_none_is_reserved():
    pool = make_pool(8)
    assert sorted(pool.allocate(8)) == list(range(8))
    assert pool.num_free == 0


def test_asking_for_more_than_is_free_takes_nothing():
    pool = make_pool(4)
    table = pool.allocate(3)
    with pytest.raises(LookupError, match="2 blocks wanted, 1 of 4 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity([table])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (500, 125)])
def test_blocks_are_counted_by_rounding_up(tokens: int, blocks: int):
    assert make_pool().blocks_for(tokens) == blocks


def test_a_freed_prefix_is_found_again_up_to_the_last_token_but_one():
    pool = make_pool()
    tokens = list(range(12))
    table = fill(pool, tokens)
    pool.release(table)
    assert match(pool, [*tokens, 99]) == table
    assert match(pool, tokens) == table[:2], "one token must be left to compute"
    assert match(pool, tokens[:5]) == table[:1]
    assert match(pool, tokens[:4]) == []


def test_equal_blocks_behind_different_prefixes_do_not_match():
    pool = make_pool()
    pool.release(fill(pool, [1, 1, 1, 1, 7, 7, 7, 7]))
    assert match(pool, [2, 2, 2, 2, 7, 7, 7, 7, 0]) == []
    assert match(pool, [7, 7, 7, 7, 0]) == []


def test_different_adapters_share_nothing_whatever_the_salt():
    roots = []
    for salt in ("", "a", "b"):
        for adapter in ("", "a", "b", "ab"):
            chain = PrefixChain(SIZE, salt, adapter)
            chain.extend(list(range(SIZE)), 1)
            roots.append(chain.links[0].digest)
    assert len(set(roots)) == len(roots)


def test_different_salts_share_nothing():
    pool = make_pool()
    table = fill(pool, list(range(8)), salt="a")
    assert match(pool, [*range(8), 9], salt="a") == table
    assert match(pool, [*range(8), 9], salt="b") == []
    assert match(pool, [*range(8), 9]) == []


def test_a_digest_that_collides_is_not_trusted():
    pool = make_pool()
    fill(pool, list(range(4)))
    chain = PrefixChain(SIZE)
    chain.extend([9, 9, 9, 9], 1)
    digest = next(iter(pool._by_digest))
    chain.links[0] = chain.links[0]._replace(digest=digest)
    assert pool.match_prefix(chain, [9, 9, 9, 9, 9]).block_ids == []


def test_what_is_forgotten_is_not_found_and_its_blocks_can_be_used():
    pool = make_pool(4)
    free, used = fill(pool, list(range(4))), fill(pool, list(range(10, 18)))
    pool.release(free)
    pool.forget()
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert match(pool, [*range(4), 9]) == match(pool, [*range(10, 18), 9]) == []
    pool.check_integrity([used])
    assert len(pool.allocate(2)) == 2


def test_a_free_block_of_the_same_content_gives_way_to_one_in_use():
    pool = make_pool(4)
    first, second = fill(pool, list(range(4))), fill(pool, list(range(4)))
    assert match(pool, [*range(4), 9]) == first, "the first in use stays the one to share"
    pool.release(first)
    chain = PrefixChain(SIZE)
    chain.extend(list(range(4)), 1)
    pool.register(second[0], chain.links[0])
    assert match(pool, [*range(4), 9]) == second
    assert pool.num_cached == 0
    pool.check_integrity([second])


def test_a_prefix_outlives_its_tail():
    pool = make_pool(4)
    tokens = list(range(16))
    table = fill(pool, tokens)
    pool.release(table)
    pool.allocate(1)
    assert match(pool, [*tokens, 0]) == table[:3]
    pool.allocate(2)
    assert match(pool, [*tokens, 0]) == table[:1]


def test_the_least_recently_used_prefix_is_evicted_first():
    pool = make_pool(4)
    old, new = list(range(8)), list(range(10, 18))
    old_table, new_table = fill(pool, old), fill(pool, new)
    pool.release(old_table)
    pool.release(new_table)
    pool.acquire(old_table)
    pool.release(old_table)
    pool.allocate(2)
    assert match(pool, [*new, 0]) == []
    assert match(pool, [*old, 0]) == old_table


def test_blocks_without_reusable_content_are_taken_before_a_cached_prefix():
    pool = make_pool(4)
    tokens = list(range(8))
    cached, plain = fill(pool, tokens), pool.allocate(2)
    pool.release(cached)
    pool.release(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert match(pool, [*tokens, 0]) == cached


def test_acquiring_a_match_takes_its_blocks_off_the_free_list():
    pool = make_pool(4)
    table = fill(pool, list(range(8)))
    pool.release(table)
    found = pool.match_prefix(PrefixChain(SIZE), [*range(8), 0])
    assert (found.block_ids, found.num_free, pool.num_cached) == (table, 2, 2)
    pool.acquire(found.block_ids)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    again = pool.match_prefix(PrefixChain(SIZE), [*range(8), 0])
    assert (again.block_ids, again.num_free) == (table, 0)


def test_a_shared_block_is_free_only_when_the_last_table_lets_go():
    pool = make_pool(4)
    table = pool.allocate(2)
    pool.acquire(table)
    pool.release(table)
    assert pool.num_used == 2
    pool.release(table)
    assert pool.num_used == 0
    pool.check_integrity([])


def test_the_first_of_two_equal_blocks_stays_the_reusable_one():
    pool = make_pool(4)
    first, second = fill(pool, [1, 2, 3, 4]), fill(pool, [1, 2, 3, 4])
    pool.release(second)
    assert match(pool, [1, 2, 3, 4, 5]) == first
    pool.check_integrity([first])


def test_releasing_too_often_is_refused():
    pool = make_pool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(table)


def test_the_integrity_check_sees_a_leak_and_an_unknown_reference():
    pool = make_pool(4)
    table = pool.allocate(2)
    pool.check_integrity([table])
    with pytest.raises(RuntimeError, match="references of block"):
        pool.check_integrity([])
    with pytest.raises(RuntimeError, match="references of block"):
        pool.check_integrity([table, table])


def test_the_integrity_check_sees_a_block_lost_from_the_free_list():
    pool = make_pool(4)
    pool._free.pop_front()
    with pytest.raises(RuntimeError, match="free blocks"):
        pool.check_integrity([])


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_books_balanced(seed: int):
    rng = random.Random(seed)
    pool = make_pool(12)
    tables: list[list[int]] = []
    for _ in range(400):
        if tables and rng.random() < 0.45:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif tables and rng.random() < 0.3:
            tables.append(list(rng.choice(tables)))
            pool.acquire(tables[-1])
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            found = match(pool, tokens)
            pool.acquire(found)
            missing = pool.blocks_for(len(tokens)) - len(found)
            if missing <= pool.num_free:
                tables.append(found + pool.allocate(missing))
                chain = PrefixChain(SIZE)
                chain.extend(tokens, len(tokens) // SIZE)
                for i in range(len(found), len(chain.links)):
                    pool.register(tables[-1][i], chain.links[i])
            else:
                pool.release(found)
        pool.check_integrity(tables)
