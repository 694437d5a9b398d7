"""What a lossless service draws from, computed in the plainest way: float64, one token at a time.

Written from the documentation of the parameters and not from `outrider.sampling`, which is what it judges.
Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.messages import SamplingParams

Law: TypeAlias = dict[tuple[int, ...], float]
"""Probability of every text of some length that can be drawn at all."""


NEVER = 1e-15
"""Less probability than this counts as none: a logit_bias of -100 leaves e^-100."""


def next_token_probs(
    logits: npt.ArrayLike, sampling: SamplingParams, *, prompt: Sequence[int], output: Sequence[int]
) -> npt.NDArray[np.float64]:
    """(V,) the distribution of one token. Penalties, temperature, then min_p, top_k and top_p."""
    values: npt.NDArray[np.float64] = np.array(logits, dtype=np.float64)
    for token, added in sampling.logit_bias:
        values[token] += added
    factor = sampling.repetition_penalty
    for token in {*prompt, *output} if factor != 1.0 else ():
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        times = list(output).count(token)
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.greedy:
        certain = np.zeros(len(values))
        certain[values.argmax()] = 1.0
        return certain
    values = values / sampling.temperature
    probs: npt.NDArray[np.float64] = np.exp(values - values.max())
    probs /= probs.sum()
    probs[probs < sampling.min_p * probs.max()] = 0
    if sampling.top_k is not None and sampling.top_k < len(probs):
        probs[probs < np.sort(probs)[-sampling.top_k]] = 0
    probs /= probs.sum()
    if sampling.top_p < 1:
        order = np.argsort(-probs)
        before = probs[order].cumsum() - probs[order]
        probs[order[before >= sampling.top_p]] = 0
        probs /= probs.sum()
    return probs


def text_law(
    next_logits: Callable[[Sequence[tuple[int, ...]]], npt.ArrayLike],
    sampling: SamplingParams,
    *,
    prompt: tuple[int, ...],
    length: int,
) -> Law:
    """The law of the first `length` tokens after a prompt, by enumeration: a top_k keeps it small."""
    law: Law = {(): 1.0}
    for _ in range(length):
        outputs = list(law)
        logits = np.asarray(next_logits([(*prompt, *output) for output in outputs]))
        longer: Law = {}
        for output, row in zip(outputs, logits, strict=True):
            probs = next_token_probs(row, sampling, prompt=prompt, output=output)
            for token in (probs > NEVER).nonzero()[0].tolist():
                longer[(*output, token)] = law[output] * float(probs[token])
        law = longer
    return law


def marginal(law: Law, keep: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Law:
    """The law of a part of the text: `keep` says which."""
    parts: Law = {}
    for text, probability in law.items():
        part = keep(text)
        parts[part] = parts.get(part, 0.0) + probability
    return parts
