import json
from typing import Any

import pytest

from cache_index.messages import SamplingParams
from router.api.parsing import parse_body
from router.api.protocol import ChatCompletionBody, CompletionBody, GenerationBody
from router.errors import InvalidRequestError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "m", "prompt": "hello"}


def chat(**parameters: Any) -> ChatCompletionBody:
    return parse_body(json.dumps(CHAT | parameters).encode(), ChatCompletionBody)


def completion(**parameters: Any) -> CompletionBody:
    return parse_body(json.dumps(COMPLETION | parameters).encode(), CompletionBody)


def refused(body: type[GenerationBody], raw: bytes | dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), body)
    return caught.value


def test_defaults_are_openais() -> None:
    assert chat().sampling(default_max_tokens=None) == SamplingParams(max_tokens=None, temperature=1.0, top_p=1.0)
    assert completion().sampling(default_max_tokens=16).max_tokens == 16


def test_every_honoured_parameter_reaches_sampling() -> None:
    body = chat(max_tokens=7, temperature=0, top_p=0.5, top_k=9, seed=-3, stop=["a", "b"], ignore_eos=True)
    expected = SamplingParams(7, 0.0, 0.5, 9, -3, ("a", "b"), True)
    assert body.sampling(default_max_tokens=99) == expected
    assert chat(max_completion_tokens=8).sampling(default_max_tokens=99).max_tokens == 8
    assert chat(stop="a").sampling(default_max_tokens=None).stop == ("a",)


def test_null_stands_for_the_default_of_every_optional_parameter() -> None:
    for body_type, required in ((ChatCompletionBody, CHAT), (CompletionBody, COMPLETION)):
        optional = {name: None for name in body_type.model_fields if name not in required}
        body = parse_body(json.dumps(required | optional).encode(), body_type)
        assert body.sampling(default_max_tokens=None) == SamplingParams()


def test_parameters_that_change_nothing_are_accepted() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        parallel_tool_calls=True,
    )


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("n", 1, 2),
        ("presence_penalty", 0, 0.5),
        ("frequency_penalty", 0.0, -1),
        ("logit_bias", {}, {"5": 1}),
        ("store", False, True),
        ("service_tier", "auto", "flex"),
        ("logprobs", False, True),
        ("top_logprobs", 0, 2),
        ("tools", [], [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto", "required"),
        ("functions", [], [{"name": "f"}]),
        ("function_call", "none", {"name": "f"}),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("modalities", ["text"], ["audio"]),
    ],
)
def test_a_parameter_not_supported_yet_is_accepted_only_with_its_neutral_value(
    name: str, neutral: object, other: object
) -> None:
    chat(**{name: neutral})
    error = refused(ChatCompletionBody, CHAT | {name: other})
    assert error.param == name
    assert "not supported yet" in error.message


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [("best_of", 1, 3), ("echo", False, True), ("suffix", None, "x"), ("logprobs", None, 0)],
)
def test_so_do_those_of_completions(name: str, neutral: object, other: object) -> None:
    completion(**{name: neutral})
    assert refused(CompletionBody, COMPLETION | {name: other}).param == name


def test_a_neutral_value_is_compared_with_its_json_type() -> None:
    assert refused(ChatCompletionBody, CHAT | {"n": True}).param == "n"
    assert refused(ChatCompletionBody, CHAT | {"logprobs": 0}).param == "logprobs"


@pytest.mark.parametrize("name", ["temprature", "best_of", "chat_template", "__class__"])
def test_an_unknown_parameter_is_refused_by_name(name: str) -> None:
    error = refused(ChatCompletionBody, CHAT | {name: 1})
    assert (error.param, error.message) == (name, f"Unknown parameter: '{name}'.")


