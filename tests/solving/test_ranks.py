"""`minimize` over ranks: the same bits as one process, sums of parts, and errors of one rank."""

import signal
from typing import Any

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.ranks import RankError, Ranks, run, threads
from arrayopt.solving.ranks import Several
from tests.support.mgh import Function

LARGE = 70_000
"""Unknowns enough that ranks share them in an engine that cuts tensors."""


def valley(x: Any) -> tuple[Any, Any]:
    """A chain of curved valleys, and its gradient."""
    a, b = x[:-1], x[1:]
    g = np.zeros_like(x)
    g[:-1] = 2 * (a - 1) - 40 * a * (b - a**2)
    g[1:] += 20 * (b - a**2)
    return ((1 - a) ** 2 + 10 * (b - a**2) ** 2).sum(), g


def same(found: Any, one: Any) -> None:
    assert found.params.tobytes() == one.params.tobytes()
    assert (found.value, found.grad_norm, found.message) == (one.value, one.grad_norm, one.message)
    assert (found.steps, found.evaluations) == (one.steps, one.evaluations)


@pytest.mark.parametrize("engine", ["auto", "array_api"])
@pytest.mark.parametrize("rule", [ao.LBFGS(), ao.CG(), ao.SPG(), ao.Adam(lr=0.05)], ids=lambda x: type(x).__name__)
def test_ranks_find_the_bits_of_one_process(rule: Any, engine: str) -> None:
    start = np.linspace(-1.0, 2.0, 40)
    one = ao.minimize(valley, start, rule, max_steps=60, engine=engine)
    for size in (2, 3):
        for found in run(size, lambda c: ao.minimize(valley, start, rule, max_steps=60, engine=engine, comm=c)):
            same(found, one)


@pytest.mark.parametrize("rule", [ao.LBFGS(memory=3), ao.SPG()], ids=lambda x: type(x).__name__)
def test_a_cut_tensor_has_the_bits_of_a_whole_one(rule: Any) -> None:
    start = np.linspace(-1.0, 2.0, LARGE)
    one = ao.minimize(valley, start, rule, max_steps=12)
    held = []

    def watch(comm: Any) -> Any:
        return ao.minimize(valley, start, rule, max_steps=12, comm=comm, callback=held.append)

    for found in run(3, watch):
        same(found, one)
    assert len(held) == 3 * one.evaluations


