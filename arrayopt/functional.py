"""`init` and `update`: pure functions for optimization, which write to no array and can be traced or differentiated."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import numpy as np

from arrayopt.arrays import array_namespace, beside, detached, dtype_name, is_array, on_its_device, size, working_dtype
from arrayopt.engines.array_api.apply import apply
from arrayopt.engines.array_api.apply_one import Done, Update
from arrayopt.engines.array_api.together import Work, together
from arrayopt.engines.layers import unless
from arrayopt.hyper import checked_bool, concrete, data, scalar
from arrayopt.params.given import named_params
from arrayopt.params.grads import match_grads
from arrayopt.params.groups import Groups, assign, grouped
from arrayopt.params.trees import rebuild
from arrayopt.rules.base import Rule
from arrayopt.rules.gradients import GradientNorms
from arrayopt.rules.named import check_rule
from arrayopt.rules.one_unknown import check_alike
from arrayopt.rules.words import choose
from arrayopt.state.loss_scale import LOSS_SCALE, LossScale
from arrayopt.state.quantized import scales
from arrayopt.state.run import is_count
from arrayopt.state.slots import new_slots
from arrayopt.state.verdict import CLIP_NORM, Verdict, joint_norm, judge


def init(
    rule: Rule,
    params: Any,
    *,
    groups: Groups | None = None,
    loss_scale: LossScale | None = None,
    skip_nonfinite: bool = False,
) -> dict[str, Any]:
    """Return the state of a rule before the first step, as a plain tree.

    Parameters
    ----------
    rule : Rule
        The update rule.
    params : array, or dict, list, tuple or namedtuple of them
        The parameters.
    groups : mapping of pattern to dict or Rule, optional
        As for `Optimizer`; pass the same groups to `update`.
    loss_scale : LossScale, optional
        A loss scale whose value is part of the state; pass the same one to `update`.
    skip_nonfinite : bool, default False
        Give each layer of a stacked tensor its own update count from the start. This is needed for ``jax.lax.scan``
        over `update` with `skip_nonfinite`, which otherwise adds these counts in its first call.

    Returns
    -------
    dict
        ``{"step": 0, "tensors": {name: {"t": 0, slot: array, ...}}}``: steps made, and for each tensor its own number
        of updates and its slots, with masters and averages. With a loss scale, ``"loss_scale": {"scale", "good"}``.

    Raises
    ------
    TypeError, ValueError
        As for `Optimizer`.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.init(ao.SGD(lr=0.1, momentum=0.9), {"w": np.ones(2)})
    {'step': 0, 'tensors': {'w': {'t': 0, 'buf': array([0., 0.])}}}
    """
    check_rule("init", rule, Rule)
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(f"init: `loss_scale` must be a LossScale or None; got {loss_scale!r}")
    checked_bool("init: `skip_nonfinite`", skip_nonfinite)
    named = named_params(params, "init", functional=True)
    rules = _rules(rule, groups, named)
    tensors: dict[str, Any] = {name: {"t": 0, **new_slots(rules[name], name, p)} for name, p in named}
    for name, p in named:
        if skip_nonfinite and rules[name].stacked:
            tensors[name]["t"] = _counts(p)
    state = {"step": 0, "tensors": tensors}
    return state if loss_scale is None else {**state, "loss_scale": loss_scale.start()}


Rule.init = init  # set here, because `arrayopt.rules` does not import code for trees of parameters


@overload
def update(
    rule: Rule,
    params: Any,
    grads: Any,
    state: dict[str, Any],
    *,
    groups: Groups | None = None,
    clip_norm: Any = None,
    loss_scale: Any = None,
    skip_nonfinite: bool = False,
    value: Any = None,
    stats: Literal[False] = False,
) -> tuple[Any, dict[str, Any]]: ...
@overload
def update(
    rule: Rule,
    params: Any,
    grads: Any,
    state: dict[str, Any],
    *,
    groups: Groups | None = None,
    clip_norm: Any = None,
    loss_scale: Any = None,
    skip_nonfinite: bool = False,
    value: Any = None,
    stats: Literal[True],
) -> tuple[Any, dict[str, Any], dict[str, Any]]: ...
def update(
    rule: Rule,
    params: Any,
    grads: Any,
    state: dict[str, Any],
    *,
    groups: Groups | None = None,
    clip_norm: Any = None,
    loss_scale: Any = None,
    skip_nonfinite: bool = False,
    value: Any = None,
    stats: bool = False,
) -> Any:
    """Return the parameters and the state after one step, without changing the old ones.

    Parameters
    ----------
    rule : Rule
        The update rule; its schedules get ``state["step"]``.
    params : tree of arrays
        The parameters.
    grads : tree of arrays and None
        Gradients, in the structure of params or by tensor name. A tensor whose gradient is None is not changed.
    state : dict
        The state from `init` or the last `update`.
    groups : mapping of pattern to dict or Rule, optional
        As for `Optimizer`.
    clip_norm : number or 0-d array, optional
        As for `Optimizer`, without schedules.
    loss_scale : LossScale, number or 0-d array, optional
        The factor that the loss was multiplied by; gradients are divided by it. Pass the number, or the same
        `LossScale` as to `init`; then multiply the loss by ``state["loss_scale"]["scale"]``. A gradient that is not
        finite skips the step.
    skip_nonfinite : bool, default False
        Skip each step with a gradient that is not finite, even without a loss scale. A skipped step changes only
        ``state["step"]`` and the loss scale. Layers of stacked tensors are skipped separately, as by `Optimizer`; their
        ``"t"`` then has a number for each layer.
    value : number or 0-d array, optional
        As for `Optimizer.step`; it may be traced.
    stats : bool, default False
        Return statistics too.

    Returns
    -------
    params, state
        The new parameters and state, in the same structure and dtypes.
    stats
        With ``stats=True``: the norms of each tensor with a gradient, and its trust ratio if the rule has one, ``{name:
        {"param_norm": ..., ...}}``, as 0-d arrays. They are undefined for a skipped step.

    Raises
    ------
    TypeError, ValueError
        As for `Optimizer.step`.

    Notes
    -----
    Works under ``jax.jit``, ``jax.grad`` and ``jax.lax.scan``, with PyTorch's autograd, and on every array-API library.
    A traced step cannot raise: a sequence that runs out gives NaN, and schedule values are not checked. Nor can it
    branch: to skip a step, it selects the old parameters and state with `where`.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> rule, params = ao.SGD(lr=0.1), {"w": np.ones(2)}
    >>> params, state = ao.update(rule, params, {"w": np.ones(2)}, rule.init(params))
    >>> params, state["step"]
    ({'w': array([0.9, 0.9])}, 1)
    """
    check_rule("update", rule, Rule)
    _check_state(state)
    checked_bool("update: `skip_nonfinite`", skip_nonfinite)
    checked_bool("update: `stats`", stats)
    value = data("update: `value`", value)
    clip_norm = scalar("update: `clip_norm`", clip_norm, CLIP_NORM, optional=True)
    named = named_params(params, "update", functional=True)
    matched = match_grads("update", named, grads, devices=False)
    if set(state["tensors"]) != {name for name, _ in named}:
        raise ValueError(
            f"update: state and params must have the same tensors; state has {sorted(state['tensors'])}, params"
            f" {sorted(name for name, _ in named)}"
        )
    if isinstance(loss_scale, LossScale) and "loss_scale" not in state:
        raise ValueError("update: `loss_scale` is a LossScale, but state has none; pass it to init too")
    own = isinstance(loss_scale, LossScale)
    given = state["loss_scale"]["scale"] if own else loss_scale
    scale = scalar("update: `loss_scale`", given, LOSS_SCALE, optional=not own)
    rules = _rules(rule, groups, named)
    left = _left_out(named, matched, rules) if skip_nonfinite and scale is None else {}
    verdict = _verdict(named, matched, scale, clip_norm, scale is not None or skip_nonfinite, left)
    hypers = {id(r): r.at(state["step"], value) for r in rules.values()}
    if value is not None:
        check_alike((r, hypers[id(r)]) for r in rules.values())
    tensors = dict(state["tensors"])
    new: list[Any] = []
    reports: dict[str, Any] = {}
    work = {}
    for name, p in named:
        if matched[name] is not None:
            r, old = rules[name], tensors[name]
            slots = {slot: x for slot, x in old.items() if slot != "t"}
            _check_slots(r, name, p, slots)
            update = Update(r, name, _next(old["t"]), hypers[id(r)], verdict.factor, stats)
            run = partial(_updated, update, p, matched[name], slots)
            work[name] = Work(r, p, run, left.get(name))
    with np.errstate(all="ignore"):  # infinity and NaN are valid results, and need no warning
        done = together(work, valued=value is not None)
    for name, p in named:
        if name not in done:
            new.append(p)
            continue
        old = tensors[name]
        t = now = _next(old["t"])
        q, slots, report = done[name]
        if stats:
            reports[name] = report
        if name in left:
            q, now = unless(left[name], q, p), unless(left[name], _counts(p) + t, _counts(p) + old["t"])
            slots = {slot: unless(left[name], x, old[slot]) for slot, x in slots.items()}
        new.append(choose(verdict.skip, p, q))
        tensors[name] = {key: choose(verdict.skip, old[key], x) for key, x in {"t": now, **slots}.items()}
    leaves, made = iter(new), {**state, "step": _next(state["step"]), "tensors": tensors}
    if isinstance(loss_scale, LossScale):
        made["loss_scale"] = loss_scale.next(state["loss_scale"], verdict.skip)
    new_params = rebuild(params, lambda leaf: leaf if leaf is None else next(leaves))
    return (new_params, made, reports) if stats else (new_params, made)


def _updated(update: Update, p: Any, g: Any, slots: dict[str, Any], known: dict[str, Any]) -> Done:
    """Update one tensor. `known` has the totals over several tensors that its rule needs."""
    with on_its_device(p):
        return apply(replace(update, hypers={**update.hypers, **known}), p, g, slots)


def _counts(p: Any) -> Any:
    """A zero for each layer of a stacked tensor, as its number of updates."""
    xp = array_namespace(p)
    return xp.zeros(p.shape[0], dtype=xp.int32, **beside(p))


def _left_out(named: list[tuple[str, Any]], grads: dict[str, Any], rules: dict[str, Rule]) -> dict[str, Any]:
    """For each stacked tensor, which layers the step skips; see `arrayopt.step.judging`."""
    stacked = {name: p for name, p in named if rules[name].stacked and grads[name] is not None and size(p)}
    found: dict[int, Any] = {}
    for name, p in stacked.items():
        xp, count = array_namespace(p), p.shape[0]
        wrong = ~xp.all(xp.isfinite(xp.reshape(detached(grads[name]), (count, -1))), axis=1)
        found[count] = wrong | found[count] if count in found else wrong
    return {name: found[p.shape[0]] for name, p in stacked.items()}


@np.errstate(all="ignore")
def _verdict(
    named: list[tuple[str, Any]], grads: dict[str, Any], scale: Any, limit: Any, check: bool, left: dict[str, Any]
) -> Verdict:
    """The verdict on a step: its factor for gradients, and whether to skip it (a bool, unless the step is traced)."""
    if limit is None and not check:
        return Verdict()
    rule, norms = GradientNorms(master_weights=False), []
    for name, p in named:
        if grads[name] is not None and size(p):
            xp, g = array_namespace(p), grads[name]
            g = unless(left[name], g, xp.zeros_like(g)) if name in left else g
            wide = xp.astype(g, working_dtype(xp, p), copy=False)
            norms.append(rule.norms(xp, p, wide, p)["grad_norm"])
    found = judge(joint_norm(norms), scale=scale, limit=limit, check=check)
    known = concrete(found.skip)
    return found if known is None else found._replace(skip=bool(known))


def _check_state(state: Any) -> None:
    """Raise TypeError if `state` does not have the form of a state."""

    def counts(x: Any, rank: int = 0) -> bool:
        return is_count(x) or (is_array(x) and x.ndim <= rank and "int" in dtype_name(x))

    tensors = state.get("tensors") if isinstance(state, dict) else None
    if not (
        isinstance(tensors, dict)
        and counts(state.get("step"))
        and all(isinstance(x, dict) and counts(x.get("t"), 1) for x in tensors.values())
        and all(is_array(y) for x in tensors.values() for slot, y in x.items() if slot != "t")
    ):
        raise TypeError(f"update: `state` must be what init or update returned; got {type(state).__name__}")


def _next(n: Any) -> Any:
    """Return n + 1 for a number of steps or updates. Raise ValueError if it is too large."""
    if isinstance(n, int) and not is_count(n + 1):
        raise ValueError(f"update: numbers of steps and updates must stay below 2**53; state has {n}")
    return n + 1


def _check_slots(rule: Rule, name: str, p: Any, slots: dict[str, Any]) -> None:
    """Raise ValueError if the slots of a tensor are not those that the rule has for it."""
    expected: list[str] = []
    for shape in ((1,) * p.ndim, tuple(p.shape)):  # slots usually depend only on the rank
        one = np.broadcast_to(0.0, shape[1:] if rule.stacked else shape)
        expected = [*rule.all_slots(np, one, dtype_name(p)), *scales(rule, one.ndim)]
        if set(slots) == set(expected):
            return
    raise ValueError(f"update: the state of {name!r} must hold {expected} for this rule; got {list(slots)}")


def _rules(rule: Rule, groups: Groups | None, named: list[tuple[str, Any]]) -> dict[str, Rule]:
    """The rule of each tensor, by name."""
    rules: dict[str, Rule] = {}
    for group in assign(rule, groups, named):
        own, _ = grouped(rule, group.given, f"group {group.label!r}")
        rules |= dict.fromkeys(group.names, own)
    return rules
