"""Whatever the drafts, the engine commits what plain decoding commits: random requests under random scripts.

The model is a table: its logits after a text are random numbers made from that text, which it reads back from
its paged cache, so that a wrong length, block or position gives other numbers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine import engine as engine_module
from outrider.engine.engine import Engine, Event, drive
from outrider.engine.model import Batch, Numerics
from outrider.messages import (
    AcceptanceRule,
    Close,
    DraftProbs,
    FinishReason,
    Grammar,
    Limits,
    Open,
    Plan,
    Resync,
    SamplingParams,
    TokenLogprobs,
    Verdict,
    VerifyOrder,
)
from outrider.sampling.draft_probs import certain, pack

VOCAB = 12
BLOCK = 16


class TableModel:
    """A `CausalModel` whose cache holds token ids."""

    numerics: Numerics = "strict"
    vocab_size = VOCAB + 4  # padded: the last ids are likeliest, and must never be drawn
    max_model_len = 96
    block_size = BLOCK
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, sharpness: float = 1.5) -> None:
        self._sharpness = sharpness
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._memory = torch.zeros(0, BLOCK, dtype=torch.int64)

    def bytes_per_block(self) -> int:
        return 8 * BLOCK

    def allocate(self, num_blocks: int) -> None:
        self._memory = torch.full((num_blocks, BLOCK), -1)

    def after(self, text: Sequence[int]) -> Tensor:
        key = tuple(text)
        if key not in self._known:
            seed = hash(key) % 2**31
            logits = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(seed))
            logits[VOCAB:] += 20
            self._known[key] = logits * self._sharpness
        return self._known[key]

    def forward(self, batch: Batch) -> Tensor:
        rows = {}
        for span in batch.spans:
            for row in range(span.start, span.start + span.rows):
                at = int(batch.positions[row])
                self._memory[span.blocks[at // BLOCK], at % BLOCK] = batch.tokens[row]
                rows[row] = self._memory[list(span.blocks)].flatten()[: at + 1].tolist()
        wanted = [self.after(rows[row]) for row in batch.logit_rows.tolist()]
        return torch.stack(wanted) if wanted else torch.empty(0, self.vocab_size)


class NoRepeats:
    """A grammar: no token twice in a row, and a text of eight tokens ends with token 0."""

    def __init__(self) -> None:
        self.text: list[int] = []

    @property
    def terminated(self) -> bool:
        return len(self.text) > 8

    def _allowed(self, text: list[int]) -> set[int]:
        if len(text) >= 8:
            return {0}
        return set(range(1, VOCAB)) - set(text[-1:])

    def allowed_prefix(self, drafts: Sequence[int]) -> int:
        for index, token in enumerate(drafts):
            known = [*self.text, *drafts[:index]]
            if len(known) > 8 or token not in self._allowed(known):
                return index
        return len(drafts)

    def masks(self, drafts: Sequence[int]) -> Tensor:
        legal = self.allowed_prefix(drafts)
        rows = [-1] * (1 + len(drafts))
        for row in range(1 + legal):
            known = [*self.text, *drafts[:row]]
            if len(known) <= 8:
                rows[row] = sum(1 << token for token in self._allowed(known))
        return torch.tensor(rows, dtype=torch.int32).unsqueeze(1)

    def advance(self, tokens: Sequence[int]) -> None:
        if self.allowed_prefix(tokens) < len(tokens):
            raise ValueError("committed against the grammar")
        self.text += tokens


class Compiler:
    """Hands out `NoRepeats`, at once unless told to wait."""

    def __init__(self, *, done: bool = True, error: Exception | None = None) -> None:
        self.futures: list[Future[Any]] = []
        self._done, self._error = done, error

    def submit(self, grammar: Grammar) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures.append(future)
        if self._error is not None:
            future.set_exception(self._error)
        elif self._done:
            future.set_result(NoRepeats())
        return future


MODEL = TableModel()


def make_engine(model: TableModel = MODEL, **options: Any) -> Engine:
    given_: dict[str, Any] = {
        "num_blocks": 40,
        "vocab_size": VOCAB,
        "max_model_len": 96,
        "grammars": Compiler(),
    } | options
    return Engine(model, **given_)


@dataclass(frozen=True)
class Case:
    """A request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    limits: Limits
    grammar: bool
    logprobs: int | None

    def opening(self, name: str = "s", plan: Plan | None = None) -> Open:
        return Open(
            name,
            0,
            self.prompt,
            (),
            self.sampling,
            self.limits,
            plan or Plan(name, 0),
            grammar=Grammar("ebnf", "no repeats") if self.grammar else None,
            logprobs=self.logprobs,
        )


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    def take(self, verdict: Verdict, prompt_len: int) -> None:
        known = prompt_len + len(self.tokens) - verdict.base_len
        self.tokens += verdict.tokens[known:]
        self.logprobs += verdict.logprobs[known:]
        self.finish, self.error = verdict.finish or self.finish, verdict.error or self.error


