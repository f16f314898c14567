import pytest

from hortus.errors import InvalidInput
from hortus.ivy.templates import Prompts

PROMPTS = Prompts({"query": "query: ", "document": ""}, "query")


@pytest.mark.parametrize(
    ("name", "ids", "text"),
    [
        (None, False, "query: "),
        ("", False, ""),
        ("document", False, ""),
        ("query", False, "query: "),
        (None, True, ""),
        ("", True, ""),
    ],
)
def test_choice(name, ids, text):
    assert PROMPTS.choose(name, ids=ids) == text


def test_without_a_default_nothing_is_added():
    assert Prompts({"query": "q"}).choose(None) == ""


def test_refusals():
    with pytest.raises(InvalidInput, match="prompts: document, query") as caught:
        PROMPTS.choose("Query")
    assert caught.value.param == "prompt_name"
    with pytest.raises(InvalidInput, match="prompts: none"):
        Prompts({}).choose("query")
    with pytest.raises(InvalidInput, match="token ids"):
        PROMPTS.choose("query", ids=True)
