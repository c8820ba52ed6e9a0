"""`emit_judge`: the CUDA source of the kernel `judge`, which `judge.py` compiles and launches.
The kernel computes the verdict on a step from norms, by the formulas of `arrayopt.state`."""

from typing import Any

import numpy as np

from arrayopt.engines.base import Criteria
from arrayopt.engines.cplusplus import header
from arrayopt.engines.cuda.printer import CudaLines
from arrayopt.fusion.namespace import NAMESPACE
from arrayopt.fusion.simplify import Graph
from arrayopt.fusion.symbol import Symbol, lift
from arrayopt.rules.words import SMALL, choose, root_of_squares
from arrayopt.state.verdict import judge

GIVEN = ("given_scale", "limit")
"""The host's numbers of a step: the loss scale of this call, and the limit of the global norm."""

STATE = ("scale", "good", "skipped", "inverse")
"""The state on the device: loss scale, good steps since it changed, skipped steps, 1 / scale."""

VERDICT = ("factor", "norm", *STATE)
"""The results: the factor for gradients, their global norm, and the state after the step."""


def emit_judge(criteria: Criteria) -> str:
    """Return the CUDA source that computes `arrayopt.state.verdict.judge` and `LossScale.next`."""
    graph, text = Graph(tiny=float(np.finfo("float64").tiny)), CudaLines()
    known: dict[str, Any] = {}
    for name in (*GIVEN, *STATE, "square", "shrunk"):
        known[name] = Symbol(graph, graph.make("host", data=name), (), "float64")
    square, shrunk = known.pop("square"), known.pop("shrunk")
    total = root_of_squares(NAMESPACE, square, shrunk, SMALL["float64"])
    scale = None if criteria.scale is None else known[criteria.scale]
    limit = known["limit"] if criteria.limit else None
    found = judge(total, scale=scale, limit=limit, check=criteria.check)
    state: dict[str, Any] = {"scale": known["scale"], "good": known["good"]}
    if criteria.scaling is not None:
        state = criteria.scaling.next(state, found.skip)
    state |= {
        "skipped": choose(found.skip, known["skipped"] + 1.0, known["skipped"]),
        "inverse": 1.0 / state["scale"],
    }
    factor = 1.0 if found.factor is None else found.factor
    results = [lift(graph, x)[0] for x in (factor, found.norm, *state.values(), found.skip)]

    text.put(0, "// The verdict over a step.", "", "typedef double W;")
    text.put(0, f"constexpr double kSmall = {SMALL['float64']!r};", "")
    for name in ("arithmetic", "sums", "judge"):
        text.put(0, f"// ---- {name}.cuh", "")
        text.put_text(header(f"{name}.cuh"))
        text.put(0, "")
    text.put(0, "// ---- what is decided", "")
    text.put(
        0,
        "__device__ void verdict_of(double square, double shrunk, const double* given, const"
        " double* state,",
    )
    text.put(0, "                           double* verdict, int* skip) {")
    text.put(1, "(void)given, (void)state;")
    places = {name: f"given[{i}]" for i, name in enumerate(GIVEN)}
    places |= {name: f"state[{i}]" for i, name in enumerate(STATE)}
    names = text.straight(results, (places | {"square": "square", "shrunk": "shrunk"}).__getitem__)
    text.put(1, *(f"verdict[{i}] = {names[n]};" for i, n in enumerate(results[:-1])))
    text.put(1, f"*skip = {names[results[-1]]};")
    text.put(0, "}")
    return text.text()
