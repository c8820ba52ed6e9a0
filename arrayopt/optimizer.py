"""The optimizer: parameters, their groups, and the state that goes with them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from arrayopt.arrays import array_namespace, detached, size
from arrayopt.foreign import OPTIMIZER, unknown
from arrayopt.hyper import Hyper, coerce, evaluate
from arrayopt.params.groups import Group, Groups, fields_of, unknown_key
from arrayopt.params.parameters import Parameters
from arrayopt.rules.base import Rule, hypers
from arrayopt.saving.saved import Saved
from arrayopt.state.loss_scale import LossScale
from arrayopt.state.run import Run, checked_count
from arrayopt.state.tensors import TensorState
from arrayopt.state.verdict import CLIP_NORM
from arrayopt.step.guard import Guard
from arrayopt.step.hooks import attach
from arrayopt.step.stats import Stats
from arrayopt.step.step import Step

__all__ = ["Optimizer"]


class Optimizer(Saved):
    """Applies an update rule to parameters, step by step.

    Parameters
    ----------
    params : array, tree of arrays, or list of group dicts
        A tree is made of dict, list, tuple and namedtuple; its arrays are named by their paths, such as
        ``blocks.0.bias`` (a lone array: ``param``), and may be of any array-API library, of float16, bfloat16, float32
        or float64 (LAMB and AdamW: complex too). Leaves that are None are left out. Or a list of group dicts,
        ``[{"params": [...], "lr": 0.1}, {"params": ...}, {"order_params": [...]}]``.
    rule : Rule
        The update rule.
    groups : mapping of pattern to dict, or list of such pairs, optional
        What some tensors have otherwise: ``{"*.bias": {"weight_decay": 0.0}}``. A pattern is a glob over the whole
        name, a compiled regular expression (searched for), or a function ``f(name, array)``. The first match wins;
        tensors without one follow the rule as it is.
    engine : str, default "auto"
        What runs the rule: ``"auto"`` chooses by the arrays; ``"array_api"`` runs it as written.
    clip_norm : number, schedule or sequence, optional
        Scale all gradients down together where their joint Euclidean norm is above this, in (0, inf).
    loss_scale : LossScale or number, optional
        What the gradients are of the loss times: they are divided by it, and where one is not finite the step is
        skipped. The loss is to be multiplied by the attribute `loss_scale`.
    skip_nonfinite : bool, default False
        Skip steps with a gradient that is not finite, without a loss scale too. A skipped step changes no parameter,
        slot or count of updates; schedules go on.
    accumulate : int, default 1
        So many calls of `step` make a step, by the mean of their gradients.
    stats : bool, default False
        Collect `Optimizer.stats` in each step.

    Attributes
    ----------
    params
        The parameters, in the structure given (list of group dicts: a flat list in their order). Arrays in it may be
        replaced by others of the same shape, dtype, library and device: ``opt.params["w"] = w``, or all at once:
        ``opt.params = tree``. The optimizer goes on from them.
    rule : Rule
        What tensors follow where their group does not say otherwise. Its fields can be read and set on the optimizer:
        ``opt.lr = 0.1``.
    groups : tuple of Group
        The groups, in order; their fields can be set too: ``opt.groups[0].lr = 0.1``.
    step_count : int
        Steps made, skipped ones too: what schedules see in the next step.
    loss_scale : float or 0-d array
        What to multiply the loss by for the next step; 1.0 where the Optimizer was made without.
    state : mapping of str to mapping
        For each tensor its number of updates ``t`` and its slots, by name.
    stats : Stats
        Trust ratio and norms of the last step, with ``stats=True``; the joint norm and how many steps were skipped.

    Raises
    ------
    TypeError, ValueError
        For parameters, groups or options that cannot be used, saying which and why.

    Notes
    -----
    Writable arrays (NumPy, CuPy, PyTorch, ...) are updated in place; others (JAX, read-only) are replaced, so keep what
    `step` returns. A step that raises has changed nothing, but for what a hook did.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> params = {"w": np.ones((2, 2)), "b": np.zeros(2)}
    >>> opt = ao.Optimizer(params, ao.LAMB(lr=0.1), groups={"b": {"weight_decay": 0.0, "adapt": False}})
    >>> params = opt.step({"w": np.ones((2, 2)), "b": np.ones(2)})
    >>> params["b"].round(3)
    array([-0.1, -0.1])
    """

    __slots__ = ("_after", "_before", "_stats")

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
    ) -> None:
        if not isinstance(rule, Rule):
            raise TypeError(f"Optimizer: `rule` must be a Rule such as LAMB(lr=1e-3); got {rule!r}")
        if not isinstance(engine, str):
            raise TypeError(f"Optimizer: `engine` must be a string; got {engine!r}")
        object.__setattr__(self, "_rule", rule)
        self._run = Run()
        self._guard = Guard()
        self._parameters = Parameters(params, rule, groups, self._run)
        self._step = Step(engine, self._parameters, self._run, loss_scale, skip_nonfinite, accumulate)
        self._stats, self.clip_norm = Stats(enabled=stats), clip_norm
        self._before: list[Callable[[Optimizer, Any], Any]] = []
        self._after: list[Callable[[Optimizer], Any]] = []

    # ---- the step ---------------------------------------------------------------------------------------------------

    def step(self, grads: Any, *, loss_scale: float | None = None) -> Any:
        """Update the parameters by their gradients.

        Parameters
        ----------
        grads : tree of arrays and None
            In the structure of the parameters, or a flat mapping by tensor name; with params as a list of group dicts,
            a flat list in their order. Shapes, library and device as the parameters'; any floating dtype of the same
            kind. A tensor whose gradient is None is left out of this step and keeps its own number of updates.
        loss_scale : number or 0-d array, optional
            What the gradients are of the loss times in this step, in (0, inf), for an Optimizer without one of its own.

        Returns
        -------
        params
            The parameters, in the structure given: the very same object where all arrays could be written in place.

        Raises
        ------
        TypeError
            If `loss_scale` is not a number.
        RuntimeError
            If another thread is using the Optimizer.
        ValueError
            If gradients do not match the parameters (listing every mismatch), or a schedule's value is out of range or
            its sequence has run out, or `loss_scale` is given twice. Nothing has been changed then.
        """
        with self._guard("Optimizer.step"):
            for before in list(self._before):
                replaced = before(self, grads)
                grads = grads if replaced is None else replaced
            matched = self._parameters.match(grads)
            made = self._step.make(self._step.coming(loss_scale, self._limit()), matched, stats=self._stats.wanted)
            if made is not None:
                self._stats.replace(*made, self._skipped)
                for after in list(self._after):
                    after(self)
            return self.params

    def _limit(self) -> float | None:
        """What the joint norm is limited to in the next step."""
        if self.clip_norm is None:
            return None
        return float(evaluate("Optimizer: `clip_norm`", self.clip_norm, self._run.steps, CLIP_NORM))

    def _skipped(self) -> Any:
        return self._run.peek("skipped")

    def advance(self, *, loss_scale: float | None = None) -> None:
        """The host's half of a step: schedules move on, and hyper-parameters go where `launch` finds them.

        A step that was captured in a CUDA graph is replayed after it, with new learning rates and step counts; see the
        documentation, "On a GPU". ``step(grads)`` is ``advance()`` and ``launch(grads)``, with hooks and statistics.

        Parameters
        ----------
        loss_scale : number or 0-d array, optional
            As for `step`.

        Raises
        ------
        TypeError, ValueError
            As `step`.
        RuntimeError
            If the Optimizer accumulates gradients, which `step` alone does.
        """
        with self._guard("Optimizer.advance"):
            self._parameters.take_up()
            self._step.advance(loss_scale, self._limit())

    def launch(self, grads: Any) -> Any:
        """The device's half of a step: parameters and state are updated, with what `advance` has said.

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
            As `step`; or if arrays are not those of a captured step, which has their addresses.
        RuntimeError
            If `advance` has not been called, or groups have changed since.
        """
        with self._guard("Optimizer.launch"):
            self._step.launch(self._parameters.match(grads))
            return self.params

    # ---- parameters and groups --------------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in order."""
        return tuple(self._parameters.groups)

    @property
    def step_count(self) -> int:
        """Steps made, skipped ones too: what schedules see in the next step."""
        return self._run.steps

    @property
    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """For each tensor its number of updates ``t`` and its slots, by name."""
        self._parameters.lend()
        return MappingProxyType({x.name: TensorState(x) for x in self._parameters.all})

    @property
    def stats(self) -> Stats:
        """Trust ratio and norms of the last step, with ``stats=True``."""
        return self._stats

    @property
    def loss_scale(self) -> Any:
        """What to multiply the loss by for the next step; 1.0 where the Optimizer was made without.

        A float; where a GPU decides if a step is skipped, a 0-d array that is there, without a wait.
        """
        return self._run.peek("scale")

    def now(self, name: str = "lr") -> float | dict[str, float | None] | None:
        """The value of a hyper-parameter in the next step, as a plain number: for logs and progress bars.

        Parameters
        ----------
        name : str, default "lr"
            A field of the rule that is a number: ``"lr"``, ``"weight_decay"``, ...

        Returns
        -------
        float, dict of str to float, or None
            One number where all groups have the same, else the number of each group by its label. None where the field
            is off, and for the `lr` of `Adafactor` and `CAME` with ``relative_step=True``: they take it from each
            tensor's number of updates.

        Raises
        ------
        ValueError
            If the rule has no such number, or a schedule's value is out of range or its sequence has run out.

        Examples
        --------
        >>> import numpy as np, arrayopt as ao
        >>> opt = ao.Optimizer({"w": np.ones(2), "b": np.ones(2)}, ao.SGD(lr=lambda step: 0.1 / (step + 1)))
        >>> opt.now()
        0.1
        """
        if name not in hypers(type(self._rule)):
            raise ValueError(f"Optimizer.now: {unknown_key(self._rule, name)}")
        found: dict[str, float | None] = {}
        for i, group in enumerate(self.groups):
            value = group.rule.at(self.step_count)[name]
            label = group.label if group.label not in found else f"{group.label} ({i})"
            found[label] = None if value is None else float(value)
        return next(iter(found.values())) if len(set(found.values())) == 1 else found

    def nonfinite(self) -> list[str]:
        """The names of the tensors whose gradients were not finite in the last step; waits for the device.

        Returns
        -------
        list of str
            A RuntimeError if no step has looked, for want of `skip_nonfinite`, a loss scale or `clip_norm`.
        """
        return self._step.judging.nonfinite()

    def averaged(self) -> Any:
        """Copies of the parameters' moving averages, in the parameters' structure and dtypes.

        Returns
        -------
        params
            For tensors without `ema_decay`, copies of the parameters themselves.
        """
        self._parameters.take_up()
        now = [(x.array, detached(x.slots.get("ema", x.array))) for x in self._parameters.all]
        return self._parameters.tree_of([array_namespace(p).astype(average, p.dtype) for p, average in now])

    @property
    def rule(self) -> Rule:
        """What tensors follow where their group does not say otherwise."""
        return self._rule

    def __getstate__(self) -> Any:
        return None, {name: getattr(self, name) for name in (*Saved.__slots__, *self.__slots__)}

    def __setstate__(self, state: Any) -> None:
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in fields_of(type(self._rule)):
            return getattr(self._rule, name)
        if name.startswith("_"):
            raise AttributeError(f"Optimizer has no attribute {name!r}")
        public = [x for x in dir(type(self)) if not x.startswith("_")]
        raise AttributeError(unknown("Optimizer", [*fields_of(type(self._rule)), *public], name, OPTIMIZER))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "params":
            with self._guard("Optimizer.params"):
                self._parameters.exchange(value, "Optimizer.params")
        elif name in fields_of(type(self._rule)):
            self._rule = self._parameters.follow(self._rule, {name: value})
        elif name == "clip_norm":
            object.__setattr__(self, name, coerce("Optimizer: `clip_norm`", value, CLIP_NORM, optional=True))
        elif name == "step_count":
            self._run.steps = checked_count("Optimizer: `step_count`", value)
        elif name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"Optimizer: {unknown_key(self._rule, name, value)}")

    def add_group(self, params: Any, **overrides: Any) -> Group:
        """Take more parameters in, as a new group; they start with fresh state and a count of their own.

        Parameters
        ----------
        params : tree of arrays
            A dict of new keys where the parameters are a dict; an array or a list, to append, where they are a list.
        **overrides
            Hyper-parameters that the group has for itself.

        Returns
        -------
        Group
            The new group. `params`, and so what `step` expects and returns, now holds the new parameters too.

        Raises
        ------
        TypeError, ValueError
            As for `Optimizer`; for names that are taken; for parameters that are neither a dict nor a list.
        """
        with self._guard("Optimizer.add_group"):
            return self._parameters.add(params, self._rule, overrides)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def before_step(self, hook: Callable[["Optimizer", Any], Any]) -> Callable[[], None]:
        """Have ``hook(opt, grads)`` called first in each step; what it returns, if not None, are the gradients.

        Returns
        -------
        callable
            Takes the hook away again.
        """
        return attach(self._before, hook)

    def after_step(self, hook: Callable[["Optimizer"], Any]) -> Callable[[], None]:
        """Have ``hook(opt)`` called at the end of each step.

        Returns
        -------
        callable
            Takes the hook away again.
        """
        return attach(self._after, hook)

    # ---- showing -----------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """How a step is run: for each bucket of tensors the engine, why it was chosen, and what it does."""
        return self._step.explain(clips=self.clip_norm is not None)

    def __repr__(self) -> str:
        every, groups = self._parameters.all, self._parameters.groups
        total = sum(size(x.array) for x in every)
        head = f"Optimizer({self._rule!r}, {len(every)} tensors, {total} parameters, step {self.step_count})"
        return "\n".join([head, *(f"  {group!r}" for group in groups if len(groups) > 1 or group.overridden)])
