"""Building the C kernels: whatever is missing or damaged, there is a library or a reason, never a crash."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.native import library

# Compiles in no time, and exports what the kernels export.
TINY = """
int outrider_native_init(int allow) { return allow; }
void outrider_pack(void) {}
void outrider_forward(void) {}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a source that compiles in no time; the folder where the library is kept."""
    source = tmp_path / "kernels.c"
    source.write_text(TINY)
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield tmp_path / "cache" / "kernels"
    library.load.cache_clear()


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)


def compiler(folder: Path, script: str) -> str:
    """A program to name in CC."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def reload() -> None:
    """As a new process would load it."""
    library.load.cache_clear()
    library.load("bfloat16")


def test_a_library_of_the_cache_needs_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load("bfloat16")
    (kept,) = cache.iterdir()
    without_compiler(monkeypatch)
    reload()
    assert list(cache.iterdir()) == [kept]


def test_each_type_has_a_library_of_its_own(cache: Path) -> None:
    library.SOURCE.write_text(
        "#ifdef FLOAT32\n#define ELEMENT float\n#else\n#define ELEMENT short\n#endif\n"
        + TINY.replace("return allow", "return sizeof(ELEMENT)")
    )
    assert [library.load(name).outrider_native_init(1) for name in ("bfloat16", "float32")] == [2, 4]
    assert len(list(cache.iterdir())) == 2


def test_a_changed_source_is_not_served_by_the_old_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load("bfloat16")
    library.SOURCE.write_text(TINY + "int more;")
    reload()
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("unusable", ["/proc/nope", "a file"])
def test_a_cache_that_cannot_be_written_is_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unusable: str
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", unusable if unusable.startswith("/") else str(tmp_path / unusable))
    assert library.load("bfloat16").outrider_native_init(7) == 7
    assert "the C kernels are built at every start" in caplog.text


def test_a_user_without_a_home_is_gone_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert library.load("bfloat16").outrider_native_init(7) == 7


@pytest.mark.parametrize("keep", [0, 100, 0.5])
def test_a_damaged_library_is_built_anew(cache: Path, keep: float) -> None:
    library.load("bfloat16")
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # this process has it mapped
    kept.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    reload()
    assert kept.read_bytes() == whole


def test_what_cannot_be_loaded_from_the_cache_is_loaded_from_elsewhere(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the home directory is mounted noexec.
    load_library = ctypes.CDLL

    def refuse_the_cache(path: str) -> object:
        if Path(path).is_relative_to(cache):
            raise OSError("failed to map segment from shared object: Operation not permitted")
        return load_library(path)

    monkeypatch.setattr(ctypes, "CDLL", refuse_the_cache)
    assert library.load("bfloat16").outrider_native_init(7) == 7


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "made no library"),
        ("echo no licence >&2; exit 3", "failed: no licence"),
        (
            """while [ "$1" != -o ]; do shift; done; echo text > "$2\"""",
            "cannot be loaded: .*(invalid|short)",
        ),
        (
            """[ "$1" = --version ] || { echo > e.c; exec cc -shared -fPIC -o "$7" e.c; }""",
            "lacks a function: .*outrider_native_init",
        ),
    ],
)
def test_a_compiler_that_makes_no_library_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    with pytest.raises(library.BuildError, match=reason):
        library.load("bfloat16")


def test_a_compiler_that_says_no_version_is_as_good_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed as cc")
    monkeypatch.setenv("CC", compiler(tmp_path, '[ "$1" = --version ] && exit 0; exec cc "$@"'))
    assert library.load("bfloat16").outrider_native_init(7) == 7


def test_a_program_that_cannot_run_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compiler"
    program.write_bytes(b"neither a script nor a program")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    with pytest.raises(library.BuildError, match="could not be run"):
        library.load("bfloat16")


def test_without_a_compiler_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    with pytest.raises(library.BuildError, match="no C compiler was found"):
        library.load("bfloat16")


def test_processes_that_build_at_once_all_get_a_library(cache: Path) -> None:
    load = (
        "import sys; from pathlib import Path; from outrider.engine.native import library; "
        "library.SOURCE = Path(sys.argv[1]); print(library.load('bfloat16').outrider_native_init(7))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", load, str(library.SOURCE)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["7\n"] * 3
    assert len(list(cache.iterdir())) == 1
