"""Prompts by category: Spec-Bench's where `../shared/data/prompts` is there, else a few of our own."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

SPEC_BENCH = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts" / "spec_bench.jsonl"
COPYING = ("extraction", "translation", "rag")
"""Categories whose answers repeat words of the prompt."""

_OWN = {
    "extraction": [
        "List the e-mail addresses in this text, one a line: write to anna.schmidt@example.org or to "
        "bob.jones@example.com; invoices go to accounting@example.net, press to press.office@example.org.",
        "Extract product and price as CSV from: The red kettle costs 24.90 euros, the blue toaster 31.50 "
        "euros, the steel whisk 6.20 euros and the oak cutting board 18.75 euros.",
        "Copy every date of this paragraph: the lease began on 3 March 2019, was renewed on 3 March 2021, "
        "changed on 17 June 2022 and ends on 2 March 2027.",
        "Name the people and their towns: Marta Keller lives in Bremen, Joao Pires in Coimbra, Aylin Demir "
        "in Izmir and Henrik Dahl in Bergen.",
    ],
    "translation": [
        "Translate German to English: Der Zug nach Hamburg faehrt heute wegen einer Stoerung erst um elf ab.",
        "Translate German to English: Die Bibliothek bleibt im August wegen Bauarbeiten geschlossen.",
        "Translate French to English: La reunion de lundi est reportee a jeudi a dix heures.",
        "Translate Spanish to English: El puente nuevo se abrira al trafico en la primavera.",
    ],
    "rag": [
        "Context: The Halden reservoir holds 41 million cubic metres and feeds three turbines of 12 MW. It "
        "was built between 1957 and 1961 and raised by four metres in 1988.\nQuestion: When was the Halden "
        "reservoir built and how was it changed later?",
        "Context: Basalt fibre is drawn from molten rock at about 1,400 degrees. It is cheaper than carbon "
        "fibre, resists heat better than glass fibre and does not burn.\nQuestion: How does basalt fibre "
        "compare with glass fibre and carbon fibre?",
        "Context: The ferry Lorna sails from Oban at 7:15 and 13:40, and from Craignure at 8:30 and 15:05. "
        "Dogs travel free. Bicycles cost two pounds.\nQuestion: When does the ferry leave Oban?",
        "Context: The heron nests in colonies from February on. Both parents feed the young for eight "
        "weeks. Outside the breeding season herons are solitary.\nQuestion: How long are young herons fed?",
    ],
    "writing": [
        "Write a short letter to a neighbour who has found your cat.",
        "Describe a market square on a rainy morning.",
    ],
    "reasoning": [
        "If all roses are flowers and some flowers fade, do some roses fade?",
        "A farmer has 17 sheep; all but nine run away. How many are left?",
    ],
    "coding": [
        "Write a Python function that returns the longest common prefix of a list of strings.",
        "Write a Python class for a queue with a bound.",
    ],
    "qa": ["Why is the sky blue?", "Who invented the printing press?"],
}


def source() -> str:
    return "Spec-Bench" if SPEC_BENCH.exists() else "own prompts"


def by_category() -> dict[str, list[str]]:
    """First turns only."""
    if not SPEC_BENCH.exists():
        return _OWN
    found: dict[str, list[str]] = defaultdict(list)
    for line in SPEC_BENCH.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        found[question["category"]].append(question["turns"][0])
    return dict(found)


def mixed(count: int) -> list[str]:
    """One of each category, then the second of each, and so on."""
    categories = list(by_category().values())
    rounds = range(max(map(len, categories)))
    return [prompts[i] for i in rounds for prompts in categories if i < len(prompts)][:count]
