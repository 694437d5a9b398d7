"""One sequence as the verifier knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.messages import FinishReason, Limits, Open, Plan, SamplingParams


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
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # leading tokens whose keys and values are in the blocks
    published: int = 0  # full blocks named in the pool
    digest: bytes = b""  # of the last published block
    drafts: tuple[int, ...] | None = None  # this round's order; None: not yet given
    gate_opens_at: float = 0.0  # when a gated sequence stops waiting for its order
    prefix_hit: int = 0  # prompt tokens found in the cache at first admission
    queue_time: float | None = None  # seconds until first admitted
    reported: bool = False  # whether a verdict was given
    heard_at: float = 0.0  # when the router was last told anything, time.monotonic

    @classmethod
    def opened(cls, message: Open, now: float) -> Sequence:
        return cls(
            name=message.sequence,
            epoch=message.epoch,
            tokens=[*message.prompt, *message.committed],
            prompt_len=len(message.prompt),
            sampling=message.sampling,
            limits=message.limits,
            plan=message.plan,
            opened_at=now,
            heard_at=now,
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

    def usable_drafts(self, vocab_size: int, max_model_len: int) -> tuple[int, ...]:
        """This round's drafts, cut to what the plan, the vocabulary and the lengths leave room for."""
        room = min(
            self.plan.num_tokens,
            self.limits.max_tokens - self.completion_len - 1,
            max_model_len - len(self.tokens) - 1,
        )
        drafts = (self.drafts or ())[: max(room, 0)]
        for index, token in enumerate(drafts):
            if not 0 <= token < vocab_size:
                return drafts[:index]
        return drafts
