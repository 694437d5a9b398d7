"""What goes back over the OpenAI wire: completions, their chunks, models, errors.

`ChatAnswers` and `CompletionAnswers` write the objects of one generation with the same verbs: opening,
piece, ending, usage, or whole. `UNSET` fields stay out of the JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType

from outrider.generation import GenerationStats
from outrider.messages import FinishReason
from outrider.text import REPLACEMENT


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Prediction tokens count what the client predicted and was verified; drafts of the service do not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0
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
    bytes: list[int] | None  # null where the token is a part of a character
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class SpeculativeDecoding(Struct):
    """vLLM's per-request block. Steps without scheduled drafts are left out; a step whose drafts could not be
    verified is in the histogram by length, under "0", and in no other figure."""

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
    listed with a later chunk. The figures come once, with the last object that carries a model's answer.
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
    first = choices[0]
    completion_tokens = sum(stats.completion_tokens for stats in choices)
    return Usage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=first.prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=first.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(stats.accepted_prediction_tokens for stats in choices),
            rejected_prediction_tokens=sum(stats.rejected_prediction_tokens for stats in choices),
        ),
    )


def metrics_of(choices: Sequence[GenerationStats], *, detailed: bool) -> Metrics:
    """vLLM's block of one answer; null for several."""
    if len(choices) > 1:
        return Metrics(None)
    (stats,) = choices
    by_length: dict[str, list[int]] = {}
    for drafted, accepted in zip(stats.per_step_drafted, stats.per_step_accepted, strict=True):
        by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += 1
    width = max([stats.planned_drafts, *stats.per_step_drafted])
    histogram = [0] * (width + 1)
    for length, counts in by_length.items():
        for accepted, steps in enumerate(counts if length != "0" else []):
            histogram[accepted] += steps
    return Metrics(
        SpeculativeDecoding(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.acceptance_rate,
            acceptance_histogram=histogram,
            acceptance_histogram_by_draft_length=dict(sorted(by_length.items(), key=lambda one: int(one[0]))),
            num_spec_steps=stats.rounds,
            num_accepted_draft_tokens=stats.accepted_tokens,
            num_draft_tokens=stats.draft_tokens,
            num_spec_tokens=stats.planned_drafts,
            per_step_accepted=list(stats.per_step_accepted) if detailed else UNSET,
            per_step_drafted=list(stats.per_step_drafted) if detailed else UNSET,
        )
    )


def figures_of(stats: GenerationStats, tokens: list[MarkedText] | UnsetType = UNSET) -> SpeculationDetail:
    """The closing figures of a generation; its tokens too where the answer is one object."""
    return SpeculationDetail(
        tokens=tokens,
        rounds=stats.rounds,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        acceptance_rate=stats.acceptance_rate,
        mean_acceptance_length=stats.mean_acceptance_length,
        wasted_draft_tokens=stats.wasted_draft_tokens,
        committed_flops=stats.committed_flops,
        rejected_flops=stats.rejected_flops,
        drafter_flops=stats.drafter_flops,
        duration_s=stats.duration,
        time_to_first_token_s=stats.time_to_first_token,
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """Something of one choice, to be written."""

    index: int
    text: str
    logprobs: Sequence[Reported] = ()
    detail: SpeculationDetail | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Reported:
    """A token with the log-probabilities that the target gives it, in words."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int  # characters of the answer before it


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


def _chat_logprobs(reported: Sequence[Reported]) -> ChatLogprobs | None:
    if not reported:
        return None
    return ChatLogprobs(
        [
            TokenLogprob(
                one.token,
                one.logprob,
                _bytes(one.token),
                [AlternativeToken(token, logprob, _bytes(token)) for token, logprob in one.top],
            )
            for one in reported
        ]
    )


def _bytes(token: str) -> list[int] | None:
    return None if REPLACEMENT in token else list(token.encode())


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


def _text_logprobs(reported: Sequence[Reported]) -> TextLogprobs | None:
    if not reported:
        return None
    tops = [dict(one.top) for one in reported]
    return TextLogprobs(
        tokens=[one.token for one in reported],
        token_logprobs=[one.logprob for one in reported],
        top_logprobs=tops if any(tops) else None,
        text_offset=[one.offset for one in reported],
    )


Answers: TypeAlias = ChatAnswers | CompletionAnswers
