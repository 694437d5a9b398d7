"""From a checked service file to a service that answers: a local Ray, one deployment call, a bounded wait.

Deploying goes through the dashboard's REST API, the way of `serve deploy`, on a local and on a remote
cluster alike: what works here works there.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias

import httpx
import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.exceptions import AuthenticationError

from outrider.errors import ConfigError, OutriderError

POLL_S = 0.5
PROBE_TIMEOUT_S = 5.0
RAY_STARTS = 3

Report: TypeAlias = Callable[[str], None]
"""Called with what the service is doing, whenever that may have changed."""


class LaunchError(OutriderError):
    """The service did not come up; the message says why and where the logs are."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster that can be deployed to."""

    dashboard: str  # "http://127.0.0.1:8265"
    logs: str  # where a person finds more


@dataclass(frozen=True, slots=True)
class Running:
    """A service that is ready."""

    url: str  # where the HTTP API is, as seen from this machine, without a slash at the end
    cluster: Cluster


@contextmanager
def local_ray() -> Iterator[Cluster]:
    """A Ray cluster of this process's own, gone when the block is left, however it is left.

    It counts at least two CPUs, so that the quickstart is placed on a machine with one as well. Its files
    are removed, unless the block raised: then the logs are worth reading. SIGTERM leaves the block too, so
    this is for the main thread of a program.
    """
    # A Unix socket's path may have 107 bytes and Ray adds about 65, so a long $TMPDIR would not do.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 24 else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="outrider-", dir=parent))
    _keep_off_proxies("127.0.0.1", "localhost")
    try:
        dashboard = _start_ray(folder)
        # Ray's own handler prints its stack and ends the process before anything here could clean up.
        signal.signal(signal.SIGTERM, _end)
        if not dashboard:
            raise LaunchError(f"Ray's dashboard, which deploys services, did not start: see {folder}")
        yield Cluster(dashboard=f"http://{dashboard}", logs=f"{folder}/session_latest/logs/serve")
    except Exception:
        ray.shutdown()
        raise
    except BaseException:  # Ctrl-C and SIGTERM are how a service is ended
        _remove(folder)
        raise
    else:
        _remove(folder)