def plain(case: Case, **options: Any) -> Answer:
    answer = Answer()
    for event in drive(make_engine(**options), [case.opening()]):
        assert isinstance(event, Verdict)
        answer.take(event, len(case.prompt))
    return answer


@st.composite
def cases(draw: st.DrawFn) -> Case:
    token = st.integers(1, VOCAB - 1)
    grammar = draw(st.booleans())
    max_tokens = draw(st.integers(1, 30))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.6, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        top_k=draw(st.sampled_from([None, 1, 4])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        choice=draw(st.integers(0, 2)),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -1.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        logit_bias=tuple(draw(st.dictionaries(token, st.sampled_from([-100.0, 2.0]), max_size=2)).items()),
    )
    stops = (0,) if grammar else tuple(draw(st.sets(token, max_size=2)))
    limits = Limits(max_tokens, stops, 0 if grammar else draw(st.integers(0, max_tokens)))
    prompt = tuple(draw(st.lists(token, min_size=1, max_size=40)))
    return Case(prompt, sampling, limits, grammar, draw(st.sampled_from([None, 0, 3])))


def scripted(
    case: Case, truth: list[int], rng: random.Random, **options: Any
) -> tuple[Answer, list[Verdict]]:
    """Answer a request under a random script: right, wrong, hostile, late, missing and doubled orders, and a
    K that changes. After every step the cache holds all tokens but the newest (public report 13)."""
    engine = make_engine(**options)
    events: list[Event] = engine.receive(case.opening(plan=Plan("s", 0, rng.choice([0, 3, 5]), 60.0)))
    answer, verdicts, prompt_len = Answer(), [], len(case.prompt)
    while engine.busy or events:
        for event in events:
            assert isinstance(event, Verdict)
            answer.take(event, prompt_len)
            verdicts.append(event)
        events = []
        if not engine.busy:
            break
        sequence = engine._sequences["s"]
        assert sequence.cached <= len(sequence.tokens) - 1
        if answer.tokens:
            assert sequence.cached == prompt_len + len(answer.tokens) - 1
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            behind = rng.choice([0, 0, 0, 1, 3])
            base = max(prompt_len, prompt_len + len(answer.tokens) - behind)
            drafts = truth[base - prompt_len :][: rng.randrange(7)]
            if drafts and rng.random() < 0.4:
                drafts[rng.randrange(len(drafts))] = rng.choice([-1, VOCAB, 10**9, rng.randrange(VOCAB)])
            probs = rng.choice([None, DraftProbs(3, b"rubbish", b""), certain(range(len(drafts)))])
            events += engine.receive(VerifyOrder("s", 0, base, tuple(drafts), draft_probs=probs))
        if rng.random() < 0.2:
            engine.receive(Plan("s", 0, rng.choice([0, 1, 6]), 60.0))
        events += engine.step()
    return answer, verdicts


