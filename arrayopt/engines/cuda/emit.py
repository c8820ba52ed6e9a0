"""Emitting CUDA: a plan as the text of one source, which the headers in ``kernels/`` make whole.

For each pass there is a `PassK`, which does what the pass does with some elements; for each loop
between passes a
`betweenK`; `piece` finds the stage, and `scalars_of` computes the scalars of a step. The kernels
are `prepare` and
`run`. Passes that differ in nothing but which scratch arrays they have, as those between products
of matrices do, share
a struct.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from arrayopt.engines.cuda.between import between, hypers, scalars
from arrayopt.engines.cuda.stages import SQUARE, stages
from arrayopt.engines.cuda.text import CudaText
from arrayopt.engines.headers import header
from arrayopt.fusion.alike import described, scratch_of
from arrayopt.fusion.graph import Node
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.plan import Plan
from arrayopt.state.quantized import scale_of

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
    m = CudaText(plan, dtype, grad_dtype or dtype, windows=windows)
    m.put(0, *(f"// {line}".rstrip() for line in f"Fused kernels{about}".splitlines()), "")
    m.constants(len(hypers(plan)))
    flat = plan.element == "C"
    if plan.multiplies:
        m.put(0, f"constexpr int kChunk = {SQUARE};", "")
    drawn = ("random",) if plan.draws else ()
    last = (
        ("flat",)
        if flat
        else ("matrix", "between", *(("flat", "square") if plan.multiplies else ()))
    )
    coded = ("quantized", "codes") if plan.quantized else ()
    for name in (
        "storage",
        "packs",
        "arithmetic",
        *coded,
        *drawn,
        "sums",
        "prepare",
        "queue",
        *last,
    ):
        m.put(0, f"// ---- {name}.cuh", "", *header(f"{name}.cuh").splitlines(), "")
    m.put(0, "// ---- the plan", "")
    alike: dict[Any, list[int]] = {}
    for j, stage in enumerate(stages(plan)):
        if stage.kind == "pass":
            k, p = stage.index, m.plan.passes[stage.index]
            again = _later(m, k)
            kept = tuple(name in again for name in p.arrays)
            same = alike.setdefault((described(p, plan, m.where), kept), [])
            same.append(k)
            m.put(0, f"// {str(plan).splitlines()[k]}")
            if len(same) == 1:
                _pass(m, k, p)
        elif stage.kind != "product":
            between(m, j, stage)
    _piece(m, flat, list(alike.values()))
    scalars(m)
    return m.text()


RESULTS = {"Whole": "tensor", "Row": "row", "Column": "column", "Batch": "batch"}


def _pass(m: CudaText, k: int, p: Pass) -> None:
    """What pass k does with some elements of a tensor."""
    sums = {kind: p.reducing(name) for kind, name in RESULTS.items()}
    inputs = [
        n.data
        for kind in ("tensor", "batch", "row", "column")
        for n in p.using(kind)
        if n.op == "input"
    ]
    m.put(0, f"struct Pass{k} {{")
    counts = ", ".join(f"k{kind} = {len(some)}" for kind, some in sums.items())
    m.put(1, f"static constexpr int {counts}, kAhead = {m.ahead(p)};")
    m.put(
        1,
        f"static constexpr bool kCodes = {str(bool(_codes(m, p.stores))).lower()};",
        "struct Sums {",
    )
    m.put(
        2, *(f"W {kind.lower()}[{max(1, len(sums[kind]))}];" for kind in ("Whole", "Row", "Batch"))
    )
    m.put(1, "};", "struct Row {")
    m.put(2, *(f"{m.kind(n)} {m.name(n)};" for n in p.using("row")))
    here = p.draws and m.windows
    m.put(
        2,
        *(
            ["long long origin;  // the position of an element, less the place that it lies in"]
            if here
            else []
        ),
    )
    m.put(1, "};", "template <int N>", "struct Columns {")
    m.put(2, *(f"{m.kind(n)} {m.name(n)}[N];" for n in p.using("column")))
    m.put(1, "};", "template <int N>", "struct Loads {")
    m.put(2, *(f"Pack<{m.stored(name)}, N> {name};" for name in p.loads))
    m.put(2, *(f"BFloat16 {scale_of(name)};" for name in _codes(m, p.loads)))
    m.put(1, "};")
    for kind, some in sums.items():
        m.fold(1, f"Of{kind}", some)
    m.put(1, "const Step step;", "const long long* const t;", "long long a, b;")
    arrays = [*p.arrays, *map(scale_of, _codes(m, p.arrays)), *inputs]
    for name in dict.fromkeys(arrays):
        m.put(1, f"{m.stored(name)}* const at_{name};")
    m.put(1, *(["const long long origin;"] if p.draws else []))
    m.put(1, *(f"{m.kind(n)} {m.name(n)};" for n in p.using("host", "tensor", "batch")))
    m.put(1, *(f"long long first_{m.name(n)};" for n in p.using("column")), "")
    _enter(m, k, p, arrays)
    _load(m, k, p)
    _work(m, k, p, sums)
    for kind in ("Whole", "Row", "Batch"):
        m.put(1, f"__device__ void keep_{kind.lower()}(long long i, const Sums& sums) const {{")
        for j, s in enumerate(sums[kind]):
            m.put(2, f"step.work[t[PART{m.partial[s]}] + i] = sums.{kind.lower()}[{j}];")
        m.put(2, "(void)i, (void)sums;")
        m.put(1, "}")
    m.put(1, "__device__ void keep_column(int k, long long i, W sum) const {")
    for j, s in enumerate(sums["Column"]):
        m.put(2, f"if (k == {j}) step.work[t[PART{m.partial[s]}] + i] = sum;")
    m.put(2, "(void)k, (void)i, (void)sum;")
    m.put(1, "}")
    m.put(0, "};", "")


def _codes(m: CudaText, names: Iterable[str]) -> list[str]:
    """The slots that are stored as codes."""
    return [name for name in names if name in m.plan.quantized]


def _enter(m: CudaText, k: int, p: Pass, arrays: list[str]) -> None:
    """Read what is the same for a tensor, a batch, a row, a column."""
    columns = {
        name: f"column_{name}" if name in m.plan.spilled else f"AT_{name}"
        for name in dict.fromkeys(arrays)
    }
    reads = [
        f"at_{name}(global(reinterpret_cast<{m.stored(name)}*>(t[{column}])))"
        for name, column in columns.items()
    ]
    given = "".join(f", int {column}" for name, column in columns.items() if name in m.plan.spilled)
    start = ["step(step)", "t(step.table + (long long)tensor * kColumns)", "a(0)", "b(0)", *reads]
    start += ["origin(t[ORIGIN])"] if p.draws else []
    m.put(
        1,
        f"__device__ Pass{k}(const Step& step, int tensor{given})",
        f"    : {', '.join(start)} {{",
    )
    m.put(2, "const W* const working = step.working + (long long)tensor * (kScalars + kValues);")
    m.put(2, *(f"{m.name(n)} = {m.value(n)};" for n in p.using("host", "tensor")), "(void)working;")
    m.put(1, "}", "__device__ void enter_batch(long long batch) {")
    m.put(
        2, "const long long A = t[IN_A], B = t[IN_B], C = t[IN_C];", "a = batch / B, b = batch % B;"
    )
    m.put(2, *(f"{m.name(n)} = {m.value(n)};" for n in p.using("batch")))
    for n in p.using("column"):
        start_of = m.index(n.axes.replace("C", "")) if n.axes != "C" else "0"
        m.put(2, f"first_{m.name(n)} = ({start_of}) * C;")
    m.put(2, "(void)A, (void)B, (void)C;")
    m.put(1, "}", "__device__ __forceinline__ Row row(long long row, long long r) const {")
    m.put(2, "const long long B = t[IN_B], R = t[IN_R];", "Row of_row;")
    m.put(2, *(f"of_row.{m.name(n)} = {m.value(n)};" for n in p.using("row")))
    if p.draws and m.windows:
        m.put(
            2, "of_row.origin = origin + row * t[IN_C] - element(tile_of(t), row, a * B + b, r, 0);"
        )
    m.put(2, "(void)B, (void)R, (void)row, (void)r;", "return of_row;")
    m.put(1, "}", "template <int N>")
    m.put(1, "__device__ __forceinline__ Columns<N> columns(long long c, int n) const {")
    m.put(2, "Columns<N> of_columns;", "#pragma unroll", "    for (int j = 0; j < N; ++j) {")
    for n in p.using("column"):
        source = f"widen(at_{n.data}[" if n.op == "input" else f"step.work[t[VEC{m.vector[n]}] + "
        text = f"{source}first_{m.name(n)} + c + j]{')' if n.op == 'input' else ''}"
        m.put(3, f"if (j < n) of_columns.{m.name(n)}[j] = {m.typed(n, text)};")
        m.put(3, f"else of_columns.{m.name(n)}[j] = 0;")
    m.put(2, "}", "(void)c, (void)n;", "return of_columns;")
    m.put(1, "}")


def _load(m: CudaText, k: int, p: Pass) -> None:
    """The elements of the arrays, up to N of them that are neighbours."""
    again = _later(m, k) | set(p.stores)
    m.put(1, "template <int N, bool kAligned>")
    m.put(
        1,
        "__device__ __forceinline__ Loads<N> load(long long i, int n) const {",
        "    Loads<N> loads;",
    )
    for name in p.loads:
        m.put(2, f"loads.{name} = read<N, kAligned, {_last(again, name)}>(at_{name} + i, n);")
    for name in _codes(m, p.loads):
        m.put(2, f"if (n > 0) loads.{scale_of(name)} = at_{scale_of(name)}[i / kBlock];")
        m.put(2, f"else loads.{scale_of(name)}.bits = 0;")
    m.put(2, "(void)i, (void)n;", "return loads;")
    m.put(1, "}")


def _later(m: CudaText, k: int) -> set[str]:
    """The arrays that passes after pass k read."""
    found = set[str]()
    for q in m.plan.passes[k + 1 :]:
        found |= set(q.loads)
    return found


def _last(again: set[str], name: str) -> str:
    """Whether an array is not among those that are read again in the step."""
    return "false" if name in again else "true"


def _work(m: CudaText, k: int, p: Pass, sums: dict[str, list[Node]]) -> None:
    """What is done with elements that have been read: operations, sums, stores."""
    later = _later(m, k)
    m.put(1, "template <int N>", "__device__ __forceinline__ void work(")
    m.put(2, "long long i, int n, bool aligned, const Loads<N>& loads, const Row& of_row,")
    m.put(2, "const Columns<N>& of_columns, Sums& sums, W (*columns)[N]) const {")
    codes = _codes(m, p.stores)
    for name in p.stores:
        m.put(
            2,
            f"float write_{name}[N];"
            if name in codes
            else f"Pack<{m.stored(name)}, N> write_{name};",
        )
    for name in _codes(m, p.loads):
        m.put(2, f"const float step_{name} = step_of<{m.stored(name)}>(loads.{scale_of(name)});")
    m.put(2, *(f"const {m.kind(n)} {m.name(n)} = of_row.{m.name(n)};" for n in p.using("row")))
    m.put(1, "#pragma unroll", "    for (int j = 0; j < N; ++j) {")
    for name, n in p.loads.items():
        value = f"loads.{name}.value[j]"
        text = f"((float){value} * step_{name})" if name in m.plan.quantized else f"widen({value})"
        m.put(3, f"const {m.kind(n)} {m.name(n)} = ({m.kind(n)}){text};")
    m.put(3, *(m.declare(n, f"of_columns.{m.name(n)}[j]") for n in p.using("column")))
    m.put(3, *(m.declare(n, m.expression(n)) for n in p.nodes))
    for name, n in p.stores.items():
        made = f"write_{name}[j] = (float){m.name(n)};" if name in codes else ""
        m.put(3, made or f"narrow({m.name(n)}, write_{name}.value[j]);")
    if p.reductions:
        m.put(3, "if (j < n) {")
        for kind in ("Whole", "Row", "Batch"):
            m.put(
                4,
                *(
                    f"{m.take(s, f'sums.{kind.lower()}[{j}]', m.name(s.args[0]))};"
                    for j, s in enumerate(sums[kind])
                ),
            )
        m.put(
            4,
            *(
                f"{m.take(s, f'columns[{j}][j]', m.name(s.args[0]))};"
                for j, s in enumerate(sums["Column"])
            ),
        )
        m.put(3, "}")
    m.put(2, "}")
    for name in p.stores:
        if name in codes:
            arrays = f"at_{name}, at_{scale_of(name)}"
            m.put(
                2, f"write_codes<N, {_last(later, name)}>({arrays}, i, n, aligned, write_{name});"
            )
        else:
            only = f"if ({m.name(p.guards[name])}) " if name in p.guards else ""
            to = f"at_{name} + i, write_{name}, n, aligned"
            m.put(2, f"{only}write<N, {_last(later, name)}>({to});")
    m.put(
        2,
        "(void)i, (void)n, (void)aligned, (void)loads, (void)of_row, (void)of_columns, (void)sums,"
        " (void)columns;",
    )
    m.put(1, "}")


def _scratch(m: CudaText, same: Mapping[int, Pass]) -> str:
    """The arguments that say where the scratch arrays are, of the passes that some stages are."""
    columns = {j: [f"AT_{x}" for x in scratch_of(p, m.plan)] for j, p in same.items()}
    *others, last = columns
    text = ""
    for i, column in enumerate(columns[last]):
        choice = "".join(
            f"stage == {j} ? {columns[j][i]} : " for j in others if columns[j][i] != column
        )
        text += f", {choice}{column}"
    return text


def _piece(m: CudaText, flat: bool, alike: list[list[int]]) -> None:
    """One piece of one stage; each stage is a function, and passes that are alike have one."""
    made = stages(m.plan)
    at = {stage.index: j for j, stage in enumerate(made) if stage.kind == "pass"}
    for j, stage in enumerate(made):
        same = next((x for x in alike if stage.kind == "pass" and x[0] == stage.index), None)
        if same is None:
            continue
        m.open(f"stage{j}", ", int stage" if same[1:] else "")
        arguments = _scratch(m, {at[k]: m.plan.passes[k] for k in same})
        m.put(1, f"Pass{stage.index} pass(step, tensor{arguments});")
        if stage.square:
            m.put(1, f"square_piece(pass, {stage.axes[-1].upper()}, piece);")
        elif flat:
            m.put(1, "flat_piece(pass, t[IN_SIZE], t[IN_TC], t[IN_ALIGNED] != 0, piece);")
        else:
            m.put(1, "matrix_piece(pass, tile_of(t), t[IN_ALIGNED] != 0, piece);")
        m.put(0, "}", "")
    m.put(0, "__device__ void piece(const Step& step, int stage) {", "    switch (stage) {")
    for j, stage in enumerate(made):
        same = next((x for x in alike if stage.kind == "pass" and stage.index in x), [])
        first, more = at[same[0]] if same else j, ", stage" if same[1:] else ""
        if stage.kind != "product":
            m.put(2, f"case {j}: stage{first}(step{more}); break;")
    m.put(1, "}")
    m.put(0, "}", "")
