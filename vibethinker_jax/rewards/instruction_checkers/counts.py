"""IFBench's counts and ratios: numbers, names, pronouns, conjunctions, punctuation, stop words, overlap."""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from vibethinker_jax.rewards.instruction_checkers.registry import checker
from vibethinker_jax.rewards.instruction_checkers.resources import PUNKT, STOP_WORDS, nltk_stop_words
from vibethinker_jax.rewards.instruction_checkers.text import (
    plain_words,
    sentences,
    stripped,
    tokens,
    word_count,
    word_set,
)

CONJUNCTIONS = word_set("and but for nor or so yet")

# The list that the prompts of count:person_names spell out.
PERSON_NAMES = word_set(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper"
    " Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah"
    " Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella"
    " Jonathan"
)

PRONOUNS = word_set(
    "i me we us you he him she her it they them"
    " my mine our ours your yours his hers its their theirs"
    " myself ourselves yourself yourselves himself herself itself themselves"
    " this that these those who whom whose which what whoever whomever whatever whichever"
    " anybody anyone anything everybody everyone everything nobody nothing somebody someone something"
    " each either neither both all some any none"
)

# Fixed scoring's stop words: English function words (articles, pronouns, prepositions, conjunctions, auxiliaries,
# adverbs of degree and place) and the pieces that contractions fall into.
FUNCTION_WORDS = (
    PRONOUNS
    | CONJUNCTIONS
    | word_set(
        "a an the as because if than then though although while until unless when where why how whether"
        " about above across after against along among around at before behind below between beyond by down during from"
        " in into of off on onto out over through to toward towards under up upon with within without"
        " am is are was were be been being have has had having do does did doing can could may might must shall should"
        " will would not no only own same too very just now here there again once further more most other such few"
        " s t d ll m re ve don isn aren wasn weren hasn haven hadn doesn didn won wouldn shouldn couldn"
    )
)


@checker("count:conjunctions")
def conjunctions(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least so many different coordinating conjunctions. Official takes "And", "and" and "and," for three."""
    found = {word for word in text.split() if stripped(word).lower() in CONJUNCTIONS}
    if not official:
        found = {stripped(word).lower() for word in found}
    return len(found) >= arguments["small_n"]


@checker("count:numbers")
def numbers(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Exactly so many numbers in digits. Official drops punctuation first, and so reads "3-4" as one number."""
    if official:
        found = re.findall(r"\d+", text.translate(str.maketrans("", "", string.punctuation)))
    else:
        found = re.findall(r"\d+(?:[.,]\d+)*", text)
    return len(found) == arguments["N"]


@checker("count:person_names")
def person_names(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least so many different names of the list."""
    return len(set(re.findall(r"\w+", text)) & PERSON_NAMES) >= arguments["N"]


@checker("count:pronouns", needs_official=(PUNKT,))
def pronouns(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least so many pronouns; "it's" has one, "she/her" two."""
    text = text.lower().replace("/", " ")
    found = tokens(text, official=True) if official else re.findall(r"[^\W\d_]+", text)
    return sum(word in PRONOUNS for word in found) >= arguments["N"]


@checker("count:punctuation")
def punctuation(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Every standard mark, and an interrobang (`?!`, `!?` or one character) beside them."""
    if not any(mark in text for mark in ("?!", "!?", "\u203d")):
        return False
    without = text.replace("?!", "", 1) if "?!" in text else text.replace("!?", "", 1)
    return set(".,!?;:") <= set(without)


@checker("count:words_japanese")
def words_japanese(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Every N-th word is Japanese. Official passes digits, and any response of fewer than N words."""
    period = int(arguments["N"])
    every = text.split() if official else [word for word in text.split() if stripped(word)]
    due = [stripped(word) for word in every[period - 1 :: period]]
    if official:
        due = [word for word in due if word and not word.isdigit()]
    elif not due:
        return False
    return all(re.search("[\u3040-\u30ff\u4e00-\u9fff]", word) for word in due)


def _trigrams(items: Sequence[str]) -> set[tuple[str, ...]]:
    return set(zip(items, items[1:], items[2:], strict=False))


@checker("ratio:overlap", needs_official=(PUNKT,))
def overlap(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The share of the response's trigrams that the reference text has is the percentage, give or take 2."""
    found = _trigrams(tokens(text, official))
    if not found:
        return False
    share = 100 * len(found & _trigrams(tokens(arguments["reference_text"], official))) / len(found)
    return abs(share - arguments["percentage"]) <= 2


@checker("ratio:stop_words", needs_official=(STOP_WORDS,))
def stop_words(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Stop words are at most so many per cent of the words. Official uses NLTK's list."""
    stops = nltk_stop_words() if official else FUNCTION_WORDS
    count = sum(word in stops for word in re.findall(r"\w+", text.lower()))
    return word_count(text) > 0 and 100 * count <= arguments["percentage"] * word_count(text)


@checker("ratio:sentence_words", needs_official=(PUNKT,))
def sentence_words(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Three sentences with the same number of characters, no word twice."""
    found = sentences(text, official)
    if len(found) != 3 or len({len(sentence.strip()) for sentence in found}) != 1:
        return False
    every = plain_words(" ".join(found))
    return len(every) == len(set(every))
