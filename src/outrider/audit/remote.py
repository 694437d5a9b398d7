"""The audit of a running service, through its OpenAI API: what a user can check without its weights.

Same seed, same tokens, with speculation off and on; and whether sampled tokens follow the probabilities that
the service itself reports. Numbers that are reported with the tokens say whether a difference is a numeric
tie.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from outrider.audit.divergence import first_difference
from outrider.audit.report import Finding, Outcome, Report
from outrider.audit.statistics import goodness_of_fit, holm
from outrider.errors import ConfigError, UnavailableError

TIMEOUT_S = 120.0
CONCURRENCY = 8
LEVEL = 1e-3
ALTERNATIVES = 20  # what the API reports at most
MOST_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token as the service reports it."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    def logprob_of(self, text: str) -> float | None:
        return self.logprob if text == self.text else dict(self.top).get(text)


class Client:
    """Chat completions of one model of a service."""

    def __init__(self, url: str, model: str | None) -> None:
        self._http = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=TIMEOUT_S)
        self.model = model or self._first_model()

    def close(self) -> None:
        self._http.close()

    def _first_model(self) -> str:
        listed = self._call("GET", "/v1/models", None)["data"]
        if not listed:
            raise ConfigError("the service lists no models: name one with --model")
        return str(listed[0]["id"])

    def answer(self, prompt: str, **fields: Any) -> list[Token]:
        """The tokens of one chat completion."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
            **fields,
        }
        choice = self._call("POST", "/v1/chat/completions", body)["choices"][0]
        entries = (choice["logprobs"] or {}).get("content") or []
        return [
            Token(
                one["token"], one["logprob"], tuple((t["token"], t["logprob"]) for t in one["top_logprobs"])
            )
            for one in entries
        ]

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self._http.base_url} does not answer: {error!r}") from error
        if answer.status_code >= 500 or answer.status_code == 429:
            raise UnavailableError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
        if answer.status_code >= 400:
            raise ConfigError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
        return answer.json()


def audit(
    client: Client,
    prompts: Sequence[str],
    *,
    tokens: int,
    draws: int,
    url: str,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Everything that can be asked over HTTP."""
    report = Report(f"{client.model} at {url}")
    report.add(_seeds(client, prompts, tokens, progress))
    report.add(_fit(client, prompts[0], min(draws, MOST_DRAWS), progress))
    return report


def _seeds(
    client: Client, prompts: Sequence[str], tokens: int, progress: Callable[[str], None]
) -> Iterator[Finding]:
    ways: list[tuple[str, Any]] = [
        ("as the service does", True),
        ("at most 1 draft a round", {"max_tokens": 1}),
        ("at most 3 drafts a round", {"max_tokens": 3}),
        ("off, again", False),
    ]
    for kind, temperature in (("greedy", 0.0), ("sampled", 0.9)):

        def texts(speculative: Any, temperature: float = temperature) -> list[list[Token]]:
            def one(numbered: tuple[int, str]) -> list[Token]:
                index, prompt = numbered
                fields = {"seed": index, "temperature": temperature, "max_tokens": tokens}
                return client.answer(prompt, speculative=speculative, **fields)

            with ThreadPoolExecutor(CONCURRENCY) as pool:
                return list(pool.map(one, enumerate(prompts)))

        progress(f"same seed, same tokens: {kind}, speculation off")
        plain = texts(False)
        for name, speculative in ways:
            progress(f"same seed, same tokens: {kind}, {name}")
            yield compare(f"{kind}: speculation {name}", plain, texts(speculative), greedy=kind == "greedy")


def compare(
    subject: str, plain: Sequence[Sequence[Token]], other: Sequence[Sequence[Token]], *, greedy: bool
) -> Finding:
    """Texts of the same seeds, token by token; where they part, what the service reported on both sides."""
    ties: list[int] = []
    defects: list[int] = []
    for wanted, got in zip(plain, other, strict=True):
        at = first_difference_of(wanted, got)
        if at is None:
            continue
        explained = at < len(wanted) and at < len(got) and is_tie(wanted[at], got[at], greedy=greedy)
        (ties if explained else defects).append(at)
    identical = len(plain) - len(ties) - len(defects)
    detail = f"{identical} of {len(plain)} identical"
    outcome = Outcome.FINE
    if ties or defects:
        outcome = Outcome.DEFECT if defects else Outcome.TIE
        detail += f"; {len(ties)} numeric ties, {len(defects)} defects; first at token {(defects or ties)[0]}"
    figures = (("identical", float(identical)), ("ties", float(len(ties))), ("defects", float(len(defects))))
    return Finding("seeds", subject, outcome, detail, figures)


def first_difference_of(wanted: Sequence[Token], got: Sequence[Token]) -> int | None:
    ids = {text: index for index, text in enumerate({one.text for one in [*wanted, *got]})}
    return first_difference([ids[one.text] for one in wanted], [ids[one.text] for one in got])


def is_tie(wanted: Token, got: Token, *, greedy: bool) -> bool:
    """Whether the position's own numbers differ, by as much as the two candidates are apart.

    Of a sampled position the noise is not known here: there the numbers need only differ at all.
    """
    gaps = []
    for one in (wanted, got):
        first, second = one.logprob_of(wanted.text), one.logprob_of(got.text)
        if first is None or second is None:
            return False
        gaps.append(first - second)
    deviation = abs(gaps[0] - gaps[1])
    return deviation > 0 and (not greedy or min(map(abs, gaps)) <= deviation)


def _fit(client: Client, prompt: str, draws: int, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Two sampled tokens a seed: the first comes with the prefill, the second out of a verify block."""
    progress(f"goodness of fit: {draws} draws")

    def one(seed: int) -> list[Token]:
        return client.answer(prompt, seed=seed, temperature=1.0, max_tokens=2, ignore_eos=True)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        texts = [text for text in pool.map(one, range(draws)) if len(text) == 2]
    groups: list[tuple[str, list[Token]]] = [("token 1", [text[0] for text in texts])]
    for first, _ in Counter(text[0].text for text in texts).most_common(3):
        groups.append((f"token 2 after {first!r}", [text[1] for text in texts if text[0].text == first]))
    fits = []
    for _, seen in groups:
        reference = seen[0].top
        cells = [text for text, _ in reference]
        probs = [math.exp(logprob) for _, logprob in reference]
        counts = Counter(one.text for one in seen)
        known = [counts[text] for text in cells]
        rest = max(0.0, 1 - sum(probs))
        fits.append(goodness_of_fit([*known, len(seen) - sum(known)], [*probs, rest], level=LEVEL))
    rejected = holm([fit.p_value for fit in fits], LEVEL)
    for (name, _), fit, bad in zip(groups, fits, rejected, strict=True):
        yield Finding(
            "fit",
            name,
            Outcome.DEFECT if bad else Outcome.FINE,
            f"{fit.draws} draws, chi-square {fit.statistic:.1f} at {fit.freedom} degrees of freedom, "
            f"p = {fit.p_value:.2g}; a distance of {fit.smallest_distance:.3f} would show",
            (("draws", float(fit.draws)), ("p_value", fit.p_value)),
        )