@settings(max_examples=120, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_any_script_of_drafts_equals_plain_decoding(case: Case, seed: int) -> None:
    """Public reports 8, 9, 11, 13, 15, 17, 18, 21 to 24 and 26, as kinds of fault: penalties, masks and
    lengths inside a block, hostile ids, stops in the middle, exact counts."""
    wanted = plain(case)
    got, verdicts = scripted(case, wanted.tokens, random.Random(seed))
    assert (got.tokens, got.finish, got.error) == (wanted.tokens, wanted.finish, None)
    assert all(0 <= token < VOCAB for token in got.tokens)
    assert len(got.tokens) <= case.limits.max_tokens
    assert got.logprobs == wanted.logprobs
    assert len(got.logprobs) == (0 if case.logprobs is None else len(got.tokens))
    for verdict in verdicts:
        assert 0 <= verdict.accepted <= verdict.drafted
        assert verdict.accepted <= len(verdict.tokens)


@settings(max_examples=15, deadline=None)
@given(st.lists(cases(), min_size=4, max_size=6), st.integers(0, 2**32))
def test_preemption_and_company_change_no_token(batch: list[Case], seed: int) -> None:
    """Public reports 11 and 40: seeds, penalties and grammars under memory pressure, beside others."""
    truths = [plain(case).tokens for case in batch]
    engine = make_engine(num_blocks=8)
    rng = random.Random(seed)
    answers = {str(i): Answer() for i in range(len(batch))}
    for i, case in enumerate(batch):
        engine.receive(case.opening(str(i), Plan(str(i), 0, 4, 0.0)))
    while engine.busy:
        for event in engine.step():
            assert isinstance(event, Verdict)
            index = int(event.sequence)
            case, answer = batch[index], answers[event.sequence]
            answer.take(event, len(case.prompt))
            ahead = truths[index][len(answer.tokens) :][: rng.randrange(5)]
            base = len(case.prompt) + len(answer.tokens)
            engine.receive(VerifyOrder(event.sequence, 0, base, tuple(ahead)))
    assert [answers[str(i)].tokens for i in range(len(batch))] == truths
    assert engine.stats().kv_blocks_used == 0


def test_logprobs_are_the_target_s_own_before_any_processor() -> None:
    """One entry a token, of the raw distribution over the tokens that exist (no padding)."""
    sampling = SamplingParams(temperature=2.0, top_k=2, logit_bias=((3, 50.0),), seed=4)
    case = Case((1, 2), sampling, Limits(5), grammar=False, logprobs=2)
    answer = plain(case)
    for index, reported in enumerate(answer.logprobs):
        raw = MODEL.after([1, 2, *answer.tokens[:index]])[:VOCAB].log_softmax(-1)
        assert reported.logprob == pytest.approx(raw[answer.tokens[index]].item(), abs=1e-6)
        assert [token for token, _ in reported.top] == raw.topk(2).indices.tolist()
    assert answer.tokens == [3] * 5


def test_a_draft_that_draws_as_the_target_is_accepted_whole_public_report_2() -> None:
    """Public report 2: the target's own weights as drafter, under the coupled rule at temperature 1."""
    case = Case((1, 2, 3), SamplingParams(seed=5), Limits(25), grammar=False, logprobs=None)
    truth = plain(case).tokens
    engine = make_engine()
    engine.receive(case.opening(plan=Plan("s", 0, 4, 60.0)))
    done, drafted, accepted = 0, 0, 0
    while engine.busy:
        for event in engine.step():
            assert isinstance(event, Verdict)
            done, drafted, accepted = (
                done + len(event.tokens), drafted + event.drafted, accepted + event.accepted,
            )  # fmt: skip
            engine.receive(VerifyOrder("s", 0, 3 + done, tuple(truth[done : done + 4])))
    assert drafted == accepted > 15


# ---- public reports, each as it was seen


def with_drafts(
    case: Case, draft: Callable[[list[int]], list[int]], k: int, truth: list[int], **options: Any
) -> tuple[Answer, list[Verdict]]:
    """Answer a request with the drafts that `draft` makes of the true continuation, K at a time."""
    engine = make_engine(**options)
    engine.receive(case.opening(plan=Plan("s", 0, k, 60.0)))
    answer, verdicts = Answer(), []
    while engine.busy:
        for event in engine.step():
            assert isinstance(event, Verdict)
            answer.take(event, len(case.prompt))
            verdicts.append(event)
            known = len(case.prompt) + len(answer.tokens)
            if event.finish is None:
                assert engine._sequences["s"].cached == known - 1
            drafts = tuple(draft(truth[len(answer.tokens) :]))
            engine.receive(VerifyOrder("s", 0, known, drafts, draft_probs=certain(drafts)))
    return answer, verdicts


def oracle(ahead: list[int]) -> list[int]:
    return ahead[:8]


def anti(ahead: list[int]) -> list[int]:
    return [(token + 1) % VOCAB for token in ahead[:8]]


LIMITS = Limits(24)


def asked(limits: Limits = LIMITS, *, grammar: bool = False, **sampling: Any) -> Case:
    return Case((1, 2, 3), SamplingParams(**sampling), limits, grammar, None)


def test_twenty_seeds_are_twenty_texts_public_report_12() -> None:
    """Public report 12: requests without a seed shared one stream of numbers. Here each is given its own."""
    assert len({tuple(plain(asked(seed=seed)).tokens) for seed in range(20)}) == 20
    assert len({tuple(plain(asked(seed=1, choice=choice)).tokens) for choice in range(5)}) == 5


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_a_single_rejected_candidate_leaves_the_cache_in_step_public_report_13(rule: AcceptanceRule) -> None:
    """Public report 13: K = 1, always wrong; after every round the cache lacks the newest token alone."""
    case = asked(seed=3, top_k=1, rule=rule)  # one token a position has any probability
    truth = plain(case).tokens
    answer, verdicts = with_drafts(case, anti, 1, truth)
    assert answer.tokens == truth
    assert sum(verdict.drafted for verdict in verdicts) >= 22
    assert sum(verdict.accepted for verdict in verdicts) == 0


@pytest.mark.parametrize("place", range(8))
def test_an_accepted_stop_token_ends_the_text_public_report_15(place: int) -> None:
    """Public report 15: an end that was accepted in the middle of a block was run over."""
    truth = plain(asked(seed=4)).tokens
    first = truth.index(truth[place])
    answer, verdicts = with_drafts(asked(Limits(24, (truth[place],)), seed=4), oracle, 8, truth)
    assert (answer.tokens, answer.finish) == (truth[: first + 1], FinishReason.STOP)
    assert verdicts[-1].accepted == (len(verdicts[-1].tokens) if first else 0)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_exactly_max_tokens_are_given_public_reports_17_and_18(max_tokens: int) -> None:
    """Public reports 17 and 18: four tokens for max_tokens 1; fewer than asked, reported as all."""
    truth = plain(asked(seed=5)).tokens
    answer, verdicts = with_drafts(asked(Limits(max_tokens), seed=5), oracle, 4, truth)
    assert (answer.tokens, answer.finish) == (truth[:max_tokens], FinishReason.LENGTH)
    assert sum(len(verdict.tokens) for verdict in verdicts) == max_tokens


def test_the_context_is_filled_and_never_passed_public_report_20() -> None:
    """Public report 20: drafts past the last position. K shrinks, down to 0."""
    truth = plain(asked(seed=6)).tokens
    for room in (1, 2, 3, 6):
        answer, verdicts = with_drafts(asked(seed=6), oracle, 5, truth, max_model_len=3 + room)
        assert (answer.tokens, answer.finish) == (truth[:room], FinishReason.LENGTH)
        assert all(verdict.base_len + verdict.drafted < 3 + room for verdict in verdicts)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"frequency_penalty": -2.0}, id="public report 21, repeating"),
        pytest.param({"frequency_penalty": 2.0}, id="public report 21, avoiding"),
        pytest.param({"frequency_penalty": 1.0}, id="public report 22"),
        pytest.param({"presence_penalty": 1.0}, id="public report 22, presence"),
        pytest.param({"repetition_penalty": 1.15}, id="public report 23"),
        pytest.param({"min_p": 0.2}, id="public report 24, min_p"),
        pytest.param({"logit_bias": ((5, -100.0), (2, 1.0))}, id="public report 24, bias"),
    ],
)
def test_a_field_means_the_same_however_much_is_accepted(fields: dict[str, Any]) -> None:
    """Public reports 21 to 24: a field that held for the newest token of a round alone, or not at all."""
    for temperature in (0.0, 1.0):
        case = asked(seed=7, temperature=temperature, **fields)
        truth = plain(case).tokens
        unshaped = plain(asked(seed=7, temperature=temperature)).tokens
        accepted = []
        for draft in (oracle, anti, lambda ahead: [*ahead[:2], 0, *ahead[3:5]]):
            answer, verdicts = with_drafts(case, draft, 8, truth)
            assert answer.tokens == truth
            accepted.append(sum(verdict.accepted for verdict in verdicts))
        assert accepted[0] > 18
        assert accepted[1] == 0
        assert truth != unshaped or temperature == 0.0
        assert "logit_bias" not in fields or 5 not in truth


