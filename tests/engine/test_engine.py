"""The engine against plain greedy decoding of the same tiny model, with every kind of order."""

from __future__ import annotations

import functools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from outrider.engine.engine import Engine, Event, drive
from outrider.engine.loading import load_model
from outrider.engine.model import Batch, CausalModel
from outrider.messages import (
    Close,
    FinishReason,
    Limits,
    Open,
    Plan,
    Resync,
    SamplingParams,
    Verdict,
    VerifyOrder,
)

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 304  # of the tiny model
PROMPTS = [[7, 8, 9, 10, 11], [42] * 40, list(range(20, 90)), [5]]

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def model_folder(tiny_llama: Path) -> Path:
    return tiny_llama


@functools.cache
def load(folder: Path) -> CausalModel:
    """One model for all: every new engine allocates its cache anew, and the one before it is over."""
    return load_model(folder, dtype="float32", device="cpu", block_size=16, cpu_kernels="torch")


@pytest.fixture
def make_engine(model_folder: Path) -> MakeEngine:
    def make(**options: int | bool) -> Engine:
        model = load(model_folder)
        settings: dict[str, int | bool] = {"num_blocks": 64, "vocab_size": model.vocab_size}
        settings |= {"max_model_len": 200} | options
        return Engine(model, **settings)  # type: ignore[arg-type]

    return make


def opening(
    name: str, prompt: list[int], *, max_tokens: int = 24, k: int = 0, sampling: SamplingParams = GREEDY
) -> Open:
    return Open(
        name, 0, tuple(prompt), (), sampling, Limits(max_tokens), Plan(name, 0, k, 60.0 if k else 0.0)
    )


def texts(events: Iterable[Event]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for event in events:
        assert isinstance(event, Verdict)
        found[event.sequence] += event.tokens
    return dict(found)


def plain(make_engine: MakeEngine, prompt: list[int], max_tokens: int = 24) -> list[int]:
    return texts(drive(make_engine(), [opening("plain", prompt, max_tokens=max_tokens)]))["plain"]


class Dictating:
    """Answers every verdict with drafts made from the true continuation: an honest little router."""

    def __init__(self, engine: Engine, truths: dict[str, list[int]], draft: Callable[[list[int]], list[int]]):
        self.engine, self.truths, self.draft = engine, truths, draft
        self.done: dict[str, list[int]] = defaultdict(list)
        self.verdicts: list[Verdict] = []

    def run(self, openings: list[Open]) -> dict[str, list[int]]:
        lengths = {o.sequence: len(o.prompt) for o in openings}
        for message in openings:
            self.engine.receive(message)
        while self.engine.busy:
            for event in self.engine.step():
                assert isinstance(event, Verdict)
                self.verdicts.append(event)
                name = event.sequence
                assert event.base_len == lengths[name] + len(self.done[name])
                self.done[name] += event.tokens
                ahead = self.truths[name][len(self.done[name]) :]
                base = lengths[name] + len(self.done[name])
                self.engine.receive(VerifyOrder(name, 0, base, tuple(self.draft(ahead))))
        return dict(self.done)


def openings_for(k: int, concurrency: int) -> list[Open]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(concurrency)]
    return [opening(f"s{i}", prompt, k=k) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_right_wrong_and_mixed_drafts_all_give_the_plain_text(
    make_engine: MakeEngine, k: int, concurrency: int
) -> None:
    openings = openings_for(k, concurrency)
    truths = {o.sequence: plain(make_engine, list(o.prompt)) for o in openings[: len(PROMPTS)]}
    truths |= {o.sequence: truths[f"s{i % len(PROMPTS)}"] for i, o in enumerate(openings)}
    dice = random.Random(k)

    def mixed(ahead: list[int]) -> list[int]:
        return [t if dice.random() < 0.7 else (t + 1) % VOCAB for t in ahead[: dice.randint(0, k)]]

    for draft in (
        lambda ahead: ahead[:k],
        lambda ahead: [(t + 1) % VOCAB for t in ahead[:k]],
        mixed,
    ):
        assert Dictating(make_engine(), truths, draft).run(openings) == truths


def test_an_oracle_is_accepted_whole(make_engine: MakeEngine) -> None:
    truth = plain(make_engine, PROMPTS[0])
    router = Dictating(make_engine(), {"s0": truth}, lambda ahead: ahead[:4])
    router.run(openings_for(4, 1))
    assert all(v.accepted == v.drafted for v in router.verdicts)
    assert len(router.verdicts) == 1 + math.ceil((len(truth) - 1) / 5)


def test_chunked_prefill_shares_steps_and_changes_nothing(make_engine: MakeEngine) -> None:
    openings = [opening(f"s{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    truths = {o.sequence: plain(make_engine, list(o.prompt)) for o in openings}
    assert texts(drive(make_engine(max_num_batched_tokens=16), openings)) == truths


def test_a_prompt_longer_than_a_step_is_computed_in_chunks(make_engine: MakeEngine) -> None:
    truth = plain(make_engine, PROMPTS[2])
    engine = make_engine(max_num_batched_tokens=16)
    assert texts(drive(engine, [opening("s0", PROMPTS[2])]))["s0"] == truth
    assert engine.stats().steps == math.ceil(len(PROMPTS[2]) / 16) + len(truth) - 1


def test_a_stop_id_inside_a_block_ends_there(make_engine: MakeEngine) -> None:
    """Public report 15."""
    truth = plain(make_engine, PROMPTS[0])
    stop = next(i for i in range(2, len(truth)) if truth[i] not in truth[:i])
    message = replace(opening("s0", PROMPTS[0], k=8), limits=Limits(24, (truth[stop],)))
    router = Dictating(make_engine(), {"s0": truth}, lambda ahead: ahead[:8])
    assert router.run([message])["s0"] == truth[: stop + 1]
    assert router.verdicts[-1].finish is FinishReason.STOP
    assert router.engine.pool.num_free == router.engine.pool.num_blocks


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_max_tokens_is_met_exactly_inside_a_block(make_engine: MakeEngine, max_tokens: int) -> None:
    """Public reports 17 and 18."""
    truth = plain(make_engine, PROMPTS[0])
    router = Dictating(make_engine(), {"s0": truth}, lambda ahead: ahead[:4])
    done = router.run([opening("s0", PROMPTS[0], k=4, max_tokens=max_tokens)])
    assert done["s0"] == truth[:max_tokens]
    assert router.verdicts[-1].finish is FinishReason.LENGTH


def test_drafts_shrink_to_the_end_of_the_context(make_engine: MakeEngine) -> None:
    """Public report 20."""
    prompt = PROMPTS[0]
    truth = plain(make_engine, prompt)
    engine = make_engine(max_model_len=len(prompt) + 7)
    done = Dictating(engine, {"s0": truth}, lambda ahead: ahead[:5]).run(openings_for(5, 1))
    assert done["s0"] == truth[:7]


def test_hostile_drafts_cost_nothing_but_speed(make_engine: MakeEngine) -> None:
    """Public report 9: ids that are no tokens never reach the embedding."""
    truth = plain(make_engine, PROMPTS[0])
    hostile = Dictating(make_engine(), {"s0": truth}, lambda ahead: [*ahead[:1], -1, 10**12, VOCAB])
    assert hostile.run(openings_for(8, 1))["s0"] == truth


def test_preempted_sequences_resume_with_the_same_text(make_engine: MakeEngine) -> None:
    """Public report 40."""
    openings = [opening(f"s{i}", [i + 1] * 30, max_tokens=60) for i in range(6)]
    truths = {o.sequence: plain(make_engine, list(o.prompt), 60) for o in openings}
    small = make_engine(num_blocks=14, prefix_caching=False)
    assert texts(drive(small, openings)) == truths
    assert small.stats().preemptions > 0
    assert small.pool.num_free == 14


def test_drafts_are_given_up_before_anybody_is_preempted(make_engine: MakeEngine) -> None:
    """Public report 40."""
    # Two prompts of 50 and room for two times 64 tokens: the third round has room for its newest token only.
    prompts = [[i + 1] * 50 for i in range(2)]
    truths = {f"s{i}": plain(make_engine, prompt, 20) for i, prompt in enumerate(prompts)}
    engine = make_engine(num_blocks=8, prefix_caching=False)
    for i, prompt in enumerate(prompts):
        engine.receive(opening(f"s{i}", prompt, k=8, max_tokens=20))
    done: dict[str, list[int]] = {"s0": [], "s1": []}
    drafted = []
    for _ in range(3):
        for event in engine.step():
            assert isinstance(event, Verdict)
            drafted.append(event.drafted)
            done[event.sequence] += event.tokens
            ahead = truths[event.sequence][len(done[event.sequence]) :]
            engine.receive(VerifyOrder(event.sequence, 0, 50 + len(done[event.sequence]), tuple(ahead[:8])))
    assert drafted == [0, 0, 8, 8, 0, 0]
    assert engine.stats().preemptions == 0
    assert all(truths[name][: len(tokens)] == tokens for name, tokens in done.items())


def test_drafts_do_not_starve_younger_sequences_nor_prompts(make_engine: MakeEngine) -> None:
    openings = openings_for(8, 8)
    truths = {o.sequence: plain(make_engine, list(o.prompt)) for o in openings}
    engine = make_engine(max_num_batched_tokens=24)
    router = Dictating(engine, truths, lambda ahead: ahead[:8])
    assert router.run(openings) == truths
    shares: dict[str, int] = defaultdict(int)
    for verdict in router.verdicts[:64]:
        shares[verdict.sequence] += len(verdict.tokens)
    assert len(shares) == 8, "everybody was served while all were running"
    assert max(shares.values()) <= 3 * min(shares.values())


def test_admission_counts_what_the_running_were_promised(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, prefix_caching=False, max_num_batched_tokens=16)
    for i in range(4):
        engine.receive(opening(f"s{i}", [i + 1] * 150, max_tokens=4))  # 10 blocks each, in 10 steps
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (2, 2)
    drive(engine, [])
    assert engine.stats().preemptions == 0


def test_who_waits_for_memory_is_told_so(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.engine.SIGN_OF_LIFE_S", 0.0)
    engine = make_engine(num_blocks=13, prefix_caching=False)
    engine.receive(opening("runs", [1] * 150))
    engine.receive(opening("waits", [2] * 100))
    signs = [event for event in engine.step() if event.sequence == "waits"]
    assert signs == [Verdict("waits", 0, 100, tokens=())]


def test_a_shared_prefix_is_computed_once_and_changes_nothing(make_engine: MakeEngine) -> None:
    """Public report 34."""
    """Public report 34."""
    prompt = PROMPTS[2]
    engine = make_engine()
    cold = drive(engine, [opening("cold", prompt)])
    rows_cold = engine.stats().rows
    warm = drive(engine, [opening("warm", prompt)])
    assert texts(cold)["cold"] == texts(warm)["warm"]
    first = warm[0]
    assert isinstance(first, Verdict)
    assert first.cached_tokens == len(prompt) // 16 * 16
    assert engine.stats().rows - rows_cold == rows_cold - first.cached_tokens


class Poisoned:
    """The tiny model, but every row that reads one token gets a NaN among its logits."""

    def __init__(self, inner: CausalModel, token: int) -> None:
        self._inner, self._token = inner, token
        self.vocab_size, self.max_model_len = inner.vocab_size, inner.max_model_len
        self.block_size, self.device, self.dtype = inner.block_size, inner.device, inner.dtype
        self.numerics = inner.numerics

    def bytes_per_block(self) -> int:
        return self._inner.bytes_per_block()

    def allocate(self, num_blocks: int) -> None:
        self._inner.allocate(num_blocks)

    def forward(self, batch: Batch) -> Tensor:
        logits = self._inner.forward(batch).clone()
        logits[batch.tokens[batch.logit_rows] == self._token, 3] = math.nan
        return logits


def test_a_nan_ends_its_own_request_and_no_other(make_engine: MakeEngine, model_folder: Path) -> None:
    """Public report 8."""
    sick, healthy = [9, 9, 251], PROMPTS[0]
    truth = plain(make_engine, healthy)
    assert 251 not in truth
    engine = Engine(Poisoned(load(model_folder), 251), num_blocks=64, vocab_size=VOCAB, max_model_len=200)
    events = drive(engine, [opening("sick", sick), opening("healthy", healthy)])
    assert texts(events) == {"sick": [], "healthy": truth}
    (failure,) = [e for e in events if isinstance(e, Verdict) and e.sequence == "sick"]
    assert failure.finish is FinishReason.ERROR
    assert failure.error == "the model's logits are not finite numbers"
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_nan_behind_a_rejected_draft_costs_nothing_but_time(
    make_engine: MakeEngine, model_folder: Path
) -> None:
    """Public report 8."""
    truth = plain(make_engine, PROMPTS[0])
    assert 251 not in truth
    engine = Engine(Poisoned(load(model_folder), 251), num_blocks=64, vocab_size=VOCAB, max_model_len=200)
    router = Dictating(engine, {"s0": truth}, lambda ahead: [*ahead[:1], 251, *ahead[2:4]])
    assert router.run(openings_for(4, 1))["s0"] == truth
    assert engine.stats().failed == 0


def first_token(engine: Engine, message: Open) -> Verdict:
    engine.receive(message)
    (verdict,) = engine.step()
    assert isinstance(verdict, Verdict)
    return verdict


def test_a_late_order_is_rebased_on_what_was_committed_meanwhile(make_engine: MakeEngine) -> None:
    prompt = PROMPTS[0]
    truth = plain(make_engine, prompt)
    engine = make_engine()
    first_token(engine, opening("s0", prompt, k=4))
    engine.step()  # the gate passed without an order: K = 0
    base = len(prompt) + 1
    (replay,) = engine.receive(VerifyOrder("s0", 0, base, tuple(truth[1:5])))
    assert replay == Verdict("s0", 0, base, tokens=(truth[1],))
    (verdict,) = engine.step()
    assert isinstance(verdict, Verdict)
    assert (verdict.drafted, verdict.accepted, verdict.tokens) == (3, 3, tuple(truth[2:6]))


def test_a_late_order_that_guessed_wrong_is_dropped(make_engine: MakeEngine) -> None:
    prompt = PROMPTS[0]
    truth = plain(make_engine, prompt)
    engine = make_engine()
    first_token(engine, opening("s0", prompt, k=4))
    engine.step()
    wrong = ((truth[1] + 1) % VOCAB, *truth[2:5])
    engine.receive(VerifyOrder("s0", 0, len(prompt) + 1, wrong))
    (verdict,) = engine.step()
    assert isinstance(verdict, Verdict)
    assert (verdict.drafted, verdict.tokens) == (0, (truth[2],))


def test_an_order_ahead_of_the_truth_is_answered_by_resync(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first_token(engine, opening("s0", PROMPTS[0], k=4))
    committed = len(PROMPTS[0]) + 1
    assert engine.receive(VerifyOrder("s0", 0, committed + 1, (1,))) == [Resync("s0", 0, committed)]
    assert engine.receive(VerifyOrder("unknown", 0, 3, (1,))) == [Resync("unknown", 0, 0)]


def test_messages_of_an_old_epoch_change_nothing(make_engine: MakeEngine) -> None:
    prompt = PROMPTS[0]
    truth = plain(make_engine, prompt)
    engine = make_engine()
    first_token(engine, opening("s0", prompt))
    rehomed = replace(opening("s0", prompt), epoch=1, committed=tuple(truth[:3]), plan=Plan("s0", 1))
    engine.receive(rehomed)
    engine.receive(rehomed)  # doubled on the way
    engine.receive(Close("s0", 0))
    engine.receive(Plan("s0", 0, 4, 60.0))
    assert texts(drive(engine, []))["s0"] == truth[3:]


def test_a_gate_holds_the_step_until_every_order_is_there(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.receive(opening("a", PROMPTS[0], k=4))
    engine.receive(opening("b", PROMPTS[1], k=4))
    engine.receive(opening("free", PROMPTS[3]))
    lengths = {e.sequence: e.base_len + 1 for e in engine.step() if isinstance(e, Verdict)}
    assert engine.gate(0.0) > 0
    engine.receive(VerifyOrder("a", 0, lengths["a"], (1, 2)))
    assert engine.gate(0.0) > 0
    engine.receive(VerifyOrder("b", 0, lengths["b"], ()))
    assert engine.gate(0.0) == 0.0


def test_a_gate_passes_with_time_and_with_a_plan_of_none(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first_token(engine, opening("a", PROMPTS[0], k=4))
    assert engine.gate(math.inf) == 0.0
    engine.receive(Plan("a", 0))
    assert engine.gate(0.0) == 0.0


def test_a_cancelled_sequence_is_freed_at_once(make_engine: MakeEngine) -> None:
    """Public report 37, the verifier's half."""
    engine = make_engine()
    first_token(engine, opening("s0", PROMPTS[2]))
    engine.receive(Close("s0", 0, cancelled=True))
    assert not engine.busy
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.stats().cancelled == 1


def test_what_cannot_be_run_is_refused_with_a_reason(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=50)
    (too_long,) = engine.receive(opening("s0", [1] * 50))
    (alien,) = engine.receive(opening("s1", [1, VOCAB + 5]))
    assert isinstance(too_long, Verdict)
    assert too_long.error == "50 tokens do not fit 50"
    assert isinstance(alien, Verdict)
    assert alien.finish is FinishReason.ERROR
    assert not engine.busy


@pytest.mark.parametrize("k", [1, 4])
def test_the_same_seed_gives_the_same_tokens_with_any_drafts(make_engine: MakeEngine, k: int) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=77)
    truth = texts(drive(make_engine(), [opening("s0", PROMPTS[0], sampling=sampling)]))["s0"]
    for draft in (lambda ahead: ahead[:k], lambda ahead: [(t + 1) % VOCAB for t in ahead[:k]]):
        router = Dictating(make_engine(), {"s0": truth}, draft)
        assert router.run([opening("s0", PROMPTS[0], k=k, sampling=sampling)])["s0"] == truth


def test_prompts_at_the_edges_of_blocks(make_engine: MakeEngine) -> None:
    for length in (15, 16, 17, 32, 33):
        prompt = [(3 * i) % 200 + 1 for i in range(length)]
        truth = plain(make_engine, prompt)
        for k in (1, 4):
            router = Dictating(make_engine(), {"s0": truth}, lambda ahead: ahead[:3])
            assert router.run([opening("s0", prompt, k=k)])["s0"] == truth
