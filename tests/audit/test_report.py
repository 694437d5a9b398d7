from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from outrider.audit import quality
from outrider.audit.prompts import BUILT_IN, load
from outrider.audit.quality import Text
from outrider.audit.report import Report
from outrider.audit.results import Comparison, Divergence, Scored, Status, Verdict
from outrider.errors import ConfigError

PARTED = Divergence(
    2, 7, "5 'a'", "6 'b'", Verdict.DEFECT, "because", 0.5, (Scored("alone", 1.0, float("-inf"), 1.0, 5),)
)
FINE = Comparison("identity", "ngram", 4, 100, (), drafted=9, accepted=3)


def shown(report: Report) -> str:
    out = io.StringIO()
    report.show(Console(file=out, width=200))
    return out.getvalue()


def test_a_report_without_defects_exits_0_and_says_what_was_seen() -> None:
    report = Report("here", (FINE,))
    assert report.exit_code == 0
    assert "no defect in 1 checks: 1 fine" in shown(report)
    assert "4 of 4 identical (100 tokens), 3 of 9 drafts accepted" in shown(report)


def test_a_defect_exits_1_and_is_shown_with_both_candidates_and_scores() -> None:
    report = Report("here", (FINE, Comparison("identity", "anti", 4, 100, (PARTED,))))
    assert report.exit_code == 1
    text = shown(report)
    assert "prompt 2, generated token 7: 5 'a' in the reference, 6 'b' here: defect: because" in text
    assert "alone" in text
    assert "1 of 2 checks found defects" in text


def test_an_audit_that_saw_nothing_does_not_pass() -> None:
    nothing = Comparison("identity", "ngram", 0, 0, ())
    assert nothing.status is Status.NOTHING
    assert Report("here", (nothing,)).exit_code == 1


def test_the_json_is_strict_and_complete(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    Report("here", (Comparison("identity", "anti", 4, 100, (PARTED,)),)).write(file)
    document = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert document["exit_code"] == 1
    (result,) = document["results"]
    assert (result["check"], result["name"], result["status"]) == ("identity", "anti", "defect")
    (pair,) = result["divergences"]
    assert (pair["position"], pair["verdict"], pair["deviation"]) == (7, "defect", 0.5)
    assert pair["scores"][0]["found"] is None  # -inf: cut off


def test_a_file_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json"):
        Report("here", (FINE,)).write(tmp_path / "no" / "folder.json")


# ---- prompts


def test_the_built_in_prompts_are_forty_and_all_different() -> None:
    assert len(set(BUILT_IN)) == len(BUILT_IN) == 40


def test_a_prompt_file_has_objects_or_strings(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "id": 3}\n\n"two"\n', encoding="utf-8")
    assert load(file, 2) == ["one", "two"]
    with pytest.raises(ConfigError, match="has 2; ask for fewer"):
        load(file, 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "line 1 is no JSON"),
        ('{"text": "a"}', "line 1: an object such as"),
        ('""', "line 1"),
        ("\n", "no prompts"),
    ],
)
def test_a_bad_prompt_file_is_refused_by_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        load(file, 1)


def test_a_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.jsonl", 1)


# ---- quality


def text(seed: int, likelihood: float, *, loop: bool = False) -> Text:
    tokens = [1, 2, 3, 4] * 6 if loop else [seed * 100 + i for i in range(24)]
    return Text(tokens, [likelihood + 0.01 * ((seed * 7) % 5)] * 24, "length" if loop else "stop")


def test_equal_texts_differ_in_nothing() -> None:
    texts = [text(seed, -1.0) for seed in range(20)]
    figures = quality.compare({"coupled": (texts, texts)})
    assert [one.figure for one in figures] == [
        "log-likelihood a token",
        "tokens",
        "repetition",
        "share that ends by itself",
    ]
    assert {one.status for one in figures} == {Status.FINE}
    assert all(one.difference is not None and one.difference.mean == 0 for one in figures)


def test_worse_text_is_seen_in_every_figure_that_is_worse() -> None:
    plain = [text(seed, -1.0) for seed in range(20)]
    worse = [text(seed, -1.5, loop=True) for seed in range(20)]
    status = {one.figure: one.status for one in quality.compare({"x": (plain, worse)})}
    assert status.pop("tokens") is Status.FINE
    assert set(status.values()) == {Status.DEFECT}


def test_few_pairs_say_nothing() -> None:
    pair = [text(1, -1.0)]
    assert {one.status for one in quality.compare({"x": (pair, pair)})} == {Status.NOTHING}
