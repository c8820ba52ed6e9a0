"""Print the program of a plan as C++, which `cpp/engine.py` compiles, and `ao.source` returns."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar

from arrayopt.codecs import BLOCK, CODECS
from arrayopt.engines.cplusplus import CPlusPlusPrinter, header
from arrayopt.engines.cpp.elements import ElementsPrinter
from arrayopt.engines.native.columns import SHARE, native_columns
from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import CACHED, Node
from arrayopt.fusion.index import Place
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower_cpu import lowered
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.segments import Segmented

REST = "int64_t* t, const double* scalars, double* values, W* work, double* part"
"""The parameters of each function, after its `SHARE`."""


class CpuPrinter(CPlusPlusPrinter):
    """Prints a program as C++ for CPUs."""

    words: ClassVar[dict[str, str]] = {"min": "least", "max": "greatest", "//": "/"}
    integer = "int64_t"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.defined: set[str] = set()

    def function(self, function: program.Function) -> None:
        """Print a function, and before it the functions of its loops over elements."""
        loops = list(program.elements_of(function.body))
        for elements in loops:
            ElementsPrinter(self, elements).print()
        most = max((len(elements.totals) for elements in loops), default=0)
        apart = "__attribute__((noinline)) " if loops else ""  # compiles faster
        share = [f"int64_t {x}" for x in SHARE[function.shared]]
        given = [*share, REST, *(f"int64_t AT_{x}" for x in function.scratch)]
        self.put(0, "", f"static {apart}void {function.name}({', '.join(given)}) {{")
        self.put(1, *([f"W got[{most}];"] if most else []))
        self.statements(1, function.body)
        self.put(0, "}")

    def statements(self, depth: int, body: Iterable[program.Statement]) -> None:
        outer, self.defined = self.defined, set()
        super().statements(depth, body)
        self.defined = outer

    def _again(self, name: str) -> bool:
        """Whether a name is defined already in this list of statements."""
        found = name in self.defined
        self.defined.add(name)
        return found

    def statement(self, depth: int, statement: program.Statement) -> None:
        index = self.index
        match statement:
            case program.Let(name, value):
                kind = "" if self._again(name) else "int64_t "
                self.put(depth, f"{kind}{name} = {index(value)};")
            case program.Array(name, _, address):
                kind = self.stored(name)
                where = f"t[AT_{name}]" if address is None else index(address)
                self.put(depth, f"{kind}* const at_{name} = ({kind}*){where};")
            case program.View(name, room, first, _):
                self.put(depth, f"auto* const {name} = {room} + {index(first)};")
            case program.Read(node, place, wide):
                if not self._again(self.bare(node)):
                    self.put(depth, self._read(node, self.value(place), wide=wide))
            case program.Compute(node):
                kind = "auto" if node.kind == "real" else self.type_of(node)
                self.put(depth, f"const {kind} {self.name(node)} = {self.expression(node)};")
                self.defined.add(self.name(node))
            case program.Start(into, reduction):
                kept = self.value(into)
                kind = "" if isinstance(into, Place) or self._again(kept) else "double "
                self.put(depth, f"{kind}{kept} = {self.start(reduction)};")
            case program.Fill(view, size, reduction):
                head = f"for (int64_t i = 0; i < {index(size)}; ++i)"
                self.put(depth, f"{head} {view}[i] = {self.start(reduction)};")
            case program.Take(reduction, into, value):
                self.put(depth, f"{self.take(reduction, self.value(into), self.place(value))};")
            case program.Write(place, value):
                self.put(depth, f"{self.place(place)} = {self.value(value)};")
            case bulk.Multiply(a, b, out, first, end, sides, factors):
                given = ["(void*)t[BLAS]"]
                given += [f"(W*)t[AT_{array}] + {index(start)}" for array, start in (a, b, out)]
                given += map(index, (first, end, *sides))
                given += [str(int(flag)) for flag in factors[:3]]
                self.put(depth, f"multiply({', '.join(given)});")
            case bulk.Spread(back, array, first, end, planes, each):
                way, count = "give" if back else "take", index((end - first) // each)
                source = f"at_{array} + {index(first)}"
                self.put(depth, f"{way}({source}, {planes}, {count}, {index(each)});")
            case bulk.Buffer(name, size):
                self.put(depth, f"W {name}[{size}];")
            case bulk.Codes(_, _, _, _, count, buffer):
                given = [*self._coded(statement), buffer, index(count)]
                self.put(depth, f"quantize({', '.join(given)});")
            case bulk.Elements():
                given = [index(statement.count)]
                for array, first, _ in statement.slices.values():
                    given.append(f"{array} + {index(first)}")
                for codes in statement.codes:
                    given += self._coded(codes)
                given += map(self.bare, statement.scalars)
                if statement.position is not None and statement.stride is not None:
                    given += [index(statement.position), index(statement.stride)]
                given += ["got"] if statement.totals else []
                self.put(depth, f"{statement.function}({', '.join(given)});")
            case _:
                super().statement(depth, statement)

    def _read(self, node: Node, place: str, *, wide: bool) -> str:
        """Return the definition of a value that is read; scalars are numbers, also conditions."""
        if node.on_host:
            kind = "double" if wide else "W"
            return f"const {kind} {self.bare(node)} = ({kind}){place};"
        if node.kind == "bool":
            return f"const bool {self.name(node)} = {place} != 0;"
        return f"const {'auto' if wide else 'W'} {self.name(node)} = {place};"

    def _coded(self, codes: bulk.Codes) -> tuple[str, str]:
        """Return the addresses of codes and of their scales."""
        scales = f"at_{codes.scale} + {self.index(codes.first // BLOCK)}"
        return f"at_{codes.array} + {self.index(codes.first)}", scales


RUN = """
// The words of a call are the addresses of its arrays, the rows last, and how many rows there are.
extern "C" void run(const int64_t* call, int64_t first, int64_t last, int64_t thread,
                    int64_t threads) {{
    const double* const scalars = (const double*)call[1];
    double *const values = (double*)call[2], *const part = (double*)call[4];
    W* const work = (W*)call[3];
    const int64_t* const rows = (const int64_t*)call[5];
    for (int64_t j = 0; j < call[6]; ++j) {{
        int64_t* t = (int64_t*)call[0] + rows[j] * kColumns;
        const double* s = scalars + rows[j] * {scalars};
        double* v = values + rows[j] * {values};
        const int64_t f = t[FIRST], n = t[LAST] - f;
        const int64_t lo = f + n * thread / threads, hi = f + n * (thread + 1) / threads;
"""


@lru_cache(maxsize=CACHED)
def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    segmented: Segmented | None = None,
    about: str = ".",
) -> str:
    """Return a C++ source that runs a plan; see `arrayopt.engines.numba.emit.emit`."""
    plan.check_wide()
    laid_out = segmented.layout if segmented else layout(plan)
    text = CpuPrinter(plan, dtype, grad_dtype or dtype, laid_out, native_columns(plan, laid_out))
    text.comment(f"Fused loops{about}")
    text.put_text(header("cpu.h"))
    real = CODECS[text.real].cplusplus
    text.put(0, "", f"typedef {real} W;", f"enum {{ kSums = {text.lanes} }};", "")
    draws = ["random.cuh", "draws.h"] if plan.draws else []
    for name in ("storage.cuh", "arithmetic.cuh", "quantized.cuh", "loops.h", *draws):
        text.put_text(header(name))
        text.put(0, "")
    text.put(0, f"enum {{ {', '.join(text.columns)}, kColumns }};")
    program = lowered(plan, segmented)
    for function in program.functions:
        text.function(function)
    text.put_text(RUN.format(scalars=len(text.layout.scalars), values=text.layout.values))
    for number, stage in enumerate(program.stages):
        if stage.function.body:
            share, scratch = SHARE[stage.function.shared], (f"AT_{x}" for x in stage.scratch)
            given = ", ".join([*share, "t, s, v, work, part", *scratch])
            now = f"first <= {number} && {number} < last"
            text.put(2, f"if ({now}) {stage.function.name}({given});")
    text.put(0, "    }", "}")
    return text.text()
