"""Chained block hashes: equal where the prefix is equal, different where anything of it differs."""

import pickle
import struct
from typing import Any

import mmh3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_index.blocks import BlockChain, PromptBlocks, as_token_ids, hash_block
from cache_index.identity import chain_root

FINGERPRINT, SCOPE = b"f" * 16, b"s" * 16
ROOT = chain_root(FINGERPRINT, SCOPE)
UINT32_MAX = 2**32 - 1

token_ids = st.integers(0, UINT32_MAX)
prompts = st.lists(token_ids, max_size=40)


def build(tokens: Any, block_size: int = 4, **changes: Any) -> PromptBlocks:
    return PromptBlocks.build(
        tokens, **{"block_size": block_size, "root": ROOT, "fingerprint": FINGERPRINT, "scope": SCOPE, **changes}
    )


def naive_hashes(tokens: list[int], block_size: int, root: bytes, extras: dict[int, bytes]) -> tuple[bytes, ...]:
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        packed = root + struct.pack(f"<{block_size}I", *block) + extras.get(start // block_size, b"")
        root = mmh3.mmh3_x64_128_digest(packed)
        hashes.append(root)
    return tuple(hashes)


@given(prompts, st.integers(1, 7), st.dictionaries(st.integers(0, 12), st.binary(max_size=4)))
def test_hashes_are_those_of_a_plain_computation(tokens: list[int], block_size: int, extras: dict[int, bytes]) -> None:
    prompt = build(tokens, block_size, extras=extras)
    assert prompt.block_hashes == naive_hashes(tokens, block_size, ROOT, extras)
    assert prompt.token_ids.tolist() == tokens
    assert prompt.num_tokens == len(prompt) == len(tokens)
    assert prompt.num_blocks == len(tokens) // block_size


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    # Routers and replicas of two releases share them; another value here empties every cache.
    assert [block_hash.hex() for block_hash in build(range(9)).block_hashes] == [
        "97ba7a0a7c089c62c4bd4bf24bcc6365",
        "c994307b90986a858e7bcf4f86d87e9d",
    ]


@given(st.lists(token_ids, min_size=1, max_size=40), st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones_and_no_earlier(tokens: list[int], data: Any) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[position] = data.draw(token_ids.filter(lambda token: token != tokens[position]))
    one, other = build(tokens).block_hashes, build(changed).block_hashes
    block = position // 4
    assert one[:block] == other[:block]
    assert not set(one[block:]) & set(other[block:])


@given(prompts, prompts)
def test_prompts_share_the_hashes_of_their_common_full_blocks(one: list[int], other: list[int]) -> None:
    tail = build(one + other)
    num_shared = len(one) // 4
    assert tail.block_hashes[:num_shared] == build(one).block_hashes


@pytest.mark.parametrize(
    "changes",
    [{"root": chain_root(b"g" * 16, SCOPE)}, {"root": chain_root(FINGERPRINT, b"t" * 16)}, {"block_size": 2}],
    ids=["another identity", "another scope", "another block size"],
)
def test_no_hash_is_shared_between_identities_scopes_and_block_sizes(changes: dict[str, Any]) -> None:
    tokens = [7] * 16
    assert not set(build(tokens).block_hashes) & set(build(tokens, **changes).block_hashes)


def test_extras_change_their_block_and_all_later_ones() -> None:
    tokens = range(12)
    plain, image = build(tokens).block_hashes, build(tokens, extras={1: b"a cat"}).block_hashes
    assert plain[0] == image[0]
    assert not set(plain[1:]) & set(image[1:])
    assert image != build(tokens, extras={1: b"a dog"}).block_hashes
    assert build(tokens, extras={1: b""}).block_hashes == plain


def test_a_repeated_block_has_another_hash_each_time() -> None:
    hashes = build([5] * 400).block_hashes
    assert len(set(hashes)) == 100


def test_a_partial_block_has_no_hash() -> None:
    assert build(range(3)).block_hashes == ()
    assert build([]).block_hashes == ()
    assert build(range(4)).block_hashes == build(range(7)).block_hashes


def test_a_test_may_bring_hashes_that_collide() -> None:
    prompt = build(range(12), digest=lambda _: b"0" * 16)
    assert prompt.block_hashes == (b"0" * 16,) * 3
    assert hash_block(ROOT, b"1234", digest=lambda packed: packed) == ROOT + b"1234"


@given(prompts)
def test_token_ids_become_uint32_by_value(tokens: list[int]) -> None:
    for given_as in (tokens, tuple(tokens), iter(tokens), np.array(tokens, dtype=np.int64)):
        ids = as_token_ids(given_as)
        assert ids.dtype == np.dtype("<u4")
        assert ids.tolist() == tokens


@pytest.mark.parametrize(
    "bad",
    [
        [-1],
        [UINT32_MAX + 1],
        [2**63],
        [2**200],
        [-(2**200)],
        [2**63, -1],
        [1.5],
        [1.0],
        ["1"],
        [None],
        [[1]],
        [[1, 2], [3]],
        [True],
        np.array([[1]]),
        np.array([1.5]),
        np.array([np.nan]),
        np.array(["1"]),
        np.array([2**40]),
        np.array([2**64 - 1], dtype=np.uint64),
    ],
    ids=repr,
)
def test_what_is_no_uint32_is_refused_and_never_becomes_another_token(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"token id|shape|sequence"):
        as_token_ids(bad)


def test_token_ids_are_a_copy_that_nobody_can_write() -> None:
    mine = np.array([1, 2, 3], dtype=np.uint32)
    ids = as_token_ids(mine)
    mine[0] = 9
    assert ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        build(range(4), block_size)


def test_a_rebased_prompt_is_the_prompt_built_under_the_other_identity() -> None:
    other = chain_root(b"g" * 16, SCOPE)
    rebased = build(range(10)).rebased(fingerprint=b"g" * 16, root=other, block_size=3)
    expected = build(range(10), 3, root=other, fingerprint=b"g" * 16)
    assert rebased.block_hashes == expected.block_hashes
    assert (rebased.block_size, rebased.root, rebased.fingerprint, rebased.scope) == (3, other, b"g" * 16, SCOPE)
    assert rebased.token_ids.tolist() == list(range(10))


def test_a_prompt_with_extras_keeps_them_and_its_block_size_when_rebased() -> None:
    prompt = build(range(10), extras={0: b"a cat"})
    other = chain_root(b"g" * 16, SCOPE)
    rebased = prompt.rebased(fingerprint=b"g" * 16, root=other, block_size=4)
    assert rebased.block_hashes == build(range(10), root=other, extras={0: b"a cat"}).block_hashes
    with pytest.raises(ValueError, match="extras"):
        prompt.rebased(fingerprint=b"g" * 16, root=other, block_size=5)


def test_a_prompt_arrives_in_another_process_as_it_was_sent() -> None:
    prompt = build(range(10), extras={1: b"a cat"})
    arrived = pickle.loads(pickle.dumps(prompt))
    assert arrived.token_ids.tolist() == prompt.token_ids.tolist()
    for name in ("block_size", "root", "fingerprint", "scope", "block_hashes", "extras"):
        assert getattr(arrived, name) == getattr(prompt, name), name


@given(prompts, prompts, st.integers(1, 7))
def test_a_chain_that_grew_has_the_hashes_of_the_whole(prompt: list[int], answer: list[int], block_size: int) -> None:
    extras = {0: b"a cat", 2: b"a dog"}
    chain = BlockChain(build(prompt, block_size, extras=extras))
    for token_id in answer:
        chain.append(token_id)
    whole = build(prompt + answer, block_size, extras=extras)
    assert tuple(chain.block_hashes) == whole.block_hashes
    assert chain.num_blocks == whole.num_blocks
    assert len(chain) == whole.num_tokens
    for index in range(chain.num_blocks):
        block_tokens = whole.token_ids[index * block_size : (index + 1) * block_size]
        assert chain.block_tokens(index) == block_tokens.tobytes()
        assert chain.block_extras(index) == extras.get(index, b"")


def test_a_chain_that_grows_leaves_its_prompt_as_it_was() -> None:
    prompt = build(range(7))
    chain = BlockChain(prompt)
    chain.append(7)
    assert prompt.token_ids.tolist() == list(range(7))
    assert len(prompt.block_hashes) == 1
    assert chain.num_blocks == 2


@pytest.mark.parametrize("token_id", [-1, UINT32_MAX + 1])
def test_a_chain_refuses_what_is_no_uint32(token_id: int) -> None:
    chain = BlockChain(build(range(3)))
    with pytest.raises(OverflowError):
        chain.append(token_id)
    assert len(chain) == 3
    assert chain.num_blocks == 0
