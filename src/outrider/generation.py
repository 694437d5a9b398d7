"""What a caller asks for and what it gets back, on either side of HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.messages import FinishReason, Grammar, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation, checked and tokenized."""

    prompt: tuple[int, ...]
    max_tokens: int | None  # None: until the context ends
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own ends
    ignore_eos: bool = False  # the model's own ends are tokens like any other
    min_tokens: int = 0  # no end before so many: neither by a stop id nor by a stop string
    grammar: Grammar | None = None
    logprobs: int | None = None  # report each token's, and so many alternatives
    prediction: tuple[int, ...] = ()  # what the caller expects the answer to be: a source of drafts
    max_draft_tokens: int | None = None  # upper K of this request; 0 is plain, None the service's
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one verdict added. `drafted[i]` says whether token i was an accepted draft.

    `text` may lag behind `tokens`: an incomplete character or a possible stop string is held back.
    """

    text: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where asked for


@dataclass(slots=True)
class GenerationStats:
    """Counted while a generation runs; acceptance as vLLM defines it (bonus tokens excluded)."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0  # verify steps that carried at least one draft
    steps: int = 0  # verifier steps that committed tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)  # of every step with drafts, invalid ones out
    per_step_accepted: list[int] = field(default_factory=list)
    invalid_drafts: int = 0  # drafts that could not be verified; not among `draft_tokens`
    predicted_drafts: int = 0  # of `draft_tokens`, those out of the caller's prediction
    accepted_prediction_tokens: int = 0  # of those, what the text is made of: nothing behind a stop string
    rejected_prediction_tokens: int = 0
    late_proposals: int = 0
    queue_time: float = 0.0  # seconds in the router's line, and at the verifier before the first prefill row
    time_to_first_token: float = 0.0  # seconds since the request was handed in
    duration: float = 0.0  # seconds
    fallback: str | None = None  # why drafts stopped, if they did
    planned_drafts: int = 0  # K
    target_parameters: int = 0  # weights that a row of the target passes through; 0: not known
    drafter_parameters: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None before the first draft."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens a round; None before the first round."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else None

    @property
    def wasted_draft_tokens(self) -> int:
        """Drafts that cost work and gave no token."""
        return self.draft_tokens - self.accepted_tokens + self.invalid_drafts

    @property
    def committed_flops(self) -> float:
        """Estimated work on rows that the answer is made of: 2 FLOPs a weight and row, attention left out."""
        rows = self.prompt_tokens - self.cached_tokens + self.completion_tokens
        return 2.0 * self.target_parameters * rows

    @property
    def rejected_flops(self) -> float:
        """Estimated work of the target on drafts that it rejected."""
        return 2.0 * self.target_parameters * (self.draft_tokens - self.accepted_tokens)

    @property
    def drafter_flops(self) -> float:
        """Estimated work of the drafter, used or not; its own prefill left out. 0 for lookups."""
        drafts = self.draft_tokens + self.invalid_drafts - self.predicted_drafts
        return 2.0 * self.drafter_parameters * drafts

    def count(self, *, drafted: int, accepted: int, invalid: int = 0) -> None:
        """Enter one verify step. A step whose drafts were all invalid is listed with 0 and is no round."""
        self.steps += 1
        self.invalid_drafts += invalid
        if drafted or invalid:
            self.per_step_drafted.append(drafted)
            self.per_step_accepted.append(accepted)
        if not drafted:
            return
        self.rounds += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        while len(self.accepted_per_position) < accepted:
            self.accepted_per_position.append(0)
        for position in range(accepted):
            self.accepted_per_position[position] += 1
