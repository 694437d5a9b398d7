"""The audit by URL: the real HTTP application over the engine in this process."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import outrider
from outrider.audit.results import Comparison, Result, Status, Verdict
from outrider.audit.service import Answer, Client, ServiceAudit, Token, explain, parts_of
from outrider.config import LimitOptions, RouterOptions
from outrider.errors import ConfigError, UnavailableError
from outrider.inprocess import LocalService
from outrider.messages import AcceptanceRule
from outrider_serve.ingress import Readiness, build_app
from outrider_serve.telemetry import Snapshot, Telemetry

PROMPTS = [
    "a b a b a b a b",
    "the router drafts",
    "a guess that is checked",
    "the answer is",
    "wrong or right",
]

Serving = Callable[..., AbstractContextManager[str]]


class HttpService:
    """What the routes stand on, with the engine of `outrider.local` behind it."""

    model_name = "tiny"
    created = 1_790_000_000

    def __init__(self, local: LocalService, numerics: str) -> None:
        self.tokenizer = local.tokenizer
        self.coordinator = local.coordinator
        self.max_model_len = local.coordinator.target.max_model_len
        self.options = RouterOptions(
            speculative_config=local.config.speculative_config, limits=LimitOptions()
        )
        self.telemetry = Telemetry(self.model_name, engine="local")
        self._numerics = numerics

    async def ready(self) -> Readiness:
        return Readiness(True, None, True, None, self._numerics)

    async def snapshots(self) -> list[Snapshot]:
        return [self.telemetry.snapshot()]


@pytest.fixture
def serving(tiny_llama: Path) -> Serving:
    """Serve the tiny model on a free port, speculating; gives the address."""

    @contextmanager
    def serve(*, numerics: str = "strict", rule: str = "coupled", **spec: Any) -> Iterator[str]:
        config = {
            "model": str(tiny_llama),
            "numerics": "strict",
            "num_kv_blocks": 512,
            "speculative_config": {
                "method": "draft_model",
                "model": str(tiny_llama),
                "num_speculative_tokens": 3,
                "rejection_sample_method": rule,
                **spec,
            },
        }
        with outrider.local(config) as local, socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            app = build_app(HttpService(local, numerics))
            server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="critical"))
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            try:
                deadline = time.monotonic() + 20
                while not server.started and time.monotonic() < deadline:
                    time.sleep(0.01)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join(20)

    return serve


def audited(
    url: str, *checks: str, rule: AcceptanceRule = AcceptanceRule.COUPLED, **options: Any
) -> list[Result]:
    client = Client(url)
    try:
        assert client.model == "tiny"
        return ServiceAudit(client, PROMPTS, tokens=16, rule=rule, checks=frozenset(checks), **options).run()
    finally:
        client.close()


def test_a_lossless_service_is_found_identical_at_every_k_and_of_equal_quality(serving: Serving) -> None:
    with serving() as url:
        found = audited(url + "/v1/", "identity", "quality")
    texts = [one for one in found if isinstance(one, Comparison)]
    assert [one.name for one in texts] == [
        "plain, mixed concurrency",
        "speculative, K of the service",
        "speculative, K = 1",
        "speculative, K = 2",
    ]
    assert {one.status for one in texts} == {Status.FINE}, [one.summary for one in texts]
    assert [one.drafted > 0 for one in texts] == [False, True, True, True]
    assert len(found) == 8
    assert not [one for one in found if one.status is Status.DEFECT]


def test_a_ratio_rule_is_held_to_what_it_promises(serving: Serving) -> None:
    """Greedy texts equal plain ones; sampled ones hang on the drafts, and are the same once more."""
    with serving(rule="rejection") as url:
        found = audited(url, "identity", rule=AcceptanceRule.REJECTION)
    texts = {one.name: one for one in found if isinstance(one, Comparison)}
    assert texts["speculative, K = 2"].compared == 2
    assert texts["speculative, K of the service, rejection: the same again"].compared == len(PROMPTS)
    assert {one.status for one in texts.values()} == {Status.FINE}, [one.summary for one in found]


def test_the_distribution_of_a_service_is_compared_with_its_own_log_probabilities(serving: Serving) -> None:
    with serving() as url:
        (one, other) = audited(url, "distribution", draws=208)
    assert one.status is Status.FINE, one.summary
    assert other.status is Status.FINE, other.summary


def test_a_service_whose_speculative_text_differs_is_caught(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Client.ask

    def wrong(self: Client, prompt: str, **fields: Any) -> list[Answer]:
        if fields.get("speculative") is True and fields["temperature"] > 0:
            fields["seed"] += 1
        return real(self, prompt, **fields)

    monkeypatch.setattr(Client, "ask", wrong)
    with serving() as url:
        found = {one.name: one for one in audited(url, "identity")}
    assert found["speculative, K of the service"].status is Status.DEFECT
    assert found["speculative, K = 1"].status is Status.FINE


# ---- what is made of answers


def token(text: str, **top: float) -> Token:
    return Token((text, tuple(text.encode())), top[text], {(t, tuple(t.encode())): p for t, p in top.items()})


def answer(*tokens: Token, finish: str = "length") -> Answer:
    return Answer("".join(one.spelling[0] for one in tokens), tokens, finish)


SAME = token("x", x=-0.1, y=-3.0)


@pytest.mark.parametrize(
    ("one", "other", "greedy", "strict", "verdict"),
    [
        (token("a", a=-0.70, b=-0.71), token("b", a=-0.72, b=-0.70), True, False, Verdict.TIE),
        (token("a", a=-0.70, b=-0.71), token("b", a=-0.72, b=-0.70), True, True, Verdict.DEFECT),
        (token("a", a=-0.2, b=-2.0), token("b", a=-0.21, b=-2.0), True, False, Verdict.DEFECT),
        (token("a", a=-0.70, b=-0.71), token("b", a=-0.70, b=-0.71), True, False, Verdict.DEFECT),
        (token("a", a=-0.70), token("b", b=-0.70), True, False, Verdict.DEFECT),
        (token("a", a=-0.70, b=-0.71), token("b", a=-0.72, b=-0.70), False, False, Verdict.UNDECIDED),
    ],
)
def test_a_pair_is_judged_by_what_the_service_shows(
    one: Token, other: Token, greedy: bool, strict: bool, verdict: Verdict
) -> None:
    found = explain(0, answer(SAME, one), answer(SAME, other), greedy=greedy, strict=strict)
    assert found is not None
    assert (found.position, found.reference, found.found, found.verdict) == (1, "'a'", "'b'", verdict)


def test_equal_answers_are_no_divergence_and_an_early_end_is_a_defect() -> None:
    assert explain(0, answer(SAME, SAME), answer(SAME, SAME), greedy=False, strict=False) is None
    early = explain(0, answer(SAME, SAME), answer(SAME), greedy=True, strict=False)
    assert early is not None
    assert early.verdict is Verdict.DEFECT
    reason = explain(0, answer(SAME), answer(SAME, finish="stop"), greedy=True, strict=False)
    assert reason is not None
    assert reason.verdict is Verdict.DEFECT


def test_tokens_beyond_the_reported_ones_share_the_probability_that_is_left() -> None:
    top = {"a": math.log(0.6), "b": math.log(0.3)}
    rare = Token(("z", (122,)), math.log(0.1), dict(token("a", **top).top))
    answers = [answer(token("a", **top))] * 120 + [answer(token("b", **top))] * 60 + [answer(rare)] * 20
    (part,) = parts_of(answers)
    assert sorted(part.law.values()) == pytest.approx([0.1, 0.3, 0.6])
    assert part.fit().statistic == pytest.approx(0.0, abs=1e-9)


def test_who_does_not_answer_is_unavailable_and_what_is_no_api_a_mistake() -> None:
    with pytest.raises(UnavailableError, match="gave no answer"):
        Client("http://127.0.0.1:9", timeout_s=5)
    with pytest.raises(ConfigError, match="an address such as"):
        Client("localhost:8000")
    page = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    with pytest.raises(ConfigError, match="is this an OpenAI API"):
        Client("http://service", transport=page)
    lost = httpx.MockTransport(lambda _: httpx.Response(503, text="no verifier"))
    with pytest.raises(UnavailableError, match="503"):
        Client("http://service", transport=lost)
    models = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": [{"id": "tiny"}]}))
    with pytest.raises(ConfigError, match="served: tiny"):
        Client("http://service", model="other", transport=models)
    silent = Client("http://service", transport=models)
    assert silent.numerics() is None
    silent.close()
