"""Greedy float32 text against transformers' `generate`, token for token, over a grid.

    python benchmarks/exactness.py [--prompts 40] [--tokens 48] [--json FILE]

SmolLM2, K in 1, 4, 8, both drafters (prompt lookup, and SmolLM2 drafting for itself), at concurrency 1 and 8.
Prints how many of the texts are identical and exits 1 unless all are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import outrider
from measure import machine
from outrider import models
from prompts import mixed, source

CUT = 1000  # tokens of a prompt: float32 prefill is slow, and exactness has nothing to gain from more


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48, help="tokens a prompt")
    parser.add_argument("--json", type=Path, help="write the counts here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"{source()}, greedy, float32, {options.prompts} prompts x {options.tokens} tokens")
    config: dict[str, Any] = {"model": "smollm2", "dtype": "float32", "max_model_len": 2048}
    with outrider.local(config) as service:
        prompts = [
            service.tokenizer.encode_chat([{"role": "user", "content": prompt}])[:CUT]
            for prompt in mixed(options.prompts)
        ]
        eos = service.tokenizer.eos_token_ids
    truths = reference(prompts, options.tokens, eos)
    wrong = 0
    counts: dict[str, int] = {}
    for method in ("ngram", "draft_model"):
        for k in (1, 4, 8):
            spec: dict[str, Any] = {"method": method, "num_speculative_tokens": k}
            if method == "draft_model":
                spec |= {"model": "smollm2", "extra": {"dtype": "float32", "device": "cpu"}}
            pins = {"planner": {"gate_ms": 60_000}}  # every round waits for its drafts
            with outrider.local(config | pins | {"speculative_config": spec}) as service:
                for concurrency in (1, 8):
                    texts: list[tuple[int, ...]] = []
                    drafted = accepted = 0
                    for start in range(0, len(prompts), concurrency):
                        requests = [
                            service.request(ids, max_tokens=options.tokens, temperature=0)
                            for ids in prompts[start : start + concurrency]
                        ]
                        for done in service.generate_many(requests):
                            texts.append(done.tokens)
                            drafted += done.stats.draft_tokens
                            accepted += done.stats.accepted_tokens
                    same = sum(a == b for a, b in zip(texts, truths, strict=True))
                    wrong += len(truths) - same
                    name = f"{method}_k{k}_c{concurrency}"
                    counts[name] = same
                    print(
                        f"  {name:20} {same} of {len(truths)} identical, "
                        f"{accepted} of {drafted} drafts accepted",
                        flush=True,
                    )
    if options.json:
        document = {"machine": machine(), "prompts": len(truths), "identical": counts}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(1 if wrong else 0)


def reference(prompts: list[list[int]], tokens: int, eos: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What `generate` writes, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(models.resolve("smollm2"), dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=list(eos),
                pad_token_id=eos[0],
            )
        found.append(tuple(output[0, len(prompt) :].tolist()))
    return found


if __name__ == "__main__":
    main()
