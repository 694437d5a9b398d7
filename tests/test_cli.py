from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from outrider.audit.greedy import Reference
from outrider_serve import cli

QUICKSTART = Path(__file__).parents[1] / "manifests" / "quickstart.yaml"
OUTRIDER = Path(sys.executable).with_name("outrider")

START_TIMEOUT_S = 240

Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_checking_a_good_file_says_so(run: Run) -> None:
    code, out, _ = run("check", str(QUICKSTART))
    assert (code, out) == (0, f"{QUICKSTART}: fine\n")


def test_checking_a_bad_file_lists_its_faults_and_exits_2(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(QUICKSTART.read_text().replace("dtype:", "dtpe:").replace("method:", "methd:"))
    code, _, err = run("check", str(bad))
    assert code == 2
    assert "args: unknown key 'dtpe'; did you mean 'dtype'?" in err
    assert "unknown key 'speculative_config.methd'; did you mean 'method'?" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["check", "serve", "demo"])
def test_a_missing_file_exits_2_without_a_stack_trace(run: Run, command: str) -> None:
    code, _, err = run(command, "no-such.yaml")
    assert code == 2
    assert err == "error: no-such.yaml: cannot be read: No such file or directory\n"


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_model_that_was_not_added_exits_2_before_ray_starts(
    run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    code, _, err = run(command, str(QUICKSTART))
    assert code == 2
    assert "run `outrider models add smollm2`" in err


@pytest.mark.parametrize("command", ["check", "serve", "demo"])
def test_a_file_without_one_of_our_applications_exits_2(run: Run, command: str, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("applications: [{name: other, import_path: 'mine:app'}]")
    code, _, err = run(command, str(other))
    assert code == 2
    assert "no application with import_path outrider_serve.app:build" in err


@pytest.mark.usefixtures("smollm2")
def test_a_taken_port_exits_2_and_names_the_way_out(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        code, _, err = run("serve", str(QUICKSTART), "--port", str(holder.getsockname()[1]))
    assert code == 2
    assert "cannot be listened on" in err
    assert "--port" in err


def test_an_address_that_is_not_a_dashboard_exits_2(run: Run) -> None:
    code, _, err = run("serve", str(QUICKSTART), "--address", "ray://head:10001")
    assert code == 2
    assert "for example http://head:8265" in err


def test_a_cluster_that_does_not_answer_exits_1(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    code, _, err = run("serve", str(QUICKSTART), "--address", f"http://127.0.0.1:{port}", "--timeout", "5")
    assert code == 1
    assert "did not take the service" in err
    assert "Traceback" not in err


def test_a_cluster_that_asks_for_a_token_exits_2_and_names_the_setting(run: Run) -> None:
    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the test's output clean."""

    server = HTTPServer(("127.0.0.1", 0), Guarded)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        code, _, err = run("serve", str(QUICKSTART), "--address", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
    assert code == 2
    assert "set RAY_AUTH_MODE=token" in err


def test_an_audit_shows_its_table_keeps_its_json_and_exits_0(
    run: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    kept, asked = tmp_path / "audit.json", tmp_path / "prompts.jsonl"
    asked.write_text('{"prompt": "the router drafts"}\n"a b a b a b"\n')
    options = ["--prompts", "2", "--prompt-file", str(asked), "--tokens", "8", "--json", str(kept)]
    code, out, err = run(
        "audit", "--model", str(tiny_llama), "--numerics", "strict", "--check", "greedy", *options
    )
    assert code == 0
    assert "no defect in 1 checks: 1 fine" in out
    assert "greedy: transformers, 2 of 2" in err
    assert json.loads(kept.read_text())["results"][0]["compared"] == 2


def test_an_audit_that_finds_a_defect_exits_1(
    run: Run, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Reference.generate

    def wrong(self: Reference, *arguments: Any) -> list[tuple[int, ...]]:
        return [(*text[:-1], (text[-1] + 1) % 300) for text in real(self, *arguments)]

    monkeypatch.setattr(Reference, "generate", wrong)
    code, out, _ = run(
        "audit", "--model", str(tiny_llama), "--prompts", "1", "--tokens", "4", "--check", "greedy"
    )
    assert code == 1
    assert "1 of 1 checks found defects" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--model is missing"),
        (["--model", "no-such-model"], "neither a folder with a config.json nor one of"),
        (["--model", "smollm2", "--check", "speed"], "there are greedy, identity, distribution, quality"),
        (["--url", "localhost:8000"], "an address such as http://localhost:8000"),
        (["--url", "http://localhost:8000", "--numerics", "strict"], "--numerics is for an audit in process"),
        (["--model", "smollm2", "--dtype", "int4"], "dtype"),
    ],
)
def test_an_audit_of_nothing_sensible_exits_2(run: Run, options: list[str], said: str) -> None:
    code, _, err = run("audit", *options)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_an_audit_of_a_service_that_is_not_there_exits_1(run: Run) -> None:
    code, _, err = run("audit", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "gave no answer" in err


def test_models_are_listed_with_their_state(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    code, out, _ = run("models", "list")
    assert code == 0
    assert "smollm2" in out
    assert "not added" in out


def test_adding_an_unknown_model_exits_2(run: Run) -> None:
    code, _, err = run("models", "add", "smollm9")
    assert code == 2
    assert "model 'smollm9' is not in the catalogue; known: smollm2" in err


def test_versions_are_those_installed(run: Run) -> None:
    import ray

    code, out, _ = run("version")
    assert code == 0
    assert f"ray {ray.__version__}" in out.splitlines()


def test_the_command_starts_without_torch_or_ray() -> None:
    # What makes `outrider --help`, and each `make`, answer at once.
    loaded = (
        "import sys, outrider_serve.cli; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.ray
@pytest.mark.usefixtures("smollm2")
@pytest.mark.timeout(2 * START_TIMEOUT_S)
def test_the_demo_ends_with_equal_texts_and_accepted_drafts() -> None:
    done = subprocess.run(
        [OUTRIDER, "demo", QUICKSTART],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
        env=os.environ | {"PYTHONUTF8": "1"},  # the frame of the table is not ASCII
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 4 texts are equal" in done.stdout
    accepted = next(line for line in done.stdout.splitlines() if "accepted / drafted" in line)
    assert int(accepted.split("│")[2].split("/")[0]) > 0


@pytest.mark.ray
@pytest.mark.usefixtures("smollm2")
@pytest.mark.timeout(2 * START_TIMEOUT_S)
def test_a_served_file_answers_until_interrupted_and_leaves_nothing(tmp_path: Path) -> None:
    # Read in a file, not a pipe: Ray's processes inherit it and would keep the pipe open.
    said = tmp_path / "stdout"
    with said.open("w") as stdout:
        service = subprocess.Popen(
            [OUTRIDER, "serve", QUICKSTART, "--port", "0", "--timeout", str(START_TIMEOUT_S)],
            stdout=stdout,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        try:
            url = _ready_url(service, said)
            served = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).json()
            assert [model["id"] for model in served["data"]] == ["smollm2"]
            service.send_signal(signal.SIGINT)
            assert service.wait(timeout=60) == 0
        finally:
            if service.poll() is None:
                service.terminate()
                service.wait(timeout=60)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/v1/models", timeout=5, trust_env=False)


def _ready_url(service: subprocess.Popen[bytes], said: Path) -> str:
    """Where the service says that it is ready; fails with its own words when it ends instead."""
    for _ in range(START_TIMEOUT_S * 2):
        text = said.read_text()
        if "Ctrl-C ends it" in text:
            line = next(line for line in text.splitlines() if line.startswith("ready at "))
            return line.split()[2].removesuffix("/v1;")
        try:
            service.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"not ready: {said.read_text()}")
