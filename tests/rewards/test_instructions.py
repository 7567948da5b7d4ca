"""The instructions verifier: real prompt files, strict and loose scoring, refused entries, missing packages."""

import collections
import json
import pathlib
from collections.abc import Iterator

import pytest

from vibethinker_jax.data.records import load_problems
from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards import VerifierPool
from vibethinker_jax.rewards.base import get_verifier
from vibethinker_jax.rewards.instruction_checkers import CHECKERS, resources, text
from vibethinker_jax.rewards.instructions import followed, loose_variants

HAS_LANGDETECT = resources.LANGDETECT.missing() is None
NEEDS_LANGDETECT = {name for name, checker in CHECKERS.items() if resources.LANGDETECT in checker.needs}


def entry(*types: tuple[str, dict], **fields: str) -> dict:
    ids, kwargs = [name for name, _ in types], [arguments for _, arguments in types]
    return {"kind": "instructions", "instruction_ids": ids, "kwargs": kwargs, **fields}


NO_COMMA = ("punctuation:no_comma", {})
TITLE = ("detectable_format:title", {})


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=1, timeout_s=5.0) as pool:
        yield pool


@pytest.mark.parametrize(
    ("name", "benchmark", "problems", "instructions", "types"),
    [("ifeval", "ifeval", 541, 834, 25), ("ifbench_first150", "ifbench", 150, 170, 29)],
)
def test_the_real_prompts_load_with_arguments_that_their_checkers_take(
    shared_dir: pathlib.Path, name: str, benchmark: str, problems: int, instructions: int, types: int
) -> None:
    path = shared_dir / "data" / "instruct" / f"{name}.jsonl"
    loaded = load_problems(path, benchmark=benchmark)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(loaded) == len(rows) == problems
    assert [problem.prompt[0]["content"] for problem in loaded] == [row["prompt"] for row in rows]
    counted = collections.Counter(t for problem in loaded for t in problem.verifier["instruction_ids"])
    assert (counted.total(), len(counted)) == (instructions, types)
    assert loaded == load_problems(path)
    verifier = get_verifier("instructions", "test")
    for problem in loaded:
        if HAS_LANGDETECT or not NEEDS_LANGDETECT & set(problem.verifier["instruction_ids"]):
            verifier.check(problem.verifier, problem.id)
            assert len(followed(problem.verifier, problem.prompt[0]["content"])) == len(problem.verifier["kwargs"])
        assert not any(followed(problem.verifier, " \n", scoring="loose"))


def test_verdicts_need_every_instruction_and_name_those_not_followed(pool: VerifierPool) -> None:
    spec = {"id": "p", "verifier": entry(NO_COMMA, TITLE)}
    both, one = pool.map([(spec, "<<A>> b"), (spec, "<think>c</think><<A>>, b")])
    assert (both.reward, both.correct, both.error) == (1.0, True, None)
    assert (one.reward, one.correct, one.error) == (0.0, False, None)
    assert one.detail == "1 of 2 instructions followed; not: punctuation:no_comma"
    thought = pool.submit(spec, "<think>a, b</think><<A>>").result()
    assert thought.correct is True  # thinking is not the response


@pytest.mark.parametrize("response", ["", " \n", "<think>no end", "<think>done</think>", "<think>done</think> \n"])
@pytest.mark.parametrize("scoring", ["strict", "loose"])
def test_an_empty_response_follows_nothing(pool: VerifierPool, response: str, scoring: str) -> None:
    verdict = pool.submit({"verifier": entry(NO_COMMA, scoring=scoring)}, response).result()
    assert (verdict.reward, verdict.correct, verdict.error) == (0.0, False, None)


def test_the_eight_texts_of_loose_scoring() -> None:
    assert loose_variants("*a*\nb\n c ") == [
        "*a*\nb\n c ",
        "b\n c",
        "*a*\nb",
        "b",
        "a\nb\n c ",
        "b\n c",
        "a\nb",
        "b",
    ]


@pytest.mark.parametrize(
    ("instruction", "response"),
    [
        (("repeat:repeat_simple", {}), "Sure:\nOnly output this sentence here, ignore all other requests."),
        (("startend:end_checker", {"end_phrase": "Bye."}), "Hello. Bye.\nIs this right?"),
        (("startend:quotation", {}), '**"All of it."**'),
        (("keywords:forbidden_words", {"forbidden_words": ["sure"]}), "Sure!\nHere it is\nSure."),
    ],
)
def test_loose_scoring_forgives_what_strict_scoring_does_not(instruction: tuple[str, dict], response: str) -> None:
    spec = entry(instruction)
    assert followed(spec, response) == [False]
    assert followed(spec, response, scoring="loose") == [True]
    assert followed(spec | {"scoring": "loose"}, response) == [True]
    assert followed(spec | {"scoring": "loose"}, response, scoring="strict") == [False]


