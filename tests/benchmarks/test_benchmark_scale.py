"""The model of steps at scale: it has all messages, and nothing takes time that has none to take."""

import math

import numpy as np
import pytest

from benchmarks import ranks as counts
from benchmarks.scale import ITEM, WORK, Machine, Messages, Step, layers_of, main, seconds

SHAPES = counts.models()["BERT-large"]
TOTAL = sum(math.prod(shape) for shape in SHAPES)


@pytest.fixture(scope="module")
def messages():
    return Messages(SHAPES, 8)


def test_each_gradient_and_each_parameter_is_sent_once(messages):
    assert sum(size for _, size, _, _ in messages.reductions) == TOTAL * ITEM
    assert sum(size for _, _, size in messages.gathers) == TOTAL * ITEM
    assert set(np.concatenate([places for places, *_ in messages.reductions])) == set(range(len(SHAPES)))
    assert sorted(place for places, *_ in messages.gathers for place in places) == list(range(len(SHAPES)))


def test_sums_reach_their_owners(messages):
    sent = 0
    for _, size, most, count in messages.reductions:
        sent += size
        if count:  # the sums of a group of buckets
            assert sent / 8 <= most <= 0.3 * sent  # between all ranks evenly, and four
            sent = 0
    assert sent == 0
    assert [count > 0 for *_, count in messages.reductions].count(True) in (2, 3)


def test_without_messages_a_step_is_its_update(messages):
    machine = Machine(latency=0.0, post=0.0, link=math.inf)
    step = Step(machine, messages, WORK["BERT-large"])
    for overlapped in (False, True):
        assert step.ours(overlapped=overlapped, ordered=True) == pytest.approx(step.update)
    assert step.zero(stage=2) == pytest.approx(step.update, rel=0.05)
    assert step.fsdp2(layers_of(SHAPES, 24)) == pytest.approx(step.update)


def test_what_overlaps_takes_no_longer():
    alone, found = seconds("BERT-large", 8)
    assert 0 < found["overlapped"] < found["at once"]
    assert found["at once"] - found["overlapped"] <= alone
    assert found["ZeRO-2"] < found["ZeRO-1"]


def test_the_tables(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["scale", "--models", "BERT-large", "--ranks", "8"])
    main()
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.count("|") == row.count("|") == 10
    monkeypatch.setattr(counts, "models", lambda: {"small": ((64, 64), (64,))})
    counts.print_counts()
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(counts.RULES) * len(counts.RANKS)