def test_an_unknown_parameter_inside_a_message_is_refused_with_its_path() -> None:
    error = refused(ChatCompletionBody, {"model": "m", "messages": [{"role": "user", "content": "a", "extra": 1}]})
    assert error.param == "messages[0].extra"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 5.0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("max_completion_tokens", 0),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", 0),
        ("seed", 1.5),
        ("stream", "true"),
        ("stream", 1),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("user", 5),
        ("metadata", "a"),
        ("cache_salt", 1),
        ("messages", "hello"),
        ("messages", []),
        ("messages", None),
        ("model", None),
    ],
)
def test_a_wrong_type_or_count_is_refused_by_name(name: str, value: object) -> None:
    assert refused(ChatCompletionBody, CHAT | {name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.1), ("seed", 2**63), ("stop", ["a", ""])],
)
def test_a_value_outside_its_range_is_refused_with_the_samplers_own_sentence(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must") as caught:
        chat(**{name: value}).sampling(default_max_tokens=None)
    assert caught.value.param == name


def test_a_stop_list_may_hold_16_strings_and_no_more() -> None:
    assert len(chat(stop=["x"] * 16).sampling(default_max_tokens=None).stop) == 16
    with pytest.raises(InvalidRequestError, match="stop must be at most 16"):
        chat(stop=["x"] * 17).sampling(default_max_tokens=None)


def test_max_tokens_may_be_as_large_as_64_bits_hold() -> None:
    assert chat(max_tokens=2**63 - 1).sampling(default_max_tokens=None).max_tokens == 2**63 - 1


def test_two_limits_contradict_each_other() -> None:
    assert (
        "max_completion_tokens"
        in refused(ChatCompletionBody, CHAT | {"max_tokens": 1, "max_completion_tokens": 1}).message
    )


def test_stream_options_need_a_stream() -> None:
    options = {"stream_options": {"include_usage": True}}
    assert chat(stream=True, **options).include_usage
    assert "stream_options" in refused(ChatCompletionBody, CHAT | options).message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  ",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "\xe9"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "a", "model": "b"}',
        b'{"model": "\\ud800"}',
        b'{"\\udc00": 1}',
        b"[" * 200_000,
        b'{"model": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model": "m",}',
        b'{"model": "m"} x',
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_a_malformed_body_is_refused(raw: bytes) -> None:
    refused(ChatCompletionBody, raw)


def test_an_escaped_pair_of_surrogates_is_a_character() -> None:
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d\\ude00 \\\\ud800"}]}'
    assert parse_body(raw, ChatCompletionBody).messages[0].text == "\N{GRINNING FACE} \\ud800"


def test_an_error_repeats_only_so_much_of_what_was_sent() -> None:
    assert len(refused(ChatCompletionBody, {"x" * 100_000: 1}).message) < 200


def test_a_body_full_of_faults_costs_one_error() -> None:
    error = refused(ChatCompletionBody, {"model": "m", "messages": [7] * 100_000})
    assert error.param == "messages[0]"
    assert error.__cause__ is not None
    assert error.__cause__.error_count() == 1  # type: ignore[attr-defined]


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [fields]}


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "one two"


def test_a_part_that_is_no_text_is_refused_with_a_sentence() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = refused(ChatCompletionBody, message(role="user", content=[image]))
    assert error.param == "messages[0].content[0].type"
    assert "only parts of type 'text' are supported" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
    ],
)
def test_a_wrong_message_is_refused_with_its_path(fields: dict[str, Any], param: str) -> None:
    assert refused(ChatCompletionBody, message(**fields)).param == param


def test_an_answer_of_the_client_can_be_sent_back_as_it_is() -> None:
    chat(
        messages=[
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "b",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
        ]
    )


@pytest.mark.parametrize(
    ("prompt", "parsed"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([0], [0])]
)
def test_a_prompt_is_a_string_or_token_ids_also_alone_in_a_list(prompt: object, parsed: object) -> None:
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "empty"),
        ([], "empty"),
        ([""], "empty"),
        ([[]], "empty"),
        (["a", "b"], "several prompts"),
        ([[1], [2]], "several prompts"),
        (["a", 1], "a prompt must be"),
        ([True], "a prompt must be"),
        ([1.0], "a prompt must be"),
        ([[["a"]]], "a prompt must be"),
        (5, "a prompt must be"),
        (None, "a prompt must be"),
    ],
)
def test_any_other_prompt_is_refused_with_a_sentence(prompt: object, sentence: str) -> None:
    error = refused(CompletionBody, COMPLETION | {"prompt": prompt})
    assert error.param == "prompt"
    assert sentence in error.message


def test_a_missing_parameter_is_named() -> None:
    assert refused(ChatCompletionBody, {"model": "m"}).message == "Missing required parameter: 'messages'."
    assert refused(CompletionBody, {"prompt": "a"}).param == "model"