def test_a_token_that_is_biased_away_is_emitted_nowhere_public_report_24() -> None:
    """Public report 24: a bias of -100 on what the target would take second, inside a block of drafts."""
    for rule in AcceptanceRule:
        truth = plain(asked(seed=8)).tokens
        case = asked(seed=8, rule=rule, logit_bias=((truth[1], -100.0),))
        answer, _ = with_drafts(case, oracle, 8, truth)  # drafts that know nothing of the bias
        assert truth[1] not in answer.tokens
        assert len(answer.tokens) == 24


def test_a_text_that_its_grammar_ends_inside_a_block_ends_there_public_report_26() -> None:
    """Public report 26: the matcher was fed what came behind the end. Under every rule."""
    for rule in AcceptanceRule:
        case = asked(Limits(24, (0,)), grammar=True, seed=9, top_k=1, rule=rule)
        truth = plain(case).tokens
        assert (len(truth), truth[-1]) == (9, 0)
        for behind in ([], [0], [0, 0, 5, 6], [7, 0]):

            def over_the_end(ahead: list[int], behind: list[int] = behind) -> list[int]:
                return [*ahead, *behind]

            answer, verdicts = with_drafts(case, over_the_end, 12, truth)
            assert (answer.tokens, answer.finish, answer.error) == (truth, FinishReason.STOP, None)
            assert len(verdicts) == 2


