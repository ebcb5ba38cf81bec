"""Text comes out whole characters at a time, and never past a stop string."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from replicas.text_stream import UNTOLD_TOKENS_MAX, TextStream


@pytest.fixture(scope="module")
def tokenizer(model_folder: Callable[[str], Path]) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_folder("llama"))


def stream(tokenizer: PreTrainedTokenizerFast, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    decoding = TextStream(tokenizer.backend_tokenizer, tokenizer("before").input_ids, stop)
    pieces: list[str] = []
    for token_id in tokenizer(text).input_ids:
        pieces.append(decoding.push(token_id))
        if decoding.stopped:
            return pieces, True
    pieces.append(decoding.flush())
    return pieces, decoding.stopped


def cut(text: str, stop: Iterable[str]) -> str:
    """What is left: up to the start of the stop string whose end comes first."""
    ends = {(at + len(s), at) for s in stop if (at := text.find(s)) >= 0}
    return text[: min(ends)[1]] if ends else text


@pytest.mark.parametrize("text", ["the sea", "naïve café", "日本語 and 🌊🌊", " leading", "trailing ", "a\n\nb\t"])
def test_the_pieces_are_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    pieces, stopped = stream(tokenizer, text)
    assert "".join(pieces) == text
    assert not stopped


def test_a_character_of_several_tokens_comes_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces, _ = stream(tokenizer, "🌊")
    assert [piece for piece in pieces if piece] == ["🌊"]
    assert len(pieces) > 2


def test_an_answer_that_ends_within_a_character_ends_with_a_replacement_character(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    token_ids = tokenizer("sea 🌊").input_ids[:-1]
    decoding = TextStream(tokenizer.backend_tokenizer, [], ())
    text = "".join(decoding.push(token_id) for token_id in token_ids) + decoding.flush()
    assert text == tokenizer.decode(token_ids)
    assert text.startswith("sea ")
    assert "\ufffd" in text


@pytest.mark.parametrize("stop", [("sky",), ("and the",), ("x", "sky and"), ("y and",)])
def test_text_ends_before_a_stop_string_that_lies_across_tokens(
    tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...]
) -> None:
    text = "the sea, the sky and the stars"
    pieces, stopped = stream(tokenizer, text, stop)
    assert stopped
    assert "".join(pieces) == cut(text, stop)


def test_what_only_looked_like_a_stop_string_is_given_out(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces, stopped = stream(tokenizer, "the stars", ("stare", "the starsx"))
    assert "".join(pieces) == "the stars"
    assert not stopped


@given(
    text=st.text(alphabet="ab 🌊é", max_size=30),
    stop=st.lists(st.text(alphabet="ab 🌊é", min_size=1, max_size=4), max_size=3),
)
def test_any_text_is_cut_at_the_stop_string_that_is_complete_first(
    tokenizer: PreTrainedTokenizerFast, text: str, stop: list[str]
) -> None:
    pieces, stopped = stream(tokenizer, text, tuple(stop))
    assert "".join(pieces) == cut(text, stop)
    assert stopped == any(s in text for s in stop)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A decoder as Llama 2's and Gemma's: unknown characters are tokens of one byte, and a run of them is one text."""
    vocab = {"<unk>": 0, "\u2581x": 1, "y": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def bytes_of(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        ([*bytes_of("A"), 3 + 0xE2, 2], "A\ufffdy"),
        ([*bytes_of("🌊"), 3 + 0xF0, 2], "🌊\ufffdy"),
        ([*bytes_of("🌊🌊"), 1, 1], "🌊🌊 x x"),
    ],
)
def test_a_bad_byte_neither_fails_nor_takes_back_what_was_given_out(
    byte_fallback: Tokenizer, token_ids: list[int], text: str
) -> None:
    decoding = TextStream(byte_fallback, [2], ())
    assert "".join(decoding.push(token_id) for token_id in token_ids) + decoding.flush() == text


def test_no_tokens_however_odd_fail(byte_fallback: Tokenizer, tokenizer: PreTrainedTokenizerFast) -> None:
    choose = random.Random(7)
    for odd in (byte_fallback, tokenizer.backend_tokenizer):
        # Past the vocabulary too: a model's embedding may have more rows than its tokenizer has tokens.
        num_tokens = odd.get_vocab_size() + 9
        for _ in range(50):
            token_ids = [choose.randrange(num_tokens) for _ in range(30)]
            decoding = TextStream(odd, token_ids[:10], ("the",))
            for token_id in token_ids[10:]:
                if not decoding.stopped:
                    decoding.push(token_id)
            decoding.flush()


@pytest.mark.parametrize("prompt", ["what is \ufffd", "the sea 🌊\ufffd"])
def test_a_prompt_that_ends_in_a_replacement_character_is_not_repeated(
    tokenizer: PreTrainedTokenizerFast, prompt: str
) -> None:
    decoding = TextStream(tokenizer.backend_tokenizer, tokenizer(prompt).input_ids, ())
    pieces = [decoding.push(token_id) for token_id in tokenizer(" and the sky").input_ids]
    assert "".join(pieces) + decoding.flush() == " and the sky"


def test_a_character_that_the_prompt_began_is_completed(tokenizer: PreTrainedTokenizerFast) -> None:
    token_ids = tokenizer("sea 🌊").input_ids
    decoding = TextStream(tokenizer.backend_tokenizer, token_ids[:-1], ())
    assert decoding.push(token_ids[-1]) == "🌊"


def test_an_answer_without_text_is_not_decoded_from_its_start_with_every_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    end, bad_byte, before = tokenizer.eos_token_id, tokenizer("🌊").input_ids[0], tokenizer("sea").input_ids
    for token_id, gained in ((end, ""), (bad_byte, "\ufffd" * 500)):
        decoding = TextStream(tokenizer.backend_tokenizer, before, ())
        text = "".join(decoding.push(token_id) for _ in range(500))
        assert len(decoding._token_ids) <= 2 * UNTOLD_TOKENS_MAX
        text += "".join(decoding.push(token) for token in tokenizer(" and the sky").input_ids)
        assert text + decoding.flush() == gained + " and the sky"
