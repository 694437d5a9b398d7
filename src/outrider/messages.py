"""The words that cross a process: frozen, slotted, versioned by committed length and leg epoch.

    router ── Open, Plan, VerifyOrder, Close ──► verifier ── Verdict, Resync ──► router
    router ── Open, DraftOrder, Close ──► drafter ── Proposal, Resync ──► router

`sequence` names one generation. `epoch` counts how often that leg (router to verifier, or router to
drafter) was re-homed; a message of an older epoch is dropped, a rejection bumps nothing. `base_len` is the
committed length the message builds on: prompt tokens plus committed tokens. Only the verifier commits, and
committed tokens never roll back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

WIRE_VERSION = 2
"""Raised when a message changes shape; both ends of a link compare it in their first frame."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words; `ERROR` and `CANCELLED` never reach a client as such."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    CANCELLED = "cancelled"


class AcceptanceRule(enum.StrEnum):
    """How drafts of a sampled sequence are judged; a greedy one accepts while equal under any of them."""

    COUPLED = "coupled"  # accept while equal to the target's own draw, which the drafter's noise anticipates
    REJECTION = "rejection"  # the ratio test, token by token; needs draft_probs
    BLOCK = "block"  # the ratio test over prefixes; needs draft_probs


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's distribution becomes a token. Temperature 0 is greedy, and so is less than 1e-5.

    Noise is keyed by (seed, choice, absolute position): see `sampling/noise.py`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0  # tokens below this share of the likeliest one's probability are cut
    seed: int = 0
    choice: int = 0  # index among the n choices of one request
    presence_penalty: float = 0.0  # taken off the logit of every token of the output so far
    frequency_penalty: float = 0.0  # the same, times how often it is there
    repetition_penalty: float = (
        1.0  # divides positive logits of tokens of prompt and output, multiplies others
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    rule: AcceptanceRule = AcceptanceRule.COUPLED

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        """Whether logits depend on which tokens were there before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def needs_draft_probs(self) -> bool:
        """Whether a draft can only be judged with the distribution that it was drawn from."""
        return self.rule != AcceptanceRule.COUPLED and not self.greedy


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a sequence ends inside the verifier; stop strings end in the router, which sees text."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # until so many are generated, `stop_token_ids` cannot be drawn


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text must match, from the first generated token to the last."""

    kind: Literal["json_object", "json_schema", "regex", "ebnf"]
    text: str = ""  # the schema as JSON, the expression, or the grammar; empty for json_object


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distribution that each of K drafts was drawn from: its `width` likeliest tokens, as shipped.

    The drafter draws from exactly these numbers, and the verifier divides by exactly these.
    """

    width: int  # N
    token_ids: bytes  # (K, N) little-endian int32
    probs: bytes  # (K, N) little-endian float32; each row sums to 1, padding has probability 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's own log-probabilities at one emitted token, before any processor."""

    logprob: float  # of the emitted token
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token id, logprob), the likeliest first


@dataclass(frozen=True, slots=True)
class Plan:
    """Router to verifier: speculate with at most `num_tokens` drafts a round, or free-run at 0.

    A gated sequence (num_tokens > 0) waits for its VerifyOrder at most `gate_s` seconds a round and then
    rides with K = 0.
    """

    sequence: str
    epoch: int
    num_tokens: int = 0
    gate_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Open:
    """Router to verifier or drafter: here is a sequence. `committed` is empty unless the leg was re-homed."""

    sequence: str
    epoch: int
    prompt: tuple[int, ...]
    committed: tuple[int, ...]
    sampling: SamplingParams
    limits: Limits
    plan: Plan
    token: str = ""  # the lease's one-time token; the in-process link needs none
    traceparent: str | None = None
    grammar: Grammar | None = None  # to the verifier only
    logprobs: int | None = None  # to the verifier only: report each token's, and so many alternatives


@dataclass(frozen=True, slots=True)
class Close:
    """Router to verifier or drafter: free the sequence. `cancelled` says that the client went away."""

    sequence: str
    epoch: int
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Router to drafter: draft `num_tokens` after the committed tokens.

    `committed_since` are the tokens between the drafter's last acknowledged base and `base_len`.
    """

    sequence: str
    epoch: int
    base_len: int
    committed_since: tuple[int, ...]
    num_tokens: int
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafter to router: a hint of what follows position `base_len`. May be lost, late or wrong."""

    sequence: str
    epoch: int
    base_len: int
    tokens: tuple[int, ...]
    draft_time: float = 0.0  # seconds the batch of drafts took
    queue_time: float = 0.0  # seconds the order waited
    draft_probs: DraftProbs | None = None  # with rules that need them


@dataclass(frozen=True, slots=True)
class VerifyOrder:
    """Router to verifier: verify these drafts after position `base_len`. No tokens means: do not wait."""

    sequence: str
    epoch: int
    base_len: int
    tokens: tuple[int, ...]
    draft_probs: DraftProbs | None = None  # with rules that need them
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verifier to router: `tokens` are committed after `base_len`: the accepted drafts, then the
    recovered or bonus token. Idempotent: a router that already knows them ignores them. Without tokens it
    is a sign of life: the sequence waits for memory, or its prompt is being computed."""

    sequence: str
    epoch: int
    base_len: int
    tokens: tuple[int, ...]
    drafted: int = 0  # draft tokens that were verified in this step
    accepted: int = 0  # the first `accepted` of `tokens` were drafts
    invalid_drafts: int = (
        0  # drafts of this round that never were: no token, bad draft_probs, not the grammar's
    )
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where the sequence was opened with them
    finish: FinishReason | None = None
    error: str | None = None  # set together with FinishReason.ERROR
    cached_tokens: int = 0  # prompt tokens served from the prefix cache; on the first verdict only
    batch: int = 0  # sequences in the step
    batch_tokens: int = 0  # rows in the step
    step_time: float = 0.0  # seconds of the step
    queue_time: float = 0.0  # seconds between Open and the first prefill row; on the first verdict only


@dataclass(frozen=True, slots=True)
class Resync:
    """Either worker to router: your base_len is not mine. `committed_len` is what I have (0: unknown)."""

    sequence: str
    epoch: int
    committed_len: int


@dataclass(frozen=True, slots=True)
class LegLost:
    """Made by the router's own end of a link: the replica behind this leg is gone or silent."""

    sequence: str
    epoch: int
    reason: str


ToVerifier: TypeAlias = Open | Plan | VerifyOrder | Close
FromVerifier: TypeAlias = Verdict | Resync | LegLost
ToDrafter: TypeAlias = Open | DraftOrder | Close
FromDrafter: TypeAlias = Proposal | Resync | LegLost
Message: TypeAlias = Open | Plan | VerifyOrder | Close | DraftOrder | Proposal | Verdict | Resync | LegLost