def _start_ray(folder: Path) -> str:
    """Start Ray's processes and return the dashboard's address, empty where it has none.

    Tries again where Ray's own fixed 30 s for a node ran out: that is a busy machine, not a wrong one.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            context = ray.init(
                address="local",  # never somebody else's cluster, whatever RAY_ADDRESS says
                num_cpus=max(2, os.cpu_count() or 1),
                include_dashboard=True,
                dashboard_host="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
            )
            return str(context.dashboard_url or "")
        except Exception as error:  # a bare Exception is what Ray raises here
            ray.shutdown()
            if attempts == RAY_STARTS:
                raise LaunchError(
                    f"Ray did not start in {RAY_STARTS} attempts ({error}); its logs are in {folder}"
                ) from error


def remote_ray(dashboard: str) -> Cluster:
    """A Ray cluster that is up; `dashboard` is what `serve deploy --address` takes."""
    if not dashboard.startswith(("http://", "https://")):
        raise ConfigError(f"address {dashboard!r} must be the dashboard's, for example http://head:8265")
    return Cluster(dashboard=dashboard.rstrip("/"), logs=f"{dashboard.rstrip('/')}/#/serve")


def with_port(config: dict[str, Any], port: int | None) -> dict[str, Any]:
    """The file's content with another HTTP port: None keeps the file's, 0 picks a free one.

    Raises `ConfigError` when the port is taken on this machine.
    """
    http = dict(config.get("http_options") or {})
    host = str(http.get("host", "0.0.0.0"))
    wanted = int(http.get("port", 8000)) if port is None else port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the proxy will do
        try:
            probe.bind((host, wanted))
        except OSError as error:
            raise ConfigError(
                f"http_options: {host}:{wanted} cannot be listened on ({error.strerror}): end what holds "
                "the port, or choose another with --port (0: any free one)"
            ) from None
        free = int(probe.getsockname()[1])
    return {**config, "http_options": {**http, "port": free}}


def deploy(config: dict[str, Any], cluster: Cluster, *, timeout_s: float, report: Report) -> Running:
    """Deploy a service file's content and wait until every application runs and answers.

    Raises `LaunchError` when an application fails, or is not ready after `timeout_s` seconds, and
    `ConfigError` when the cluster asks for a token that was not sent.
    """
    deadline = time.monotonic() + timeout_s
    try:
        client = ServeSubmissionClient(cluster.dashboard)
        client.deploy_applications(config)
    except AuthenticationError:
        raise ConfigError(
            f"{cluster.dashboard} asks for Ray's token: set RAY_AUTH_MODE=token, which sends the one in "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None
    except (ConnectionError, RuntimeError) as error:  # the head cannot be reached, or refuses
        raise LaunchError(f"{cluster.dashboard} did not take the service: {_cause(str(error))}") from error
    names = [application.get("name", "default") for application in config["applications"]]
    _wait_running(client, names, cluster, deadline, report)
    http = config.get("http_options") or {}
    host = str(http.get("host", "0.0.0.0"))
    if host in ("0.0.0.0", "::"):
        host = httpx.URL(cluster.dashboard).host
    running = Running(url=f"http://{host}:{http.get('port', 8000)}", cluster=cluster)
    prefixes = [application.get("route_prefix", "/") or "" for application in config["applications"]]
    for prefix in prefixes:
        _wait_ready(running, prefix.rstrip("/"), deadline, report)
    return running


def _wait_running(
    client: ServeSubmissionClient, names: list[str], cluster: Cluster, deadline: float, report: Report
) -> None:
    while True:
        applications = client.get_serve_details()["applications"]
        waiting = []
        for name in names:
            details = applications.get(name, {})
            status = details.get("status", "NOT_STARTED")
            if status in ("DEPLOY_FAILED", "UNHEALTHY"):
                cause = _cause(details.get("message", ""))
                raise LaunchError(f"the application {name!r} is {status}: {cause}\nlogs: {cluster.logs}")
            if status != "RUNNING":
                waiting.append(_progress(name, details))
        if not waiting:
            return
        report("; ".join(waiting))
        if time.monotonic() > deadline:
            raise LaunchError(f"not running in time: {'; '.join(waiting)}\nlogs: {cluster.logs}")
        time.sleep(POLL_S)


def _wait_ready(running: Running, prefix: str, deadline: float, report: Report) -> None:
    url = f"{running.url}{prefix}/health/ready"
    report("the HTTP API")
    while True:
        try:
            answer = httpx.get(url, timeout=PROBE_TIMEOUT_S, trust_env=False)
            said = f"{answer.status_code} {answer.text[:200]}"
            if answer.status_code == httpx.codes.OK:
                return
        except httpx.TransportError as error:
            said = str(error)
        if time.monotonic() > deadline:
            raise LaunchError(f"{url} is not ready in time: {said}\nlogs: {running.cluster.logs}")
        time.sleep(POLL_S)


def _progress(name: str, details: dict[str, Any]) -> str:
    """`quickstart (Router up, Verifier starting)`."""
    states = [
        f"{deployment} {'up' if state.get('status') == 'HEALTHY' else 'starting'}"
        for deployment, state in sorted(details.get("deployments", {}).items())
    ]
    return f"{name} ({', '.join(states)})" if states else name


def _cause(message: str) -> str:
    """The last exception of a Serve message, without the tracebacks around it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)]
    return (raised or lines or ["no reason given"])[-1]


def _keep_off_proxies(*hosts: str) -> None:
    """Ray's client follows HTTP_PROXY, and a proxy cannot reach this machine's loopback."""
    for variable in ("NO_PROXY", "no_proxy"):
        listed = [host for host in os.environ.get(variable, "").split(",") if host]
        os.environ[variable] = ",".join([*listed, *(host for host in hosts if host not in listed)])


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _remove(folder: Path) -> None:
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