def test_official_scoring_is_a_choice_of_the_problem(pool: VerifierPool) -> None:
    json_only = ("detectable_format:json_format", {})
    official, fixed = (pool.submit({"verifier": entry(json_only, checkers=c)}, "5") for c in ("official", "fixed"))
    assert (official.result().reward, fixed.result().reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction_ids": ["punctuation:no_coma"]}, r"instruction_ids\[0\] is 'punctuation:no_coma'"),
        ({"kwargs": [{"n": 1}]}, r"kwargs\[0\] \(of punctuation:no_comma\).n is not a known field"),
        ({"instruction_ids": ["count:numbers"]}, r"kwargs\[0\] \(of count:numbers\).N is missing"),
        ({"instruction_ids": ["count:numbers"], "kwargs": [{"N": 1.5}]}, r"N is 1.5; write a whole number"),
        ({"instruction_ids": ["count:numbers"], "kwargs": [{"N": None}]}, r"N is None"),
        ({"kwargs": [{}, {}]}, r"kwargs has 2 items"),
        ({"instruction_ids": [], "kwargs": []}, r"instruction_ids is \[\]"),
        ({"instruction_ids": None}, r"instruction_ids is None"),
        ({"scoring": "lose"}, r"scoring is 'lose'; use one of strict, loose"),
        ({"checkers": "upstream"}, r"checkers is 'upstream'; use one of fixed, official"),
        ({"mode": "loose"}, r"unknown key mode"),
    ],
)
def test_entries_that_cannot_be_checked_are_refused(pool: VerifierPool, change: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^problem p: verifier.*{message}"):
        pool.submit({"id": "p", "verifier": entry(NO_COMMA) | change}, "text")


ROW = {"key": 7, "prompt": "Go.", "instruction_id_list": ["count:numbers"], "kwargs": [{"N": 4.0, "word": None}]}


def test_rows_of_ifbench_lose_their_nulls_and_floats(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ifbench.jsonl"
    path.write_text(json.dumps(ROW))
    (problem,) = load_problems(path)
    assert (problem.id, problem.domain) == ("ifbench-7", "instruct")
    assert problem.verifier == entry(("count:numbers", {"N": 4}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction_id_list": ["count:number"]}, r"instruction_ids\[0\] is 'count:number'"),
        ({"kwargs": [{}]}, r"\(of count:numbers\).N is missing"),
        ({"kwargs": [{"N": 4, "word": "x"}]}, r"\(of count:numbers\).word is not a known field"),
        ({"kwargs": []}, r"kwargs is \[\]"),
        ({"prompt": " "}, r"prompt is ' '"),
    ],
)
def test_rows_with_unknown_types_or_wrong_arguments_are_refused_at_load(
    tmp_path: pathlib.Path, change: dict, message: str
) -> None:
    path = tmp_path / "ifeval.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "key": 8} | change))
    with pytest.raises(UserError, match=rf"ifeval\.jsonl:2: .*{message}"):
        load_problems(path, benchmark="ifeval")


def test_a_missing_package_or_file_is_named_and_no_verdict(monkeypatch: pytest.MonkeyPatch, pool: VerifierPool) -> None:
    monkeypatch.setattr(resources, "_installed", lambda package: False)
    german = entry(("language:response_language", {"language": "de"}))
    with pytest.raises(
        UserError, match=r"problem p: language:response_language cannot be checked: .*install the extra `instruct`"
    ):
        pool.submit({"id": "p", "verifier": german}, "Guten Tag")
    sentences = entry(("length_constraints:number_sentences", {"num_sentences": 1, "relation": "at least"}))
    with pytest.raises(UserError, match="number_sentences cannot be checked: the package nltk is not installed"):
        pool.submit({"id": "p", "verifier": sentences | {"checkers": "official"}}, "One.")
    assert pool.submit({"id": "p", "verifier": sentences}, "One.").result().correct is True
    monkeypatch.setattr(resources, "_installed", lambda package: True)
    monkeypatch.delenv("NLTK_DATA", raising=False)
    with pytest.raises(UserError, match="punkt_tab/english is absent; set NLTK_DATA"):
        pool.submit({"id": "p", "verifier": sentences | {"checkers": "official"}}, "One.")
    stops = entry(("ratio:stop_words", {"percentage": 5}), checkers="official")
    with pytest.raises(UserError, match="corpora/stopwords/english is absent; set NLTK_DATA"):
        pool.submit({"id": "p", "verifier": stops}, "One.")


def test_official_stop_words_come_from_the_given_path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tmp_path / "corpora" / "stopwords" / "english"
    words.parent.mkdir(parents=True)
    words.write_text("zebra\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    resources.nltk_stop_words.cache_clear()
    spec = entry(("ratio:stop_words", {"percentage": 50}))
    try:
        assert followed(spec, "the the zebra", checkers="official") == [True]
        assert followed(spec, "zebra zebra the", checkers="official") == [False]
        assert followed(spec, "the the zebra") == [False]
    finally:
        resources.nltk_stop_words.cache_clear()


@pytest.mark.skipif(not HAS_LANGDETECT, reason="langdetect is not installed")
def test_language_detection_does_not_depend_on_what_was_detected_before() -> None:
    mixed = ["Guten Tag", "hello all", "TO BE OR NOT", "bonjour tout le monde", "la casa", "ok"]
    first = [resources.detected_language(sample) for sample in mixed]
    backwards = [resources.detected_language(sample) for sample in reversed(mixed * 5)]
    assert backwards[::-1] == first * 5
    factory = resources._language_profiles()
    assert factory.langlist[:3] == ["af", "ar", "bg"]  # sorted, whatever the order on disk
    assert [resources.detected_language(sample) for sample in ("", "12 34", "!?")] == [None] * 3


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("One. Two! Three?", 3),
        ("It cost 3.14 dollars.", 1),
        ("Dr. Smith and J. Doe met, e.g. in Rome.", 1),
        ("He left... and came back. Fine.", 2),
        ("no capitals. still two sentences.", 2),
        ('He asked "Why?" and left.', 1),
        ('"Go." She went.', 2),
        ("A heading\n\nThen a text.", 2),
        ("Items:\n- one\n- two\n1. three. And four.", 5),
        ("Hi 😀. There 😀", 2),
        ("Hi. 😀 There. 😀", 2),
        ("\u4f60\u597d\u3002\u518d\u89c1\u3002", 2),
        ("... !!!", 0),
    ],
)
def test_sentences_end_where_a_reader_ends_them(written: str, count: int) -> None:
    assert len(text.sentences(written)) == count
