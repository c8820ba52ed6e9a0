"""Sophia with an estimate of the Hessian's diagonal, as in optax."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from arrayopt.optax.transformation import state_of
from arrayopt.rules import Sophia


class EstimateState(NamedTuple):
    """The state of Sophia with an estimate.

    Attributes
    ----------
    count : 0-d array
        The number of updates.
    slots : dict of str to tree
        The rule's slots, each as a tree like the parameters; ``hess`` is the average of estimates.
    hessian_fn_state : tree
        The state of the estimate.
    """

    count: Any
    slots: dict[str, Any]
    hessian_fn_state: Any


def estimating(
    sophia: optax.GradientTransformationExtraArgs, hessian_diagonal_fn: Any, b2: Any, update_interval: Any
) -> optax.GradientTransformationExtraArgs:
    """Return Sophia with a slot ``hess`` that is an average of estimates of the Hessian's diagonal.

    Every `update_interval` updates, `hessian_diagonal_fn` makes an estimate after the step, and ``hess`` becomes
    ``b2 * hess + (1 - b2) * estimate``. Keyword arguments of ``update`` are passed to `hessian_diagonal_fn`.
    """
    estimate = optax.with_extra_args_support(hessian_diagonal_fn)
    own_state = state_of(Sophia)

    def init(params: Any) -> EstimateState:
        own = sophia.init(params)
        return EstimateState(own.count, own.slots, estimate.init(params))

    def update(grads: Any, state: EstimateState, params: Any = None, **extra: Any) -> tuple[Any, EstimateState]:
        if not isinstance(state, EstimateState):
            raise TypeError(
                "sophia: `state` must be what init or update of sophia returned; got"
                f" {type(state).__name__}. Make one with tx.init(params)"
            )
        updates, own = sophia.update(grads, own_state(state.count, state.slots), params, **extra)

        def averaged(old: Any, new: Any) -> Any:
            return b2 * old + (1 - b2) * new.astype(old.dtype)

        def estimated(hess: Any, fn_state: Any) -> tuple[Any, Any]:
            diagonal, fn_state = estimate.update(grads, fn_state, params=params, **extra)
            return jax.tree.map(averaged, hess, diagonal), fn_state

        def kept(hess: Any, fn_state: Any) -> tuple[Any, Any]:
            return hess, fn_state

        due = jnp.equal(state.count % update_interval, 0)
        hess, fn_state = jax.lax.cond(due, estimated, kept, own.slots["hess"], state.hessian_fn_state)
        return updates, EstimateState(own.count, {**own.slots, "hess": hess}, fn_state)

    return optax.GradientTransformationExtraArgs(init, update)
