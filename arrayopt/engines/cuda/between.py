"""CUDA for what is computed between the passes, and for the scalars of a step before them."""

from arrayopt.engines.cuda.stages import Stage
from arrayopt.engines.cuda.text import CudaText
from arrayopt.engines.written import INDEX
from arrayopt.fusion.graph import CLIP, COUNT, KEY, UPDATES, Node, reachable
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.phases import GIVEN
from arrayopt.fusion.plan import Plan

__all__ = ["between", "hypers", "scalars"]


def between(text: CudaText, j: int, stage: Stage) -> None:
    """Stage j, which is a loop, a sum or a store."""
    text.type = "W" if stage.axes else "double"
    text.open(f"stage{j}")
    reads = [a for n in stage.nodes for a in n.args if a.op == "input" and not a.on_host]
    names = dict.fromkeys([*(n.data for n in reads if n.axes != text.plan.element), *stage.slots])
    stored = [text.plan.small[name] for name in stage.slots]
    names |= dict.fromkeys(n.data for n in stored if n.op == "input")
    text.put(1, *(text.pointer(name) for name in names))
    if stage.kind == "reduce":
        _reduce(text, stage.nodes[0])
    elif stage.axes == "":
        _whole(text, stage)
    else:
        _each(text, stage)
    text.put(1, "(void)piece;")
    text.put(0, "}", "")
    text.type = "W"


def _read(text: CudaText, depth: int, nodes: tuple[Node, ...], made: set[Node]) -> None:
    """Read what operations need that is neither computed here nor read, and say that it is."""
    wanted = dict[Node, None]()
    for n in nodes:
        for a in () if n.reduces else n.args:
            if a not in made and a.op != "const":
                wanted[a] = None
    text.put(depth, *(text.declare(n, text.value(n)) for n in wanted))
    made.update(wanted)


def _indices(m: CudaText, depth: int, axes: str, source: str) -> None:
    """Take a position over some axes apart."""
    rest = source
    for i, x in reversed(list(enumerate(axes))):
        m.put(depth, f"const long long {INDEX[x]} = {rest}{f' % {x}' if i else ''};")
        rest = f"{rest} / {x}"


def _each(text: CudaText, stage: Stage) -> None:
    """A loop over some axes: partial sums are put together, operations follow; or slots are
    written.
    """
    count = " * ".join(stage.axes)
    text.put(1, "const long long begin = (long long)piece * kOutputs;")
    text.put(
        1,
        f"const long long count = {count}, end = begin + kOutputs < count ? begin + kOutputs :"
        " count;",
    )
    text.put(0, "#pragma unroll 1")
    text.put(1, "for (long long i = begin + threadIdx.x; i < end; i += kThreads) {")
    _indices(text, 2, stage.axes, "i")
    _read(text, 2, stage.nodes, set(stage.nodes))
    for node in stage.nodes:
        if node.reduces:
            _put_together(text, node)
        else:
            text.put(2, text.declare(node, text.expression(node)))
        if node in text.vector:
            text.put(2, f"step.work[t[VEC{text.vector[node]}] + i] = {text.name(node)};")
    _store(text, 2, stage, "i")
    text.put(2, *(f"(void){INDEX[x]};" for x in stage.axes))
    text.put(1, "}")


def _put_together(text: CudaText, total: Node) -> None:
    """A reduction over elements from its partial results, in their order."""
    base, kind = f"t[PART{text.partial[total]}]", text.where.partials[total]
    batch = "a * B + b" if "B" in total.axes else "a" if "A" in total.axes else "0"
    text.put(
        2, f"double sum{total.id} = {REDUCTIONS[total.op].cuda}::start(0, 0.0);", "#pragma unroll 1"
    )
    if kind == "row":
        text.put(2, "for (long long k = 0; k < t[IN_NC]; ++k)")
        at = f"(({batch}) * R + r) * t[IN_NC] + k"
    elif kind == "column":
        text.put(2, "for (long long k = 0; k < t[IN_NR]; ++k)")
        at = f"(({batch}) * t[IN_NR] + k) * C + c"
    # the tiles of a matrix; if only the first axis is left, of B matrices that follow each other
    else:
        several = "B * " if total.axes == "A" else ""
        text.put(2, f"for (long long k = 0, tiles = {several}t[IN_NR] * t[IN_NC]; k < tiles; ++k)")
        at = f"({batch}) * tiles + k"
    text.put(3, f"{text.take(total, f'sum{total.id}', f'(double)step.work[{base} + {at}]')};")
    text.put(2, text.declare(total, f"(W)sum{total.id}"))


