"""What the audit asks: a short list of our own, or a file of the user's, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import ConfigError

MAX_FILE_BYTES = 64 << 20

BUILT_IN: tuple[str, ...] = (
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a lighthouse in winter.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "Translate into French: The train to the coast leaves at seven in the morning.",
    "List the first ten prime numbers, separated by commas.",
    "Write a Python function that reverses the words of a sentence.",
    "What is the difference between a comet and an asteroid?",
    'Return this as JSON with the keys name and age: "Mara is thirty-four years old."',
    "Summarise: A ferry crosses the strait twice a day. In storms it stays in the harbour, and then the "
    "island gets neither mail nor bread.",
    "Continue the pattern: red, blue, red, blue, red,",
    "Give me a recipe for pancakes with four ingredients.",
    "Who was the first person to walk on the moon, and in which year?",
    "Correct the grammar: She don't knows where the books is.",
    "Write an SQL query that counts the orders of each customer.",
    "Tell a story that begins with: The clock struck thirteen.",
    "Name three rivers in South America.",
    "Wie funktioniert eine Wärmepumpe? Antworte kurz.",
    "Resume en español: El mercado abre los sábados y cierra a mediodía.",
    "用一句话介绍长城。",
    "Compute 17 times 23 and show each step.",
    "Rewrite politely: Send me the report now.",
    "Give the opposite of each word: hot, early, empty, brave.",
    "Write a limerick about a cat that learned to code.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Copy the list without its last item: apple, pear, plum, fig, quince.",
    "What does the proverb 'still waters run deep' mean?",
    "Write an email that postpones a meeting to Thursday at ten.",
    "Classify as positive or negative: The soup was cold, but the waiter was kind.",
    "Explain recursion to a ten-year-old.",
    "Fill in: The capital of Japan is ____, and the capital of Kenya is ____.",
    "Turn this into a bulleted list: tents, two lamps, a stove and enough water for three days.",
    "Write a regular expression that matches a date such as 2024-05-31.",
    "Count from one to twenty in words.",
    "Invent a name and a slogan for a shop that repairs umbrellas.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Why?",
    "Quote the sentence and add nothing: Speculation is a guess that is checked.",
    "Describe the taste of a lemon to somebody who has never had one.",
    "Write HTML for a table with two rows and three columns.",
    "Give three tips for sleeping well 🙂",
    "a a a a b b b b a a a a b b b b a a a a",
)


def load(file: Path | None, count: int) -> list[str]:
    """The first `count` prompts, of the file or the built-in list. Raises `ConfigError`.

    A line of the file is an object with `prompt`, or a JSON string.
    """
    known: Sequence[str] = BUILT_IN if file is None else _read(file)
    where = "the built-in list" if file is None else str(file)
    if count > len(known):
        raise ConfigError(f"--prompts {count}: {where} has {len(known)}; ask for fewer, or give another file")
    return list(known[:count])


def _read(file: Path) -> list[str]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--prompt-file {file} is larger than {MAX_FILE_BYTES >> 20} MiB: shorten it")
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {file} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--prompt-file {file}, line {number} is no JSON: {error}") from error
        prompt = item.get("prompt") if isinstance(item, dict) else item
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(
                f'--prompt-file {file}, line {number}: an object such as {{"prompt": "Hello"}}, or a string'
            )
        found.append(prompt)
    if not found:
        raise ConfigError(f"--prompt-file {file} has no prompts")
    return found
