"""A real model's next-token logits, on a small slice of its vocabulary, remembered by prefix.

Goodness of fit needs ten thousands of draws, and they all come from a few prefixes. So the model computes
each prefix once, and the real engine, rounds, drafter and rules run over what is remembered. The paged cache
is real, too: it holds token ids where a model holds keys and values, and a prefix is read back from its
blocks. A wrong length, position or block therefore gives the logits of another prefix.

Shapes: L logit rows, W words of the slice, V vocabulary of the real model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.engine.model import Batch, CausalModel, Numerics, Span

Prefix: TypeAlias = tuple[int, ...]
Score: TypeAlias = Callable[[Sequence[Prefix]], Tensor]
"""Next-token logits (len(prefixes), W) float32 of token sequences."""

MOST_PREFIXES = 1 << 16
"""Remembered at once: 16 MiB of 64 words. Beyond, all are forgotten and computed anew as they come."""

SCORING_BLOCKS = 64

NOTHING_HELD = -1  # no token: whoever reads it was told a wrong length, and its score fails


class Remembered:
    """A `Score` that asks another once a prefix."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._known: dict[Prefix, int] = {}
        self._logits: Tensor | None = None

    @classmethod
    def of(cls, score: Score) -> Remembered:
        return score if isinstance(score, cls) else cls(score)

    def __call__(self, prefixes: Sequence[Prefix]) -> Tensor:
        missing = list(dict.fromkeys(prefix for prefix in prefixes if prefix not in self._known))
        if missing:
            if len(self._known) + len(missing) > MOST_PREFIXES:
                self._known, self._logits = {}, None
                missing = list(dict.fromkeys(prefixes))
            for number, prefix in enumerate(missing, start=len(self._known)):
                self._known[prefix] = number
            fresh = self._score(missing)
            self._logits = fresh if self._logits is None else torch.cat([self._logits, fresh])
        assert self._logits is not None
        return self._logits[[self._known[prefix] for prefix in prefixes]]


class SliceModel:
    """A `CausalModel` whose logits come from a `Score`."""

    def __init__(self, score: Score, *, vocab_size: int, max_model_len: int, block_size: int = 16) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.numerics: Numerics = "strict"  # a prefix has one row, whoever asks
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.score = Remembered.of(score)
        self._held: list[list[int]] = []  # token ids by block and place

    def bytes_per_block(self) -> int:
        return 8 * self.block_size

    def allocate(self, num_blocks: int) -> None:
        self._held = [[NOTHING_HELD] * self.block_size for _ in range(num_blocks)]

    def forward(self, batch: Batch) -> Tensor:
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        wanted = set(batch.logit_rows.tolist())
        prefixes: list[Prefix] = []
        for span in batch.spans:
            rows = range(span.start, span.start + span.rows)
            for row in rows:
                block, place = divmod(positions[row], self.block_size)
                self._held[span.blocks[block]][place] = tokens[row]
            held = [token for block in span.blocks for token in self._held[block]]
            # By the contract row i of a span sees up to itself, and the last one `length` tokens.
            prefixes += [
                tuple(held[: span.length - span.rows + 1 + i]) for i, row in enumerate(rows) if row in wanted
            ]
        if not prefixes:
            return torch.zeros(0, self.vocab_size)
        return self.score(prefixes)


class RealScore:
    """Scores by a real model: every prefix is prefilled, and the slice of its logits kept."""

    def __init__(self, model: CausalModel, *, most_rows: int = 512) -> None:
        """`model` gets a cache of its own here: nobody else may have called `allocate` on it."""
        self._model = model
        self._most_rows = most_rows
        model.allocate(SCORING_BLOCKS)

    def on(self, words: Sequence[int]) -> Score:
        """The logits of a slice: real token ids, whose index is their id in the slice."""

        def score(prefixes: Sequence[Prefix]) -> Tensor:
            real = [tuple(words[token] for token in prefix) for prefix in prefixes]
            return self.whole(real)[:, list(words)]

        return score

    @torch.inference_mode()
    def whole(self, prefixes: Sequence[Prefix]) -> Tensor:
        """(len(prefixes), V) of real token ids, in batches of bounded rows."""
        answers = []
        begin = 0
        while begin < len(prefixes):
            end, rows, blocks = begin, 0, 0
            while end < len(prefixes):
                size = len(prefixes[end])
                needed = -(-size // self._model.block_size)
                if end > begin and (rows + size > self._most_rows or blocks + needed > SCORING_BLOCKS):
                    break
                end, rows, blocks = end + 1, rows + size, blocks + needed
            answers.append(self._model.forward(self._batch(prefixes[begin:end])).float().cpu())
            begin = end
        return torch.cat(answers)

    def _batch(self, prefixes: Sequence[Prefix]) -> Batch:
        spans: list[Span] = []
        start = block = 0
        for prefix in prefixes:
            used = -(-len(prefix) // self._model.block_size)
            spans.append(Span(start, len(prefix), len(prefix), tuple(range(block, block + used))))
            start, block = start + len(prefix), block + used
        return Batch(
            torch.tensor([token for prefix in prefixes for token in prefix]),
            torch.tensor([position for prefix in prefixes for position in range(len(prefix))]),
            tuple(spans),
            torch.tensor([span.start + span.rows - 1 for span in spans]),
        )


def likely_words(model: RealScore, prompt: Prefix, *, size: int, steps: int = 4) -> tuple[int, ...]:
    """A slice for a prompt of real ids: its own tokens and what is likely after it, `size` in all."""
    words = list(dict.fromkeys(prompt))
    texts = [prompt]
    for _ in range(steps):
        best = model.whole(texts).topk(6, dim=-1).indices.tolist()
        words += [token for row in best for token in row]
        texts = [(*text, token) for text, row in zip(texts, best, strict=True) for token in row[:2]]
    return tuple(dict.fromkeys(words))[: max(size, len(set(prompt)))]


def always(*probs: float) -> Score:
    """A made-up model that says the same after every prefix."""
    logits = torch.tensor(probs).log()
    return lambda prefixes: logits.repeat(len(prefixes), 1)


def shaken(score: Score, *, strength: float, heat: float) -> Score:
    """Another model's logits, made of this one's: flatter, and off by noise that hangs on the prefix alone.

    What a drafter that is often wrong has to say.
    """

    def rescore(prefixes: Sequence[Prefix]) -> Tensor:
        logits = score(prefixes)
        noise = torch.empty_like(logits)
        for row, prefix in enumerate(prefixes):
            seed = hash((1, prefix)) & 0x7FFFFFFF  # of integers: the same in every process
            noise[row] = torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(seed))
        return logits / heat + strength * noise

    return rescore
