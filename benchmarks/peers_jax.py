"""optax under ``jax.jit`` with donated buffers, as a contestant."""

from collections.abc import Callable
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import numpy as np

from benchmarks.contest import Contestant, Running
from benchmarks.ours import STATE
from benchmarks.problems import Problem

__all__ = ["contestants", "running", "transforms"]

OPTIONS: dict[str, dict[str, Any]] = {
    "LAMB": {"learning_rate": 1e-3, "weight_decay": 0.01},
    "LARS": {"learning_rate": 0.1, "weight_decay": 1e-4},
    "AdamW": {"learning_rate": 1e-3, "weight_decay": 0.01},
    "SGD": {"learning_rate": 0.01, "momentum": 0.9},
    "Lion": {"learning_rate": 1e-4, "weight_decay": 0.01},
    "RMSprop": {"learning_rate": 1e-3, "decay": 0.99, "eps_in_sqrt": False},
    "NAdam": {"learning_rate": 2e-3},
    "RAdam": {"learning_rate": 1e-3},
    "Adan": {"learning_rate": 1e-3, "weight_decay": 0.01},
    "AdEMAMix": {"learning_rate": 1e-3, "weight_decay": 0.01},
    "ScheduleFreeAdamW": {"learning_rate": 2.5e-3, "weight_decay": 0.01},
}

NAMES = {"AdEMAMix": "contrib.ademamix", "ScheduleFreeAdamW": "contrib.schedule_free_adamw"}
"""What optax calls them, if not as we do in small letters."""

COMPILING = {"LAMB": 40.0, "LARS": 32.0, "AdamW": 8.5, "SGD": 0.8}
USUAL = 20.0
"""Seconds to compile a step over 1,000 tensors on one core; it grows about as the power 3/2 of their number."""


def contestants(rule: str, problem: Problem, patience: float = 60.0) -> list[Contestant]:
    """The peer of a rule, if there is one and it takes no more than `patience` seconds to compile."""
    if rule not in OPTIONS:
        return []
    size, left_out = 4.0 * problem.elements, ""
    compiling = COMPILING.get(rule, USUAL) * (len(problem.shapes) / 1000) ** 1.5
    if missing := [name for name in ("jax", "optax") if not find_spec(name)]:
        left_out = f"{missing[0]} is not installed"
    elif compiling > patience:
        minutes = f"{compiling / 60:.0f} min" if compiling > 60 else f"{compiling:.0f} s"
        left_out = f"XLA takes about {minutes} to compile a step over {len(problem.shapes):,} tensors"
    build: Callable[[], Running] = lambda: running(transforms(rule)["optax"], problem)  # noqa: E731
    return [Contestant("optax", build, held=size * (1 + STATE[rule]), extra=size * 3, left_out=left_out)]


def transforms(rule: str) -> dict[str, Any]:
    """The rule by optax, and by `arrayopt.optax` with the same options where it has the function."""
    import optax
    import optax.contrib

    import arrayopt.optax

    name = NAMES.get(rule, rule.lower())
    made = {"optax": attrgetter(name)(optax)(**OPTIONS[rule])}
    if hasattr(arrayopt.optax, name):
        made["arrayopt.optax"] = getattr(arrayopt.optax, name)(**OPTIONS[rule])
    return made


def running(transform: Any, problem: Problem) -> Running:
    """Steps of a transformation of optax."""
    import jax
    import optax

    params = [jax.numpy.array(x) for x in problem.params()]
    grads = [jax.dlpack.from_dlpack(x) for x in problem.grads]
    held = [params, jax.jit(transform.init)(params)]
    del params

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*held, grads).compile()

    def step() -> None:
        held[:] = compiled(*held, grads)
        jax.block_until_ready(held)

    return Running(step, lambda: [np.asarray(x) for x in held[0]])
