"""Ranks write one checkpoint together: the bytes of one process, each rank a part of them, and all or nothing."""

import os
from typing import Any

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.ranks import RankError, run
from arrayopt.saving import writing

SHAPES = {"embed": (120, 900), "w": (300, 70), "small": (5,), "empty": (0, 3), "b": (40_000,)}


def stepped(comm: Any = None, **options: Any) -> ao.Optimizer:
    """An optimizer after two steps."""
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    opt = ao.Optimizer(params, ao.LAMB(lr=0.01, **options), engine="numpy", comm=comm)
    for _ in range(2):
        opt.step({name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()})
    return opt


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each array that is written, in the order of time."""
    sizes, write = list[int](), writing._write

    def counted(file: Any, array: Any) -> Any:
        found = write(file, array)
        sizes.append(found[1])
        return found

    monkeypatch.setattr(writing, "_write", counted)
    return sizes


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8"}, {"state_dtype": "bfloat16"}], ids=str)
def test_the_file_has_the_bytes_of_one_process(tmp_path: Any, options: Any, ranks: int, written: list[int]) -> None:
    stepped(**options).save(tmp_path / "one")
    every = sum(written)
    written.clear()
    shares = run(ranks, lambda comm: _shared(comm, tmp_path / "all", options))
    assert (tmp_path / "all").read_bytes() == (tmp_path / "one").read_bytes()
    assert sum(written) == every  # each array once
    assert max(shares) < 1.5 * every / ranks
    assert min(shares) > 0.5 * every / ranks
    resumed = run(ranks, lambda comm: _loaded(comm, tmp_path / "all", options))
    assert all(np.array_equal(found, stepped(**options).params["w"]) for found in resumed)


def _shared(comm: Any, path: Any, options: Any) -> int:
    """Save; how many bytes of arrays this rank was to write."""
    opt = stepped(comm, **options)
    file = writing.File(path, opt._dump(lambda x, slot: writing.Scattered(opt._team, x, slot)), opt._params())
    writers = file.writers(comm.size)
    opt.save(path)
    return sum(
        writing.length(about) for (about, _), rank in zip(file._arrays, writers, strict=True) if rank == comm.rank
    )


def _loaded(comm: Any, path: Any, options: Any) -> Any:
    opt = stepped(comm, **options)
    return opt.load(path)["w"]


def test_divided_tensors_are_written_by_a_rank_that_has_a_part(tmp_path: Any) -> None:
    shapes = {"large": (900, 1100)}

    def save(comm: Any, path: Any) -> list[str]:
        opt = ao.Optimizer({"large": np.ones(shapes["large"], np.float32)}, ao.LAMB(), engine="cpp", comm=comm)
        opt.step({"large": np.arange(990_000, dtype=np.float32).reshape(900, 1100)})
        opt.save(path)
        return [tensor.kind for tensor in opt._parameters.all]

    save(None, tmp_path / "one")
    assert run(3, lambda comm: save(comm, tmp_path / "all")) == [["cut"]] * 3
    assert (tmp_path / "all").read_bytes() == (tmp_path / "one").read_bytes()


def test_ranks_that_do_not_see_the_file_hand_their_parts_to_rank_0(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped().save(tmp_path / "one")

    def elsewhere(temporary: str) -> Any:
        raise FileNotFoundError(temporary)

    monkeypatch.setattr(writing, "_joined", elsewhere)
    run(3, lambda comm: stepped(comm).save(tmp_path / "all"))
    assert (tmp_path / "all").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_file_of_the_same_name_on_another_machine_is_not_written_into(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped().save(tmp_path / "one")
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    monkeypatch.setattr(writing, "_joined", lambda temporary: open(other, "r+b"))  # noqa: SIM115
    run(2, lambda comm: stepped(comm).save(tmp_path / "all"))
    assert (tmp_path / "all").read_bytes() == (tmp_path / "one").read_bytes()
    assert other.read_bytes() == b"something else"


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_cannot_write_leaves_the_old_file(
    tmp_path: Any, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    own = writing.File._write_own

    def full(self: Any, rank: int, writers: Any, files: Any) -> Any:
        if rank == failing:
            raise OSError(28, "No space left on device")
        return own(self, rank, writers, files)

    def save(comm: Any) -> str:
        opt = stepped(comm)
        with pytest.raises((OSError, RankError)) as caught:
            opt.save(path)
        opt.step({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})  # the run goes on
        return repr(caught.value)

    monkeypatch.setattr(writing.File, "_write_own", full)
    said = run(3, save)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
    assert said[failing].startswith("OSError")
    assert all("No space left on device" in x for x in said)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_does_not_keep_others_waiting(
    tmp_path: Any, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others need what the failing rank has: it hands that over before it raises."""
    write, calls = writing._write, []

    def failing_write(file: Any, array: Any) -> Any:
        calls.append(0)
        if len(calls) == 1 + failing:
            raise OSError(5, "Input/output error")
        return write(file, array)

    monkeypatch.setattr(writing, "_write", failing_write)

    def save(comm: Any) -> str:
        opt = ao.Optimizer({"large": np.ones((900, 1100), np.float32)}, ao.LAMB(), engine="cpp", comm=comm)
        with pytest.raises((OSError, RankError)) as caught:
            opt.save(tmp_path / "x")
        return str(caught.value)

    assert all("Input/output error" in said for said in run(3, save))
    assert not os.listdir(tmp_path)
