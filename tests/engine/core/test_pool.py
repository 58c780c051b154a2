"""The pool of blocks."""

from random import Random

import pytest
from starling_engine.kv.pool import BlockPool, OutOfBlocks


def test_takes_and_gives_back() -> None:
    pool = BlockPool(5)
    blocks = pool.take(4)
    assert sorted(blocks) == [1, 2, 3, 4], "block 0 is never given out"
    with pytest.raises(OutOfBlocks):
        pool.take(1)
    for block in blocks:
        pool.release(block)
    assert pool.num_free == 4
    pool.check_integrity([])


def test_a_shared_block_is_free_when_all_have_released_it() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.share(block)
    pool.release(block)
    pool.check_integrity([[block]])
    pool.release(block)
    assert pool.num_free == 2


def test_the_least_recently_used_block_is_uncached_first() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, block_hash in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.cache_block(0, block_hash, block)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.take(1)
    assert [pool.find(0, block_hash) is not None for block_hash in (b"a", b"b", b"c")] == [True, False, True]


def test_uncached_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    first, second, third = pool.take(3)
    pool.cache_block(0, b"a", first)
    for block in (first, second, third):
        pool.release(block)
    assert pool.take(2) == [third, second]
    assert pool.find(0, b"a") == first


def test_a_hit_takes_a_free_block_out_of_the_list() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.cache_block(0, b"a", block)
    pool.release(block)
    pool.share(block)
    assert pool.num_free == 1 and pool.take(1) != [block]
    pool.evict_free_blocks()
    assert pool.find(0, b"a") == block, "only free blocks are uncached"


def test_the_first_block_of_a_hash_stays_cached() -> None:
    pool = BlockPool(3)
    one, two = pool.take(2)
    pool.cache_block(0, b"a", one)
    pool.cache_block(0, b"a", two)
    assert pool.find(0, b"a") == one


def cached(pool: BlockPool, count: int) -> list[int]:
    """Takes blocks, and caches them by their own numbers."""
    blocks = pool.take(count)
    for block in blocks:
        pool.cache_block(0, bytes([block]), block)
    return blocks


def test_spent_blocks_are_taken_before_others_that_are_cached() -> None:
    pool = BlockPool(6)
    blocks = cached(pool, 4)
    for block in blocks:
        pool.release(block, worth=0 if block == blocks[2] else 1)
    pool.spend(blocks[1])
    pool.touch(blocks[1])
    pool.touch(blocks[0])
    pool.check_integrity([])
    assert pool.take(5) == [5, blocks[2], blocks[1], blocks[3], blocks[0]], "blank, spent, and by their last use"
    pool.spend(blocks[0])
    assert pool.num_free == 0, "it is in use"


def test_a_spent_block_that_is_found_is_none_any_more() -> None:
    pool = BlockPool(3)
    first, second = cached(pool, 2)
    pool.release(first, worth=0)
    pool.release(second)
    pool.share(first)
    pool.release(first, worth=1)
    assert pool.take(1) == [second]


def test_a_block_that_is_worth_more_stays_while_others_are_taken() -> None:
    """A worth of four outlives three blocks of one that were freed later, and not the fourth: then it had its time."""
    pool = BlockPool(3)
    precious, other = cached(pool, 2)
    pool.release(precious, worth=4)
    for number in range(3):
        pool.release(other, worth=1)
        assert pool.take(1) == [other], number
        pool.cache_block(0, bytes([10 + number]), other)
        pool.check_integrity([[other]])
    pool.release(other, worth=2)
    pool.touch(other)
    assert pool.take(1) == [precious]


def test_blocks_of_one_worth_are_taken_by_their_last_use() -> None:
    pool = BlockPool(4)
    first, second, third = cached(pool, 3)
    for block in (first, second, third):
        pool.release(block, worth=5)
    pool.touch(first)
    assert pool.take(3) == [second, third, first]


def test_a_block_has_nothing_of_the_worth_of_what_it_held_before() -> None:
    pool = BlockPool(3)
    first, second = cached(pool, 2)
    pool.release(first, worth=0)
    assert pool.take(1) == [first]
    pool.cache_block(0, b"other", first)
    pool.release(second, worth=1)
    pool.release(first)
    assert pool.take(1) == [second]


def test_blocks_that_are_taken_at_once_are_those_of_one_after_the_other() -> None:
    together, alone = BlockPool(200), BlockPool(200)
    for pool in (together, alone):
        random = Random(0)
        for block in cached(pool, 190):
            pool.release(block, worth=random.choice((0.0, 0.3, 1.0, 2.0, 7.0, 40.0)))
    taken = together.take(180)
    assert taken == [alone.take(1)[0] for _ in range(180)]
    together.check_integrity([taken])


def test_a_block_that_was_computed_again_takes_the_place_of_a_free_one() -> None:
    pool = BlockPool(4)
    old, other, new = pool.take(3)
    pool.cache_block(0, b"a", old)
    pool.cache_block(0, b"b", other)
    pool.release(old)
    pool.release(other)
    assert pool.cache_block(0, b"a", new) and pool.find(0, b"a") == new
    pool.release(new)
    pool.check_integrity([])
    assert pool.take(2) == [old, other], "what was computed last stays longest"
