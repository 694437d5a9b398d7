"""The block pool: what is taken comes back, what is shared is shared, what is kept is found again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.blocks import BlockPool, OutOfBlocks, chain_digest


def publish(pool: BlockPool, blocks: list[int], tokens: list[int]) -> None:
    digest = b""
    for index in range(len(tokens) // pool.block_size):
        digest = chain_digest(digest, tokens[index * pool.block_size : (index + 1) * pool.block_size])
        pool.publish(blocks[index], digest)


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(4, 2)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 of 4 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_prefix_is_shared_but_for_its_last_token() -> None:
    pool = BlockPool(8, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    blocks = pool.allocate(3)
    publish(pool, blocks, tokens)
    assert pool.shared_prefix(tokens) == blocks[:2]  # the last token's row is needed for logits
    assert pool.shared_prefix([*tokens, 7]) == blocks
    assert pool.shared_prefix([1, 2, 9, 4, 5]) == blocks[:1]
    assert pool.shared_prefix([9, 2, 3, 4, 5]) == []


def test_released_content_is_found_until_its_block_is_reused() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.allocate(2)
    publish(pool, blocks, [1, 2, 3, 4])
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.shared_prefix([1, 2, 3, 4, 5]) == blocks
    pool.release(blocks)
    pool.allocate(3)
    assert pool.shared_prefix([1, 2, 3, 4, 5]) == []


def test_a_shared_block_is_free_only_when_its_last_owner_left() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    publish(pool, blocks, [1, 2])
    assert pool.shared_prefix([1, 2, 3]) == blocks
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_without_prefix_caching_nothing_is_shared() -> None:
    pool = BlockPool(4, 2, prefix_caching=False)
    publish(pool, pool.allocate(2), [1, 2, 3, 4])
    assert pool.shared_prefix([1, 2, 3, 4, 5]) == []


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=12), st.integers(0, 2**16))
def test_every_block_comes_back_whatever_is_shared(prompts: list[list[int]], order: int) -> None:
    pool = BlockPool(64, 2)
    owned = []
    for tokens in prompts:
        blocks = pool.shared_prefix(tokens)
        blocks += pool.allocate(pool.blocks_for(len(tokens)) - len(blocks))
        publish(pool, blocks, tokens)
        owned.append(blocks)
        if order >> len(owned) & 1:
            pool.release(owned.pop(0))
    for blocks in owned:
        pool.release(blocks)
    assert pool.num_free == 64
