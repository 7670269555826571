"""docs/glossary.md says each term once: all are used, and no retired word is."""

import re

import pytest

from kernel_fusion.checks import glossary

TERMS, TEXTS = glossary.terms(), glossary.texts()


def test_terms_stand_once_and_in_order():
    assert TERMS == sorted(set(TERMS), key=str.lower)


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_used(term):
    word = re.compile(rf"(?<![a-z0-9]){re.escape(term)}(?:s|es|d|ed|ing)?(?![a-z0-9])", re.IGNORECASE)
    assert any(word.search(text) for text in TEXTS.values())


@pytest.mark.parametrize("row", glossary.retired(), ids=lambda row: row.pattern)
def test_a_retired_word_is_gone(row):
    assert row.term in TERMS or re.search(rf"\b{re.escape(row.term)}\b", "".join(TEXTS.values()))
    assert [use for path, text in TEXTS.items() for use in row.uses(path, text)] == [], f"the term is {row.term}"
