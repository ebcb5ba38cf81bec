import asyncio
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_index.identity import chain_root, scope_key
from cache_index.messages import ModelCard
from router.api.prompts import Prompts
from router.api.protocol import Message
from router.errors import ContextLengthExceededError, InvalidRequestError

SECRET = "s"
HELLO = [Message(role="user", content="the quick fox")]


@pytest.fixture
def card(make_card: Callable[..., ModelCard]) -> ModelCard:
    return make_card()


@pytest.fixture
def prompts(card: ModelCard) -> Iterator[Prompts]:
    built = Prompts.load(card, SECRET, num_threads=2)
    yield built
    built.close()


def text_of(tokenizer: Any, blocks: Any) -> str:
    return str(tokenizer.decode([int(token) for token in blocks.token_ids]))


async def test_a_conversation_is_rendered_by_the_template_up_to_the_answer(prompts: Prompts, tokenizer: Any) -> None:
    blocks = await prompts.chat([Message(role="system", content="be brief"), *HELLO], tenant="t", cache_salt=None)
    expected = "<|system|>be brief<|end|><|user|>the quick fox<|end|><|assistant|>"
    assert text_of(tokenizer, blocks) == expected
    # The template writes special tokens; the tokenizer must not add its own in front.
    assert [int(token) for token in blocks.token_ids] == tokenizer(expected, add_special_tokens=False)["input_ids"]


async def test_a_completion_has_the_tokenizers_own_special_tokens(prompts: Prompts, tokenizer: Any) -> None:
    blocks = await prompts.completion("the quick fox", tenant="t", cache_salt=None)
    assert text_of(tokenizer, blocks) == "<|begin|>the quick fox"


async def test_token_ids_are_taken_as_they_are(prompts: Prompts) -> None:
    blocks = await prompts.completion([5, 6, 7, 8, 9], tenant="t", cache_salt=None)
    assert [int(token) for token in blocks.token_ids] == [5, 6, 7, 8, 9]
    assert blocks.num_blocks == 1


async def test_the_role_developer_is_rendered_as_system(prompts: Prompts) -> None:
    as_developer, as_system = [
        await prompts.chat([Message(role=role, content="be brief"), *HELLO], tenant="t", cache_salt=None)
        for role in ("developer", "system")
    ]
    assert as_developer.block_hashes == as_system.block_hashes


async def test_the_chain_starts_from_identity_and_scope(prompts: Prompts, card: ModelCard) -> None:
    blocks = await prompts.completion([5] * 8, tenant="t", cache_salt="salt")
    scope = scope_key(SECRET.encode(), "t", "salt")
    assert blocks.scope == scope
    assert blocks.fingerprint == card.identity.fingerprint()
    assert blocks.root == chain_root(card.identity.fingerprint(), scope)
    assert blocks.block_size == card.block_size


async def test_tenant_and_salt_each_split_the_cache_and_the_same_ones_share_it(prompts: Prompts) -> None:
    async def hashes(tenant: str, salt: str | None) -> tuple[bytes, ...]:
        return (await prompts.completion([5] * 8, tenant=tenant, cache_salt=salt)).block_hashes

    assert await hashes("t", None) == await hashes("t", None)
    kinds = [await hashes("t", None), await hashes("u", None), await hashes("t", ""), await hashes("t", "x")]
    assert len(set(kinds)) == 4


async def test_many_threads_give_what_one_gives(prompts: Prompts) -> None:
    texts = [f"the quick brown fox {number} " * 8 for number in range(64)]
    one_by_one = [await prompts.completion(text, tenant="t", cache_salt=None) for text in texts]
    at_once = await asyncio.gather(*(prompts.completion(text, tenant="t", cache_salt=None) for text in texts))
    assert [blocks.block_hashes for blocks in at_once] == [blocks.block_hashes for blocks in one_by_one]


async def test_what_the_template_raises_is_told_to_the_client(prompts: Prompts) -> None:
    with pytest.raises(InvalidRequestError, match="this model takes no tool results") as caught:
        await prompts.chat([Message(role="tool", content="42")], tenant="t", cache_salt=None)
    assert caught.value.param == "messages"


async def test_a_template_that_fails_on_its_own_is_no_fault_of_ours(
    make_card: Callable[..., ModelCard], tokenizer: Any
) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = "{{ messages[0].content + 1 }}"
    broken = Prompts(make_card(), changed, SECRET, num_threads=1)
    with pytest.raises(InvalidRequestError, match="can only concatenate"):
        await broken.chat(HELLO, tenant="t", cache_salt=None)
    broken.close()


async def test_a_model_without_a_template_completes_but_does_not_chat(
    make_card: Callable[..., ModelCard], plain_tokenizer_folder: Path
) -> None:
    plain = Prompts.load(make_card(plain_tokenizer_folder), SECRET, num_threads=1)
    assert (await plain.completion("the fox", tenant="t", cache_salt=None)).num_tokens > 1
    with pytest.raises(InvalidRequestError, match="has no chat template"):
        await plain.chat(HELLO, tenant="t", cache_salt=None)
    plain.close()


@pytest.mark.parametrize("outside", [-1, 10**6, 2**32, 10**30])
async def test_a_token_id_outside_the_vocabulary_is_refused(prompts: Prompts, outside: int) -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        await prompts.completion([5, outside], tenant="t", cache_salt=None)


async def test_the_last_token_id_of_the_vocabulary_is_accepted(prompts: Prompts, tokenizer: Any) -> None:
    await prompts.completion([len(tokenizer) - 1], tenant="t", cache_salt=None)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        await prompts.completion([len(tokenizer)], tenant="t", cache_salt=None)


async def test_a_prompt_may_fill_the_context_and_not_exceed_it(prompts: Prompts, card: ModelCard) -> None:
    await prompts.completion([5] * card.max_model_len, tenant="t", cache_salt=None)
    with pytest.raises(ContextLengthExceededError, match=r"length is 512 tokens.* 513 tokens") as caught:
        await prompts.completion([5] * (card.max_model_len + 1), tenant="t", cache_salt=None)
    assert caught.value.param == "prompt"


async def test_a_prompt_without_a_token_is_refused(make_card: Callable[..., ModelCard], tokenizer: Any) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = "{{ '' }}"
    silent = Prompts(make_card(), changed, SECRET, num_threads=1)
    with pytest.raises(InvalidRequestError, match="at least one token"):
        await silent.chat(HELLO, tenant="t", cache_salt=None)
    silent.close()


def test_an_empty_secret_is_refused_at_once(card: ModelCard) -> None:
    with pytest.raises(ValueError, match="secret"):
        Prompts.load(card, "", num_threads=1)
