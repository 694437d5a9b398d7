"""The audit of a running service, by its OpenAI API alone.

What can be asked from outside: the same requests with and without drafts, and the target's own
log-probabilities beside what is drawn. A service does not show its noise, so that a sampled pair of texts can
be shown to be a defect under strict numerics only; greedy ones are judged by their log-probabilities.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from outrider.audit import distribution, quality
from outrider.audit.distribution import Counted, Sampled
from outrider.audit.law import Law
from outrider.audit.results import Comparison, Divergence, Result, Verdict, first_difference
from outrider.audit.workload import in_groups, options
from outrider.errors import ConfigError, UnavailableError
from outrider.messages import AcceptanceRule

Progress: TypeAlias = Callable[[str], None]
Spelling: TypeAlias = tuple[str, tuple[int, ...]]
"""A token as a service shows it: text and bytes."""

MODES: tuple[tuple[str, Any], ...] = (
    ("plain, mixed concurrency", False),
    ("speculative, K of the service", True),
    ("speculative, K = 1", {"max_tokens": 1}),
    ("speculative, K = 2", {"max_tokens": 2}),
)
"""The request field `speculative` of each comparison."""

TOP = 20  # alternatives a token: all that the API gives
CHOICES = 8  # texts a request for distributions
DRAWN_TOKENS = 4  # of each
MOST_REQUESTS = 4_000
CONTEXTS = ("Name any colour.", "Continue: once upon a time there was")
MOST_CONCURRENT = 16


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer, with the target's raw log-probabilities."""

    spelling: Spelling
    logprob: float
    top: Mapping[Spelling, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice."""

    text: str
    tokens: tuple[Token, ...]
    finish: str
    drafted: int = 0  # of the whole request
    accepted: int = 0

    @property
    def spellings(self) -> list[Spelling]:
        return [token.spelling for token in self.tokens]


class Client:
    """Chat completions and health of one service."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout_s: float = 300.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`model` defaults to the first that is served. Raises `UnavailableError` or `ConfigError`."""
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r}: an address such as http://localhost:8000")
        self._http = httpx.Client(base_url=base, timeout=timeout_s, transport=transport)
        served = [str(card["id"]) for card in self._json("GET", "/v1/models")["data"]]
        if model is not None and model not in served:
            raise ConfigError(f"--model {model!r} is not served there; served: {', '.join(served)}")
        self.model = model or served[0]

    def close(self) -> None:
        self._http.close()

    def numerics(self) -> str | None:
        """strict or fast; None where the service does not say."""
        response = self._send("GET", "/health")
        try:
            said = response.json().get("numerics")
        except (ValueError, AttributeError):
            return None
        return said if isinstance(said, str) else None

    def ask(self, prompt: str, **fields: Any) -> list[Answer]:
        """The choices of one chat completion, with log-probabilities."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "logprobs": True,
            "speculation_detail": True,
            **fields,
        }
        answer = self._json("POST", "/v1/chat/completions", json=body)
        detail = answer.get("outrider") or {}
        return [
            Answer(
                choice["message"]["content"],
                tuple(_token(one) for one in (choice.get("logprobs") or {}).get("content") or ()),
                choice["finish_reason"],
                detail.get("draft_tokens") or 0,
                detail.get("accepted_tokens") or 0,
            )
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def _json(self, method: str, path: str, **options: Any) -> Any:
        response = self._send(method, path, **options)
        if response.status_code >= 500 or response.status_code == 429:
            raise UnavailableError(f"{path} answered {response.status_code}: {response.text[:300]}")
        if response.status_code != 200:
            raise ConfigError(f"{path} answered {response.status_code}: {response.text[:300]}")
        try:
            return response.json()
        except ValueError:
            raise ConfigError(f"{path} did not answer with JSON: is this an OpenAI API?") from None

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self._http.base_url}{path} gave no answer: {error!r}") from error


def _token(entry: Mapping[str, Any]) -> Token:
    top = {_spelling(one): float(one["logprob"]) for one in entry.get("top_logprobs") or ()}
    return Token(_spelling(entry), float(entry["logprob"]), top)


def _spelling(entry: Mapping[str, Any]) -> Spelling:
    return str(entry["token"]), tuple(entry.get("bytes") or ())


@dataclass(frozen=True, slots=True)
class ServiceAudit:
    """What to ask of a service."""

    client: Client
    prompts: Sequence[str]
    tokens: int = 96
    draws: int = 4_000
    rule: AcceptanceRule = AcceptanceRule.COUPLED  # what the service runs
    checks: frozenset[str] = frozenset({"identity", "distribution", "quality"})
    progress: Progress = field(default=lambda _: None)

    def run(self) -> list[Result]:
        found: list[Result] = []
        if self.checks & {"identity", "quality"}:
            found += self._texts(strict=self.client.numerics() == "strict")
        if "distribution" in self.checks:
            found += self._distributions()
        return found

    def _texts(self, *, strict: bool) -> list[Result]:
        every = range(len(self.prompts))
        self.progress("identity: the reference, plain and one at a time")
        reference = [self._ask(index, False) for index in every]
        # Under a ratio rule a sampled text hangs on the drafts, too.
        alike = [index for index in every if self.rule is AcceptanceRule.COUPLED or _greedy(index)]
        found: list[Result] = []
        for name, speculative in MODES:
            answers = self._ask_all(name, every, speculative)
            if "identity" in self.checks:
                drafting = bool(speculative)
                found.append(_compare(name, alike, reference, answers, strict=strict, drafting=drafting))
            if speculative is not True:
                continue
            if "identity" in self.checks and len(alike) < len(self.prompts):
                again = f"{name}, {self.rule}: the same again"
                repeated = self._ask_all(again, every[::-1], speculative)[::-1]
                found.append(_compare(again, every, answers, repeated, strict=strict, drafting=True))
            if "quality" in self.checks:
                sampled = [index for index in every if not _greedy(index)]
                pair = ([_text(reference[i]) for i in sampled], [_text(answers[i]) for i in sampled])
                found += quality.compare({name: pair})
        return found

    def _ask_all(self, name: str, indices: Sequence[int], speculative: Any) -> list[Answer]:
        """In mixed company."""
        answers: list[Answer] = []
        with ThreadPoolExecutor(MOST_CONCURRENT) as threads:
            for group in in_groups(indices):
                answers += threads.map(lambda index: self._ask(index, speculative), group)
                self.progress(f"{name}: {len(answers)} of {len(indices)}")
        return answers

    def _ask(self, index: int, speculative: Any) -> Answer:
        (answer,) = self.client.ask(
            self.prompts[index],
            max_tokens=self.tokens,
            top_logprobs=5,
            speculative=speculative,
            **options(index),
        )
        return answer

    def _distributions(self) -> list[Result]:
        """Draws at temperature 1 beside the log-probabilities that the service reports for them."""
        requests = min(-(-self.draws // CHOICES), MOST_REQUESTS)
        samples = []
        for context in CONTEXTS:
            answers: list[Answer] = []
            drafted = accepted = 0
            with ThreadPoolExecutor(MOST_CONCURRENT // 4) as threads:
                for choices in threads.map(
                    lambda number, text=context: self._draw(text, number), range(requests)
                ):
                    answers += choices
                    drafted += choices[0].drafted
                    accepted += choices[0].accepted
                    if len(answers) % (20 * CHOICES) == 0:
                        self.progress(f"distribution: {len(answers)} draws after {context!r}")
            samples.append(
                Sampled(
                    f"rule of the service, after {context!r}",
                    len(answers),
                    drafted,
                    accepted,
                    parts_of(answers),
                    drafts_expected=False,  # whether any is rejected is the service's own affair
                )
            )
        return list(distribution.judge(samples))

    def _draw(self, context: str, number: int) -> list[Answer]:
        return self.client.ask(
            context,
            max_tokens=DRAWN_TOKENS,
            temperature=1.0,
            seed=number,
            n=CHOICES,
            top_logprobs=TOP,
            ignore_eos=True,
        )


def parts_of(answers: Sequence[Answer]) -> tuple[Counted, ...]:
    """One test a prefix that was reached often: what followed it, beside what the service says of it.

    Its likeliest tokens are cells; all others together are one, with the probability that is left. The
    reported numbers are averaged: under fast numerics they differ a little from request to request.
    """
    reached: defaultdict[tuple[Spelling, ...], list[Token]] = defaultdict(list)
    for answer in answers:
        for at, token in enumerate(answer.tokens):
            if token.top:
                reached[tuple(answer.spellings[:at])].append(token)
    parts = []
    for prefix, tokens in sorted(reached.items(), key=lambda item: (len(item[0]), -len(item[1]))):
        if len(tokens) < distribution.SHORTEST_RUN:
            continue
        common = set.intersection(*(set(token.top) for token in tokens))
        cells = {spelling: number for number, spelling in enumerate(sorted(common))}
        law: Law = {
            (number,): sum(math.exp(token.top[spelling]) for token in tokens) / len(tokens)
            for spelling, number in cells.items()
        }
        others: tuple[int, ...] = (len(cells),)
        law[others] = max(1 - sum(law.values()), 1e-9)
        counts: Counter[tuple[int, ...]] = Counter(
            (cells[one.spelling],) if one.spelling in cells else others for one in tokens
        )
        parts.append(Counted("after " + repr("".join(text for text, _ in prefix)), counts, law))
    return tuple(parts)


def _greedy(index: int) -> bool:
    return float(options(index)["temperature"]) == 0.0


def _compare(
    name: str,
    indices: Sequence[int],
    reference: Sequence[Answer],
    found: Sequence[Answer],
    *,
    strict: bool,
    drafting: bool,
) -> Comparison:
    divergences = [
        explain(index, reference[index], found[index], greedy=_greedy(index), strict=strict)
        for index in indices
    ]
    return Comparison(
        "identity",
        name,
        compared=len(indices),
        tokens=sum(len(reference[index].tokens) for index in indices),
        divergences=tuple(one for one in divergences if one is not None),
        drafted=sum(found[index].drafted for index in indices),
        accepted=sum(found[index].accepted for index in indices),
        drafts_expected=drafting,
    )


def explain(index: int, reference: Answer, found: Answer, *, greedy: bool, strict: bool) -> Divergence | None:
    """Why two answers differ, from what a service shows of them; None where they do not."""
    at = first_difference(reference.spellings, found.spellings)
    if at is None:
        if (reference.text, reference.finish) == (found.text, found.finish):
            return None
        reason = "equal tokens, and another text or another reason to end"
        return Divergence(index, len(found.tokens), reference.finish, found.finish, Verdict.DEFECT, reason)
    texts = (reference, found)
    names = [repr(one.tokens[at].spelling[0]) if at < len(one.tokens) else "the end" for one in texts]

    def verdict(is_: Verdict, reason: str, deviation: float | None = None) -> Divergence:
        return Divergence(index, at, names[0], names[1], is_, reason, deviation)

    if strict:
        return verdict(Verdict.DEFECT, "the service runs with strict numerics, under which nothing is a tie")
    if "the end" in names:
        return verdict(Verdict.DEFECT, "one text ends where the other goes on, after equal tokens")
    if not greedy:
        return verdict(
            Verdict.UNDECIDED, "sampled: a service does not show its noise; run the audit in process"
        )
    one, other = reference.tokens[at], found.tokens[at]
    both = (one.spelling, other.spelling)
    if not all(spelling in token.top for spelling in both for token in (one, other)):
        return verdict(Verdict.DEFECT, "one candidate is not among the other's five likeliest tokens")
    if options(index).get("repetition_penalty", 1.0) != 1.0:
        return verdict(Verdict.UNDECIDED, "penalised: what a service reports is from before the penalty")
    margins = [token.top[both[0]] - token.top[both[1]] for token in (one, other)]
    deviation = abs(margins[0] - margins[1])
    if deviation and min(abs(margin) for margin in margins) <= deviation:
        reason = f"both candidates are within the {deviation:.3g} by which the two computations differ"
        return verdict(Verdict.TIE, reason, deviation)
    reason = f"the margins are {margins[0]:.3g} and {margins[1]:.3g}: one of them is no likeliest token"
    return verdict(Verdict.DEFECT, reason, deviation)


def _text(answer: Answer) -> quality.Text:
    return quality.Text(answer.spellings, [token.logprob for token in answer.tokens], answer.finish)