def _whole(text: CudaText, stage: Stage) -> None:
    """Values of the tensor as a whole: partial sums are put together by all threads, operations are
    one thread's.

    Each is read just before it is needed, and kept as soon as it is there: some rules have too many
    for the registers.
    """
    sums = [n for n in stage.nodes if n.reduces]
    if sums:
        text.fold(1, "Of", sums)
        text.put(1, f"double sum[{len(sums)}];", "start<Of>(sum);")
        text.put(1, "for (long long k = threadIdx.x; k < t[IN_UNITS]; k += kThreads) {")
        for j, s in enumerate(sums):
            text.put(
                2,
                f"{text.take(s, f'sum[{j}]', f'(double)step.work[t[PART{text.partial[s]}] + k]')};",
            )
        text.put(1, "}", "block_fold<Of>(sum);")
    text.put(1, "if (threadIdx.x != 0) return;")
    made = set(stage.nodes)
    for n in [*sums, *(n for n in stage.nodes if not n.reduces)]:
        _read(text, 1, (n,), made)
        text.put(
            1,
            text.declare(n, f"sum[{sums.index(n)}]" if n.reduces else text.expression(n)),
            _keep(text, n, text.name(n)),
        )
    _store(text, 1, stage, "0")


def _keep(m: CudaText, n: Node, name: str) -> str:
    """Leave a value of the tensor for later stages."""
    return f"working[kScalars + {m.tensor[n]}] = (W)(value[{m.tensor[n]}] = {name});"


def _store(text: CudaText, depth: int, stage: Stage, index: str) -> None:
    """Write slots; several may hold the same value."""
    read = set[Node]()
    for name in stage.slots:
        n = text.plan.small[name]
        if n.op != "const" and n not in read:
            text.put(depth, text.declare(n, text.value(n)))
        read.add(n)
        text.put(depth, f"narrow({text.name(n)}, at_{name}[{index}]);")


def _reduce(text: CudaText, node: Node) -> None:
    """A reduction over some axes of what an earlier loop has made."""
    of = node.args[0]
    gone = "".join(x for x in of.axes if x not in node.axes)
    text.put(1, "const long long begin = (long long)piece * kResults;")
    text.put(1, f"const long long count = {' * '.join(node.axes) or '1'};")
    text.put(1, "const long long end = begin + kResults < count ? begin + kResults : count;")
    kind, width = REDUCTIONS[node.op].cuda, " * ".join(gone)
    indices = "[&](long long i, long long j)"
    text.put(1, f"fold_over<{kind}>(begin, end, {width}, {indices} {{")
    _indices(text, 2, node.axes, "i")
    _indices(text, 2, gone, "j")
    text.put(2, "(void)i;", f"return (double)({text.value(of)});")
    text.put(1, "}, [&](long long i, double sum) {")
    text.put(
        2,
        _keep(text, node, "sum")
        if node.axes == ""
        else f"step.work[t[VEC{text.vector[node]}] + i] = (W)sum;",
    )
    text.put(2, "(void)i;")
    text.put(1, "});")


def hypers(plan: Plan) -> list[str]:
    """The hyper-parameters that the scalars of a step are computed from, in the order of their
    table.
    """
    names = [n.data for n in reachable(plan.scalars) if n.op == "host"]
    others = COUNT, KEY, *GIVEN
    return [x for x in names if x not in (UPDATES, CLIP) and not x.startswith(others)]


def scalars(text: CudaText) -> None:
    """The scalars of a step, from hyper-parameters, the tensor's count and its extents."""
    text.type = "double"
    text.put(
        0,
        "__device__ void scalars_of(const long long* t, const double* hyper, double count, double"
        " factor,",
    )
    text.put(0, "                           double* scalar, W* working) {")
    text.put(1, "(void)t, (void)hyper, (void)count, (void)factor, (void)scalar, (void)working;")
    table = {UPDATES: "count", CLIP: "factor"}
    table |= {name: f"hyper[{i}]" for i, name in enumerate(hypers(text.plan))}
    table |= {name: f"(double)t[KEY{i}]" for i, name in enumerate(text.keys)}
    for i, name in enumerate(text.given):
        table[name] = f"*reinterpret_cast<const double*>(t[GIVEN{i}])"

    def given(name: str) -> str:
        extents = " * ".join(f"(double)t[IN_{x}]" for x in name.removeprefix(COUNT))
        return extents if name.startswith(COUNT) else table[name]

    known = text.straight(list(text.plan.scalars), given)
    text.put(1, *(f"working[{i}] = (W)(scalar[{i}] = {known[n]});" for n, i in text.scalar.items()))
    text.put(0, "}")
    text.type = "W"
