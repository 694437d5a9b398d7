"""Prompt lookup: what followed the last time these tokens were seen is the guess.

Saxena 2023, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding). Good where the
answer copies from the prompt (extraction, rewriting, code edits) or repeats itself; costs no weights.

The longest suffix of `prompt_lookup_max` .. `prompt_lookup_min` tokens that also occurs earlier wins, and of
its occurrences the most recent one. Its continuation is copied as LZ77 copies: a copy that runs into the end
of the sequence goes on with what it has just written, so a loop of any period is drafted for all K tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from outrider.config import SpeculativeConfig
from outrider.contracts import Draft, DraftContext, TargetInfo
from outrider.errors import ConfigError
from outrider.sampling.draft_probs import guess

MAX_ENTRIES = 1 << 20
"""N-grams kept over all sequences, about 140 bytes each. Beyond it the sequence unused for longest is
dropped and, should it come back, indexed anew. The sequence at hand is always kept whole."""


class SuffixIndex:
    """Where each n-gram of one sequence last ended, grown by new tokens only."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens: tuple[int, ...] = ()
        self._lengths = range(longest, shortest - 1, -1)
        self._last_end: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._last_end)

    def advance(self, tokens: tuple[int, ...]) -> None:
        """Make this the index of `tokens`: of what is new, or of all of it where the past differs.

        The n-grams that end with the newest token wait for the next call: the suffix must not find itself.
        """
        if tokens[: len(self.tokens)] != self.tokens:
            self._last_end.clear()
            self.tokens = ()
        last_end = self._last_end
        for length in self._lengths:
            for end in range(max(len(self.tokens), length), len(tokens)):
                last_end[tokens[end - length : end]] = end
        self.tokens = tokens

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens after the latest earlier place of the longest suffix; [] without one."""
        tokens = self.tokens
        for length in self._lengths:
            end = self._last_end.get(tokens[-length:])
            if end is not None:
                period = tokens[end:]
                return list((period * (count // len(period) + 1))[:count])
        return []


class NgramDrafter:
    """Drafts by looking the newest tokens up in the sequence itself. Reads `prompt_lookup_max` and `_min`."""

    needs_device = False

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        if config.extra:
            raise ConfigError(
                f"speculative_config.extra: ngram takes no extra keys (got {', '.join(config.extra)}); "
                "its own are prompt_lookup_max and prompt_lookup_min"
            )
        self._shortest = config.prompt_lookup_min
        self._longest = config.prompt_lookup_max
        self._indexes: OrderedDict[str, SuffixIndex] = OrderedDict()  # least recently used first
        self._entries = 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [
            guess(self._index(context).continuation(context.num_tokens), context.sampling)
            if context.num_tokens > 0
            else Draft()
            for context in contexts
        ]

    def forget(self, sequence: str) -> None:
        index = self._indexes.pop(sequence, None)
        if index is not None:
            self._entries -= len(index)

    def _index(self, context: DraftContext) -> SuffixIndex:
        index = self._indexes.get(context.sequence)
        if index is None:
            index = self._indexes[context.sequence] = SuffixIndex(self._shortest, self._longest)
        self._indexes.move_to_end(context.sequence)
        self._entries -= len(index)
        index.advance(tuple(context.tokens))
        self._entries += len(index)
        while self._entries > MAX_ENTRIES and len(self._indexes) > 1:
            self.forget(next(iter(self._indexes)))
        return index
