"""CUDA for what is computed between the passes, and for the scalars of a step before them."""

from arrayopt.engines.cuda.stages import Stage
from arrayopt.engines.cuda.text import CudaText
from arrayopt.engines.written import INDEX
from arrayopt.fusion.graph import CLIP, COUNT, KEY, UPDATES, Node, reachable
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.plan import Plan

__all__ = ["between", "hypers", "scalars"]


def between(m: CudaText, j: int, stage: Stage) -> None:
    """Stage j, which is a loop, a sum or a store."""
    m.type = "W" if stage.axes else "double"
    m.open(f"stage{j}")
    reads = [a for n in stage.nodes for a in n.args if a.op == "input" and not a.on_host]
    names = dict.fromkeys([*(n.data for n in reads if n.axes != m.plan.element), *stage.slots])
    stored = [m.plan.small[name] for name in stage.slots]
    names |= dict.fromkeys(n.data for n in stored if n.op == "input")
    m.put(1, *(m.pointer(name) for name in names))
    if stage.kind == "reduce":
        _reduce(m, stage.nodes[0])
    elif stage.axes == "":
        _whole(m, stage)
    else:
        _each(m, stage)
    m.put(1, "(void)piece;")
    m.put(0, "}", "")
    m.type = "W"


def _read(m: CudaText, depth: int, nodes: tuple[Node, ...], made: set[Node]) -> None:
    """Read what operations need that is neither computed here nor read, and say that it is."""
    wanted = dict.fromkeys(
        a for n in nodes if not n.reduces for a in n.args if a not in made and a.op != "const"
    )
    m.put(depth, *(m.declare(n, m.value(n)) for n in wanted))
    made.update(wanted)


def _indices(m: CudaText, depth: int, axes: str, source: str) -> None:
    """Take a position over some axes apart."""
    rest = source
    for i, x in reversed(list(enumerate(axes))):
        m.put(depth, f"const long long {INDEX[x]} = {rest}{f' % {x}' if i else ''};")
        rest = f"{rest} / {x}"


def _each(m: CudaText, stage: Stage) -> None:
    """A loop over some axes: partial sums are put together, operations follow; or slots are
    written.
    """
    count = " * ".join(stage.axes)
    m.put(1, "const long long begin = (long long)piece * kOutputs;")
    m.put(
        1,
        f"const long long count = {count}, end = begin + kOutputs < count ? begin + kOutputs :"
        " count;",
    )
    m.put(0, "#pragma unroll 1")
    m.put(1, "for (long long i = begin + threadIdx.x; i < end; i += kThreads) {")
    _indices(m, 2, stage.axes, "i")
    _read(m, 2, stage.nodes, set(stage.nodes))
    for n in stage.nodes:
        if n.reduces:
            _put_together(m, n)
        else:
            m.put(2, m.declare(n, m.expression(n)))
        if n in m.vector:
            m.put(2, f"step.work[t[VEC{m.vector[n]}] + i] = {m.name(n)};")
    _store(m, 2, stage, "i")
    m.put(2, *(f"(void){INDEX[x]};" for x in stage.axes))
    m.put(1, "}")


def _put_together(m: CudaText, s: Node) -> None:
    """A reduction over elements from its partial results, in their order."""
    base, kind = f"t[PART{m.partial[s]}]", m.where.partials[s]
    batch = "a * B + b" if "B" in s.axes else "a" if "A" in s.axes else "0"
    m.put(2, f"double sum{s.id} = {REDUCTIONS[s.op].cuda}::start(0, 0.0);", "#pragma unroll 1")
    if kind == "row":
        m.put(2, "for (long long k = 0; k < t[IN_NC]; ++k)")
        at = f"(({batch}) * R + r) * t[IN_NC] + k"
    elif kind == "column":
        m.put(2, "for (long long k = 0; k < t[IN_NR]; ++k)")
        at = f"(({batch}) * t[IN_NR] + k) * C + c"
    # the tiles of a matrix; if only the first axis is left, of B matrices that follow each other
    else:
        several = "B * " if s.axes == "A" else ""
        m.put(2, f"for (long long k = 0, tiles = {several}t[IN_NR] * t[IN_NC]; k < tiles; ++k)")
        at = f"({batch}) * tiles + k"
    m.put(3, f"{m.take(s, f'sum{s.id}', f'(double)step.work[{base} + {at}]')};")
    m.put(2, m.declare(s, f"(W)sum{s.id}"))