def test_a_grammar_that_leaves_no_token_ends_its_own_request_only() -> None:
    """Both ask for eight different tokens and the end; one of them may not end so soon."""
    stuck = asked(Limits(24, (0,), min_tokens=20), grammar=True, seed=10)
    fine = replace(stuck, limits=Limits(24, (0,)))
    answers = {"stuck": Answer(), "fine": Answer()}
    for event in drive(make_engine(), [stuck.opening("stuck"), fine.opening("fine")]):
        assert isinstance(event, Verdict)
        answers[event.sequence].take(event, 3)
    assert answers["stuck"].finish is FinishReason.ERROR
    assert "leaves no token" in str(answers["stuck"].error)
    assert answers["fine"] == plain(fine)


def test_an_end_that_the_model_has_no_logit_for_is_no_end() -> None:
    """Some tokenizers name an end beyond the vocabulary: it can be neither drawn nor banned."""
    case = asked(Limits(6, (VOCAB + 1, -1, 10**9), min_tokens=3), seed=11)
    assert plain(case).tokens == plain(asked(Limits(6), seed=11)).tokens


# ---- the ratio rules: a law, not a text

RATIO_VOCAB = 6


def first_two(rule: AcceptanceRule, seeds: int, *, spoil: str | None = None) -> Counter[tuple[int, int]]:
    """The second and third token of many seeds: a verified block of up to 3 drafts gives them.

    `spoil`: what is wrong with the row of the second draft, depending on the first draft alone.
    """
    model = TableModel(sharpness=1.0)
    engine = Engine(model, num_blocks=600, vocab_size=RATIO_VOCAB, max_model_len=96, max_num_seqs=256)
    rng = random.Random(1)
    guesses: dict[tuple[int, ...], list[float]] = {}

    def guess(text: tuple[int, ...]) -> list[float]:
        if text not in guesses:  # another distribution altogether
            guesses[text] = (model.after(text)[:RATIO_VOCAB] * 0.3).flip(0).softmax(-1).tolist()
        return guesses[text]

    def order(name: str, text: tuple[int, ...]) -> VerifyOrder:
        known, rows = text, []
        for index in range(3):
            row = guess(known)
            known += tuple(rng.choices(range(RATIO_VOCAB), row))
            if spoil is not None and index == 1 and known[len(text)] % 2:
                row = [share * (math.nan if spoil == "nan" else 3.0) for share in row]
            rows.append(row)
        probs = pack(torch.arange(RATIO_VOCAB).expand(3, -1), torch.tensor(rows))
        return VerifyOrder(name, 0, len(text), known[len(text) :], draft_probs=probs)

    counts: Counter[tuple[int, int]] = Counter()
    for begin in range(0, seeds, 256):
        texts: dict[str, tuple[int, ...]] = {}
        for seed in range(begin, begin + 256):
            sampling = SamplingParams(seed=seed, rule=rule)
            texts[str(seed)] = (1,)
            engine.receive(Open(str(seed), 0, (1,), (), sampling, Limits(5), Plan(str(seed), 0, 3, 60.0)))
        while engine.busy:
            for event in engine.step():
                assert isinstance(event, Verdict)
                name = event.sequence
                texts[name] += event.tokens
                done = len(texts[name]) > 3
                engine.receive(Close(name, 0) if done else order(name, texts[name]))
        counts.update((text[2], text[3]) for text in texts.values())
    assert engine.stats().draft_tokens > seeds
    assert (engine.stats().invalid_draft_probs > 0) == (spoil is not None)
    return counts


