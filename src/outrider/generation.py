"""What a caller asks for and what it gets back, on either side of HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.messages import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation, checked and tokenized."""

    prompt: tuple[int, ...]
    max_tokens: int | None  # None: until the context ends
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
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
    late_proposals: int = 0
    queue_time: float = 0.0  # seconds in the router's line, and at the verifier before the first prefill row
    time_to_first_token: float = 0.0  # seconds since the request was handed in
    duration: float = 0.0  # seconds
    fallback: str | None = None  # why drafts stopped, if they did

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None before the first draft."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens a round; None before the first round."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else None

    def count(self, *, drafted: int, accepted: int) -> None:
        """Enter one verify step."""
        self.steps += 1
        if not drafted:
            return
        self.rounds += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        while len(self.accepted_per_position) < accepted:
            self.accepted_per_position.append(0)
        for position in range(accepted):
            self.accepted_per_position[position] += 1
