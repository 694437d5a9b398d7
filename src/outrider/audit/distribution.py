"""Check (c): are sampled tokens drawn from the target's own distribution, under each rule?

Texts of a few tokens are drawn by ten thousands and compared with their law, which is enumerated. Later
tokens are drawn inside and behind blocks that were drafted, so each part of a text is a test: every token
alone, and the first few together. All tests share one chance of a false alarm, `LEVEL`, by Holm's correction.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from outrider.audit.draws import Drawn, Lockstep
from outrider.audit.law import Law, marginal, text_law
from outrider.audit.results import Status
from outrider.audit.slice_model import Score, SliceModel, always, shaken
from outrider.audit.statistics import Fit, goodness_of_fit, holm, smallest_tv
from outrider.config import SpeculativeConfig
from outrider.contracts import Drafter
from outrider.engine.engine import Engine
from outrider.engine.model import CausalModel
from outrider.messages import AcceptanceRule, SamplingParams
from outrider.registry import drafter_factory

LEVEL = 0.001
"""Chance that an audit of a lossless service reports any misfit."""

POWER = 0.99
LENGTH = 5  # tokens of a text: the prefill's, and two rounds of up to K + 1
OUT = -100.0  # the bias of a word that is not to be drawn
WAVE = 128  # texts drawn at once
CONTEXT = 64  # tokens that the slice's cache has room for
SHORTEST_RUN = 200  # draws, below which chi-square says nothing


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of drawing. `share`: of the draws asked for, where a setting is costly or its faults are
    large."""

    name: str
    sampling: SamplingParams
    num_speculative_tokens: int = 3
    drafting: str = ""  # draft_sample_method; empty: what fits the rule
    top_n: int = 64
    share: float = 1.0
    few_words: int | None = None  # only so many words can be drawn, the likeliest after the prompt

    def over(self, logits: Sequence[float]) -> SamplingParams:
        """Its sampling after a prompt with these next-token logits: a logit_bias takes out the others."""
        if self.few_words is None:
            return self.sampling
        order = sorted(range(len(logits)), key=lambda word: -logits[word])
        others = sorted(order[self.few_words :])
        return replace(self.sampling, logit_bias=tuple((word, OUT) for word in others))

    @property
    def speculative(self) -> SpeculativeConfig:
        return SpeculativeConfig.model_validate(
            {
                "method": "draft_model",
                "num_speculative_tokens": self.num_speculative_tokens,
                "rejection_sample_method": self.sampling.rule,
                "draft_sample_method": self.drafting or None,
                "draft_probs_top_n": self.top_n,
            }
        )


def settings_of(rule: AcceptanceRule) -> list[Setting]:
    """What each rule is tried with."""
    plain = SamplingParams(temperature=0.9, top_k=4, rule=rule)
    penalised = replace(
        plain, presence_penalty=0.3, frequency_penalty=0.4, repetition_penalty=1.2, top_p=0.95, min_p=0.02
    )
    return [
        # Drafter and target agree on what is possible and on nothing else.
        Setting("four words", replace(plain, temperature=1.5, top_k=None), few_words=4, share=0.25),
        Setting("temperature, top_k", plain, share=0.25),
        Setting("few draft_probs, K = 2", plain, num_speculative_tokens=2, top_n=2, share=0.125),
        Setting("greedy drafts", plain, drafting="greedy", share=0.125),
        Setting("every parameter", penalised, share=0.125),
    ]


@dataclass(frozen=True, slots=True)
class HardCase:
    """Made-up models after which a known fault shows more than after any real prompt."""

    name: str
    target: Score
    drafter: Score
    words: int
    prompt: tuple[int, ...]

    def setting(self, rule: AcceptanceRule) -> Setting:
        return Setting(self.name, SamplingParams(temperature=1.0, rule=rule))


HARD_CASES = (
    # Noise that drafter and verifier share moves every drafted token by a TV of 0.044.
    HardCase("three words", always(0.2, 0.4, 0.4), always(0.6, 0.3, 0.1), 3, (0, 1, 2)),
    # Noise of a rejected draft that draws the same position again, under block: 0.09 in four tokens together.
    HardCase("two words", always(1 / 3, 2 / 3), always(2 / 3, 1 / 3), 2, (0, 1, 1, 0)),
)


