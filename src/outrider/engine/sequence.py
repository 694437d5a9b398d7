"""One sequence as the verifier knows it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from outrider.engine.verification import Block
from outrider.grammar import GrammarState
from outrider.messages import DraftProbs, FinishReason, Limits, Open, Plan, SamplingParams, TokenLogprobs
from outrider.sampling.draft_probs import CheckedProbs, check
from outrider.sampling.processors import Lane


@dataclass(frozen=True, slots=True)
class Sifted:
    """Drafts that were cut, by reason."""

    tokens: int = 0  # no token of the vocabulary, or behind such a one
    draft_probs: int = 0  # no sound distribution, or behind such a one
    grammar: int = 0  # the grammar forbids them


@dataclass(slots=True)
class Sequence:
    """Tokens are the truth; blocks and `cached` say how much of it the KV cache holds."""

    name: str
    epoch: int
    tokens: list[int]  # prompt, then committed
    prompt_len: int
    sampling: SamplingParams
    limits: Limits
    plan: Plan
    opened_at: float  # seconds, time.monotonic
    logprobs: int | None = None  # report each token's, and so many alternatives
    reported_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens from `opened_len` on
    opened_len: int = 0  # tokens it was opened with
    compiling: Future[GrammarState] | None = None  # the grammar, until it is there
    grammar: GrammarState | None = None  # advanced over all committed tokens
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # leading tokens whose keys and values are in the blocks
    published: int = 0  # full blocks named in the pool
    digest: bytes = b""  # of the last published block
    drafts: tuple[int, ...] | None = None  # this round's order; None: not yet given
    ordered: int = 0  # drafts that came with the order, before any was cut
    draft_probs: DraftProbs | None = None  # as they came with the order
    checked_probs: CheckedProbs | None = None  # what is good of them, under rules that need them
    invalid_drafts: int = 0  # of this round's order, sifted out
    gate_opens_at: float = 0.0  # when a gated sequence stops waiting for its order
    prefix_hit: int = 0  # prompt tokens found in the cache at first admission
    queue_time: float | None = None  # seconds until first admitted
    reported: bool = False  # whether a verdict was given
    heard_at: float = 0.0  # when the router was last told anything, time.monotonic

    @classmethod
    def opened(cls, message: Open, now: float, vocab_size: int) -> Sequence:
        # A tokenizer may name an end that the model has no logit for: it cannot be drawn, nor be banned.
        ends = tuple(token for token in message.limits.stop_token_ids if 0 <= token < vocab_size)
        return cls(
            name=message.sequence,
            epoch=message.epoch,
            tokens=[*message.prompt, *message.committed],
            prompt_len=len(message.prompt),
            sampling=message.sampling,
            limits=replace(message.limits, stop_token_ids=ends),
            plan=message.plan,
            opened_at=now,
            heard_at=now,
            logprobs=message.logprobs,
            opened_len=len(message.prompt) + len(message.committed),
        )

    @property
    def completion_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Only the newest token is missing from the cache: a step gives a token."""
        return self.cached == len(self.tokens) - 1

    @property
    def gated(self) -> bool:
        """Waits for an order before it steps."""
        return self.plan.num_tokens > 0 and self.decoding and self.drafts is None

    def order(self, drafts: tuple[int, ...] | None, draft_probs: DraftProbs | None) -> None:
        """Take this round's drafts; None: the round is over, and the next order not yet given."""
        self.drafts, self.draft_probs = drafts, draft_probs
        self.ordered = len(drafts or ())
        self.checked_probs, self.invalid_drafts = None, 0

    def sift(self, vocab_size: int) -> Sifted:
        """Cut this round's drafts to those that can be verified; says what was cut, and why.

        Under the ratio rules the first draft that the grammar forbids stays: the target gives it no
        probability, so it is rejected like any other and recovered from the residual.
        """
        drafts = self.drafts or ()
        ratio = self.sampling.needs_draft_probs
        real = next((i for i, token in enumerate(drafts) if not 0 <= token < vocab_size), len(drafts))
        bad_tokens = len(drafts) - real
        drafts = drafts[:real]
        bad_probs = 0
        if ratio and drafts:
            self.checked_probs = check(self.draft_probs, drafts, vocab_size)
            bad_probs = len(drafts) - self.checked_probs.rows
            drafts = drafts[: self.checked_probs.rows]
        forbidden = 0
        if self.grammar is not None and drafts:
            legal = self.grammar.allowed_prefix(drafts) + ratio
            forbidden = max(0, len(drafts) - legal)
            drafts = drafts[:legal]
        if self.drafts is not None:
            self.drafts = drafts
        self.invalid_drafts += bad_probs + bad_tokens + forbidden
        return Sifted(bad_tokens, bad_probs, forbidden)

    def block(self, drafts: tuple[int, ...]) -> Block:
        """The newest token's row and those of `drafts`, for the verification."""
        completed = self.completion_len
        lane = Lane(
            self.sampling,
            len(self.tokens),
            drafts,
            prompt=self.tokens[: self.prompt_len] if self.sampling.penalised else (),
            output=self.tokens[self.prompt_len :] if self.sampling.penalised else (),
            banned=self.limits.stop_token_ids,
            banned_rows=min(max(0, self.limits.min_tokens - completed), 1 + len(drafts)),
            grammar=None if self.grammar is None else self.grammar.masks(drafts),
        )
        return Block(lane, self.checked_probs, self.logprobs)

    def logprobs_from(self, position: int) -> tuple[TokenLogprobs, ...]:
        """What was reported of the tokens from `position` on; nothing where that is not known here."""
        if self.logprobs is None or position < self.opened_len:
            return ()
        return tuple(self.reported_logprobs[position - self.opened_len :])

    def commit(self, new_tokens: list[int], max_model_len: int) -> tuple[list[int], FinishReason | None]:
        """Append what plain decoding would have: up to a stop id, max_tokens or the end of the context.

        Returns the tokens that were appended and the reason to finish, if there is one.
        """
        for count, token in enumerate(new_tokens, start=1):
            self.tokens.append(token)
            if token in self.limits.stop_token_ids:
                return new_tokens[:count], FinishReason.STOP
            if self.completion_len >= self.limits.max_tokens or len(self.tokens) >= max_model_len:
                return new_tokens[:count], FinishReason.LENGTH
        return new_tokens, None

    def draft_room(self, max_model_len: int) -> int:
        """How many drafts the plan and the lengths leave room for: counts, never tokens."""
        room = min(
            self.plan.num_tokens,
            self.limits.max_tokens - self.completion_len - 1,
            max_model_len - len(self.tokens) - 1,
        )
        return max(room, 0)