def _whole(m: CudaText, stage: Stage) -> None:
    """Values of the tensor as a whole: partial sums are put together by all threads, operations are
    one thread's.

    Each is read just before it is needed, and kept as soon as it is there: some rules have too many
    for the registers.
    """
    sums = [n for n in stage.nodes if n.reduces]
    if sums:
        m.fold(1, "Of", sums)
        m.put(1, f"double sum[{len(sums)}];", "start<Of>(sum);")
        m.put(1, "for (long long k = threadIdx.x; k < t[IN_UNITS]; k += kThreads) {")
        for j, s in enumerate(sums):
            m.put(2, f"{m.take(s, f'sum[{j}]', f'(double)step.work[t[PART{m.partial[s]}] + k]')};")
        m.put(1, "}", "block_fold<Of>(sum);")
    m.put(1, "if (threadIdx.x != 0) return;")
    made = set(stage.nodes)
    for n in [*sums, *(n for n in stage.nodes if not n.reduces)]:
        _read(m, 1, (n,), made)
        m.put(
            1,
            m.declare(n, f"sum[{sums.index(n)}]" if n.reduces else m.expression(n)),
            _keep(m, n, m.name(n)),
        )
    _store(m, 1, stage, "0")


def _keep(m: CudaText, n: Node, name: str) -> str:
    """Leave a value of the tensor for later stages."""
    return f"working[kScalars + {m.tensor[n]}] = (W)(value[{m.tensor[n]}] = {name});"


def _store(m: CudaText, depth: int, stage: Stage, index: str) -> None:
    """Write slots; several may hold the same value."""
    read = set[Node]()
    for name in stage.slots:
        n = m.plan.small[name]
        if n.op != "const" and n not in read:
            m.put(depth, m.declare(n, m.value(n)))
        read.add(n)
        m.put(depth, f"narrow({m.name(n)}, at_{name}[{index}]);")


def _reduce(m: CudaText, n: Node) -> None:
    """A reduction over some axes of what an earlier loop has made."""
    of = n.args[0]
    gone = "".join(x for x in of.axes if x not in n.axes)
    m.put(1, "const long long begin = (long long)piece * kResults;")
    m.put(1, f"const long long count = {' * '.join(n.axes) or '1'};")
    m.put(1, "const long long end = begin + kResults < count ? begin + kResults : count;")
    m.put(
        1,
        f"fold_over<{REDUCTIONS[n.op].cuda}>(begin, end, {' * '.join(gone)}, [&](long long i, long"
        f" long j) {{",
    )
    _indices(m, 2, n.axes, "i")
    _indices(m, 2, gone, "j")
    m.put(2, "(void)i;", f"return (double)({m.value(of)});")
    m.put(1, "}, [&](long long i, double sum) {")
    m.put(
        2, _keep(m, n, "sum") if n.axes == "" else f"step.work[t[VEC{m.vector[n]}] + i] = (W)sum;"
    )
    m.put(2, "(void)i;")
    m.put(1, "});")


def hypers(plan: Plan) -> list[str]:
    """The hyper-parameters that the scalars of a step are computed from, in the order of their
    table.
    """
    names = [n.data for n in reachable(plan.scalars) if n.op == "host"]
    return [x for x in names if x not in (UPDATES, CLIP) and not x.startswith((COUNT, KEY))]


def scalars(m: CudaText) -> None:
    """The scalars of a step, from hyper-parameters, the tensor's count and its extents."""
    m.type = "double"
    m.put(
        0,
        "__device__ void scalars_of(const long long* t, const double* hyper, double count, double"
        " factor,",
    )
    m.put(0, "                           double* scalar, W* working) {")
    m.put(1, "(void)t, (void)hyper, (void)count, (void)factor, (void)scalar, (void)working;")
    table = {UPDATES: "count", CLIP: "factor"} | {
        name: f"hyper[{i}]" for i, name in enumerate(hypers(m.plan))
    }
    table |= {name: f"(double)t[KEY{i}]" for i, name in enumerate(m.keys)}

    def given(name: str) -> str:
        extents = " * ".join(f"(double)t[IN_{x}]" for x in name.removeprefix(COUNT))
        return extents if name.startswith(COUNT) else table[name]

    known = m.straight(list(m.plan.scalars), given)
    m.put(1, *(f"working[{i}] = (W)(scalar[{i}] = {known[n]});" for n, i in m.scalar.items()))
    m.put(0, "}")
    m.type = "W"
