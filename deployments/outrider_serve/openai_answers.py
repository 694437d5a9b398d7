"""What goes back over the OpenAI wire: completions, their chunks, models, errors.

`ChatAnswers` and `CompletionAnswers` write the objects of one request with the same verbs: opening, piece and
ending for each choice, then closing; or whole. `UNSET` fields stay out of the JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType

from outrider.generation import GenerationStats
from outrider.messages import FinishReason
from outrider_serve.token_spelling import Reported, Spelling

LOWEST_LOGPROB = -9999.0
"""What OpenAI says of a token that cannot be drawn: JSON has no minus infinity."""


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of drafts, only those out of the client's `prediction` count here. Rejected ones are no part of
    `completion_tokens`, which are the tokens that were delivered."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0  # no model's thinking is told apart here
    audio_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class AlternativeToken(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None  # null where the token has no text
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None  # each with the emitted token; null: none were asked for
    text_offset: list[int]  # characters of the answer before each


class SpeculativeDecoding(Struct):
    """vLLM's per-request block. Steps without scheduled drafts are left out; a step whose drafts were all
    invalid is in the histogram by length, under "0", and in no other figure."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]  # [j]: steps that accepted j drafts, j up to K
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # K
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class Metrics(Struct):
    speculative_decoding: SpeculativeDecoding | None


class MarkedText(Struct):
    """Text of one token, and whether it was an accepted draft."""

    text: str
    drafted: bool


class SpeculationDetail(Struct):
    """The extension `outrider`, sent when the body says `speculation_detail: true`.

    The texts of `tokens` together are the text they come with; a token whose text is not certain yet is
    listed with a later chunk. The figures come once, with the last object that carries a model's answer,
    summed over its choices. FLOPs are estimates of `generation.GenerationStats`: 2 x parameters x rows.
    """

    tokens: list[MarkedText] | UnsetType = UNSET
    rounds: int | UnsetType = UNSET
    draft_tokens: int | UnsetType = UNSET
    accepted_tokens: int | UnsetType = UNSET
    acceptance_rate: float | UnsetType | None = UNSET
    mean_acceptance_length: float | UnsetType | None = UNSET
    wasted_draft_tokens: int | UnsetType = UNSET
    committed_flops: float | UnsetType = UNSET
    rejected_flops: float | UnsetType = UNSET
    drafter_flops: float | UnsetType = UNSET
    duration_s: float | UnsetType = UNSET
    time_to_first_token_s: float | UnsetType = UNSET


class AssistantMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    message: AssistantMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    metrics: Metrics | UnsetType = UNSET
    outrider: SpeculationDetail | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    metrics: Metrics | UnsetType = UNSET
    outrider: SpeculationDetail | UnsetType = UNSET


class TextChoice(Struct):
    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: TextLogprobs | None = None


class Completion(Struct):
    """The whole of a completion, and also one chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
    metrics: Metrics | UnsetType = UNSET
    outrider: SpeculationDetail | UnsetType = UNSET


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "outrider"


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct):
    error: ErrorDetail


def usage_of(choices: Sequence[GenerationStats]) -> Usage:
    """The usage of all choices of a request: its prompt counts once."""
    prompt_tokens = choices[0].prompt_tokens
    completion_tokens = sum(stats.completion_tokens for stats in choices)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        # Of a prompt that counts once, what no choice had to compute.
        prompt_tokens_details=PromptTokensDetails(min(stats.cached_tokens for stats in choices)),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(stats.accepted_prediction_tokens for stats in choices),
            rejected_prediction_tokens=sum(stats.rejected_prediction_tokens for stats in choices),
        ),
    )


def metrics_of(choices: Sequence[GenerationStats], *, detailed: bool) -> Metrics:
    """vLLM's block; null for several choices, as there, and where nothing was to be drafted."""
    stats = choices[0]
    longest = max(stats.planned_drafts, *stats.per_step_drafted, 0)
    if len(choices) > 1 or not longest:
        return Metrics(None)
    by_length: dict[int, list[int]] = {}
    for drafted, accepted in zip(stats.per_step_drafted, stats.per_step_accepted, strict=True):
        by_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1
    rounds = [
        (drafted, accepted)
        for drafted, accepted in zip(stats.per_step_drafted, stats.per_step_accepted, strict=True)
        if drafted
    ]
    took = Counter(accepted for _, accepted in rounds)
    return Metrics(
        SpeculativeDecoding(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.acceptance_rate,
            acceptance_histogram=[took[accepted] for accepted in range(longest + 1)],
            acceptance_histogram_by_draft_length={str(k): by_length[k] for k in sorted(by_length)},
            num_spec_steps=stats.rounds,
            num_accepted_draft_tokens=stats.accepted_tokens,
            num_draft_tokens=stats.draft_tokens,
            num_spec_tokens=stats.planned_drafts,
            per_step_accepted=[accepted for _, accepted in rounds] if detailed else UNSET,
            per_step_drafted=[drafted for drafted, _ in rounds] if detailed else UNSET,
        )
    )