def drafter_over(model: CausalModel, speculative: SpeculativeConfig) -> Drafter:
    """The plugin `draft_model` as it drafts for a service, with a model that is already here.

    The core knows no plugin: the class that drafts is found beside the one that the registry names.
    """
    module: Any = sys.modules[drafter_factory("draft_model").__module__]
    return cast(
        Drafter,
        module.DraftGenerator(
            model,
            drafting=speculative.drafting,
            top_n=speculative.draft_probs_top_n,
            num_blocks=WAVE * CONTEXT // model.block_size,
            vocab_size=model.vocab_size,
            max_model_len=CONTEXT,
            max_rows=WAVE * CONTEXT,
        ),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One test: a part of the text."""

    part: str
    fit: Fit
    adjusted_p: float  # Holm, over all tests of the audit
    smallest_tv: float  # found with 99 % power, whatever its shape


@dataclass(frozen=True, slots=True)
class Distribution:
    """All tests of one setting after one prompt."""

    name: str
    draws: int
    drafted: int
    accepted: int
    parts: tuple[Part, ...]
    drafts_expected: bool = True
    check: str = "distribution"

    @property
    def worst(self) -> Part:
        return min(self.parts, key=lambda part: (part.adjusted_p, part.fit.p_value))

    @property
    def status(self) -> Status:
        if not self.parts:
            return Status.NOTHING
        if self.worst.adjusted_p < LEVEL:
            return Status.DEFECT
        judged = 0 < self.accepted < self.drafted  # a rule that only accepts, or never does, was not tried
        return Status.FINE if judged or not self.drafts_expected else Status.NOTHING

    @property
    def summary(self) -> str:
        if not self.parts:
            return f"{self.draws} draws are too few"
        worst, least = self.worst, min(part.smallest_tv for part in self.parts)
        line = (
            f"{len(self.parts)} tests, {self.draws} draws; smallest p {worst.fit.p_value:.2g} "
            f"({worst.part}; {worst.adjusted_p:.2g} for all); finds a TV of {least:.3f}"
        )
        if worst.fit.impossible:
            line += f"; {worst.fit.impossible} tokens that cannot be drawn"
        if worst.adjusted_p < LEVEL:
            line += f"; seen TV {worst.fit.tv:.3f}"
        if self.drafted:
            line += f"; {self.accepted} of {self.drafted} drafts accepted"
        return line


@dataclass(frozen=True, slots=True)
class Counted:
    """A part of the drawn texts beside its law, not yet judged."""

    name: str
    counts: Counter[tuple[int, ...]]
    law: Law

    def fit(self) -> Fit:
        texts = sorted({*self.law, *self.counts})
        return goodness_of_fit(
            [self.counts[text] for text in texts], [self.law.get(text, 0.0) for text in texts]
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """One setting's draws, cut into parts."""

    name: str
    draws: int
    drafted: int
    accepted: int
    parts: tuple[Counted, ...]
    drafts_expected: bool = True


def sample(
    score: Score,
    *,
    vocab_size: int,
    prompt: tuple[int, ...],
    setting: Setting,
    draws: int,
    draft_score: Score | None = None,
    first_seed: int = 1,
    after: str = "",
) -> Sampled:
    """Draw texts by the real engine over a slice model.

    `draft_score` defaults to a drafter that is often wrong; `after` names the prompt, for the report.
    """
    target = SliceModel(score, vocab_size=vocab_size, max_model_len=CONTEXT)
    blocks = WAVE * CONTEXT // target.block_size
    engine = Engine(
        target,
        num_blocks=blocks,
        vocab_size=vocab_size,
        max_model_len=CONTEXT,
        max_num_seqs=WAVE,
        max_num_batched_tokens=WAVE * CONTEXT,
    )
    drafts = SliceModel(
        draft_score or shaken(score, strength=2.5, heat=1.5), vocab_size=vocab_size, max_model_len=CONTEXT
    )
    drafter = drafter_over(drafts, setting.speculative)
    lockstep = Lockstep(engine, drafter, setting.num_speculative_tokens)
    count = max(SHORTEST_RUN, int(draws * setting.share))
    sampling = setting.over(target.score([prompt])[0].tolist())
    drawn = lockstep.draw(prompt, sampling, range(first_seed, first_seed + count), length=LENGTH)
    law = text_law(target.score, sampling, prompt=prompt, length=LENGTH)
    name = f"{setting.sampling.rule}: {setting.name}" + (f", after {after!r}" if after else "")
    return Sampled(name, count, drawn.drafted, drawn.accepted, _parts(drawn, law))


def _parts(drawn: Drawn, law: Law) -> tuple[Counted, ...]:
    """Every token alone, and the first 2, 3 and 4 together."""
    cuts = [(f"token {at + 1}", slice(at, at + 1)) for at in range(LENGTH)]
    cuts += [(f"tokens 1-{end}", slice(0, end)) for end in range(2, LENGTH)]
    return tuple(
        Counted(
            name,
            Counter(text[cut] for text in drawn.texts),
            marginal(law, lambda text, cut=cut: text[cut]),  # type: ignore[misc]
        )
        for name, cut in cuts
    )


def judge(samples: Sequence[Sampled]) -> list[Distribution]:
    """Test everything that was drawn, together: the more tests, the smaller each one's share of `LEVEL`."""
    fits = [part.fit() for one in samples for part in one.parts]
    adjusted = iter(zip(fits, holm([fit.p_value for fit in fits]), strict=True))
    level = LEVEL / max(len(fits), 1)
    known: dict[tuple[int, int], float] = {}
    found = []
    for one in samples:
        parts = []
        for counted in one.parts:
            fit, p = next(adjusted)
            key = (fit.draws, fit.freedom)
            if key not in known:
                known[key] = smallest_tv(*key, level=level, power=POWER)
            parts.append(Part(counted.name, fit, p, known[key]))
        found.append(
            Distribution(one.name, one.draws, one.drafted, one.accepted, tuple(parts), one.drafts_expected)
        )
    return found