@pytest.mark.parametrize(
    ("rule", "spoil"),
    [
        (AcceptanceRule.COUPLED, None),
        (AcceptanceRule.REJECTION, None),
        (AcceptanceRule.REJECTION, "nan"),
        (AcceptanceRule.BLOCK, None),
        (AcceptanceRule.BLOCK, "nan"),
        (AcceptanceRule.BLOCK, "sum"),
    ],
)
def test_every_rule_keeps_the_target_s_law_also_with_bad_rows(
    rule: AcceptanceRule, spoil: str | None
) -> None:
    """Public reports 6, 8 and 10: what cannot be judged is drawn anew, and biases nothing. Report 14: drafts
    that the target's own draw is matched against bias nothing either."""
    seeds = 4096
    counts = first_two(rule, seeds, spoil=spoil)
    model = TableModel(sharpness=1.0)
    law: defaultdict[tuple[int, int], float] = defaultdict(float)
    for first in range(RATIO_VOCAB):
        one = model.after([1])[:RATIO_VOCAB].softmax(-1)[first].item()
        for second in range(RATIO_VOCAB):
            two = model.after([1, first])[:RATIO_VOCAB].softmax(-1)[second].item()
            for third, share in enumerate(model.after([1, first, second])[:RATIO_VOCAB].softmax(-1).tolist()):
                law[second, third] += one * two * share
    statistic = sum((counts[cell] - seeds * p) ** 2 / (seeds * p) for cell, p in law.items())
    assert statistic < 76.5  # 99.99 % quantile at 35 degrees of freedom


def test_a_missing_row_ends_the_draft_and_is_counted_public_report_10() -> None:
    """Public report 10: no draft is judged by another rule in silence."""
    sampling = SamplingParams(seed=1, rule=AcceptanceRule.BLOCK)
    for given_, drafted in ((None, 0), (certain((3,)), 1), (certain((3, 4)), 2)):
        engine = make_engine()
        engine.receive(Open("s", 0, (1, 2), (), sampling, Limits(20), Plan("s", 0, 4, 60.0)))
        engine.step()
        engine.receive(VerifyOrder("s", 0, 3, (3, 4, 5), draft_probs=given_))
        (verdict,) = engine.step()
        assert isinstance(verdict, Verdict)
        assert (verdict.drafted, verdict.invalid_drafts) == (drafted, 3 - drafted)
        assert engine.stats().invalid_draft_probs == 3 - drafted


def test_whether_drafts_find_memory_does_not_depend_on_what_was_drawn() -> None:
    """A pool without room for the whole order leaves all of it out, also where a bad row or a forbidden token
    has made it short enough."""
    sampling = SamplingParams(seed=1, rule=AcceptanceRule.REJECTION)
    for rows in (1, 2, 4):
        engine = make_engine(num_blocks=2, prefix_caching=False)
        engine.receive(Open("s", 0, (1,) * 29, (), sampling, Limits(20), Plan("s", 0, 4, 60.0)))
        engine.step()
        assert engine._sequences["s"].cached == 29  # three of 32 places are left: one token and two drafts
        engine.receive(VerifyOrder("s", 0, 30, (3, 4, 5, 6), draft_probs=certain((3, 4, 5, 6)[:rows])))
        (verdict,) = engine.step()
        assert isinstance(verdict, Verdict)
        assert verdict.drafted == 0


def test_a_late_order_is_dropped_under_a_ratio_rule() -> None:
    sampling = SamplingParams(seed=1, rule=AcceptanceRule.REJECTION)
    engine = make_engine()
    engine.receive(Open("s", 0, (1, 2), (), sampling, Limits(20), Plan("s", 0, 3, 60.0)))
    (first,) = engine.step()
    assert isinstance(first, Verdict)
    late = VerifyOrder("s", 0, 2, (*first.tokens, 4, 5), draft_probs=certain((*first.tokens, 4, 5)))
    (replay,) = engine.receive(late)
    assert isinstance(replay, Verdict)
    assert (replay.base_len, replay.tokens) == (2, first.tokens)
    assert not engine._sequences["s"].drafts


