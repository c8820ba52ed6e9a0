"""The optimizer: parameters, their groups, and the state that goes with them."""

import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from arrayopt.arrays import Array, dtype_name, is_array, place, size, writable
from arrayopt.clipping import clip_factor, global_norm
from arrayopt.engines import Bucket, explain_bucket, select
from arrayopt.groups import Group, Groups, Tensor, assign, fields_of, new_slots, override, unknown_key
from arrayopt.hyper import Hyper, coerce, evaluate
from arrayopt.params import extend, is_group_list, match_grads, named_params, parse_group_list
from arrayopt.rules.base import Rule
from arrayopt.state import CLIP_NORM, dump, load
from arrayopt.stats import Stats
from arrayopt.trees import flatten, rebuild

__all__ = ["Optimizer"]

_ARRAY, _NAME, _FORM = map(operator.attrgetter, ("array", "name", "form"))
_LOOK = operator.attrgetter("dtype", "shape")


class Optimizer:
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
    stats : bool, default False
        Collect `Optimizer.stats` in each step.

    Attributes
    ----------
    params
        The parameters, in the structure given (list of group dicts: a flat list in their order).
    rule : Rule
        What tensors follow where their group does not say otherwise. Its fields can be read and set on the optimizer:
        ``opt.lr = 0.1``.
    groups : tuple of Group
        The groups, in order; their fields can be set too: ``opt.groups[0].lr = 0.1``.
    step_count : int
        Steps made: what schedules see in the next step.
    state : mapping of str to mapping
        For each tensor its number of updates ``t`` and its slots, by name.
    stats : Stats
        Trust ratio and norms of the last step, with ``stats=True``.

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

    __slots__ = (
        "_after",
        "_before",
        "_by_position",
        "_engine",
        "_groups",
        "_in_place",
        "_leaves",
        "_made",
        "_rule",
        "_stats",
        "_tensors",
        "_tree",
        "clip_norm",
        "step_count",
    )

    _rule: Rule
    step_count: int
    clip_norm: Hyper | None

    def __init__(
        self,
        params: Any,
        rule: Rule,
        *,
        groups: Groups | None = None,
        engine: str = "auto",
        clip_norm: Hyper | None = None,
        stats: bool = False,
    ) -> None:
        if not isinstance(rule, Rule):
            raise TypeError(f"Optimizer: `rule` must be a Rule such as LAMB(lr=1e-3); got {rule!r}")
        by_position = is_group_list(params)
        if by_position:
            if groups is not None:
                raise ValueError("Optimizer: give `groups`, or params as a list of group dicts, not both")
            named, entries = parse_group_list(params)
            made: Any = [(str(i), overrides, names) for i, (overrides, names) in enumerate(entries)]
            tree: Any = [leaf for _, leaf in named]
        else:
            tree = list(params) if isinstance(params, Iterator) else params
            named = named_params(tree)
            made = assign(rule, groups, named)
        object.__setattr__(self, "_rule", rule)
        self._engine, self.clip_norm = engine, clip_norm
        self._stats, self.step_count = Stats(enabled=stats), 0
        self._tree, self._by_position = tree, by_position
        tensors = {name: Tensor(name, leaf) for name, leaf in named}
        self._tensors = list(tensors.values())
        self._groups = [Group(label, rule, over, [tensors[name] for name in names]) for label, over, names in made]
        self._made: tuple[list[Any], list[Bucket]] = ([], [])
        self._before: list[Callable[[Optimizer, Any], Any]] = []
        self._after: list[Callable[[Optimizer], Any]] = []
        self._in_place, self._leaves = all(writable(leaf) for _, leaf in named), [leaf for _, leaf in named]
        self._start(self._groups)
        for bucket in self._buckets():
            select(engine, bucket)

    def _start(self, groups: list[Group]) -> None:
        """Give tensors their first state."""
        for group in groups:
            for tensor in group.tensors:
                tensor.slots = new_slots(group.rule, tensor.name, tensor.array)

    # ---- the step ---------------------------------------------------------------------------------------------------

    def step(self, grads: Any) -> Any:
        """Update the parameters by their gradients.

        Parameters
        ----------
        grads : tree of arrays and None
            In the structure of the parameters, or a flat mapping by tensor name; with params as a list of group dicts,
            a flat list in their order. Shapes, library and device as the parameters'; any floating dtype of the same
            kind. A tensor whose gradient is None is left out of this step and keeps its own number of updates.

        Returns
        -------
        params
            The parameters, in the structure given: the very same object where all arrays could be written in place.

        Raises
        ------
        ValueError
            If gradients do not match the parameters (listing every mismatch), or a schedule's value is out of range or
            its sequence has run out. Nothing has been changed then.
        """
        for before in list(self._before):
            replaced = before(self, grads)
            grads = grads if replaced is None else replaced
        matched = self._match(grads)
        limit = evaluate("Optimizer: `clip_norm`", self.clip_norm, self.step_count, CLIP_NORM)
        limit = float(limit) if is_array(limit) else limit
        norm = None if limit is None else global_norm([g for g in matched if g is not None])
        clip = None if limit is None else clip_factor(norm, limit)
        launches = []
        for bucket in self._buckets():
            hypers = [group.rule.at(self.step_count) for group in bucket.groups]
            engine, _ = select(self._engine, bucket)
            given = list(map(matched.__getitem__, bucket.places))
            launches.append(engine.prepare(bucket, given, hypers, clip=clip, stats=self._stats.enabled))
        reports: dict[str, dict[str, Array]] = {}
        for launch in launches:
            reports |= launch()
        self.step_count += 1
        if self._in_place:  # some array may have become read-only and have been replaced
            self._in_place = all(map(operator.is_, map(_ARRAY, self._tensors), self._leaves))
        if self._stats.enabled:
            self._stats.replace(reports)
            self._stats.global_norm = norm
        for after in list(self._after):
            after(self)
        return self.params

    def _match(self, grads: Any) -> list[Array | None]:
        """The tensors' gradients, checked."""
        if type(grads) is dict and len(grads) == len(self._tensors):  # at first sight; what is not right is looked at
            names, forms = list(map(_NAME, self._tensors)), map(_FORM, self._tensors)
            given = list(map(grads.get, names))
            kinds = set(map(type, given))
            if kinds == {np.ndarray} and all(map(operator.eq, map(_LOOK, given), forms)):
                return given
            some = type(None) in kinds and kinds <= {np.ndarray, type(None)} and all(map(grads.__contains__, names))
            if some and all(g is None or _LOOK(g) == form for g, form in zip(given, forms, strict=True)):
                return given
        named = [(tensor.name, tensor.array) for tensor in self._tensors]
        return list(match_grads("Optimizer.step", named, grads, by_position=self._by_position).values())

    def _buckets(self) -> list[Bucket]:
        """Tensors that share a structure of rule, a dtype, a library and a device; kept until a structure changes."""
        structures = [group.rule.structure for group in self._groups]
        if structures != self._made[0]:
            buckets: dict[Any, Bucket] = {}
            position = {tensor.name: i for i, tensor in enumerate(self._tensors)}
            for group, structure in zip(self._groups, structures, strict=True):
                for tensor in group.tensors:
                    xp, device = place(tensor.array)
                    key = (structure, dtype_name(tensor.array), xp, str(device))
                    bucket = buckets.setdefault(key, Bucket())
                    if group not in bucket.groups:
                        bucket.groups.append(group)
                    bucket.tensors.append(tensor)
                    bucket.places.append(position[tensor.name])
                    bucket.group_of.append(len(bucket.groups) - 1)
            self._made = structures, list(buckets.values())
        return self._made[1]

    # ---- parameters and groups --------------------------------------------------------------------------------------

    @property
    def params(self) -> Any:
        """The parameters, in the structure given."""
        if self._in_place:
            return self._tree
        leaves = [leaf for _, leaf in flatten(self._tree) if leaf is not None]
        if any(tensor.array is not leaf for tensor, leaf in zip(self._tensors, leaves, strict=True)):
            new = iter(self._tensors)
            self._tree = rebuild(self._tree, lambda leaf: leaf if leaf is None else next(new).array)
        return self._tree

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in order."""
        return tuple(self._groups)

    @property
    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """For each tensor its number of updates ``t`` and its slots, by name."""
        return MappingProxyType({x.name: MappingProxyType({"t": x.t, **x.slots}) for x in self._tensors})

    @property
    def stats(self) -> Stats:
        """Trust ratio and norms of the last step, with ``stats=True``."""
        return self._stats

    @property
    def rule(self) -> Rule:
        """What tensors follow where their group does not say otherwise."""
        return self._rule

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "_made"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "_made": ([], [])}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in fields_of(type(self._rule)):
            return getattr(self._rule, name)
        raise AttributeError(f"Optimizer has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in fields_of(type(self._rule)):
            self._set_field(name, value)
        elif name == "clip_norm":
            object.__setattr__(self, name, coerce("Optimizer: `clip_norm`", value, CLIP_NORM, optional=True))
        elif name == "step_count" or name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"Optimizer: {unknown_key(self._rule, name)}")

    def _set_field(self, name: str, value: Any) -> None:
        """Change a field of the rule, for all groups that do not set it for themselves."""
        change = {name: value}
        rule = override(self._rule, change, "Optimizer")
        following = [group for group in self._groups if name not in group.overridden]
        rules = [group.checked(group.rule, change) for group in following]
        self._rule = rule
        for group, new in zip(following, rules, strict=True):
            group.replace_rule(new)

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
        tree, named = extend("Optimizer.add_group", self._tree, params, [x.name for x in self._tensors])
        group = Group(f"added {len(self._groups)}", self._rule, overrides, [Tensor(name, leaf) for name, leaf in named])
        self._start([group])
        self._groups.append(group)
        self._tensors += group.tensors
        self._in_place = self._in_place and all(writable(leaf) for _, leaf in named)
        self._leaves += [leaf for _, leaf in named]
        self._tree = tree
        return group

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def before_step(self, hook: Callable[["Optimizer", Any], Any]) -> Callable[[], None]:
        """Have ``hook(opt, grads)`` called first in each step; what it returns, if not None, are the gradients.

        Returns
        -------
        callable
            Takes the hook away again.
        """
        return _attach(self._before, hook)

    def after_step(self, hook: Callable[["Optimizer"], Any]) -> Callable[[], None]:
        """Have ``hook(opt)`` called at the end of each step.

        Returns
        -------
        callable
            Takes the hook away again.
        """
        return _attach(self._after, hook)

    # ---- saving and showing -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of everything but the parameters: step count, hyper-parameters, and each tensor's count and slots.

        Returns
        -------
        dict
            Plain dicts, lists, numbers and *copies* of arrays; schedules as they are. It can be pickled if they can.
        """
        return dump(self.step_count, self.clip_norm, self._rule, self._groups)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a snapshot: state, counts and hyper-parameters become those of the saved optimizer.

        Parameters
        ----------
        saved : dict
            What `state_dict` returned, of an optimizer over tensors of the same names, shapes and dtypes, in the same
            groups, under rules with the same switches. The arrays are copied.

        Raises
        ------
        TypeError
            If it is no such dict.
        ValueError
            If it does not fit, listing every mismatch. Nothing has been changed then.
        """
        self.step_count, self.clip_norm, self._rule = load(saved, self._rule, self._groups)

    def explain(self) -> str:
        """How a step is run: for each bucket of tensors the engine, why it was chosen, and what it does."""
        return "\n".join(explain_bucket(bucket, self._engine) for bucket in self._buckets())

    def __repr__(self) -> str:
        total = sum(size(x.array) for x in self._tensors)
        head = f"Optimizer({self._rule!r}, {len(self._tensors)} tensors, {total} parameters, step {self.step_count})"
        return "\n".join(
            [head, *(f"  {group!r}" for group in self._groups if len(self._groups) > 1 or group.overridden)]
        )


def _attach(hooks: list[Any], hook: Any) -> Callable[[], None]:
    """Add a hook, and return what takes it away."""
    if not callable(hook):
        raise TypeError(f"Optimizer: a hook must be a function; got {hook!r}")
    entry = _Hook(hook)
    hooks.append(entry)
    return lambda: hooks.remove(entry) if entry in hooks else None


class _Hook:
    """A hook, each time that it is given another one."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        return self.hook(*args)
