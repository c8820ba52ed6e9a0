"""Emitting CUDA: the struct that does what a pass does with some elements of a tensor."""

from collections.abc import Iterable

from arrayopt.engines.cuda.text import CudaText
from arrayopt.fusion.graph import Node
from arrayopt.fusion.plan import Plan
from arrayopt.state.quantized import scale_of

__all__ = ["PassText", "later"]

RESULTS = {"Whole": "tensor", "Row": "row", "Column": "column", "Batch": "batch"}
"""By what each kind of result is called in the headers, its kind in a plan."""


def later(plan: Plan, number: int) -> set[str]:
    """The arrays that passes after this one read."""
    found = set[str]()
    for pass_ in plan.passes[number + 1 :]:
        found |= set(pass_.loads)
    return found


class PassText:
    """The struct of a pass, being written.

    Parameters
    ----------
    text : CudaText
        The source that it is written into.
    number : int
        The number of the pass in the plan.
    """

    def __init__(self, text: CudaText, number: int) -> None:
        self.text, self.number, self.of = text, number, text.plan.passes[number]
        self.sums = {kind: self.of.reducing(name) for kind, name in RESULTS.items()}
        inputs = []
        for kind in ("tensor", "batch", "row", "column"):
            inputs += [node.data for node in self.of.using(kind) if node.op == "input"]
        stored = [*self.of.arrays, *map(scale_of, self._codes(self.of.arrays)), *inputs]
        self.arrays = list(dict.fromkeys(stored))
        self.later = later(text.plan, number)
        self.windows = self.of.draws and text.windows

    def write(self) -> None:
        """Write all of it."""
        self.text.put(0, f"struct Pass{self.number} {{")
        self._types()
        self._members()
        self._enter()
        self._enter_row()
        self._enter_columns()
        self._load()
        self._work()
        self._keep()
        self.text.put(0, "};", "")

    def _codes(self, names: Iterable[str]) -> list[str]:
        """The slots that are stored as codes."""
        return [name for name in names if name in self.text.plan.quantized]

    def _fields(self, indent: int, nodes: Iterable[Node], more: str = "") -> None:
        """Declare values."""
        text = self.text
        text.put(indent, *(f"{text.kind(node)} {text.name(node)}{more};" for node in nodes))

    def _types(self) -> None:
        """The types: sums, what a row and columns have, what is loaded."""
        text, loads = self.text, self.of.loads
        counts = ", ".join(f"k{kind} = {len(some)}" for kind, some in self.sums.items())
        text.put(1, f"static constexpr int {counts}, kAhead = {text.ahead(self.of)};")
        codes = str(bool(self._codes(self.of.stores))).lower()
        text.put(1, f"static constexpr bool kCodes = {codes};", "struct Sums {")
        for kind in ("Whole", "Row", "Batch"):
            text.put(2, f"W {kind.lower()}[{max(1, len(self.sums[kind]))}];")
        text.put(1, "};", "struct Row {")
        self._fields(2, self.of.using("row"))
        if self.windows:
            about = "the position of an element, less the place that it lies in"
            text.put(2, f"long long origin;  // {about}")
        text.put(1, "};", "template <int N>", "struct Columns {")
        self._fields(2, self.of.using("column"), "[N]")
        text.put(1, "};", "template <int N>", "struct Loads {")
        text.put(2, *(f"Pack<{text.stored(name)}, N> {name};" for name in loads))
        text.put(2, *(f"BFloat16 {scale_of(name)};" for name in self._codes(loads)))
        text.put(1, "};")
        for kind, some in self.sums.items():
            text.fold(1, f"Of{kind}", some)

    def _members(self) -> None:
        """Where arrays lie, and values that are the same for a tensor or a batch."""
        text = self.text
        text.put(1, "const Step step;", "const long long* const t;", "long long a, b;")
        for name in self.arrays:
            text.put(1, f"{text.stored(name)}* const at_{name};")
        if self.of.draws:
            text.put(1, "const long long origin;")
        self._fields(1, self.of.using("host", "tensor", "batch"))
        for node in self.of.using("column"):
            text.put(1, f"long long first_{text.name(node)};")
        text.put(1, "")

    def _read(self, indent: int, nodes: Iterable[Node], into: str = "") -> None:
        """Read values over fewer axes."""
        text = self.text
        for node in nodes:
            text.put(indent, f"{into}{text.name(node)} = {text.value(node)};")

    def _enter(self) -> None:
        """Read what is the same for a tensor, or for a batch."""
        text, given = self.text, ""
        start = ["step(step)", "t(step.table + (long long)tensor * kColumns)", "a(0)", "b(0)"]
        for name in self.arrays:
            column = f"AT_{name}"
            if name in text.plan.spilled:
                column = f"column_{name}"
                given += f", int {column}"
            lies = f"reinterpret_cast<{text.stored(name)}*>(t[{column}])"
            start.append(f"at_{name}(global({lies}))")
        start += ["origin(t[ORIGIN])"] if self.of.draws else []
        text.put(1, f"__device__ Pass{self.number}(const Step& step, int tensor{given})")
        text.put(1, f"    : {', '.join(start)} {{")
        values = "step.working + (long long)tensor * (kScalars + kValues)"
        text.put(2, f"const W* const working = {values};")
        self._read(2, self.of.using("host", "tensor"))
        text.put(2, "(void)working;")
        text.put(1, "}", "__device__ void enter_batch(long long batch) {")
        text.put(2, "const long long A = t[IN_A], B = t[IN_B], C = t[IN_C];")
        text.put(2, "a = batch / B, b = batch % B;")
        self._read(2, self.of.using("batch"))
        for node in self.of.using("column"):
            start_of = text.index(node.axes.replace("C", "")) if node.axes != "C" else "0"
            text.put(2, f"first_{text.name(node)} = ({start_of}) * C;")
        text.put(2, "(void)A, (void)B, (void)C;")
        text.put(1, "}")

    def _enter_row(self) -> None:
        """Read what is the same for a row."""
        text = self.text
        text.put(1, "__device__ __forceinline__ Row row(long long row, long long r) const {")
        text.put(2, "const long long B = t[IN_B], R = t[IN_R];", "Row of_row;")
        self._read(2, self.of.using("row"), "of_row.")
        if self.windows:
            place = "element(tile_of(t), row, a * B + b, r, 0)"
            text.put(2, f"of_row.origin = origin + row * t[IN_C] - {place};")
        text.put(2, "(void)B, (void)R, (void)row, (void)r;", "return of_row;")
        text.put(1, "}")

    def _enter_columns(self) -> None:
        """Read what is the same for each of N columns."""
        text = self.text
        text.put(1, "template <int N>")
        text.put(1, "__device__ __forceinline__ Columns<N> columns(long long c, int n) const {")
        text.put(2, "Columns<N> of_columns;", "#pragma unroll", "    for (int j = 0; j < N; ++j) {")
        for node in self.of.using("column"):
            place = f"first_{text.name(node)} + c + j"
            if node.op == "input":
                source = f"widen(at_{node.data}[{place}])"
            else:
                source = f"step.work[t[VEC{text.vector[node]}] + {place}]"
            into = f"of_columns.{text.name(node)}[j]"
            text.put(3, f"if (j < n) {into} = {text.typed(node, source)};", f"else {into} = 0;")
        text.put(2, "}", "(void)c, (void)n;", "return of_columns;")
        text.put(1, "}")

    def _load(self) -> None:
        """The elements of the arrays, up to N of them that are neighbours."""
        text, again = self.text, self.later | set(self.of.stores)
        text.put(1, "template <int N, bool kAligned>")
        text.put(1, "__device__ __forceinline__ Loads<N> load(long long i, int n) const {")
        text.put(2, "Loads<N> loads;")
        for name in self.of.loads:
            last = _last(again, name)
            text.put(2, f"loads.{name} = read<N, kAligned, {last}>(at_{name} + i, n);")
        for name in map(scale_of, self._codes(self.of.loads)):
            text.put(2, f"if (n > 0) loads.{name} = at_{name}[i / kBlock];")
            text.put(2, f"else loads.{name}.bits = 0;")
        text.put(2, "(void)i, (void)n;", "return loads;")
        text.put(1, "}")

    def _work(self) -> None:
        """What is done with elements that have been read: operations, sums, stores."""
        text, codes = self.text, self._codes(self.of.stores)
        text.put(1, "template <int N>", "__device__ __forceinline__ void work(")
        text.put(2, "long long i, int n, bool aligned, const Loads<N>& loads, const Row& of_row,")
        text.put(2, "const Columns<N>& of_columns, Sums& sums, W (*columns)[N]) const {")
        for name in self.of.stores:
            packed = f"Pack<{text.stored(name)}, N> write_{name};"
            text.put(2, f"float write_{name}[N];" if name in codes else packed)
        for name in self._codes(self.of.loads):
            step = f"step_of<{text.stored(name)}>(loads.{scale_of(name)})"
            text.put(2, f"const float step_{name} = {step};")
        for node in self.of.using("row"):
            text.put(2, text.declare(node, f"of_row.{text.name(node)}"))
        text.put(1, "#pragma unroll", "    for (int j = 0; j < N; ++j) {")
        self._compute()
        self._sum_up()
        text.put(2, "}")
        for name in self.of.stores:
            self._store(name, coded=name in codes)
        unused = ("i", "n", "aligned", "loads", "of_row", "of_columns", "sums", "columns")
        text.put(2, ", ".join(f"(void){name}" for name in unused) + ";")
        text.put(1, "}")

    def _compute(self) -> None:
        """What is computed of one element, up to what is to be stored."""
        text = self.text
        for name, node in self.of.loads.items():
            value, kind = f"loads.{name}.value[j]", text.kind(node)
            coded = name in text.plan.quantized
            made = f"((float){value} * step_{name})" if coded else f"widen({value})"
            text.put(3, text.declare(node, f"({kind}){made}"))
        for node in self.of.using("column"):
            text.put(3, text.declare(node, f"of_columns.{text.name(node)}[j]"))
        for node in self.of.nodes:
            text.put(3, text.declare(node, text.expression(node)))
        for name, node in self.of.stores.items():
            made = f"narrow({text.name(node)}, write_{name}.value[j]);"
            if name in text.plan.quantized:
                made = f"write_{name}[j] = (float){text.name(node)};"
            text.put(3, made)

    def _sum_up(self) -> None:
        """Take an element's values into what is reduced."""
        if not self.of.reductions:
            return
        text = self.text
        text.put(3, "if (j < n) {")
        for kind in ("Whole", "Row", "Batch", "Column"):
            for i, total in enumerate(self.sums[kind]):
                into = f"columns[{i}][j]" if kind == "Column" else f"sums.{kind.lower()}[{i}]"
                text.put(4, f"{text.take(total, into, text.name(total.args[0]))};")
        text.put(3, "}")

    def _store(self, name: str, *, coded: bool) -> None:
        """Store up to N elements of an array."""
        last, guards = _last(self.later, name), self.of.guards
        if coded:
            to = f"at_{name}, at_{scale_of(name)}, i, n, aligned, write_{name}"
            self.text.put(2, f"write_codes<N, {last}>({to});")
            return
        only = f"if ({self.text.name(guards[name])}) " if name in guards else ""
        self.text.put(2, f"{only}write<N, {last}>(at_{name} + i, write_{name}, n, aligned);")

    def _keep(self) -> None:
        """Leave partial results for what follows."""
        text = self.text
        for kind in ("Whole", "Row", "Batch"):
            name = kind.lower()
            text.put(1, f"__device__ void keep_{name}(long long i, const Sums& sums) const {{")
            for number, total in enumerate(self.sums[kind]):
                place = f"step.work[t[PART{text.partial[total]}] + i]"
                text.put(2, f"{place} = sums.{name}[{number}];")
            text.put(2, "(void)i, (void)sums;")
            text.put(1, "}")
        text.put(1, "__device__ void keep_column(int k, long long i, W sum) const {")
        for number, total in enumerate(self.sums["Column"]):
            place = f"step.work[t[PART{text.partial[total]}] + i]"
            text.put(2, f"if (k == {number}) {place} = sum;")
        text.put(2, "(void)k, (void)i, (void)sum;")
        text.put(1, "}")


def _last(again: set[str], name: str) -> str:
    """Whether an array is not among those that are read again in the step."""
    return "false" if name in again else "true"
