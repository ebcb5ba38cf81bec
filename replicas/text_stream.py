"""Tokens to text as they come, and stop strings in that text.

A character may need several tokens, and a stop string may lie across tokens: text is given out only once neither can
change it any more.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

__all__ = ["TextStream"]

# Enough for a decoder to know whether the answer's first token begins with a space or continues a word.
CONTEXT_TOKENS = 6


class TextStream:
    """The text of one answer. `stopped` is True once a stop string was complete; the text ends before it."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(list(prompt_token_ids[-CONTEXT_TOKENS:]), skip_special_tokens=True)
        self._stop = tuple(stop)
        self._pending_ids: list[int] = []
        self._held_back = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that this token makes certain; often empty."""
        assert not self.stopped, "nothing comes after a stop string"
        self._pending_ids.append(token_id)
        text = self._decoder.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._pending_ids.clear()
        return self._release(text)

    def flush(self) -> str:
        """What was held back, at the end: an incomplete character becomes U+FFFD, as Transformers' decode gives it."""
        if self.stopped:
            return ""
        rest = self._tokenizer.decode(self._pending_ids, skip_special_tokens=True) if self._pending_ids else ""
        self._pending_ids.clear()
        text = self._release(rest)
        held_back, self._held_back = self._held_back, ""
        return text if self.stopped else text + held_back

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
