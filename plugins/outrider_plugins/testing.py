"""Three drafters that know the answer, to drive the real loop in tests and demonstrations.

`oracle` drafts the target's true continuation, `anti` a first token that is always wrong, `scripted` as many
right tokens a round as its script says. They learn the truth from `speculative_config.extra`:

    {"continuations": [[[1, 5, 9], [4, 4, 2]], ...]}        pairs of prompt and what the target makes of it

(in Python also the mapping {(1, 5, 9): (4, 4, 2)}). A sequence that left the known text gets no drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config import SpeculativeConfig
from outrider.contracts import Draft, DraftContext, TargetInfo
from outrider.errors import ConfigError
from outrider.sampling.draft_probs import guess


class Continuations:
    """What the target makes of each known prompt."""

    def __init__(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self._by_prompt = dict(pairs)
        self._prompt_lengths = sorted({len(prompt) for prompt in self._by_prompt}, reverse=True)

    def after(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """The true tokens after `tokens`, a known prompt and part of its continuation; None for any other.

        Where several known texts fit, the one with the longest prompt speaks.
        """
        known = tuple(tokens)
        for length in self._prompt_lengths:
            continuation = self._by_prompt.get(known[:length])
            committed = known[length:]
            if continuation is not None and continuation[: len(committed)] == committed:
                return continuation[len(committed) :]
        return None


class OracleDrafter:
    """Every draft is right, as long as the truth is known."""

    needs_device = False

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        _refuse_unknown_keys(config, {"continuations"})
        self._truth = _continuations(config, target, required=True)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [
            guess((self._truth.after(context.tokens) or ())[: context.num_tokens], context.sampling)
            for context in contexts
        ]

    def forget(self, sequence: str) -> None:
        """Nothing is kept."""


class AntiDrafter:
    """The first draft is always wrong, so all that follow must fall with it, right as they may be.

    Without `continuations` it counts on from the newest token, which a target may happen to agree with. With
    `out_of_range: true` it sends what is no token at all: ids past the vocabulary and negative ones in turn.
    """

    needs_device = False

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        _refuse_unknown_keys(config, {"continuations", "out_of_range"})
        self._truth = _continuations(config, target, required=False)
        self._vocab_size = target.vocab_size
        self._out_of_range = config.extra.get("out_of_range", False)
        if not isinstance(self._out_of_range, bool):
            raise ConfigError(
                f"speculative_config.extra.out_of_range: true or false (got {self._out_of_range!r})"
            )

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [guess(self._drafts(context)[: context.num_tokens], context.sampling) for context in contexts]

    def forget(self, sequence: str) -> None:
        """Nothing is kept."""

    def _drafts(self, context: DraftContext) -> list[int]:
        count = context.num_tokens
        if self._out_of_range:
            return [self._vocab_size + i if i % 2 == 0 else -i for i in range(count)]
        right = self._truth.after(context.tokens)
        if right:
            return [_another(right[0], self._vocab_size), *right[1:count]]
        newest = context.tokens[-1]
        return [(newest + 1 + i) % self._vocab_size for i in range(count)]


@dataclass(slots=True)
class _Script:
    """Where one sequence is in the script."""

    round: int = 0
    base_len: int | None = None  # committed length that `round` was drafted at


class ScriptedDrafter:
    """In a sequence's round i, the first `accept[i % len(accept)]` drafts are right and the next is wrong.

    A round is a new committed length: an order that is repeated gets the same answer again. After the wrong
    token the right ones go on, so that a verifier that accepts beyond a rejection is found out.
    """

    needs_device = False

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        _refuse_unknown_keys(config, {"continuations", "accept"})
        self._truth = _continuations(config, target, required=True)
        self._vocab_size = target.vocab_size
        accept = config.extra.get("accept")
        if not isinstance(accept, Sequence) or not accept or not all(_is_count(entry) for entry in accept):
            raise ConfigError(
                "speculative_config.extra.accept: right drafts of each round, such as [4, 0, 2] "
                f"(got {accept!r})"
            )
        self._accept = tuple(accept)
        self._scripts: dict[str, _Script] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [guess(self._drafts(context)[: context.num_tokens], context.sampling) for context in contexts]

    def forget(self, sequence: str) -> None:
        self._scripts.pop(sequence, None)

    def _drafts(self, context: DraftContext) -> list[int]:
        right = self._truth.after(context.tokens)
        if right is None:
            return []
        wrong_at = self._accept[self._round(context) % len(self._accept)]
        return [
            _another(token, self._vocab_size) if i == wrong_at else token for i, token in enumerate(right)
        ]

    def _round(self, context: DraftContext) -> int:
        script = self._scripts.setdefault(context.sequence, _Script())
        base_len = len(context.tokens)
        if script.base_len is not None and script.base_len != base_len:
            script.round += 1
        script.base_len = base_len
        return script.round


def _another(token: int, vocab_size: int) -> int:
    """A valid token that is not this one."""
    return (token + 1) % vocab_size


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _refuse_unknown_keys(config: SpeculativeConfig, known: set[str]) -> None:
    for key in config.extra:
        if key not in known:
            raise ConfigError(
                f"speculative_config.extra: unknown key {key!r}; known keys: {', '.join(sorted(known))}"
            )


def _continuations(config: SpeculativeConfig, target: TargetInfo, *, required: bool) -> Continuations:
    """`extra.continuations`, checked token by token against the target's vocabulary."""
    key = "speculative_config.extra.continuations"
    given = config.extra.get("continuations")
    if given is None and not required:
        return Continuations(())
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, Sequence) or not pairs or isinstance(pairs, str):
        raise ConfigError(
            f"{key}: pairs of prompt and continuation, such as [[[1, 5], [4, 2]]] (got {given!r})"
        )
    read = []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ConfigError(f"{key}.{number}: a prompt and its continuation (got {pair!r})")
        for tokens in pair:
            if not isinstance(tokens, Sequence) or isinstance(tokens, str):
                raise ConfigError(f"{key}.{number}: a list of token ids (got {tokens!r})")
            for token in tokens:
                if not _is_count(token) or token >= target.vocab_size:
                    raise ConfigError(
                        f"{key}.{number}: token ids from 0 to {target.vocab_size - 1} (got {token!r})"
                    )
        read.append((tuple(pair[0]), tuple(pair[1])))
    return Continuations(read)
