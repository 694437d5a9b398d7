"""What goes back over the OpenAI wire: completions, their chunks, models, errors.

`ChatAnswers` and `CompletionAnswers` write the objects of one generation with the same verbs: opening,
piece, ending, usage, or whole. `UNSET` fields stay out of the JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType

from outrider.generation import GenerationStats
from outrider.messages import FinishReason


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    logprobs: None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    outrider: SpeculationDetail | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    outrider: SpeculationDetail | UnsetType = UNSET


class TextChoice(Struct):
    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class Completion(Struct):
    """The whole of a completion, and also one chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
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


def usage_of(stats: GenerationStats) -> Usage:
    return Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        total_tokens=stats.prompt_tokens + stats.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=stats.cached_tokens),
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
        duration_s=stats.duration,
        time_to_first_token_s=stats.time_to_first_token,
    )


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """Writes the objects of one chat completion. `null_usage`: chunks say `usage: null` before the last."""

    id: str
    created: int
    model: str
    null_usage: bool = False

    def opening(self) -> ChatChunk | None:
        return self._chunk(ChatChunkChoice(Delta(role="assistant", content="")))

    def piece(self, text: str, detail: SpeculationDetail | UnsetType) -> ChatChunk:
        return self._chunk(ChatChunkChoice(Delta(content=text)), detail)

    def ending(self, reason: FinishReason, detail: SpeculationDetail | UnsetType) -> ChatChunk:
        return self._chunk(ChatChunkChoice(Delta(), finish_reason=reason), detail)

    def usage(self, usage: Usage, detail: SpeculationDetail | UnsetType) -> ChatChunk:
        return ChatChunk(self.id, self.created, self.model, [], usage=usage, outrider=detail)

    def whole(
        self, text: str, reason: FinishReason, usage: Usage, detail: SpeculationDetail | UnsetType
    ) -> ChatCompletion:
        choice = ChatChoice(AssistantMessage(text), finish_reason=reason)
        return ChatCompletion(self.id, self.created, self.model, [choice], usage, outrider=detail)

    def _chunk(self, choice: ChatChunkChoice, detail: SpeculationDetail | UnsetType = UNSET) -> ChatChunk:
        usage = None if self.null_usage else UNSET
        return ChatChunk(self.id, self.created, self.model, [choice], usage=usage, outrider=detail)


@dataclass(frozen=True, slots=True)
class CompletionAnswers:
    """Writes the objects of one completion; the same verbs as `ChatAnswers`."""

    id: str
    created: int
    model: str
    null_usage: bool = False

    def opening(self) -> Completion | None:
        return None

    def piece(self, text: str, detail: SpeculationDetail | UnsetType) -> Completion:
        return self._chunk(TextChoice(text), detail)

    def ending(self, reason: FinishReason, detail: SpeculationDetail | UnsetType) -> Completion:
        return self._chunk(TextChoice("", finish_reason=reason), detail)

    def usage(self, usage: Usage, detail: SpeculationDetail | UnsetType) -> Completion:
        return Completion(self.id, self.created, self.model, [], usage=usage, outrider=detail)

    def whole(
        self, text: str, reason: FinishReason, usage: Usage, detail: SpeculationDetail | UnsetType
    ) -> Completion:
        choice = TextChoice(text, finish_reason=reason)
        return Completion(self.id, self.created, self.model, [choice], usage=usage, outrider=detail)

    def _chunk(self, choice: TextChoice, detail: SpeculationDetail | UnsetType) -> Completion:
        usage = None if self.null_usage else UNSET
        return Completion(self.id, self.created, self.model, [choice], usage=usage, outrider=detail)


Answers: TypeAlias = ChatAnswers | CompletionAnswers