def figures_of(
    choices: Sequence[GenerationStats], tokens: list[MarkedText] | UnsetType = UNSET
) -> SpeculationDetail:
    """The closing figures of a request; its tokens too where the answer is one object with one choice."""
    rounds = sum(stats.rounds for stats in choices)
    drafted = sum(stats.draft_tokens for stats in choices)
    accepted = sum(stats.accepted_tokens for stats in choices)
    return SpeculationDetail(
        tokens=tokens,
        rounds=rounds,
        draft_tokens=drafted,
        accepted_tokens=accepted,
        acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / rounds if rounds else None,
        wasted_draft_tokens=sum(stats.wasted_draft_tokens for stats in choices),
        committed_flops=sum(stats.committed_flops for stats in choices),
        rejected_flops=sum(stats.rejected_flops for stats in choices),
        drafter_flops=sum(stats.drafter_flops for stats in choices),
        duration_s=max(stats.duration for stats in choices),
        time_to_first_token_s=min(stats.time_to_first_token for stats in choices),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """Something of one choice, to be written."""

    index: int
    text: str
    logprobs: Sequence[Reported] | None = None  # None: not asked for
    detail: SpeculationDetail | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Closing:
    """What comes once, at the end of an answer."""

    usage: Usage
    metrics: Metrics | UnsetType = UNSET
    detail: SpeculationDetail | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """Writes the objects of one chat completion. `null_usage`: chunks say `usage: null` before the last."""

    id: str
    created: int
    model: str
    null_usage: bool = False

    def opening(self, index: int) -> ChatChunk | None:
        return self._chunk(ChatChunkChoice(Delta(role="assistant", content=""), index=index))

    def piece(self, piece: Piece) -> ChatChunk:
        delta = Delta(content=piece.text)
        choice = ChatChunkChoice(delta, index=piece.index, logprobs=_chat_logprobs(piece.logprobs))
        return self._chunk(choice, piece.detail)

    def ending(self, index: int, reason: FinishReason, detail: SpeculationDetail | UnsetType) -> ChatChunk:
        return self._chunk(ChatChunkChoice(Delta(), finish_reason=reason, index=index), detail)

    def closing(self, closing: Closing) -> ChatChunk:
        return ChatChunk(
            self.id,
            self.created,
            self.model,
            [],
            usage=closing.usage,
            metrics=closing.metrics,
            outrider=closing.detail,
        )

    def whole(self, pieces: Sequence[tuple[Piece, FinishReason]], closing: Closing) -> ChatCompletion:
        choices = [
            ChatChoice(
                AssistantMessage(piece.text),
                finish_reason=reason,
                index=piece.index,
                logprobs=_chat_logprobs(piece.logprobs),
            )
            for piece, reason in pieces
        ]
        return ChatCompletion(
            self.id,
            self.created,
            self.model,
            choices,
            closing.usage,
            metrics=closing.metrics,
            outrider=closing.detail,
        )

    def _chunk(self, choice: ChatChunkChoice, detail: SpeculationDetail | UnsetType = UNSET) -> ChatChunk:
        usage = None if self.null_usage else UNSET
        return ChatChunk(self.id, self.created, self.model, [choice], usage=usage, outrider=detail)


def _chat_logprobs(reported: Sequence[Reported] | None) -> ChatLogprobs | None:
    if reported is None:
        return None
    content = []
    for one in reported:
        top = [AlternativeToken(other.name, _finite(x), _bytes(other)) for other, x in one.top]
        content.append(TokenLogprob(one.token.name, _finite(one.logprob), _bytes(one.token), top))
    return ChatLogprobs(content)


def _bytes(token: Spelling) -> list[int] | None:
    return None if token.bytes is None else list(token.bytes)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


@dataclass(frozen=True, slots=True)
class CompletionAnswers:
    """Writes the objects of one completion; the same verbs as `ChatAnswers`. `echo` is put in front."""

    id: str
    created: int
    model: str
    null_usage: bool = False
    echo: str = ""

    def opening(self, index: int) -> Completion | None:
        return self._chunk(TextChoice(self.echo, index=index)) if self.echo else None

    def piece(self, piece: Piece) -> Completion:
        logprobs = _text_logprobs(piece.logprobs)
        return self._chunk(TextChoice(piece.text, index=piece.index, logprobs=logprobs), piece.detail)

    def ending(self, index: int, reason: FinishReason, detail: SpeculationDetail | UnsetType) -> Completion:
        return self._chunk(TextChoice("", finish_reason=reason, index=index), detail)

    def closing(self, closing: Closing) -> Completion:
        return self._object([], closing)

    def whole(self, pieces: Sequence[tuple[Piece, FinishReason]], closing: Closing) -> Completion:
        choices = [
            TextChoice(
                self.echo + piece.text,
                finish_reason=reason,
                index=piece.index,
                logprobs=_text_logprobs(piece.logprobs),
            )
            for piece, reason in pieces
        ]
        return self._object(choices, closing)

    def _object(self, choices: list[TextChoice], closing: Closing) -> Completion:
        return Completion(
            self.id,
            self.created,
            self.model,
            choices,
            usage=closing.usage,
            metrics=closing.metrics,
            outrider=closing.detail,
        )

    def _chunk(self, choice: TextChoice, detail: SpeculationDetail | UnsetType = UNSET) -> Completion:
        usage = None if self.null_usage else UNSET
        return Completion(self.id, self.created, self.model, [choice], usage=usage, outrider=detail)


def _text_logprobs(reported: Sequence[Reported] | None) -> TextLogprobs | None:
    if reported is None:
        return None
    alternatives = [
        {token.name: _finite(x) for token, x in (*one.top, (one.token, one.logprob))} for one in reported
    ]
    return TextLogprobs(
        tokens=[one.token.name for one in reported],
        token_logprobs=[_finite(one.logprob) for one in reported],
        top_logprobs=alternatives if any(one.top for one in reported) else None,
        text_offset=[one.offset for one in reported],
    )


Answers: TypeAlias = ChatAnswers | CompletionAnswers
