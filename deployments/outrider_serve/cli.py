"""The command `outrider`: check, serve and demonstrate a service file; manage named models.

Exit codes: 0 fine, 1 the service failed, 2 the user's mistake.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from outrider import models
from outrider.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from outrider_serve.launch import Running

# Ray, Serve and pydantic take seconds to import: the commands that need them do it themselves.

app = typer.Typer(
    help="Speculative decoding on Ray Serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Named models in this user's cache.", no_args_is_help=True)
app.add_typer(models_app, name="models")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

ServiceFile = Annotated[Path, typer.Argument(metavar="FILE", help="a Serve config file", show_default=False)]
Timeout = Annotated[float, typer.Option("--timeout", min=1.0, help="seconds until the service must be ready")]


def main() -> None:
    """Entry point: our errors become one message on stderr and an exit code."""
    try:
        app()
    except ConfigError as error:
        err.print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        sys.exit(2)
    except OutriderError as error:
        err.print(f"failed: {error}", markup=False, style="red", soft_wrap=True)
        sys.exit(1)


@app.command()
def check(file: ServiceFile) -> None:
    """Lint a whole service file, unknown keys included, which Serve itself ignores."""
    from outrider_serve.service_file import read

    read(file)
    out.print(f"{file}: fine", markup=False)


@app.command()
def serve(
    file: ServiceFile,
    address: Annotated[
        str | None,
        typer.Option(help="dashboard of a cluster that is up, http://host:8265; default: start one here"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="instead of the file's HTTP port; 0: any free one")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="show one answer once the service is up")] = False,
    timeout: Timeout = 300.0,
) -> None:
    """Run a service file: on a Ray cluster of its own until Ctrl-C, or on one that is up."""
    from outrider_serve import launch

    config, model = _checked(file, local=address is None)
    if address is not None:
        if port is not None:
            raise ConfigError(
                "--port is for a cluster of our own: on a cluster that is up, Serve keeps its port"
            )
        with _status("deploying") as report:
            running = launch.deploy(config, launch.remote_ray(address), timeout_s=timeout, report=report)
        _announce(running, model)
        if demo:
            _demonstrate(running, model)
        return
    config = launch.with_port(config, port)
    try:
        with _started(config, timeout) as running:
            if demo:
                _demonstrate(running, model)
            _announce(running, model)
            # A new local Ray asks for a token, and its clients send theirs only when told to.
            again = f"RAY_AUTH_MODE=token outrider serve {file} --address {running.cluster.dashboard}"
            out.print(f"after an edit: {again}", markup=False, soft_wrap=True)
            out.print("Ctrl-C ends it.")
            threading.Event().wait()
    except KeyboardInterrupt:
        out.print("ended")


@app.command()
def demo(file: ServiceFile, timeout: Timeout = 300.0) -> None:
    """Start a service file here, stream one answer with its drafts marked, compare, and shut down."""
    from outrider_serve import launch

    config, model = _checked(file, local=True)
    with _started(launch.with_port(config, 0), timeout) as running:
        _demonstrate(running, model)


@app.command()
def audit(
    model: Annotated[
        str | None,
        typer.Option(
            help="in process: a folder or a named model; with --url: the served name, default its first"
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="audit a running service, http://localhost:8000, and no local model")
    ] = None,
    dtype: Annotated[str, typer.Option(help="in process: auto, float32, bfloat16, float16")] = "auto",
    device: Annotated[str, typer.Option(help="in process: auto, cpu, cuda, cuda:1")] = "auto",
    numerics: Annotated[str, typer.Option(help="in process: auto, strict, fast")] = "auto",
    draft_model: Annotated[
        str | None, typer.Option(help="in process: the drafter's weights; default: the target's own")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="prompts of the built-in list or the file")] = 40,
    prompt_file: Annotated[
        Path | None, typer.Option(help='JSON lines, {"prompt": "..."} or a string each')
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="tokens a text")] = 96,
    draws: Annotated[
        int | None,
        typer.Option(min=200, max=10_000_000, help="a distribution; default: 20000, and 4000 with --url"),
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="with --url: its rejection_sample_method; default: coupled")
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="only these: greedy, identity, distribution, quality")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="in process: any other engine key")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="write all that was found to this file")] = None,
) -> None:
    """Is this model, or this running service, lossless? Exit code 0: yes, as far as seen; 1: defects."""
    from outrider.audit.command import AuditOptions, run

    asked = AuditOptions(
        model=model,
        url=url,
        engine={"dtype": dtype, "device": device, "numerics": numerics},
        overrides=tuple(set_ or ()),
        draft_model=draft_model,
        prompts=prompts,
        prompt_file=prompt_file,
        tokens=tokens,
        draws=draws,
        rule=rule,
        checks=tuple(check or ()),
    )
    with _status("audit") as report:
        found = run(asked, report)
    found.show(out)
    if json is not None:
        found.write(json)
    raise typer.Exit(found.exit_code)


@models_app.command("list")
def list_models() -> None:
    """Every model that can be named, and whether it is in the cache."""
    present = models.installed()
    for model in models.catalogue():
        state = str(models.resolve(model.name)) if model.name in present else "not added"
        out.print(f"{model.name}\t{model.title}\t{model.licence}\t{state}", markup=False, soft_wrap=True)


@models_app.command("add")
def add_model(name: Annotated[str, typer.Argument(help="a name of `outrider models list`")]) -> None:
    """Convert a named model into the cache, once."""
    if name in models.installed():
        out.print(f"{name}: {models.resolve(name)}", markup=False, soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as progress:
        bar = progress.add_task(name, total=1.0)
        folder = models.add(name, lambda doing, done: progress.update(bar, description=doing, completed=done))
    out.print(f"{name}: {folder}", markup=False, soft_wrap=True)


@app.command()
def version() -> None:
    """Versions of Outrider and of what it stands on."""
    for package in ("outrider", "ray", "torch", "transformers"):
        out.print(f"{package} {installed_version(package)}")


def _checked(file: Path, *, local: bool) -> tuple[dict[str, Any], str]:
    """The file's content and the name its first service answers to; `ConfigError` when it cannot run.

    Where the service runs here (`local`), its models must be here too.
    """
    from outrider_serve.service_file import read, service_args

    config = read(file)
    services = service_args(config)  # one at least: a file without is a fault
    if local:
        for args in services:
            models.resolve(args.model)
    return config, services[0].model_name


@contextmanager
def _started(config: dict[str, Any], timeout: float) -> Iterator[Running]:
    """A service on a Ray of its own, ready; both are gone when the block is left."""
    from outrider_serve import launch

    with ExitStack() as stack:
        with _status("starting Ray") as report:
            cluster = stack.enter_context(launch.local_ray())
            running = launch.deploy(config, cluster, timeout_s=timeout, report=report)
        yield running


@contextmanager
def _status(doing: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, a line for each change elsewhere."""
    last = ""

    def line(text: str) -> None:
        nonlocal last
        if text != last:
            err.print(f"waiting for {text}", markup=False)
            last = text

    if not err.is_terminal:
        err.print(doing)
        yield line
        return
    with err.status(doing) as status:
        yield lambda text: status.update(f"waiting for {text}")


def _announce(running: Running, model: str) -> None:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'
    out.print(f"ready at {running.url}/v1; dashboard {running.cluster.dashboard}", soft_wrap=True)
    out.print(
        f"curl {running.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        markup=False,
        soft_wrap=True,
    )


def _demonstrate(running: Running, model: str) -> None:
    from outrider_serve import demo as demonstration

    if not demonstration.run(running.url, model, out):
        raise OutriderError("speculation changed the text")
