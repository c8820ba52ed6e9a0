"""`Optimizer`: applies update rules to parameters, and holds their groups and state."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Never

from arrayopt.engines.base import Report
from arrayopt.engines.layers import stack_of
from arrayopt.foreign import arguments_of, check_names, listed_names
from arrayopt.html import Text
from arrayopt.hyper import Hyper, data, evaluate
from arrayopt.interrupts import uninterrupted
from arrayopt.params.given import as_params
from arrayopt.params.groups import Group, Groups, fields_of
from arrayopt.params.parameters import Parameters
from arrayopt.params.parts import mesh_of
from arrayopt.ranks.same import alike
from arrayopt.ranks.team import team
from arrayopt.rules.base import Rule
from arrayopt.rules.named import check_rule
from arrayopt.saving.later import Writer
from arrayopt.settings import Settings
from arrayopt.state.loss_scale import LossScale
from arrayopt.state.run import Run
from arrayopt.state.tensors import explain_state
from arrayopt.state.verdict import CLIP_NORM
from arrayopt.step.coming import Begun, Coming
from arrayopt.step.given import Again, GivenStep
from arrayopt.step.guard import Guard
from arrayopt.step.hooks import attach
from arrayopt.step.stats import Stats

NOT_GIVEN: Any = object()
"""The default of `grads` in `Optimizer.step`, which cannot be None: a single parameter may have the gradient None."""


class Optimizer(Settings):
    """Applies an update rule to parameters, step by step.

    Parameters
    ----------
    params : array, tree of arrays, or list of group dicts
        A tree consists of dicts, lists, tuples and namedtuples. Its arrays are named by their paths, such as
        ``blocks.0.bias`` (a single array is named ``param``), and may be of any array-API library, in float16,
        bfloat16, float32 or float64; most rules also support complex dtypes. Leaves that are None are ignored.
        Alternatively, a list of group dicts, ``[{"params": [...], "lr": 0.1}, {"params": ...}, {"order_params":
        [...]}]``.
    rule : Rule
        The update rule.
    groups : mapping of pattern to dict or Rule, or list of such pairs, optional
        Other settings for some tensors: ``{"*.bias": {"weight_decay": 0.0}}``; or a rule of their own: ``{"head.*":
        SGD(lr=0.1)}``, or ``{"head.*": {"rule": rule, "lr": schedule}}`` with some of its values changed. A pattern is
        a glob that must match the whole name, a compiled regular expression that must be found in the name, or a
        function ``f(name, array)``. The first pattern that matches wins. Tensors that match no pattern use the
        optimizer's rule unchanged.
    engine : str, default "auto"
        What runs the rule. ``"auto"`` chooses the fastest for the arrays; ``"array_api"`` runs the rule as written.
    clip_norm : number, schedule or sequence, optional
        The maximum Euclidean norm of all gradients together, in (0, inf). If the norm is larger, all gradients are
        scaled down by the same factor.
    loss_scale : LossScale or number, optional
        The factor that you multiply the loss by. `step` divides the gradients by it, and skips the step if one is not
        finite. Multiply the loss by the attribute `loss_scale`.
    skip_nonfinite : bool, default False
        Skip each step with a gradient that is not finite, even without a loss scale. A skipped step changes no
        parameter, slot or count of updates; schedules continue. For stacked tensors, single layers are skipped: the
        layer with that index in all stacked tensors with the same number of layers; see `skipped_layers`. With a loss
        scale, or for a tensor that is not stacked, the whole step is skipped.
    accumulate : int, default 1
        The number of calls of `step` that make one update, with the mean of their gradients.
    stats : bool, default False
        Collect `Optimizer.stats` in each step.
    comm : communicator or Ranks, optional
        The ranks that share the work: a communicator of mpi4py, a process group of ``torch.distributed``, or one of
        `arrayopt.ranks.threads`. Each rank stores and updates its part of the state, and has all parameters after each
        step. All ranks make the same calls. See "Many processes and devices" in the documentation.

    Raises
    ------
    TypeError, ValueError
        If parameters, groups or options are invalid. The message says which, and why.

    Notes
    -----
    Writable arrays (NumPy, CuPy, PyTorch, ...) are updated in place. Others (JAX, read-only arrays) are replaced, so
    keep what `step` returns. A step that raises an error changes nothing, except what a hook has done.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> params = {"w": np.ones((2, 2)), "b": np.zeros(2)}
    >>> opt = ao.Optimizer(params, ao.LAMB(lr=0.1), groups={"b": {"weight_decay": 0.0, "adapt": False}})
    >>> params = opt.step({"w": np.ones((2, 2)), "b": np.ones(2)})
    >>> params["b"].round(3)
    array([-0.1, -0.1])
    """

    __slots__ = ("__weakref__", "_after", "_again", "_before")

    def __init__(
        self,
        params: Any,
        rule: Rule,
        *,
        groups: Groups | None = None,
        engine: str = "auto",
        clip_norm: Hyper | None = None,
        loss_scale: LossScale | float | None = None,
        skip_nonfinite: bool = False,
        accumulate: int = 1,
        stats: bool = False,
        comm: Any = None,
    ) -> None:
        params = as_params("Optimizer", params)
        object.__setattr__(self, "_team", team(mesh_of(params) if comm is None else comm, engine))
        with self._team.warned("Optimizer"):
            check_rule("Optimizer", rule, Rule)
            if not isinstance(engine, str):
                raise TypeError(f"Optimizer: `engine` must be a string; got {engine!r}")
            object.__setattr__(self, "_rule", rule)
            self._run = Run()
            self._guard, self._writer = Guard(self._run), Writer()
            self._parameters = Parameters(params, rule, groups, self._run, self._team.divide)
            self._step = GivenStep(
                engine, self._parameters, self._run, self._team, loss_scale, skip_nonfinite, accumulate
            )
            self._guard.arrive = self._step.arrive
            self._stats, self.clip_norm = Stats(partial(self._run.peek, "skipped"), enabled=stats), clip_norm
            self._before: list[Callable[[Optimizer, Any], Any]] = []
            self._after: list[Callable[[Optimizer], Any]] = []
            self._again = Again(self._guard, self._step, self._before) if self._team.size > 1 else None
        options: dict[str, Any] = {"loss_scale": loss_scale, "skip_nonfinite": skip_nonfinite, "accumulate": accumulate}
        options |= {"clip_norm": clip_norm, "engine": engine}
        self._team.agree("Optimizer", partial(alike, self._parameters.groups, options))

    # ---- the step ---------------------------------------------------------------------------------------------------

    def step(
        self,
        grads: Any = NOT_GIVEN,
        *_: Never,
        loss_scale: float | None = None,
        value: float | None = None,
        incomplete: bool = False,
        wait: bool = True,
        **given: Never,
    ) -> Any:
        """Update the parameters with gradients, or end a step that `give` has started.

        Parameters
        ----------
        grads : tree of arrays and None
            In the structure of the parameters, or a flat mapping by tensor name. If params were a list of group dicts:
            a flat list in their order. Shapes, library and device are those of the parameters; the dtype may be another
            of the same kind, real or complex. A tensor whose gradient is None is not changed in this step. Omit `grads`
            to end a step with `give`.
        loss_scale : number or 0-d array, optional
            The factor that the loss was multiplied by in this step, in [2**-126, 2**127]; only if the Optimizer was
            made without a loss scale.
        value : number or 0-d array, optional
            The function value, for rules that use `h.value`. It is not divided by the loss scale. With `accumulate`,
            the value of the last call is used. All ranks must pass the same value. If all tensors are stacked with the
            same number of layers, it may be an array of their library with one value per layer.
        incomplete : bool, default False
            End the step although `give` has refused a gradient. That tensor is not changed.
        wait : bool, default True
            With ranks, wait for the parameters that other ranks update. With False, they arrive in the background: call
            `wait` before you use one. `params` and all other calls wait too.

        Returns
        -------
        params
            The parameters, in the structure given: the same object if all arrays could be written in place. None with
            ``wait=False``.

        Raises
        ------
        TypeError
            If `loss_scale` or `value` is not a number, or something else is passed, such as parameters or `lr`.
        RuntimeError
            If another thread is using the Optimizer; or if `give` has refused a gradient.
        ValueError
            If gradients do not match the parameters (the message lists every mismatch) or share memory with slots or
            other parameters, a schedule's value is out of range, a sequence has run out, `loss_scale` is given twice, a
            rule needs a value that is not given, or ranks disagree about the step; or if gradients passed to `give`
            have been used without this `value` or `loss_scale`. Nothing is changed.
        RankError
            If another rank has failed or did not answer in time; the message says whether anything has changed.
        """
        if _:
            raise TypeError("Optimizer.step: pass gradients alone, opt.step(grads); the optimizer has the parameters")
        if given:
            for name in given.keys() & fields_of(type(self._rule)):
                todo = f"set opt.{name} before the step, or give the rule a schedule"
                raise TypeError(f"Optimizer.step has no `{name}`; {todo}")
            check_names("Optimizer.step", arguments_of(self.step), given, {})
        if value is not None:
            value = data("Optimizer.step: `value`", value, rank=1)
        if grads is NOT_GIVEN and (self._team.size > 1 or self._team.holds):
            return self._end_taken(loss_scale, value, incomplete=incomplete, wait=wait)
        if grads is NOT_GIVEN:
            for name, x in (("value", value), ("loss_scale", loss_scale)):
                if x is not None:
                    done = "tensors passed to `give` are already updated"
                    raise ValueError(f"Optimizer.step: `{name}` needs gradients; {done}")
            params = self._end_release(incomplete=incomplete)
            return params if wait else None
        with self._guard("Optimizer.step", changes=True):
            self._step.release.check_whole("Optimizer.step, with gradients")
            with self._team.warned("Optimizer.step"):
                for before in list(self._before):
                    replaced = self._guard.calling(before, self, grads)
                    grads = grads if replaced is None else replaced
                matched, stats = self._parameters.match(grads), self._stats.wanted
                coming = self._step.coming(loss_scale, self._limit(), value, wait=wait)
                begun = self._step.begin(coming, matched, stats=stats)
                self._made(coming, begun, stats=stats)
            return self.params if wait else None

    def give(self, name: str, grad: Any) -> None:
        """Pass the gradient of one tensor. `step()` without gradients ends the step.

        Without `comm`, the tensor is updated immediately. With ranks that have different gradients, gradients are
        reduced in buckets while others are still being computed, and `step()` updates the tensors; one such rank alone
        keeps a copy until then. In all cases, the gradient may be freed afterwards, and the result has the same bits as
        ``step(grads)``. All tensors use the same hyper-parameters. With `accumulate`, a gradient is added to the sum of
        its tensor, and `step()` ends a micro-step.

        Parameters
        ----------
        name : str
            The name of the tensor, as in `groups` and `state`.
        grad : array
            Its gradient, as for `step`.

        Raises
        ------
        TypeError, ValueError
            As for `step`; if the tensor is unknown, or was already given in this step; or if an option needs all
            gradients at once: hooks before a step, and ranks with ``grads="reduced"``; without `comm` also `clip_norm`,
            a loss scale, `skip_nonfinite` and `stats`. The tensor is not changed.
        RuntimeError
            If settings have changed since the first gradient of the step, without `comm`.
        RankError
            If another rank has failed or did not answer in time.

        Notes
        -----
        Between the first `give` and `step()` the Optimizer is in the middle of a step: it can be loaded, but not saved.
        With ranks, `give` may wait for other ranks, so all ranks give gradients of the same tensors, in any order. If
        `step()` raises an error, all gradients of the step must be given again; but with `accumulate`, before the last
        micro-step, only those that were refused or missing.

        Examples
        --------
        >>> import numpy as np, arrayopt as ao
        >>> opt = ao.Optimizer({"w": np.ones(2), "b": np.zeros(2)}, ao.SGD(lr=0.1))
        >>> opt.give("b", np.ones(2))
        >>> opt.give("w", np.ones(2))
        >>> opt.step()
        {'w': array([0.9, 0.9]), 'b': array([-0.1, -0.1])}
        """
        if self._again is not None and self._again.take(name, grad):
            return
        with self._guard("Optimizer.give", changes=True):
            step, places = self._step, self._parameters.places
            waits = self._waits() if self._before or not self._team.holds else []
            try:
                step.release.check(name, places, waits)
                step.give(name, places[name], grad)
            except BaseException as error:
                if isinstance(name, str) and name in places and (step.release.given or not waits):
                    step.release.refuse(name, error)
                raise

    def wait(self, name: str | None = None) -> Any:
        """Wait for one parameter, or for all, after ``step(grads, wait=False)``.

        Parameters
        ----------
        name : str, optional
            The name of the tensor, as in `groups` and `state`. Parameters arrive one after the other, so this also
            waits for those before it.

        Returns
        -------
        array or params
            The parameter; without a name all of them, in the structure given.

        Raises
        ------
        ValueError
            If there is no such tensor.
        RankError
            If another rank has failed or did not answer in time: load a checkpoint then.
        """
        if name is None:
            return self.params
        with self._guard("Optimizer.wait", arrived=False):
            place = self._parameters.places.get(name)
            if place is not None:
                self._step.arrive(place)
                return self._parameters.all[place].array
        raise ValueError(f"Optimizer.wait: there is no tensor {name!r}; {listed_names(self._parameters.places)}")

    def __del__(self) -> None:
        """Wait for parameters that other ranks are still sending, because no later call can."""
        step = getattr(self, "_step", None)  # None if `__init__` has raised an error
        if step is not None and step.is_arriving and not sys.is_finalizing():
            step.arrive()

    def _waits(self) -> list[str]:
        """The options that need all gradients at once, so that `give` cannot be used."""
        step, alone = self._step, self._team.size == 1 and not self._team.holds
        found = {
            "`clip_norm`": self.clip_norm is not None and alone,
            "a loss scale": (step.judging.scaling is not None or step.accumulator.scaled) and alone,
            "`skip_nonfinite`": step.judging.skip_nonfinite and alone,
            "`stats`": self._stats.wanted and alone,
            "hooks before a step": bool(self._before),
            "totals": alone and step.meets,
            "`grads='reduced'` of Ranks": not (alone or self._team.holds),
        }
        return [what for what, needed in found.items() if needed]

    def _end_taken(self, loss_scale: Any, value: Any, *, incomplete: bool, wait: bool, none: bool = False) -> Any:
        """End a step of several ranks whose gradients were passed to `give`; with `none`, even if there are none."""
        step, team, failed = self._step, self._team, True
        with self._guard("Optimizer.step", changes=True):
            try:
                given, rooms = step.collect()
                with team.warned("Optimizer.step"):
                    self._parameters.take_up()
                    stats = self._stats.wanted
                    coming = step.coming(loss_scale, self._limit(), value, wait=wait)
                    if loss_scale is not None and step.accumulator.every > 1:
                        raise ValueError(
                            "Optimizer.step: with `accumulate`, gradients passed to `give` are already in sums, so"
                            " `loss_scale` must be an option of the Optimizer"
                        )
                    if not (none or step.release or step.accumulator.begun):
                        raise TypeError("Optimizer.step: pass the gradients, or call `give` for each of them first")
                    step.release.check_end("Optimizer.step", incomplete=incomplete, again=step.accumulator.last)
                    begun = step.begin_taken(coming, given, rooms, stats=stats)
                    self._made(coming, begun, stats=stats)
                failed = False
            finally:
                step.drop_taken(failed=failed)
            return self.params if wait else None

    def _made(self, coming: Coming, begun: Begun, *, stats: bool) -> None:
        """Finish a step that has begun, and call the hooks after it."""
        step, team = self._step, self._team
        team.hooked = step.accumulator.last and (bool(self._after) or self._stats.requested)
        with team.after("Optimizer.step"):
            if step.make(coming, begun, stats=stats, record=self._record):
                self._guard.calling(self._stats.deliver)
                for after in list(self._after):
                    self._guard.calling(after, self)

    def _end_release(self, *, incomplete: bool) -> Any:
        """End the step that `give` has begun, in one process."""
        with self._guard("Optimizer.step", changes=True):
            if not self._step.release:
                raise TypeError("Optimizer.step: pass the gradients, or call `give` for each of them first")
            if self._step.end_release(incomplete=incomplete):
                for after in list(self._after):
                    self._guard.calling(after, self)
            return self.params

    def _record(self, reports: dict[str, Report], norm: Any) -> None:
        """Put the reports of a step into `stats`, in the order of the tensors."""
        places = self._parameters.places

        def place(name: str) -> tuple[int, int, str]:
            return places[name if name in places else stack_of(name)], len(name), name  # layer 10 after 9

        self._stats.replace({name: reports[name] for name in sorted(reports, key=place)}, norm)

    def _limit(self) -> float | None:
        """The value of `clip_norm` in the next step."""
        if self.clip_norm is None:
            return None
        return float(evaluate("Optimizer: `clip_norm`", self.clip_norm, self._run.steps, CLIP_NORM))

    def advance(self, *, loss_scale: float | None = None, value: float | None = None) -> None:
        """The host's part of a step: advance schedules, and prepare hyper-parameters for `launch`.

        Call it before each replay of a step that was captured in a CUDA graph: the replay then uses new learning rates
        and step counts. See the documentation, "On a GPU". ``step(grads)`` is ``advance()`` and ``launch(grads)``, with
        hooks and reports; `launch` leaves `stats` without reports, but with the global norm.

        Parameters
        ----------
        loss_scale, value : number or 0-d array, optional
            As for `step`.

        Raises
        ------
        TypeError, ValueError
            As `step`.
        RuntimeError
            If the Optimizer accumulates gradients, which only `step` supports; or if the structure of groups, or
            whether gradients are clipped, scaled or checked, has changed since the step was captured.
        """
        with self._guard("Optimizer.advance", changes=True), self._team.warned("Optimizer.advance"):
            self._step.release.check_whole("Optimizer.advance")
            self._parameters.take_up()
            self._step.advance(loss_scale, self._limit(), data("Optimizer.advance: `value`", value))

    def launch(self, grads: Any) -> Any:
        """The device's part of a step: update parameters and state with the hyper-parameters that `advance` prepared.

        On a GPU it can be captured in a CUDA graph, after one step with the same arrays.

        Parameters
        ----------
        grads : tree of arrays and None
            As for `step`.

        Returns
        -------
        params
            As `step` returns them.

        Raises
        ------
        ValueError
            As for `step`; or if arrays are not those of the captured step, which contains their addresses.
        RuntimeError
            If `advance` has not been called, or groups have changed since.
        """
        with self._guard("Optimizer.launch", changes=True):
            self._step.release.check_whole("Optimizer.launch")
            with nullcontext() if self._step.capturing else self._team.warned("Optimizer.step"):
                self._step.launched(self._parameters.match(grads), lambda _, norm: self._record({}, norm))()
            return self.params

    # ---- parameters and groups --------------------------------------------------------------------------------------

    def add_group(self, params: Any, **overrides: Any) -> Group:
        """Add parameters as a new group, with new state and update counts.

        Parameters
        ----------
        params : tree of arrays
            A dict with new keys if the parameters are a dict. An array, or a list to append, if they are a list.
        **overrides
            The group's own values of the rule's fields, and ``rule=`` if it has another rule.

        Returns
        -------
        Group
            The new group. `params` now holds the new parameters too, and `step` expects their gradients.

        Raises
        ------
        TypeError, ValueError
            As `Optimizer`; also if a name is taken, or the parameters are neither a dict nor a list.
        """
        with self._guard("Optimizer.add_group", changes=True), self._team.warned("Optimizer.add_group"):
            self._step.release.check_whole("Optimizer.add_group")
            group, put = self._parameters.add(params, self._rule, overrides)
            self._team.agree("Optimizer.add_group", partial(alike, [group], {}))
            with uninterrupted():
                put()
            return group

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def before_step(self, hook: Callable[["Optimizer", Any], Any]) -> Callable[[], None]:
        """Call ``hook(opt, grads)`` at the start of each step. If it returns gradients, the step uses those.

        Returns
        -------
        callable
            Call it to remove the hook.

        Raises
        ------
        TypeError
            If `hook` is not a function.

        Examples
        --------
        >>> import numpy as np, arrayopt as ao
        >>> opt = ao.Optimizer(np.zeros(2), ao.SGD(lr=1.0))
        >>> remove = opt.before_step(lambda opt, grads: 0.5 * grads)
        >>> opt.step(np.ones(2))
        array([-0.5, -0.5])
        >>> remove()
        """
        return attach(self._before, hook)

    def after_step(self, hook: Callable[["Optimizer"], Any]) -> Callable[[], None]:
        """Call ``hook(opt)`` at the end of each step. If it raises an error, the step has been made.

        Returns
        -------
        callable
            Call it to remove the hook.

        Raises
        ------
        TypeError
            If `hook` is not a function.
        """
        return attach(self._after, hook)

    def _take_place(self, old: "Optimizer | None") -> None:
        """Take over the hooks of an old optimizer, which can still be removed, and its loss scale and skipped steps.

        Users may hold references to slots of the old optimizer; these are slots of this one now.
        """
        if old is not None:
            if old._parameters.lent:
                self._parameters.lend()
            self._run.loss = old._run.loss
            self._before, self._after = old._before, old._after
            self._again = None if self._again is None else Again(self._guard, self._step, self._before)

    # ---- showing -----------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Describe how a step runs: which engine runs which tensors, why it was chosen, and its passes over memory.

        The bytes of state are those of this process.
        """
        every = self._parameters.all
        steps = self._step.explain(clips=self.clip_norm is not None)
        return Text("\n".join([*self._team.explain(every), steps, *explain_state(every)]))