def test_a_forbidden_draft_is_a_rejection_under_a_ratio_rule_and_cut_under_the_others() -> None:
    """Public reports 24 and 25: the grammar holds inside the block, for drafts as for the bonus token."""
    for rule, drafted, invalid in ((AcceptanceRule.BLOCK, 3, 1), (AcceptanceRule.COUPLED, 2, 2)):
        sampling = SamplingParams(seed=1, rule=rule)
        engine = make_engine()
        case = Case((1, 2), sampling, Limits(20, (0,)), grammar=True, logprobs=None)
        engine.receive(case.opening(plan=Plan("s", 0, 4, 60.0)))
        (first,) = engine.step()
        assert isinstance(first, Verdict)
        a, b = [token for token in range(1, VOCAB) if token != first.tokens[0]][:2]
        drafts = (a, b, b, a)  # the third repeats the second
        engine.receive(VerifyOrder("s", 0, 3, drafts, draft_probs=certain(drafts)))
        (second,) = engine.step()
        assert isinstance(second, Verdict)
        assert (second.drafted, second.invalid_drafts) == (drafted, invalid)
        text = [*first.tokens, *second.tokens]
        assert all(one != other for one, other in itertools.pairwise(text))
        assert engine.stats().invalid_grammar == invalid


# ---- grammars that are not there yet


def test_a_grammar_that_compiles_holds_nobody_up() -> None:
    compiler = Compiler(done=False)
    engine = make_engine(grammars=compiler)
    waiting = Case((1, 2), SamplingParams(seed=1), Limits(6, (0,)), grammar=True, logprobs=None)
    other = replace(waiting, grammar=False)
    engine.receive(waiting.opening("waiting"))
    assert 0 < engine.gate(engine._sequences["waiting"].opened_at) <= engine_module.COMPILE_POLL_S
    assert engine.step() == []
    engine.receive(other.opening("other"))
    assert engine.gate(0.0) == 0
    while "other" in engine._sequences:
        assert all(event.sequence == "other" for event in engine.step())
    compiler.futures[0].set_result(NoRepeats())
    tokens = [token for event in drive(engine, []) if isinstance(event, Verdict) for token in event.tokens]
    assert tokens == plain(waiting).tokens


@pytest.mark.parametrize("fault", ["late", "broken", "none"])
def test_a_grammar_that_cannot_be_had_ends_its_request_with_the_reason(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "COMPILE_TIMEOUT_S", 0.0)
    compilers = {"late": Compiler(done=False), "broken": Compiler(error=RuntimeError("no such rule"))}
    engine = make_engine(grammars=compilers.get(fault))
    case = Case((1, 2), SamplingParams(seed=1), Limits(6), grammar=True, logprobs=None)
    events = engine.receive(case.opening()) or engine.step()
    (event,) = events
    assert isinstance(event, Verdict)
    reasons = {"late": "took longer than", "broken": "no such rule", "none": "compiles no grammars"}
    assert reasons[fault] in str(event.error)
    assert event.finish is FinishReason.ERROR
    assert not engine.busy


def test_a_rehomed_sequence_goes_on_in_its_grammar_with_its_seed_and_penalties() -> None:
    """A verifier is lost: prompt and committed tokens open the sequence on another one."""
    sampling = SamplingParams(seed=9, frequency_penalty=0.8)
    case = Case((1, 2), sampling, Limits(20, (0,)), grammar=True, logprobs=1)
    whole = plain(case)
    for known in range(1, len(whole.tokens)):
        engine = make_engine()
        opening = replace(case.opening(), committed=tuple(whole.tokens[:known]))
        answer = Answer()
        for event in drive(engine, [opening]):
            assert isinstance(event, Verdict)
            answer.take(event, len(case.prompt) + known)
        assert answer.tokens == whole.tokens[known:]
        assert answer.logprobs == whole.logprobs[known:]


def test_closing_a_sequence_that_waits_for_its_grammar_frees_it() -> None:
    engine = make_engine(grammars=Compiler(done=False))
    case = Case((1, 2), SamplingParams(seed=1), Limits(6), grammar=True, logprobs=None)
    engine.receive(case.opening())
    engine.receive(Close("s", 0, cancelled=True))
    assert not engine.busy
    assert engine.receive(VerifyOrder("s", 0, 2, ())) == [Resync("s", 0, committed_len=0)]
