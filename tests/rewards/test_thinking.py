import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibethinker_jax.rewards.thinking import answer_text


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("plain answer", "plain answer"),
        ("", ""),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the prompt ended in <think>
        ("<think>a</think>b</think>c", "c"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>a</think>", ""),
        ("<think>maybe 7", None),  # truncated while thinking
        ("answer first <think>then doubts", None),
        ("<think>a</think>b<think>c", None),  # started to think again
    ],
)
def test_only_text_after_the_last_closing_tag_counts(response, expected):
    assert answer_text(response) == expected


def test_a_response_without_tags_is_refused_only_where_thinking_is_required():
    assert answer_text("7", require_thinking=False) == "7"
    assert answer_text("7", require_thinking=True) is None
    assert answer_text("<think>a</think>7", require_thinking=True) == "7"
    assert answer_text("a</think>7", require_thinking=True) == "7"


@given(st.lists(st.sampled_from(["<think>", "</think>", "x", " ", "7"])).map("".join), st.booleans())
def test_the_counted_text_never_holds_a_tag(response, require_thinking):
    text = answer_text(response, require_thinking)
    if text is not None:
        assert "<think>" not in text
        assert "</think>" not in text
        assert response.endswith(text)
