"""Printing a program as C++."""

import math
from collections.abc import Iterable
from typing import ClassVar

from arrayopt.codecs import BLOCK
from arrayopt.engines.columns import native_columns
from arrayopt.engines.cplusplus import CPlusPlus
from arrayopt.engines.cpp.vectors import in_vectors
from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import POSITION, Node, Spare
from arrayopt.fusion.index import Place
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.plan import Plan

__all__ = ["Text"]

REST = "int64_t* t, const double* scalars, double* values, W* work, double* part"
ARGUMENTS = {
    "": REST,
    "units": f"int64_t lo, int64_t hi, int64_t thread, {REST}",
    "threads": f"int64_t thread, int64_t threads, {REST}",
}
"""What a function takes, by how threads share it."""


class Text(CPlusPlus):
    """The text of a source, being written."""

    words: ClassVar[dict[str, str]] = {"min": "least", "max": "greatest", "//": "/"}
    whole = "int64_t"

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, layout: Layout) -> None:
        super().__init__(plan, dtype, grad_dtype, layout, native_columns(plan, layout))
        self.known: set[str] = set()

    def name(self, node: Node) -> str:
        if node.op in ("const", POSITION):
            return "position" if node.op == POSITION else self.constant(node)
        truth = node.on_host and node.dtype == "bool"
        return f"({self.bare(node)} != 0)" if truth else self.bare(node)

    def function(self, function: program.Function) -> None:
        """Print a function, after the loops over elements that it calls."""
        most = 0
        for elements in program.elements_of(function.body):
            self._elements(elements)
            most = max(most, len(elements.totals))
        given = [ARGUMENTS[function.shared], *(f"int64_t AT_{x}" for x in function.scratch)]
        self.put(0, "", f"static void {function.name}({', '.join(given)}) {{")
        self.put(1, *([f"W got[{most}];"] if most else []))
        self.statements(1, function.body)
        self.put(0, "}")

    def statements(self, depth: int, body: Iterable[program.Statement]) -> None:
        outer, self.known = self.known, set()
        super().statements(depth, body)
        self.known = outer

    def _again(self, name: str) -> bool:
        """Whether these statements have defined a name before."""
        found = name in self.known
        self.known.add(name)
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
                kind = "auto" if node.dtype == "real" else self.kind(node)
                self.put(depth, f"const {kind} {self.name(node)} = {self.expression(node)};")
                self.known.add(self.name(node))
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
        """A scalar keeps its number, also where it is a truth value."""
        if node.on_host:
            kind = "double" if wide else "W"
            return f"const {kind} {self.bare(node)} = ({kind}){place};"
        if node.dtype == "bool":
            return f"const bool {self.name(node)} = {place} != 0;"
        return f"const {'auto' if wide else 'W'} {self.name(node)} = {place};"

    def _coded(self, codes: bulk.Codes) -> tuple[str, str]:
        """Where codes are, and their scales."""
        first = codes.first
        return (
            f"at_{codes.array} + {self.index(first)}",
            f"at_{codes.scale} + {self.index(first // BLOCK)}",
        )

    def _elements(self, loop: bulk.Elements) -> None:
        """Print a loop over elements as a function."""
        totals = loop.totals
        given = {"count": "int64_t count"}
        decoded = {f"at_{codes.array}" for codes in loop.codes}
        for name in loop.slices:
            kind = self.stored(loop.storage[name]) if name in loop.storage else "W"
            written = name in loop.stores or name in loop.into.values() or name in decoded
            given[name] = f"{'' if written else 'const '}{kind}* __restrict {name}"
        for codes in loop.codes:
            array, kind = codes.array, self.stored(codes.array)
            given[f"codes_{array}"] = f"const {kind}* __restrict codes_{array}"
            given[f"scales_{array}"] = f"const BFloat16* __restrict scales_{array}"
        for node in loop.scalars:
            kind = "W" if node.on_host else self.kind(node)
            given[self.bare(node)] = f"const {kind} {self.bare(node)}"
        if loop.position is not None:
            given |= {"start": "int64_t start", "each": "int64_t each"}
        given |= {"got": "W* __restrict got"} if totals else {}
        declared = ", ".join(given.values())
        summed = {s.args[0].id for s in totals if not isinstance(s.data, Spare)}
        spare = [s for s in totals if isinstance(s.data, Spare) and s.data.plain in summed]
        spare = [] if loop.stores or loop.into else spare
        function = f"{loop.function}_of" if spare else loop.function
        self.put(0, "", *(["template <bool all>"] if spare else []))
        self.put(0, f"static __attribute__((noinline)) void {function}({declared}) {{")
        self.put(1, *(f"W s{s.id} = {self.start(s)};" for s in totals))
        stored = {self.stored(loop.storage[name]) for name in loop.stores if name in loop.storage}
        vectors = bool(loop.codes or loop.sums) and in_vectors(loop, {self.real, *stored})
        self.put(1, "int64_t first = 0;")
        if vectors:
            self._vectors(loop, spare)
        self._decoded(loop)
        clauses = [f" reduction({REDUCTIONS[s.op].simd}:s{s.id})" for s in totals]
        if totals:
            clauses.append(" simdlen(kSums)")
        self.put(0, f"#pragma omp simd{''.join(clauses)}")
        self.put(1, "for (int64_t i = first; i < count; ++i) {")
        if loop.position is not None:
            self.put(2, "const int64_t position = start + i * each;")
        for name, node in loop.loads.items():
            here = f"{name}[i]"
            if name in loop.storage:
                here = f"widen({here})"
            elif node.dtype == "bool":
                here = f"{here} != 0"
            self.put(2, f"const {self.kind(node)} {self.name(node)} = {here};")
        self._computed(2, loop, "")
        for name, node in loop.stores.items():
            here, value = f"{name}[i]", self.name(node)
            only = f"if ({self.name(loop.guards[name])}) " if name in loop.guards else ""
            if name in loop.storage:
                self.put(2, f"{only}narrow({value}, {here});")
            else:  # g++ makes no vectors of a conversion
                value += " ? (W)1 : (W)0" if node.dtype == "bool" else ""
                self.put(2, f"{only}{here} = {value};")
        self._summed(2, loop, spare, "s")
        self.put(1, "}", *(f"got[{i}] = s{s.id};" for i, s in enumerate(totals)))
        self.put(0, "}")
        if spare:
            self._without(loop, spare, declared, ", ".join(given))

    def _computed(self, depth: int, loop: bulk.Elements, kind: str) -> None:
        """Print what a loop computes of an element, or of a vector of a kind."""
        products = {n: i for i, n in enumerate(loop.nodes) if (n.op, n.dtype) == ("mul", "real")}
        for node in loop.nodes:
            text = self.expression(node)
            if node.op in ("add", "sub") and products.keys() >= {*node.args}:
                text = self._fused(node, first=min(node.args, key=products.__getitem__))
            if (node.op, node.dtype) == ("add", "complex"):
                text = self._fused_complex(node, loop) or text
            if node.op == "where" and node.dtype == "real" and not node.args[0].axes:
                text = f"chosen({', '.join(map(self.name, node.args))})"
            integers = node.dtype == "bool" or OPS[node.op].integers
            made = "Integers" if kind and integers else kind or self.kind(node)
            self.put(depth, f"const {made} {self.name(node)} = {text};")

    def _fused(self, node: Node, first: Node) -> str:
        """The sum or difference of two products, of which the first is not rounded."""
        left, right = node.args
        a, b = map(self.name, first.args)
        if node.op == "add":
            return f"fused({a}, {b}, {self.name(right if first is left else left)})"
        if first is left:
            return f"fused({a}, {b}, -{self.name(right)})"
        return f"fused(-{a}, {b}, {self.name(left)})"

    def _fused_complex(self, node: Node, loop: bulk.Elements) -> str:
        """The sum of a complex number and a real multiple of one, which is not rounded; else none."""
        for x, product in (node.args, node.args[::-1]):
            kinds = {factor.dtype for factor in product.args} if product in loop.nodes else set()
            if product.op == "mul" and x.dtype == "complex" and kinds == {"real", "complex"}:
                return f"fused({', '.join(map(self.name, (*product.args, x)))})"
        return ""

    def _summed(self, depth: int, loop: bulk.Elements, spare: list[Node], kept: str) -> None:
        """Print what a loop adds up, in variables whose names begin so."""
        for s, node in loop.sums.items():
            into = f"{loop.into[s]}[i]" if s in loop.into else f"{kept}{s.id}"
            only = "if (all) " if s in spare else ""
            if kept == "v" and s in loop.into:
                at = f"{loop.into[s]} + i"
                self.put(depth, f"put_vector(vector_at({at}) + {self.name(node)}, {at});")
                continue
            if (s.op, node.op, node.dtype) == ("sum", "mul", "real") and node in loop.nodes:
                a, b = map(self.name, node.args)  # g++ alone may round it in the last elements
                self.put(depth, f"{only}{into} = fused({a}, {b}, {into});")
                continue
            self.put(depth, f"{only}{self.take(s, into, self.name(node))};")

    def _decoded(self, loop: bulk.Elements) -> None:
        """Print what decodes the codes that a loop has not read in vectors."""
        arrays = [codes.array for codes in loop.codes]
        beside = self._beside(loop)
        for i, x in enumerate(arrays):
            others = "".join(f", {name} + first" for name in beside[i :: len(arrays)])
            given = f"codes_{x} + first, scales_{x} + first / kBlock, at_{x} + first, count - first"
            self.put(1, f"dequantize({given}{others});")

    def _beside(self, loop: bulk.Elements) -> list[str]:
        """What a loop reads beside codes."""
        decoded = {f"at_{codes.array}" for codes in loop.codes}
        return [name for name in loop.loads if name not in decoded]

    def _vectors(self, loop: bulk.Elements, spare: list[Node]) -> None:
        """Print what comes before a loop: the same of whole vectors, or blocks of codes."""
        arrays = [codes.array for codes in loop.codes]
        steps = {f"at_{x}": f"codes_{x} + i, step_{x}" for x in arrays}
        self.put(0, "#ifdef VECTORS")
        self.put(1, *(f"Floats v{s.id} = {{}};" for s in loop.totals))
        size = "kBlock" if arrays else "kLanes"
        self.put(1, f"for (; first + {size} <= count; first += {size}) {{")
        if arrays:
            for name in (*self._beside(loop), *(f"codes_{x}" for x in arrays)):
                self.put(2, f"ask_for<{int(bool(loop.stores))}>({name} + first);")
            for x in arrays:
                step = f"step_{x} = step_of<{self.stored(x)}>(scales_{x}[first / kBlock])"
                self.put(2, f"const float {step};")
            self.put(0, "#pragma GCC unroll 2")
        self.put(2, f"for (int64_t i = first; i < first + {size}; i += kLanes) {{")
        for name, node in loop.loads.items():
            here = f"decoded({steps[name]})" if name in steps else f"vector_at({name} + i)"
            self.put(3, f"const auto {self.name(node)} = {here};")
        self._computed(3, loop, "Floats")
        for name, node in loop.stores.items():
            self.put(3, f"put_vector({self.name(node)}, {name} + i);")
        self._summed(3, loop, spare, "v")
        self.put(2, "}")
        self.put(1, "}", *(f"s{s.id} += sum_of(v{s.id});" for s in loop.totals))
        self.put(0, "#endif")

    def _without(self, loop: bulk.Elements, spare: list[Node], declared: str, given: str) -> None:
        """Print the function that makes spare sums only if the plain ones need them."""
        at = {s.args[0].id: i for i, s in enumerate(loop.totals) if s not in spare}
        enough = dict[str, None]()
        for s in spare:
            i, low, high = at[s.data.plain], s.data.low, s.data.high
            enough[f"got[{i}] >= (W){low!r}"] = None
            enough |= {f"got[{i}] <= (W){high!r}": None} if math.isfinite(high) else {}
        self.put(0, "", f"static void {loop.function}({declared}) {{")
        self.put(1, f"{loop.function}_of<false>({given});")
        self.put(1, f"if (!({' && '.join(enough)})) {loop.function}_of<true>({given});")
        self.put(0, "}")
