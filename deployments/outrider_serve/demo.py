"""One streamed answer with its accepted drafts marked, and the same answer without speculation beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.errors import GenerationError, UnavailableError

PROMPT = """\
Correct the grammar of this text and keep everything else as it is:

The lighthouse at Cape Ferren were built in 1874 from granite that was shipped from the mainland. Its \
lamp could be saw at a distance of nineteen miles. The last keeper, Thomas Aldous, leaved the tower in \
1981, when the lamp was made automatic. Today the lighthouse is a museum, and visitors can climb its 164 \
steps from May to September."""
"""A rewrite: most of the answer stands in the prompt, which is what prompt lookup lives on."""

MAX_TOKENS = 160
REPETITIONS = 2
CHUNK_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 300.0

DRAFTED = "underline green"


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    drafted: bool  # guessed by the drafter and accepted by the verifier


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """What the service measured about one answer; the rates are None without drafts."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    duration_s: float
    time_to_first_token_s: float


@dataclass(slots=True)
class Answer:
    """One chat completion, as it came."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    stats: AnswerStats | None = None

    def measured(self) -> AnswerStats:
        if self.stats is None:
            raise GenerationError("the stream ended without its statistics: the answer was cut short")
        return self.stats


def run(url: str, model: str, console: Console) -> bool:
    """Show the demo against a running service; whether both ways gave the same text.

    Raises `UnavailableError` when the service cannot be reached or falls silent, `GenerationError` when
    it answers with an error.
    """
    with httpx.Client(
        base_url=url, timeout=httpx.Timeout(CHUNK_TIMEOUT_S, connect=5.0), trust_env=False
    ) as http:
        for speculative in (
            True,
            False,
        ):  # caches, kernels and connections, so that the first run is like the rest
            _answer(http, model, speculative=speculative, max_tokens=8, show=_nothing)

        console.print(Text(PROMPT, style="dim"), end="\n\n")
        console.print(_legend(console), end="\n\n")
        drafted, plain = [], []
        for repetition in range(REPETITIONS):  # interleaved: what else the machine does hits both alike
            show = _printer(console) if repetition == 0 else _nothing
            drafted.append(_answer(http, model, speculative=True, max_tokens=MAX_TOKENS, show=show))
            plain.append(_answer(http, model, speculative=False, max_tokens=MAX_TOKENS, show=_nothing))

    console.print("\n")
    console.print(_comparison(drafted, plain))
    texts = {answer.text for answer in (*drafted, *plain)}
    if len(texts) == 1:
        console.print(
            f"All {2 * REPETITIONS} texts are equal: speculation changed the speed and nothing else."
        )
        return True
    console.print("The texts differ, and they must not:", style="bold red")
    for text in sorted(texts):
        console.print(Text(f"--- {text}"))
    return False


def _answer(
    http: httpx.Client, model: str, *, speculative: bool, max_tokens: int, show: Callable[[list[Token]], None]
) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "speculative": speculative,
        "speculation_detail": True,
    }
    answer = Answer()
    for event in _events(http, body):
        for choice in event.get("choices", []):
            answer.text += choice.get("delta", {}).get("content") or ""
        detail = event.get("outrider") or {}
        if fresh := [Token(token["text"], token["drafted"]) for token in detail.get("tokens", [])]:
            answer.tokens += fresh
            show(fresh)
        if "rounds" in detail:
            answer.stats = AnswerStats(**{name: detail[name] for name in AnswerStats.__slots__})
    answer.measured()
    return answer


def _events(http: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to its [DONE]."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise GenerationError(
                    f"the service answered {response.status_code}: {response.read()[:500]!r}"
                )
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:"):
                    continue
                if data == "[DONE]":
                    return
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise GenerationError(f"the service gave up: {event['error'].get('message')}")
                yield event
                if time.monotonic() > deadline:
                    raise UnavailableError(f"one answer took more than {ANSWER_TIMEOUT_S:.0f} s")
    except httpx.TransportError as error:
        raise UnavailableError(f"the service at {http.base_url} fell silent: {error}") from error
    raise GenerationError("the stream ended without [DONE]: the answer was cut short")


# ── What is shown ─────────────────────────────────────────────────────────────────────────────────────


def _nothing(tokens: list[Token]) -> None:
    """The printer of an answer that is only measured."""


def _printer(console: Console) -> Callable[[list[Token]], None]:
    def show(tokens: list[Token]) -> None:
        console.print(marked(tokens, styled=_has_styles(console)), end="", soft_wrap=True)

    return show


def marked(tokens: list[Token], *, styled: bool) -> Text:
    """The text of one chunk with its accepted drafts marked: by style, or by brackets where there is none."""
    text = Text()
    drafts = "".join(token.text for token in tokens if token.drafted)  # they come first in a round
    if drafts:
        text.append(drafts if styled else f"[{drafts}]", style=DRAFTED)
    text.append("".join(token.text for token in tokens if not token.drafted))
    return text


def _legend(console: Console) -> Text:
    how = "underlined" if _has_styles(console) else "in brackets"
    legend = marked([Token("drafted", drafted=True)], styled=_has_styles(console))
    return legend.append(
        f" ({how}): guessed by the Drafter, accepted by the Verifier; the rest: the Verifier's own"
    )


def _has_styles(console: Console) -> bool:
    """Underline survives NO_COLOR; a pipe or a dumb terminal has neither."""
    return console.is_terminal and not console.is_dumb_terminal


def _comparison(drafted: list[Answer], plain: list[Answer]) -> Table:
    table = Table(title=f"greedy, {REPETITIONS} interleaved repetitions each")
    table.add_column("")
    table.add_column("speculative", justify="right")
    table.add_column("plain", justify="right")
    fast, slow = _tokens_per_second(drafted), _tokens_per_second(plain)
    one = drafted[0].measured()
    table.add_row("tokens/s after the first", f"{fast:.1f}", f"{slow:.1f}")
    table.add_row("ratio", f"{fast / slow:.2f}", "1.00")
    table.add_row("time to first token", f"{_first(drafted) * 1e3:.0f} ms", f"{_first(plain) * 1e3:.0f} ms")
    table.add_row("tokens", str(len(drafted[0].tokens)), str(len(plain[0].tokens)))
    table.add_row("rounds with drafts", str(one.rounds), "-")
    table.add_row("accepted / drafted tokens", f"{one.accepted_tokens} / {one.draft_tokens}", "-")
    table.add_row("acceptance rate", _or_dash(one.acceptance_rate), "-")
    table.add_row("mean acceptance length", _or_dash(one.mean_acceptance_length), "-")
    return table


def _tokens_per_second(answers: list[Answer]) -> float:
    """Decoding speed over all repetitions: the prefill, which both ways share, is left out."""
    seconds = sum(a.measured().duration_s - a.measured().time_to_first_token_s for a in answers)
    return sum(len(a.tokens) - 1 for a in answers) / seconds if seconds > 0 else 0.0


def _first(answers: list[Answer]) -> float:
    return sum(a.measured().time_to_first_token_s for a in answers) / len(answers)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
