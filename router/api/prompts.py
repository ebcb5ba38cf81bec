"""From messages or text to `PromptBlocks`: the model's own chat template and tokenizer, off the event loop.

Rendering is the template's business and happens in two visible steps, text first and tokens then, because a template
writes its special tokens itself: tokenizing must not add them a second time.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cache_index.blocks import PromptBlocks
from cache_index.identity import chain_root, scope_key
from cache_index.messages import ModelCard

from ..errors import ContextLengthExceededError, InvalidRequestError
from .protocol import Message

__all__ = ["Prompts"]

T = TypeVar("T")


class Prompts:
    """Renders, tokenizes and hashes prompts for one model, on a few threads of its own.

    The queue in front of the threads has no bound of its own: every prompt in it holds a place among the gateway's
    bounded streams.
    """

    def __init__(self, card: ModelCard, tokenizer: PreTrainedTokenizerBase, secret: str, *, num_threads: int) -> None:
        """Raises ValueError for an empty secret, under which anybody could compute a tenant's scope."""
        self._card = card
        self._tokenizer = tokenizer
        self._secret = secret.encode("utf-8")
        scope_key(self._secret, tenant="")
        self._fingerprint = card.identity.fingerprint()
        # The first call may switch truncation and padding off in the tokenizer; the threads share it, and after this
        # none of them changes it any more.
        self._tokenizer("")
        self._vocab_size = len(tokenizer)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, card: ModelCard, secret: str, *, num_threads: int) -> Self:
        """Load the tokenizer that `card` names: reads files, or the network for a hub id.

        Code that a repository may bring along is not run.
        """
        tokenizer = AutoTokenizer.from_pretrained(card.tokenizer, revision=card.revision, trust_remote_code=False)
        return cls(card, tokenizer, secret, num_threads=num_threads)

    def close(self) -> None:
        """Let the threads end; prompts that still wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def chat(self, messages: Sequence[Message], *, tenant: str, cache_salt: str | None) -> PromptBlocks:
        """The conversation, rendered by the chat template up to the point where the assistant answers.

        Raises InvalidRequestError where the model has no template or the template refuses the messages, and
        ContextLengthExceededError.
        """
        return await self._on_thread(lambda: self._build(self._chat_tokens(messages), "messages", tenant, cache_salt))

    async def completion(self, prompt: str | list[int], *, tenant: str, cache_salt: str | None) -> PromptBlocks:
        """Plain text, with the special tokens that the tokenizer adds by default, or token ids as they are.

        Raises InvalidRequestError for a prompt without tokens or an id outside the vocabulary, and
        ContextLengthExceededError.
        """
        return await self._on_thread(lambda: self._build(self._tokens(prompt), "prompt", tenant, cache_salt))

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise InvalidRequestError(
                f"The model '{self._card.name}' has no chat template; use /v1/completions.", param="messages"
            )
        conversation = [_template_fields(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            # A template is a program of the model's author, run on these messages: most raise on purpose, to say what
            # they do not accept, and the others fail on what they did not expect.
            raise InvalidRequestError(
                f"The model's chat template does not accept these messages: {error}", param="messages"
            ) from error
        return self._encode(str(text), add_special_tokens=False)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens=True)
        outside = next((token for token in prompt if not 0 <= token < self._vocab_size), None)
        if outside is not None:
            raise InvalidRequestError(
                f"The prompt has a token id outside the vocabulary, which has {self._vocab_size} tokens.",
                param="prompt",
            )
        return prompt

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Not verbose: a prompt over the context is told to the client, not to the log.
        encoded: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return encoded

    def _build(self, token_ids: list[int], param: str, tenant: str, cache_salt: str | None) -> PromptBlocks:
        card = self._card
        if not token_ids:
            raise InvalidRequestError("The prompt must have at least one token.", param=param)
        if len(token_ids) > card.max_model_len:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {card.max_model_len} tokens. However, your {param} resulted "
                f"in {len(token_ids)} tokens. Please reduce the length of the {param}.",
                param=param,
            )
        scope = scope_key(self._secret, tenant, cache_salt)
        return PromptBlocks.build(
            token_ids,
            block_size=card.block_size,
            root=chain_root(self._fingerprint, scope),
            fingerprint=self._fingerprint,
            scope=scope,
        )


def _template_fields(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields
