"""Goodness of fit: do sampled tokens follow the target's own distribution, under every acceptance rule?

The engine, the rounds and the drafter's draws are the service's own code; only the model in front of them is
remembered: each distinct text before a token is computed once by the real model and looked up from then on.
It speaks over its own likeliest tokens only, and the drafter is the same model with its logits bent, so that
drafts are accepted about as often as rejected. Thousands of seeds then cost seconds, and the counts of the
first tokens, after the prompt, inside a block and after it, are held against the exact law.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.audit.divergence import logits_after
from outrider.audit.report import Finding, Outcome
from outrider.audit.statistics import goodness_of_fit, holm
from outrider.contracts import Draft, DraftContext
from outrider.engine.engine import Engine
from outrider.engine.model import Batch, Numerics
from outrider.generation import GenerationRequest, GenerationStats
from outrider.messages import (
    AcceptanceRule,
    Close,
    Limits,
    Open,
    Plan,
    SamplingParams,
    Verdict,
    VerifyOrder,
)
from outrider.sampling import draft as drafting
from outrider.sampling.draft_probs import pack
from outrider.sampling.processors import Lane
from outrider.speculation.sequential import SequentialRounds

LEVEL = 1e-3
"""Chance of any false alarm in one audit."""

VOCAB = 24
LENGTH = 3  # tokens of each text: the first comes with the prefill, the others out of a block
TOP_K = 5
TEMPERATURE = 0.9
NUM_DRAFTS = 3
BATCH = 256  # texts at once


class RememberedModel:
    """A `CausalModel` over `VOCAB` tokens of a real one; each text is computed once."""

    numerics: Numerics = "strict"
    block_size = 16
    device = torch.device("cpu")
    dtype = torch.float32
    max_model_len = 64
    vocab_size = VOCAB

    def __init__(self, compute: Callable[[Sequence[int]], Tensor]) -> None:
        """`compute`: logits (VOCAB,) after a text of token ids below VOCAB."""
        self._compute = compute
        self._known: dict[bytes, Tensor] = {}
        self._memory = torch.zeros(0, self.block_size, dtype=torch.int16)

    def bytes_per_block(self) -> int:
        return 2 * self.block_size

    def allocate(self, num_blocks: int) -> None:
        self._memory = torch.full((num_blocks, self.block_size), -1, dtype=torch.int16)

    def after(self, text: Tensor) -> Tensor:
        """Logits after a text, (n,) int16."""
        key = text.numpy().tobytes()
        if key not in self._known:
            self._known[key] = self._compute(text.tolist())
        return self._known[key]

    def forward(self, batch: Batch) -> Tensor:
        """The cache holds token ids, so that what a row sees is what the blocks say, as with a real one."""
        wanted = set(batch.logit_rows.tolist())
        rows = []
        for span in batch.spans:
            blocks = torch.tensor(span.blocks)
            slots = torch.arange(span.length - span.rows, span.length)
            place = (blocks[slots // self.block_size], slots % self.block_size)
            self._memory[place] = batch.tokens[span.start : span.start + span.rows].to(torch.int16)
            text = self._memory[blocks].flatten()
            for row in range(span.start, span.start + span.rows):
                if row in wanted:
                    rows.append(self.after(text[: int(batch.positions[row]) + 1]))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


def narrowed(engine: Engine, prompt: Sequence[int]) -> tuple[RememberedModel, int]:
    """The engine's own model over the tokens that are likeliest after the prompt; length of the prompt."""
    first = logits_after(engine, prompt, 1)[: engine.vocab_size]
    likely = first.topk(8).indices.tolist()
    mean = first.softmax(-1)
    for token in likely:
        mean = mean + logits_after(engine, [*prompt, token], 1)[: engine.vocab_size].softmax(-1)
    ids = mean.topk(VOCAB).indices

    def compute(text: Sequence[int]) -> Tensor:
        real = [*prompt, *(int(ids[token]) for token in text[1:])]
        return logits_after(engine, real, 1)[ids].float()

    return RememberedModel(compute), 1  # the prompt is one token of the narrow vocabulary


class BentDrafter:
    """Drafts from the target's own logits, bent: flatter, and with a favourite here and there."""

    needs_device = False

    def __init__(self, model: RememberedModel, rule: AcceptanceRule) -> None:
        self._model = model
        self._drafting = "coupled" if rule is AcceptanceRule.COUPLED else "probabilistic"
        self._bend = torch.sin(torch.arange(VOCAB) * 2.4)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def forget(self, sequence: str) -> None:
        """Nothing is kept."""

    def _draft(self, context: DraftContext) -> Draft:
        text, base = list(context.tokens), len(context.tokens)
        ids, probs = [], []
        for _ in range(context.num_tokens):
            logits = self._model.after(torch.tensor(text, dtype=torch.int16)) * 0.7 + self._bend
            drawn = drafting.draw_drafts(
                logits[None],
                [Lane(context.sampling, len(text))],
                vocab_size=VOCAB,
                rounds=[base],
                drafting=self._drafting,  # type: ignore[arg-type]
                top_n=VOCAB,
            )
            text.append(int(drawn.tokens[0]))
            if drawn.ids is not None and drawn.probs is not None:
                ids.append(drawn.ids[0])
                probs.append(drawn.probs[0])
        shipped = pack(torch.stack(ids), torch.stack(probs)) if ids else None
        return Draft(tuple(text[base:]), shipped)


