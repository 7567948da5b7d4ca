"""Stop strings: where in a sequence of tokens does a text first appear. No JAX."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """The completion ends after `length` tokens; `text` is what they say before `stop`."""

    length: int
    text: str
    stop: str


class StopStrings:
    """Finds the first token at which the decoded text contains one of several strings.

    The answer is defined on the tokens alone: the smallest k for which decode(tokens[:k]) contains a stop string, so
    it does not depend on how many tokens at a time are looked at. A string spread over several tokens, and one that
    ends inside a token, are found. Special tokens have no text and match nothing: use stop_token_ids for them.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.stops = tuple(stops)
        self.decode = decode
        self.longest = max(len(stop) for stop in self.stops)
        # A token with text has at least one byte. Four more cover a character cut at the window's edge.
        self.window = max(len(stop.encode()) for stop in self.stops) + 4

    def find(self, tokens: Sequence[int], new: int) -> StopMatch | None:
        """Looks for a match that one of the last `new` tokens completes; earlier ones must have been looked at."""
        seen = len(tokens) - new
        recent = self.decode(tokens[self._window_start(tokens, seen) :])
        if not any(stop in recent for stop in self.stops):
            return None
        for length in range(seen + 1, len(tokens) + 1):
            text = self.decode(tokens[:length])
            hits = [(text.find(stop), stop) for stop in self.stops if stop in text]
            if hits:
                at, stop = min(hits)
                return StopMatch(length, text[:at], stop)
        return None

    def _window_start(self, tokens: Sequence[int], seen: int) -> int:
        """First token of a window whose text before `seen` is longer than any stop string."""
        size = self.window
        # Special tokens in between have no text: take more until there is enough.
        while size < seen and len(self.decode(tokens[seen - size : seen])) <= self.longest:
            size *= 2
        return max(0, seen - size)
