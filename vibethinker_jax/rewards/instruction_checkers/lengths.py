"""How long a response is: words, sentences, paragraphs."""

import re
from collections.abc import Mapping
from typing import Any

from vibethinker_jax.rewards.instruction_checkers.registry import checker
from vibethinker_jax.rewards.instruction_checkers.resources import PUNKT
from vibethinker_jax.rewards.instruction_checkers.text import holds, sentences, stripped, word_count


@checker("length_constraints:number_words")
def number_words(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least / less than so many words."""
    return holds(word_count(text), arguments["relation"], arguments["num_words"])


@checker("count:word_count_range")
def word_count_range(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Between so many and so many words, both included."""
    return arguments["min_words"] <= word_count(text) <= arguments["max_words"]


@checker("length_constraints:number_sentences", needs_official=(PUNKT,))
def number_sentences(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least / less than so many sentences."""
    return holds(len(sentences(text, official)), arguments["relation"], arguments["num_sentences"])


@checker("length_constraints:number_paragraphs")
def number_paragraphs(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Exactly so many paragraphs, divided by `***`, which the prompts demand; blank lines divide none.

    Official also divides at three asterisks inside a line, such as those of bold italics.
    """
    divider = r"\s?\*\*\*\s?" if official else r"^[ \t]*\*\*\*[ \t]*$"
    parts = re.split(divider, text, flags=re.MULTILINE)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    return sum(1 for part in parts if part.strip()) == arguments["num_paragraphs"]


@checker("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Exactly so many paragraphs, divided by blank lines, and the n-th starts with the word.

    Official indexes the paragraphs with blank ones among them, and so misses the n-th behind an extra blank line.
    """
    nth, wanted = int(arguments["nth_paragraph"]), arguments["first_word"].lower()
    if official:
        parts = text.split("\n\n")
        count = sum(1 for part in parts if part.strip())
        if count != arguments["num_paragraphs"] or nth > count or not parts[nth - 1].strip():
            return False
        word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
        return re.split("[.,?!'\"]", word)[0].lower() == wanted
    parts = [part for part in re.split(r"\n[ \t]*\n", text) if part.strip()]
    if len(parts) != arguments["num_paragraphs"] or nth > len(parts):
        return False
    return stripped(parts[nth - 1].split()[0]).lower() == wanted


@checker("count:unique_word_count")
def unique_word_count(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least so many different words. Official counts lone punctuation as one more."""
    unique = {stripped(word) for word in text.lower().split()}
    if not official:
        unique.discard("")
    return len(unique) >= arguments["N"]
