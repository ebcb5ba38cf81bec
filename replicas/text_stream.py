"""Tokens to text as they come, and stop strings in that text.

A character may need several tokens, and a stop string may lie across tokens: text is given out only once neither can
change it any more.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

__all__ = ["TextStream"]

# Enough for a decoder to know whether the answer's first token begins with a space or continues a word.
CONTEXT_TOKENS = 6

UNTOLD_TOKENS_MAX = 32
"""Far more than a character's four bytes. Past it no text is waited for: an answer of nothing but special tokens or bad
bytes would else be decoded from its start with every token."""

# What decoders write for bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one answer. `stopped` is True once a stop string was complete; the text ends before it.

    A token's text depends on its neighbours, so it is what the text of a few tokens gains by it (the two offsets of
    vLLM's and TGI's detokenizers). `tokenizers`' own DecodeStream is of the same kind, but raises where a byte-fallback
    decoder takes text back, and gives the prompt's last tokens out where those end within a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Tokens whose text was given out, as context, and then those whose text was not.
        self._token_ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._num_told = len(self._token_ids)
        self._told = self._decode(self._token_ids)
        self._held_back = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that this token makes certain; often empty."""
        assert not self.stopped, "nothing comes after a stop string"
        self._token_ids.append(token_id)
        text = self._untold()
        is_full = len(self._token_ids) - self._num_told >= UNTOLD_TOKENS_MAX
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        if not text:
            if is_full:
                del self._token_ids[self._num_told :]
            return ""
        self._tell()
        return self._release(text)

    def flush(self) -> str:
        """What was held back, at the end: an incomplete character becomes U+FFFD, as Transformers' decode gives it."""
        if self.stopped:
            return ""
        rest = self._untold()
        self._tell()
        text = self._release(rest)
        held_back, self._held_back = self._held_back, ""
        return text if self.stopped else text + held_back

    def _untold(self) -> str:
        text = self._decode(self._token_ids)
        # The second where the prompt ended within a character, which the answer has completed.
        for told in (self._told, self._told.rstrip(REPLACEMENT)):
            if text.startswith(told):
                return text[len(told) :]
        # A byte-fallback decoder takes a run of bytes for one piece of text, so a bad byte spoils those before it.
        return self._decode(self._token_ids[self._num_told :])

    def _tell(self) -> None:
        self._token_ids = self._token_ids[self._num_told :]
        self._num_told = len(self._token_ids)
        self._told = self._decode(self._token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _release(self, text: str) -> str:
        self._held_back += text
        # The one that is complete first wins, so the cut does not depend on how the text falls into tokens.
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held_back.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)
            text, self._held_back = self._held_back[:start], ""
            return text
        keep = max((_overlap(self._held_back, stop) for stop in self._stop), default=0)
        certain = len(self._held_back) - keep
        text, self._held_back = self._held_back[:certain], self._held_back[certain:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of the whole stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
