"""The seams: what a drafter is, and what a leg to a worker is. Everything else is plain code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.messages import (
    Close,
    DraftOrder,
    DraftProbs,
    FromDrafter,
    FromVerifier,
    Open,
    Plan,
    SamplingParams,
    VerifyOrder,
)


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a drafter may know about the model it drafts for."""

    model: str  # folder of the target's weights and tokenizer
    vocab_size: int  # ids below this are valid
    max_model_len: int
    dtype: str
    device: str
    parameters: int = 0  # weights that a token passes through; 0: not known


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One sequence that asks for drafts. `tokens` is prompt plus committed: the whole truth, read only.

    A drafter with a cache compares `tokens` with what it has cached and recomputes the difference; it is
    never told of rejections, and can be restarted at any time.
    """

    sequence: str
    tokens: Sequence[int]
    num_tokens: int  # K: how many drafts are wanted
    sampling: SamplingParams
    prompt_len: int = 0  # how many of `tokens` are the prompt: penalties count the others


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter guesses for one context, at most `num_tokens` tokens; none is a fine answer.

    `probs` is asked for by `context.sampling.needs_draft_probs` and left out otherwise: the distributions
    that the tokens were drawn from, after every processor. `sampling.draft_probs` packs them; `certain`
    there is for a guess that was no draw.
    """

    tokens: tuple[int, ...] = ()
    probs: DraftProbs | None = None


class Drafter(Protocol):
    """A plugin that guesses. Found by entry point in the group `outrider.drafters`.

    The entry point names a class called as `cls(config, target)` with the service's
    `SpeculativeConfig` and a `TargetInfo`; it raises `ConfigError` when the two do not fit.
    """

    needs_device: bool
    """False: runs in the router by default. True: gets a deployment of its own."""

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """Draft for a batch: one draft a context, in order.

        Under temperature > 0 a good drafter draws with `outrider.sampling.draft`: with the target's own noise
        under the coupled rule, so that equal distributions give equal tokens; with noise of its own and
        `probs` under the others. A drafter that has `parameters` (an int attribute: weights that a token
        passes through) has its work counted in FLOPs.
        """
        ...

    def forget(self, sequence: str) -> None:
        """The sequence is over or moved away: free what is kept for it. Unknown sequences are fine."""
        ...


class VerifierLeg(Protocol):
    """One sequence's way to the verifier that holds it."""

    @property
    def replica(self) -> str:
        """Which replica it is, for traces and logs."""
        ...

    def send(self, message: Plan | VerifyOrder | Close) -> None:
        """Queue a message for the next frame; never blocks. After `Close` the leg is done."""
        ...


class DrafterLeg(Protocol):
    """One sequence's way to the drafter that knows it."""

    @property
    def replica(self) -> str:
        """Which replica it is, for traces and logs."""
        ...

    def send(self, message: DraftOrder | Close) -> None:
        """Queue a message for the next frame; never blocks. After `Close` the leg is done."""
        ...


class VerifierPool(Protocol):
    """Where a router finds a verifier for a new or re-homed sequence."""

    async def lease(self, opening: Open, deliver: Callable[[FromVerifier], None]) -> VerifierLeg:
        """Find a verifier, send it `opening`, and deliver what it says about the sequence.

        `deliver` is called on the caller's event loop. Raises `OverloadedError` when no place came free
        within the pool's bound, `UnavailableError` when no verifier could be reached.
        """
        ...


class DrafterPool(Protocol):
    """Where a router finds a drafter; the same promise as `VerifierPool.lease`, same errors."""

    async def lease(self, opening: Open, deliver: Callable[[FromDrafter], None]) -> DrafterLeg: ...
