from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from outrider.errors import GenerationError, UnavailableError
from outrider_serve import demo
from outrider_serve.demo import Token, marked


@dataclass(frozen=True)
class Script:
    """What the fake service says. It is the demo's side of the API: chunks, their detail, the statistics."""

    speculative: str = "Maria opened"
    plain: str = "Maria opened"
    status: int = 200
    done: bool = True
    error: str | None = None


@contextmanager
def fake_service(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            assert (body["model"], body["temperature"], body["stream"]) == ("tiny", 0, True)
            self.send_response(script.status)
            self.end_headers()
            if script.status != 200:
                self.wfile.write(b'{"error": {"message": "no such model"}}')
                return
            text = script.speculative if body["speculative"] else script.plain
            for event in _events(text, drafted=body["speculative"], error=script.error):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            if script.done:
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def _events(text: str, *, drafted: bool, error: str | None) -> Iterator[dict[str, Any]]:
    if error is not None:
        yield {"error": {"message": error}}
        return
    head, space, tail = text.partition(" ")
    yield {
        "choices": [{"delta": {"content": head}}],
        "outrider": {"tokens": [{"text": head, "drafted": drafted}]},
    }
    yield {
        "choices": [{"delta": {"content": space + tail}, "finish_reason": "stop"}],
        "outrider": {
            "tokens": [{"text": space + tail, "drafted": False}],
            "rounds": 1 if drafted else 0,
            "draft_tokens": 4 if drafted else 0,
            "accepted_tokens": 1 if drafted else 0,
            "acceptance_rate": 0.25 if drafted else None,
            "mean_acceptance_length": 2.0 if drafted else None,
            "duration_s": 0.2 if drafted else 0.3,
            "time_to_first_token_s": 0.1,
        },
    }


def shown(script: Script, *, terminal: bool = False) -> tuple[bool, str]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100, highlight=False, no_color=terminal)
    with fake_service(script) as url:
        equal = demo.run(url, "tiny", console)
    return equal, screen.getvalue()


def test_equal_texts_are_said_to_be_equal_and_compared_in_figures() -> None:
    equal, screen = shown(Script())
    assert equal
    assert "All 4 texts are equal" in screen
    cells = {line.split("│")[1].strip(): line.split("│")[2:4] for line in screen.splitlines() if "│" in line}
    assert [cell.strip() for cell in cells["tokens/s after the first"]] == ["10.0", "5.0"]
    assert [cell.strip() for cell in cells["ratio"]] == ["2.00", "1.00"]
    assert [cell.strip() for cell in cells["accepted / drafted tokens"]] == ["1 / 4", "-"]
    assert [cell.strip() for cell in cells["acceptance rate"]] == ["0.25", "-"]
    assert [cell.strip() for cell in cells["mean acceptance length"]] == ["2.00", "-"]


def test_different_texts_are_a_failure_and_shown() -> None:
    equal, screen = shown(Script(plain="Anna opened"))
    assert not equal
    assert "--- Anna opened" in screen
    assert "--- Maria opened" in screen


def test_accepted_drafts_are_in_brackets_where_there_is_no_style() -> None:
    _, screen = shown(Script())
    assert "[Maria] opened" in screen
    assert "[drafted] (in brackets)" in screen


def test_accepted_drafts_are_underlined_on_a_terminal_without_colour() -> None:
    _, screen = shown(Script(), terminal=True)
    assert "\x1b[4mMaria\x1b[0m opened" in screen
    assert "(underlined)" in screen


def test_accepted_drafts_are_coloured_and_underlined() -> None:
    text = marked([Token("a", drafted=True), Token("b", drafted=False)], styled=True)
    assert text.plain == "ab"
    (span,) = text.spans
    assert (span.start, span.end, str(span.style)) == (0, 1, "underline green")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(status=404), "answered 404: .*no such model"),
        (Script(done=False), r"without \[DONE\]"),
        (Script(error="out of blocks"), "gave up: out of blocks"),
    ],
)
def test_a_failed_answer_says_why(script: Script, reason: str) -> None:
    with pytest.raises(GenerationError, match=reason):
        shown(script)


def test_a_service_that_is_gone_is_unavailable() -> None:
    with fake_service(Script()) as url:
        pass
    with pytest.raises(UnavailableError, match="fell silent"):
        demo.run(url, "tiny", Console(file=io.StringIO()))
