"""`PassPrinter`: prints the work of a pass as a struct of CUDA, for `emit.py`.
Templates in ``kernels/`` loop over rows, columns and elements, and call the struct's members."""

from collections.abc import Iterable

from arrayopt.engines.cuda.printer import CudaPrinter
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import Place, name
from arrayopt.fusion.program import Body, Function, Read
from arrayopt.state.quantized import scale_of

RESULTS = {"Whole": "tensor", "Row": "row", "Column": "column", "Batch": "batch"}
"""The kinds of results by their names in the headers: what a partial result is of."""


class PassPrinter:
    """Prints the struct of a pass into the source `text`."""

    def __init__(self, text: CudaPrinter, function: Function) -> None:
        (body,) = function.body
        assert isinstance(body, Body)
        self.text, self.function, self.body = text, function, body
        self.loop = body.elements
        self.sums = {kind: body.sums[of] for kind, of in RESULTS.items()}
        self.loads = {x: n for x, n in self.loop.loads.items() if x in self.loop.storage}
        self.coded = {x: a for x, a in self.loop.storage.items() if a in body.codes}
        self.scales = {x: scale_of(a) for x, a in self.coded.items() if x in self.loads}
        self.windows = self.loop.position is not None and text.windows

    def write(self, ahead: int) -> None:
        """Print the struct; a thread reads `ahead` vectors of an array before it uses the first."""
        self.text.put(0, f"struct {self.function.name} {{")
        self._types(ahead)
        self._members()
        self._enter()
        self._enter_row()
        self._enter_columns()
        self._load()
        self._work()
        self._keep()
        self.text.put(0, "};", "")

    def _stored(self, at: str) -> str:
        """The C++ type of the elements of a stored array."""
        return self.text.stored(self.loop.storage[at])

    def _fields(self, indent: int, nodes: Iterable[Node], more: str = "") -> None:
        """Print a field for each value."""
        text = self.text
        text.put(indent, *(f"{text.type_of(n)} {text.bare(n)}{more};" for n in nodes))

    def _types(self, ahead: int) -> None:
        """Print the nested types: sums, values of a row and of columns, and loaded elements."""
        text = self.text
        counts = ", ".join(f"k{kind} = {len(some)}" for kind, some in self.sums.items())
        text.put(1, f"static constexpr int {counts}, kAhead = {ahead};")
        codes = str(any(x in self.coded for x in self.loop.stores)).lower()
        text.put(1, f"static constexpr bool kCodes = {codes};", "struct Sums {")
        for kind in ("Whole", "Row", "Batch"):
            text.put(2, f"W {kind.lower()}[{max(1, len(self.sums[kind]))}];")
        text.put(1, "};", "struct Row {")
        self._fields(2, [x.node for x in self.body.row])
        if self.windows:
            about = "the position of an element, less the place that it lies in"
            text.put(2, f"long long origin;  // {about}")
        text.put(1, "};", "template <int N>", "struct Columns {")
        self._fields(2, self.body.columns, "[N]")
        text.put(1, "};", "template <int N>", "struct Loads {")
        text.put(2, *(f"Pack<{self._stored(x)}, N> {x};" for x in self.loads))
        text.put(2, *(f"BFloat16 {scale};" for scale in self.scales.values()))
        text.put(1, "};")
        for kind, some in self.sums.items():
            text.fold(1, f"Of{kind}", list(some))

    def _members(self) -> None:
        """Print the members: addresses of arrays, and values of the tensor and of the matrix."""
        text = self.text
        text.put(1, "const Step step;", "const long long* const t;", "long long a, b;")
        text.put(1, *(f"{text.stored(x)}* const at_{x};" for x in self.body.arrays))
        if self.loop.position is not None:
            text.put(1, "const long long origin;")
        self._fields(1, [x.node for x in (*self.body.tensor, *self.body.batch)])
        text.put(1, *(f"long long first_{text.bare(n)};" for n in self.body.columns), "")

    def _read(self, indent: int, reads: Iterable[Read], into: str = "") -> None:
        """Print statements that read values over fewer axes than the elements have."""
        text = self.text
        for x in reads:
            text.put(indent, f"{into}{text.bare(x.node)} = {text.read(x.node, x.place)};")

    def _enter(self) -> None:
        """Print the constructor, which reads a tensor's values, and `enter_batch` (a matrix's)."""
        text, scratch = self.text, self.function.scratch
        given = "".join(f", int column_{x}" for x in scratch)
        start = ["step(step)", "t(step.table + (long long)tensor * kColumns)", "a(0)", "b(0)"]
        for x in self.body.arrays:
            column = f"{'column' if x in scratch else 'AT'}_{x}"
            start.append(f"at_{x}(global(reinterpret_cast<{text.stored(x)}*>(t[{column}])))")
        if self.loop.position is not None:
            start.append(f"origin({text.index(self.loop.position)})")
        text.put(1, f"__device__ {self.function.name}(const Step& step, int tensor{given})")
        text.put(1, f"    : {', '.join(start)} {{")
        values = "step.working + (long long)tensor * (kScalars + kValues)"
        text.put(2, f"const W* const working = {values};")
        self._read(2, self.body.tensor)
        text.put(2, "(void)working;")
        text.put(1, "}", "__device__ void enter_batch(long long batch) {")
        text.put(2, "const long long A = t[IN_A], B = t[IN_B], C = t[IN_C];")
        text.put(2, "a = batch / B, b = batch % B;")
        self._read(2, self.body.batch)
        for node, place in self.body.columns.items():
            text.put(2, f"first_{text.bare(node)} = {text.index(place.index)};")
        text.put(2, "(void)A, (void)B, (void)C;")
        text.put(1, "}")

    def _enter_row(self) -> None:
        """Print `row`, which reads the values of a row."""
        text = self.text
        text.put(1, "__device__ __forceinline__ Row row(long long row, long long r) const {")
        text.put(2, "const long long B = t[IN_B], R = t[IN_R];", "Row of_row;")
        self._read(2, self.body.row, "of_row.")
        if self.windows:
            place = "element(tile_of(t), row, a * B + b, r, 0)"
            text.put(2, f"of_row.origin = origin + row * t[IN_C] - {place};")
        text.put(2, "(void)B, (void)R, (void)row, (void)r;", "return of_row;")
        text.put(1, "}")

    def _enter_columns(self) -> None:
        """Print `columns`, which reads the values of N columns."""
        text = self.text
        text.put(1, "template <int N>")
        text.put(1, "__device__ __forceinline__ Columns<N> columns(long long c, int n) const {")
        text.put(2, "Columns<N> of_columns;", "#pragma unroll", "for (int j = 0; j < N; ++j) {")
        for node, place in self.body.columns.items():
            here = name(f"first_{text.bare(node)}") + name("c") + name("j")
            into = f"of_columns.{text.bare(node)}[j]"
            source = text.read(node, Place(place.room, here))
            text.put(3, f"if (j < n) {into} = {source};", f"else {into} = 0;")
        text.put(2, "}", "(void)c, (void)n;", "return of_columns;")
        text.put(1, "}")

    def _load(self) -> None:
        """Print `load`, which reads up to N consecutive elements of each array."""
        text = self.text
        text.put(1, "template <int N, bool kAligned>")
        text.put(1, "__device__ __forceinline__ Loads<N> load(long long i, int n) const {")
        text.put(2, "Loads<N> loads;")
        for x in self.loads:
            last = str(x not in self.loop.stores and self._last(x)).lower()
            text.put(2, f"loads.{x} = read<N, kAligned, {last}>({x} + i, n);")
        for x in self.scales.values():
            text.put(2, f"if (n > 0) loads.{x} = at_{x}[i / kBlock];")
            text.put(2, f"else loads.{x}.bits = 0;")
        text.put(2, "(void)i, (void)n;", "return loads;")
        text.put(1, "}")

    def _last(self, at: str) -> bool:
        """Whether the step does not read this array again."""
        return self.loop.storage[at] not in self.body.again

    def _work(self) -> None:
        """Print `work`, which processes elements that were read: operations, sums, stores."""
        text, loop = self.text, self.loop
        text.put(1, "template <int N>", "__device__ __forceinline__ void work(")
        text.put(2, "long long i, int n, bool aligned, const Loads<N>& loads, const Row& of_row,")
        text.put(2, "const Columns<N>& of_columns, Sums& sums, W (*columns)[N]) const {")
        for at in loop.stores:
            packed = f"Pack<{self._stored(at)}, N> write_{at};"
            text.put(2, f"float write_{at}[N];" if at in self.coded else packed)
        for at, scale in self.scales.items():
            text.put(2, f"const float step_{at} = step_of<{self._stored(at)}>(loads.{scale});")
        for read in self.body.row:
            text.put(2, text.declare(read.node, f"of_row.{text.bare(read.node)}"))
        text.put(2, "#pragma unroll", "for (int j = 0; j < N; ++j) {")
        self._compute()
        self._sum_up()
        text.put(2, "}")
        for at in loop.stores:
            last = str(self._last(at)).lower()
            if at in self.coded:
                to = f"{at}, at_{scale_of(self.coded[at])}, i, n, aligned, write_{at}"
                text.put(2, f"write_codes<N, {last}>({to});")
            else:
                only = f"if ({text.name(loop.guards[at])}) " if at in loop.guards else ""
                text.put(2, f"{only}write<N, {last}>({at} + i, write_{at}, n, aligned);")
        unused = ("i", "n", "aligned", "loads", "of_row", "of_columns", "sums", "columns")
        text.put(2, ", ".join(f"(void){x}" for x in unused) + ";")
        text.put(1, "}")

    def _compute(self) -> None:
        """Print the computation for one element, and the conversion of results for storage."""
        text = self.text
        for at, node in self.loads.items():
            made = f"widen(loads.{at}.value[j])"
            if at in self.coded:
                made = f"((float)loads.{at}.value[j] * step_{at})"
            text.put(3, text.declare(node, f"({text.type_of(node)}){made}"))
        for node in self.body.columns:
            text.put(3, text.declare(node, f"of_columns.{text.bare(node)}[j]"))
        for node in self.loop.nodes:
            text.put(3, text.declare(node, text.expression(node)))
        for at, node in self.loop.stores.items():
            made = f"narrow({text.name(node)}, write_{at}.value[j]);"
            if at in self.coded:
                made = f"write_{at}[j] = (float){text.name(node)};"
            text.put(3, made)

    def _sum_up(self) -> None:
        """Print the statements that add an element's values to the reductions."""
        text = self.text
        if self.loop.sums:
            text.put(3, "if (j < n) {")
            for kind in ("Whole", "Row", "Batch", "Column"):
                for i, total in enumerate(self.sums[kind]):
                    into = f"columns[{i}][j]" if kind == "Column" else f"sums.{kind.lower()}[{i}]"
                    text.put(4, f"{text.take(total, into, text.name(self.loop.sums[total]))};")
            text.put(3, "}")

    def _keep(self) -> None:
        """Print the functions that store partial results for later stages."""
        text = self.text
        for kind in ("Whole", "Row", "Batch"):
            made = kind.lower()
            text.put(1, f"__device__ void keep_{made}(long long i, const Sums& sums) const {{")
            for number, first in enumerate(self.sums[kind].values()):
                place = text.place(Place("work", first + name("i")))
                text.put(2, f"{place} = sums.{made}[{number}];")
            text.put(2, "(void)i, (void)sums;")
            text.put(1, "}")
        text.put(1, "__device__ void keep_column(int k, long long i, W sum) const {")
        for number, first in enumerate(self.sums["Column"].values()):
            place = text.place(Place("work", first + name("i")))
            text.put(2, f"if (k == {number}) {place} = sum;")
        text.put(2, "(void)k, (void)i, (void)sum;")
        text.put(1, "}")
