"""Emitting CUDA: a plan as the text of one source, which the headers in ``kernels/`` make whole.

For each pass there is a `PassK`, which does what the pass does with some elements; for each loop
between passes a
`betweenK`; `piece` finds the stage, and `scalars_of` computes the scalars of a step. The kernels
are `prepare` and
`run`. Passes that differ in nothing but which scratch arrays they have, as those between products
of matrices do, share
a struct.
"""

from collections.abc import Mapping
from typing import Any

from arrayopt.engines.cuda.between import between, hypers, scalars
from arrayopt.engines.cuda.emit_pass import PassText, later
from arrayopt.engines.cuda.stages import SQUARE, stages
from arrayopt.engines.cuda.text import CudaText
from arrayopt.engines.headers import header
from arrayopt.fusion.alike import described, scratch_of
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.plan import Plan

__all__ = ["LEAN", "emit"]

LEAN = True
"""A thread has 80 registers where three blocks share a multiprocessor; see
`arrayopt.fusion.trace.trace`.
"""


def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    about: str = ".",
    windows: bool = False,
) -> str:
    """The text of a CUDA source that runs a plan.

    Parameters
    ----------
    plan : Plan
        The plan.
    dtype, grad_dtype : str
        What parameters and gradients are stored in.
    about : str
        What to say in the first line, and below it.
    windows : bool
        Whether it is of matrices that the user has cut; see `arrayopt.fusion.windows`.
    """
    text = CudaText(plan, dtype, grad_dtype or dtype, windows=windows)
    text.put(0, *(f"// {line}".rstrip() for line in f"Fused kernels{about}".splitlines()), "")
    text.constants(len(hypers(plan)))
    if plan.multiplies:
        text.put(0, f"constexpr int kChunk = {SQUARE};", "")
    for name in _headers(plan):
        text.put(0, f"// ---- {name}.cuh", "", *header(f"{name}.cuh").splitlines(), "")
    text.put(0, "// ---- the plan", "")
    alike: dict[Any, list[int]] = {}
    for number, stage in enumerate(stages(plan)):
        if stage.kind == "pass":
            k, pass_ = stage.index, plan.passes[stage.index]
            again = later(plan, k)
            kept = tuple(name in again for name in pass_.arrays)
            same = alike.setdefault((described(pass_, plan, text.where), kept), [])
            same.append(k)
            text.put(0, f"// {str(plan).splitlines()[k]}")
            if len(same) == 1:
                PassText(text, k).write()
        elif stage.kind != "product":
            between(text, number, stage)
    _piece(text, list(alike.values()))
    scalars(text)
    return text.text()


def _headers(plan: Plan) -> list[str]:
    """The headers that a plan takes, in their order."""
    names = ["storage", "packs", "arithmetic"]
    names += ["quantized", "codes"] if plan.quantized else []
    names += ["random"] if plan.draws else []
    names += ["sums", "prepare", "queue"]
    if plan.element == "C":
        return [*names, "flat"]
    return [*names, "matrix", "between", *(("flat", "square") if plan.multiplies else ())]


def _scratch(text: CudaText, same: Mapping[int, Pass]) -> str:
    """The arguments that say where the scratch arrays are, of the passes that some stages are."""
    columns = {}
    for number, pass_ in same.items():
        columns[number] = [f"AT_{name}" for name in scratch_of(pass_, text.plan)]
    *others, last = columns
    arguments = ""
    for i, column in enumerate(columns[last]):
        choice = ""
        for number in others:
            if columns[number][i] != column:
                choice += f"stage == {number} ? {columns[number][i]} : "
        arguments += f", {choice}{column}"
    return arguments


def _piece(text: CudaText, alike: list[list[int]]) -> None:
    """One piece of one stage; each stage is a function, and passes that are alike have one."""
    made, passes = stages(text.plan), text.plan.passes
    at = {stage.index: number for number, stage in enumerate(made) if stage.kind == "pass"}
    for same in alike:
        number, stage = at[same[0]], made[at[same[0]]]
        text.open(f"stage{number}", ", int stage" if same[1:] else "")
        arguments = _scratch(text, {at[k]: passes[k] for k in same})
        text.put(1, f"Pass{stage.index} pass(step, tensor{arguments});")
        if stage.square:
            text.put(1, f"square_piece(pass, {stage.axes[-1].upper()}, piece);")
        elif text.plan.element == "C":
            text.put(1, "flat_piece(pass, t[IN_SIZE], t[IN_TC], t[IN_ALIGNED] != 0, piece);")
        else:
            text.put(1, "matrix_piece(pass, tile_of(t), t[IN_ALIGNED] != 0, piece);")
        text.put(0, "}", "")
    function = {k: (at[same[0]], ", stage" if same[1:] else "") for same in alike for k in same}
    text.put(0, "__device__ void piece(const Step& step, int stage) {", "    switch (stage) {")
    for number, stage in enumerate(made):
        first, more = function[stage.index] if stage.kind == "pass" else (number, "")
        if stage.kind != "product":
            text.put(2, f"case {number}: stage{first}(step{more}); break;")
    text.put(1, "}")
    text.put(0, "}", "")