def test_projected_and_several_arrays() -> None:
    start = {"a": np.linspace(-1.0, 0.4, 10), "b": np.linspace(0.0, 0.5, 12).reshape(3, 4)}

    def f(p: Any) -> Any:
        value, g = valley(np.concatenate([p["a"], p["b"].ravel()]))
        return value, {"a": g[:10], "b": g[10:].reshape(3, 4)}

    box = ao.projections.box(-2.0, 0.6)
    one = ao.minimize(f, start, project=box)
    for found in run(2, lambda c: ao.minimize(f, start, project=box, comm=c)):
        assert all(np.array_equal(found.params[k], one.params[k]) for k in start)
        assert found.value == one.value


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("grads", ["sum", "mean"])
def test_each_rank_has_its_part_of_the_function(grads: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((24, 5)).astype(dtype)
    b = rng.standard_normal(24).astype(dtype)

    def part(rows: slice, factor: float) -> Any:
        def f(x: Any) -> Any:
            wrong = a[rows] @ x - b[rows]
            return factor * 0.5 * float((abs(wrong) ** 2).sum()), (factor * (a[rows].conj().T @ wrong)).astype(dtype)

        return f

    exact = np.linalg.lstsq(a, b, rcond=None)[0]
    for size in (1, 2, 3):

        def solve(comm: Any, size: int = size) -> Any:
            mine = slice(comm.rank * 24 // size, (comm.rank + 1) * 24 // size)
            f = part(mine, size if grads == "mean" else 1.0)
            return ao.minimize(f, np.zeros(5, dtype), tol=1e-3, comm=Ranks(comm, grads=grads), check_gradient=True)

        every = run(size, solve)
        assert all(found.params.tobytes() == every[0].params.tobytes() for found in every)
        assert every[0].converged
        assert np.allclose(every[0].params, exact, atol=1e-3)


def test_sums_of_ranks_are_added_in_their_order() -> None:
    parts = [1e16, 1.0, -1e16]  # in another order the sum is another

    def f(comm: Any) -> Any:
        return lambda x: (parts[comm.rank], np.array([parts[comm.rank], 1.0, 2.0, 3.0, 4.0]))

    for found in run(3, lambda c: ao.minimize(f(c), np.zeros(5), max_steps=0, comm=Ranks(c, grads="sum"))):
        assert found.value == (parts[0] + parts[1]) + parts[2]
        assert found.grad_norm == 12.0


def test_an_error_of_one_rank_ends_the_run_on_all() -> None:
    def solve(comm: Any) -> str:
        calls = []

        def f(x: Any) -> Any:
            calls.append(0)
            if comm.rank == 1 and len(calls) == 3:
                raise ZeroDivisionError("the wave has left the grid")
            return valley(x)

        with pytest.raises((RankError, ZeroDivisionError)) as caught:
            ao.minimize(f, np.zeros(8), comm=comm)
        return repr(caught.value)

    found = run(3, solve)
    assert found[1] == "ZeroDivisionError('the wave has left the grid')"
    for said in found[0], found[2]:
        assert said.startswith("RankError")
        assert "rank 1 failed: ZeroDivisionError: the wave has left the grid" in said


@pytest.mark.parametrize("where", ["f", "callback"])
@pytest.mark.parametrize("rule", [ao.LBFGS(), ao.Adam(lr=0.05)], ids=lambda x: type(x).__name__)
def test_an_interrupt_of_one_rank_leaves_the_best_point_to_all(rule: Any, where: str) -> None:
    def solve(comm: Any) -> Any:
        calls = []

        def interrupt(me: str) -> None:
            calls.extend([0] if where == me else [])
            if where == me and comm.rank == 1 and len(calls) == 6:
                raise KeyboardInterrupt

        def f(x: Any) -> Any:
            interrupt("f")
            return valley(x)

        start, callback = np.linspace(-1.0, 2.0, 40), lambda result: interrupt("callback")
        return ao.minimize(f, start, rule, comm=comm, callback=callback if where == "callback" else None)

    one, *others = run(3, solve)
    assert one.message == "not converged: it was interrupted"
    assert one.evaluations == (5 if where == "f" else 6)
    for found in others:
        same(found, one)


@pytest.mark.parametrize("early", [True, False])
def test_signals_wait_but_in_functions_of_the_user(early: bool) -> None:
    ranks, done = Several(Ranks(threads(1)[0])), []

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("held")

    with pytest.raises(KeyboardInterrupt), ranks.together():  # noqa: PT012 - what comes after is the subject
        if early:
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            ranks.own(lambda: done.append("called") or interrupt())
        interrupt()
        done.append("end")
    assert done == [*(["held"] if early else ["called"]), "held", "end"]


def test_an_interrupt_beside_an_error_or_before_the_first_value_is_raised() -> None:
    def solve(comm: Any, at: int, errors: tuple[Any, Any]) -> Any:
        calls = []

        def f(x: Any) -> Any:
            calls.append(0)
            if len(calls) == at and errors[comm.rank]:
                raise errors[comm.rank]
            return valley(x)

        with pytest.raises((KeyboardInterrupt, ValueError, RankError)) as caught:
            ao.minimize(f, np.zeros(8), comm=comm)
        return type(caught.value)

    both = KeyboardInterrupt(), ValueError("no")
    assert run(2, lambda comm: solve(comm, 3, both)) == [KeyboardInterrupt, ValueError]
    assert run(2, lambda comm: solve(comm, 1, (KeyboardInterrupt(), None))) == [KeyboardInterrupt, RankError]


def test_ranks_that_do_not_agree_are_told_so() -> None:
    def other_value(comm: Any) -> Any:
        return ao.minimize(lambda x: (valley(x)[0] + comm.rank, valley(x)[1]), np.zeros(8), comm=comm)

    with pytest.raises(ValueError, match="the value that `f` has returned"):
        run(2, other_value)
    with pytest.raises(ValueError, match="`tol`"):
        run(2, lambda c: ao.minimize(valley, np.zeros(8), tol=1e-3 * (1 + c.rank), comm=c))
    with pytest.raises(ValueError, match="`max_steps`"):
        run(2, lambda c: ao.minimize(valley, np.zeros(8), max_steps=5 - 6 * c.rank, comm=c))
    with pytest.raises(ValueError, match="pass each rank its own"):
        run(2, lambda c: ao.minimize(valley, np.zeros((2, 8)), stacked=True, comm=c))


def test_one_rank_may_call_back_and_another_show_progress() -> None:
    one, seen = ao.minimize(valley, np.zeros(8)), list[Any]()

    def solve(comm: Any) -> Any:
        callback = seen.append if comm.rank == 0 else None
        return ao.minimize(valley, np.zeros(8), comm=comm, callback=callback, progress=comm.rank == 1)

    for found in run(3, solve):
        same(found, one)
    assert [x.evaluations for x in seen] == list(range(1, one.evaluations + 1))


def test_one_rank_ends_the_run_of_all() -> None:
    def solve(comm: Any) -> Any:
        def callback(result: Any) -> None:
            if comm.rank == 1 and result.evaluations == 4:
                raise StopIteration

        return ao.minimize(valley, np.zeros(8), comm=comm, callback=callback)

    for found in run(3, solve):
        assert found.evaluations == 4
        assert found.message == "not converged: the callback stopped it"


def test_collected_functions_end_where_one_process_ends() -> None:
    for problem in ("rosenbrock", "helical_valley", "wood"):
        f = Function(problem)
        one = ao.minimize(f, f.start)
        for found in run(2, lambda c, f=f: ao.minimize(f, f.start, comm=c)):
            same(found, one)