@dataclass(slots=True)
class _Leg:
    """A sequence's way to the engine, in one thread: messages wait until the step is over."""

    replica: str
    waiting: list[Plan | VerifyOrder | Close]

    def send(self, message: Plan | VerifyOrder | Close) -> None:
        self.waiting.append(message)


def sampled(
    model: RememberedModel, rule: AcceptanceRule, draws: int, *, drafts: int = NUM_DRAFTS
) -> tuple[Counter[tuple[int, ...]], GenerationStats]:
    """How often each text of `LENGTH` tokens came out, over `draws` seeds, and what became of the drafts."""
    engine = Engine(
        model,
        num_blocks=2 * BATCH,
        vocab_size=VOCAB,
        max_model_len=model.max_model_len,
        max_num_seqs=BATCH,
        max_num_batched_tokens=BATCH * (1 + drafts),
        prefix_caching=False,
    )
    drafter = BentDrafter(model, rule)
    counts: Counter[tuple[int, ...]] = Counter()
    stats = GenerationStats()
    for begin in range(0, draws, BATCH):
        outbox: list[Plan | VerifyOrder | Close] = []
        rounds: dict[str, SequentialRounds] = {}
        for seed in range(begin, min(draws, begin + BATCH)):
            sampling = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, rule=rule)
            request = GenerationRequest(prompt=(0,), max_tokens=LENGTH + 1, sampling=sampling)
            one = SequentialRounds(
                str(seed),
                request,
                num_tokens=drafts,
                gate_s=1.0,
                drafter=drafter if drafts else None,
                stats=stats,
            )
            rounds[one.sequence] = one
            limits = Limits(max_tokens=LENGTH + 1)
            engine.receive(Open(one.sequence, 0, (0,), (), sampling, limits, one.plan))
            one.attach_verifier(_Leg("audit", outbox), one.plan)
        while engine.busy:
            for event in engine.step():
                if isinstance(event, Verdict):
                    rounds[event.sequence].on_verdict(event)
            for message in outbox:
                engine.receive(message)
            outbox.clear()
        counts.update(tuple(one.tokens[1 : 1 + LENGTH]) for one in rounds.values())
    return counts, stats


def law(model: RememberedModel) -> dict[tuple[int, ...], float]:
    """The exact probability of each text of `LENGTH` tokens, by the definition of the request's fields."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, prob in known.items():
            logits = model.after(torch.tensor([0, *text], dtype=torch.int16)).double()
            kept = torch.where(logits >= logits.topk(TOP_K).values[-1], logits / TEMPERATURE, -math.inf)
            for token, share in enumerate(kept.softmax(-1).tolist()):
                if share > 0:
                    longer[*text, token] = prob * share
        known = longer
    return known


def check(
    engine: Engine,
    prompt: Sequence[int],
    *,
    draws: int = 20_000,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[Finding]:
    """Every rule, and plain sampling, against the law: each position's tokens and whole texts."""
    model, _ = narrowed(engine, prompt)
    return check_model(model, draws=draws, progress=progress)


def check_model(
    model: RememberedModel, *, draws: int, progress: Callable[[str], None] = lambda doing: None
) -> list[Finding]:
    expected = law(model)
    questions: list[tuple[str, str]] = []
    fits = []
    ways: list[tuple[str, AcceptanceRule, int]] = [("plain", AcceptanceRule.COUPLED, 0)]
    ways += [(str(rule), rule, NUM_DRAFTS) for rule in AcceptanceRule]
    for name, rule, drafts in ways:
        progress(f"goodness of fit: {name}")
        counts, stats = sampled(model, rule, draws, drafts=drafts)
        share = stats.acceptance_rate
        accepted = "" if share is None else f"; {share:.0%} of drafts accepted"
        for tokens in (1, 2, LENGTH):
            seen: Counter[tuple[int, ...]] = Counter()
            wanted: Counter[tuple[int, ...]] = Counter()
            for text, count in counts.items():
                seen[text[tokens - 1 : tokens] if tokens < LENGTH else text] += count
            for text, prob in expected.items():
                wanted[text[tokens - 1 : tokens] if tokens < LENGTH else text] += prob  # type: ignore[assignment]
            cells = list(dict.fromkeys(itertools.chain(wanted, seen)))
            what = f"texts of {LENGTH} tokens" if tokens == LENGTH else f"token {tokens}"
            questions.append((f"{name}: {what}", accepted))
            fits.append(
                goodness_of_fit([seen[c] for c in cells], [float(wanted[c]) for c in cells], level=LEVEL)
            )
    rejected = holm([fit.p_value for fit in fits], LEVEL)
    return [
        Finding(
            "fit",
            subject,
            Outcome.DEFECT if bad else Outcome.FINE,
            f"{fit.draws} draws, chi-square {fit.statistic:.1f} at {fit.freedom} degrees of freedom, "
            f"p = {fit.p_value:.2g}; a distance of {fit.smallest_distance:.3f} would show{accepted}",
            (
                ("draws", float(fit.draws)),
                ("statistic", fit.statistic),
                ("freedom", float(fit.freedom)),
                ("p_value", fit.p_value),
                ("smallest_distance", fit.smallest_distance),
            ),
        )
        for (subject, accepted), fit, bad in zip(questions, fits, rejected, strict=True)
    ]
