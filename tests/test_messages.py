"""Messages of errors and warnings, as `make messages` prints them, follow one pattern."""

import re
from functools import cache

import numpy as np
import pytest

import arrayopt as ao
from tests import messages

found = cache(messages.messages)
WORDS = {"can't": "cannot", "doesn't": "does not", "whole number": "integer", "Please": "nothing", "!": "nothing"}


def test_messages_are_found():
    texts = [text for _, _, text in found()]
    assert len(texts) > 400
    assert "{who}: `rule` must be a Rule such as {example}; got {said}" in texts


@pytest.mark.parametrize("word", WORDS)
def test_messages_use_the_same_words(word):
    odd = [f"{file}:{line}: {text}" for file, line, text in found() if f"{word} " in f"{text} "]
    assert not odd, f"write {WORDS[word]!r} in place of {word!r}"


def test_a_message_ends_without_a_full_stop():
    odd = [f"{file}:{line}: {text}" for file, line, text in found() if text.endswith(".")]
    assert not odd


def test_counts_in_messages_are_singular_or_plural():
    """`counted` writes ``1 tensor`` and ``2 tensors``; a number before a noun makes ``1 tensors``."""
    odd = [
        f"{file}:{line}: {text}"
        for file, line, text in found()
        if re.search(r"\{len\([^{}]*\)\} (?!has )[a-z]+s\b", text)
    ]
    assert not odd


def test_one_of_a_thing_is_singular():
    opt = ao.Optimizer({"x": np.ones((1, 1))}, ao.SGD(lr=0.1, stacked=True), groups={"x": {"lr": 1.0}}, engine="numpy")
    for text in (repr(opt), repr(opt.groups[0]), opt.explain()):
        assert not re.search(r"\b1 (parameter|tensor|layer|thread)s", text), text
