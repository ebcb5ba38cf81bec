"""Wire models of the OpenAI API: what a client may send, and what it gets back.

Nothing that a client sends is ignored in silence. A parameter is one of:

| kind | parameters | what happens |
|---|---|---|
| honoured | model, messages, prompt, max_tokens, max_completion_tokens, temperature, top_p, seed, stop, stream, stream_options | as OpenAI has it |
| our extensions | top_k, ignore_eos, cache_salt | top_k tokens to sample from; go on after end of text; a partition of the tenant's cache |
| no effect on the answer | user, metadata, safety_identifier, prompt_cache_key, prompt_cache_retention, parallel_tool_calls | accepted |
| neutral value only | n, best_of, echo, suffix, logprobs, top_logprobs, presence_penalty, frequency_penalty, logit_bias, tools, tool_choice, functions, function_call, response_format, modalities, store, service_tier | another value is refused by name |
| any other | | refused by name |

`null` stands for a parameter's default throughout. Defaults are OpenAI's: temperature 1, top_p 1, and for completions
16 tokens. The role `developer` is OpenAI's newer word for `system`, and is passed to the template as that. A message's
`name` and `tool_call_id` are given to the chat template, which decides whether they are shown to the model.
"""  # noqa: E501  (a table's row is one line)

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cache_index.messages import FinishReason, SamplingParams

from ..errors import InvalidRequestError

__all__ = [
    "COMPLETION_TOKENS_DEFAULT",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionBody",
    "ChatMessage",
    "Completion",
    "CompletionBody",
    "CompletionChoice",
    "GenerationBody",
    "Message",
    "ModelList",
    "ModelObject",
    "PromptTokensDetails",
    "Usage",
]

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default of `max_tokens` in /v1/completions; chat completions have none."""


class _Received(BaseModel):
    # Strict: "5" is no integer and true is no number, so a client's mistake is told rather than guessed at.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _neutral(*values: object) -> AfterValidator:
    """Accept nothing but `values` (and null): those that ask for what happens anyway."""

    def check(value: object) -> object:
        # Types are compared too, because True == 1 in Python and JSON has two different values there.
        if value is None or any(type(value) is type(neutral) and value == neutral for neutral in values):
            return value
        raise PydanticCustomError("unsupported", "this value is not supported yet; leave the parameter out")

    return AfterValidator(check)


# Reading a list or a map ends at its first fault: a body full of them must not cost an error object for each.
FAIL_FAST = Field(fail_fast=True)

Tokens = Annotated[int, Field(ge=1, lt=2**63)]
Penalty = Annotated[Any, _neutral(0, 0.0)]
Tools = Annotated[Any, _neutral([])]
ToolChoice = Annotated[Any, _neutral("none", "auto")]
OnlyNull = Annotated[Any, _neutral()]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _only_text(kind: str) -> str:
    if kind != "text":
        raise PydanticCustomError("unsupported", "only parts of type 'text' are supported: this model reads no other")
    return kind


class TextPart(_Received):
    """One part of a message's content."""

    type: Annotated[str, AfterValidator(_only_text)]
    text: str


def _content_kind(content: object) -> str:
    return "<parts>" if isinstance(content, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], FAIL_FAST, Tag("<parts>")], Discriminator(_content_kind)
]


class Message(_Received):
    """One message of a conversation. Only an assistant's may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    # What an answer of OpenAI's client carries back when it is appended to the conversation as it is.
    tool_calls: Tools = None
    function_call: OnlyNull = None
    refusal: OnlyNull = None
    audio: OnlyNull = None
    annotations: Tools = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None:
            raise PydanticCustomError("no_content", "a message must have content")
        return self

    @property
    def text(self) -> str:
        """The content as one string; text parts are joined without anything between them."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class StreamOptions(_Received):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, _neutral(False)] = None


class GenerationBody(_Received):
    """What chat completions and completions have in common."""

    model: str
    max_tokens: Tokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Tokens | None = None
    seed: int | None = None
    stop: Annotated[list[str], FAIL_FAST, BeforeValidator(_listed)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None

    user: str | None = None
    metadata: Annotated[dict[str, str], FAIL_FAST] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    n: Annotated[Any, _neutral(1)] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[Any, _neutral({})] = None
    store: Annotated[Any, _neutral(False)] = None
    service_tier: Annotated[Any, _neutral("auto", "default")] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "'stream_options' is only allowed when 'stream' is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, *, default_max_tokens: int | None) -> SamplingParams:
        """How to sample, with OpenAI's defaults for what the client left open.

        Raises InvalidRequestError for a value outside its range.
        """
        max_tokens = self._max_tokens()
        try:
            return SamplingParams(
                max_tokens=default_max_tokens if max_tokens is None else max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k,
                seed=self.seed,
                stop=tuple(self.stop or ()),
                ignore_eos=bool(self.ignore_eos),
            )
        except ValueError as error:
            # Its sentences begin with the parameter's name.
            sentence = str(error)
            raise InvalidRequestError(sentence, param=sentence.partition(" ")[0]) from error


class ChatCompletionBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Tokens | None = None

    logprobs: Annotated[Any, _neutral(False)] = None
    top_logprobs: Annotated[Any, _neutral(0)] = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    functions: Tools = None
    function_call: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[Any, _neutral({"type": "text"})] = None
    modalities: Annotated[Any, _neutral(["text"])] = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatCompletionBody":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError(
                "two_limits", "'max_tokens' and 'max_completion_tokens' can't be set at the same time"
            )
        return self

    def _max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _one_prompt(value: object) -> str | list[int]:
    """The one prompt that a request holds: a string, or token ids; either may stand in a list by itself."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    if value in ("", []):
        raise PydanticCustomError("empty", "the prompt must not be empty")
    if isinstance(value, list) and len(value) > 1 and all(isinstance(prompt, str | list) for prompt in value):
        raise PydanticCustomError("unsupported", "several prompts are not supported yet; send one request for each")
    raise PydanticCustomError("prompt_type", "a prompt must be a string or a list of token ids")


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | list[int], PlainValidator(_one_prompt)]

    logprobs: OnlyNull = None
    best_of: Annotated[Any, _neutral(1)] = None
    echo: Annotated[Any, _neutral(False)] = None
    suffix: OnlyNull = None


class PromptTokensDetails(BaseModel):
    """Where a prompt's tokens came from."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one request. `cached_tokens` is what the replica really reused."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> "Usage":
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatMessage(BaseModel):
    """The answer's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The one choice of a chat completion."""

    index: int = 0
    message: ChatMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(_Answer):
    """A whole chat answer."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: Sequence[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    """What a chunk adds to the one choice; the first says the role, the last is empty and says the reason."""

    index: int = 0
    delta: dict[str, str]
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatChunk(_Answer):
    """One event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: Sequence[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    """The one choice of a completion, or what a chunk adds to it."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None


class Completion(_Answer):
    """A whole completion, or one event of a streamed one: OpenAI has one shape for both."""

    object: Literal["text_completion"] = "text_completion"
    choices: Sequence[CompletionChoice]
    usage: Usage | None = None


class ModelObject(BaseModel):
    """A model that can be named in a request."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "warmroute"
    max_model_len: int


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: Sequence[ModelObject]
