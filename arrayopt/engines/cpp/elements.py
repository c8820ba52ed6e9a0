"""Print a loop over elements (`fusion.bulk.Elements`) as a C++ function. `emit.py` uses it for each
such loop of a program.
"""

import math

from arrayopt.engines.cplusplus import CPlusPlusPrinter
from arrayopt.engines.printer import rounded_nodes, unrounded_products
from arrayopt.fusion.bulk import Elements
from arrayopt.fusion.graph import Node, Spare

COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
ARITHMETIC = {"add", "sub", "mul", "div", "over", "sqrt", "neg", "where", "minimum", "maximum"}
ARITHMETIC |= {"current_bfloat16", "joined_bfloat16", "low_bfloat16", "round_bfloat16"}
SLOW = {"current_float16", "joined_float16", "low_float16", "round_float16", "uniform"}
"""Operations on vectors of float32 in the headers that are slow in g++'s own vectors."""
TYPES = {"float32", "float", "BFloat16", "Half", "Low8"}


class ElementsPrinter:
    """Prints the function of a loop.

    The function first runs over whole vectors, or blocks of codes, if the headers have all its
    operations on vectors. Then it decodes the codes that are left, and runs element by element.
    """

    def __init__(self, text: CPlusPlusPrinter, loop: Elements) -> None:
        self.text, self.loop, self.put = text, loop, text.put
        self.coded = {f"at_{codes.array}": codes.array for codes in loop.codes}
        self.beside = [name for name in loop.loads if name not in self.coded]
        self.only = {name: f"if ({text.name(n)}) " for name, n in loop.guards.items()}
        self.unrounded = unrounded_products(loop)
        self.spare = [] if loop.stores or loop.into else _spare_sums(loop)

    def print(self) -> None:
        """Print the function; with spare sums, a template and a function that calls it."""
        loop, parameters = self.loop, self._parameters()
        declared = ", ".join(parameters.values())
        function = f"{loop.function}_of" if self.spare else loop.function
        self.put(0, "", *(["template <bool all>"] if self.spare else []))
        self.put(0, f"static __forceinline__ void {function}({declared}) {{")
        self.put(1, *(f"Lanes s{s.id}({self.text.start(s)});" for s in loop.totals))
        self.put(1, "int64_t first = 0;")
        if self._is_in_vectors():
            self._vectors()
        self._decode()
        self._one_by_one()
        if loop.totals:
            self._in_lanes()
        self.put(0, "}")
        if self.spare:
            self._call_twice(declared, ", ".join(parameters))

    def _parameters(self) -> dict[str, str]:
        """Return the declarations of the parameters, by name."""
        text, loop = self.text, self.loop
        written = {*loop.stores, *loop.into.values(), *self.coded}
        given = {"count": "int64_t count"}
        for name in loop.slices:
            kind = text.stored(loop.storage[name]) if name in loop.storage else "W"
            given[name] = f"{'' if name in written else 'const '}{kind}* __restrict {name}"
        for x in self.coded.values():
            given[f"codes_{x}"] = f"const {text.stored(x)}* __restrict codes_{x}"
            given[f"scales_{x}"] = f"const BFloat16* __restrict scales_{x}"
        for node in loop.scalars:
            kind = "W" if node.on_host else text.type_of(node)
            given[text.bare(node)] = f"const {kind} {text.bare(node)}"
        if loop.position is not None:
            given |= {"start": "int64_t start", "each": "int64_t each"}
        if loop.totals:
            given["got"] = "W* __restrict got"
        return given

    def _is_in_vectors(self) -> bool:
        """Whether to run over whole vectors first: if that is faster than g++'s own vectors."""
        loop, slow = self.loop, any(n.op in SLOW for n in self.loop.nodes)
        if not (loop.codes or loop.sums or slow):
            return False
        stored = [loop.storage[name] for name in loop.stores if name in loop.storage]
        types = {self.text.real, *map(self.text.stored, stored)}
        given = [*loop.loads.values(), *(n for n in loop.scalars if not n.on_host)]
        reals = all(n.kind == "real" for n in given)
        sums = all(s.op == "sum" for s in (*loop.totals, *loop.into))
        return types <= TYPES and reals and sums and all(map(_is_of_vectors, loop.nodes))

    def _vectors(self) -> None:
        """Print the loops over vectors."""
        loop, text = self.loop, self.text
        size = "kBlock" if loop.codes else "kLanes"
        self.put(0, "#ifdef VECTORS")
        self.put(1, *(f"Floats v{s.id} = {{}};" for s in loop.totals))
        for node in loop.nodes:
            if node.op == "uniform":
                given = ", ".join(map(text.name, node.args[1:]))
                self.put(1, f"const Drawn v{node.id}(count, start, each, {given});")
        for x in self.coded.values():
            self.put(1, f"const Steps<{text.stored(x)}> steps_{x}(scales_{x}, count / kBlock);")
        self.put(1, f"for (; first + {size} <= count; first += {size}) {{")
        if loop.codes:
            for name in (*self.beside, *(f"codes_{x}" for x in self.coded.values())):
                self.put(2, f"ask_for<{int(bool(loop.stores))}>({name} + first);")
            self.put(0, "#pragma GCC unroll 2")
        self.put(2, f"for (int64_t i = first; i < first + {size}; i += kLanes) {{")
        for name, node in loop.loads.items():
            here = f"vector_at({name} + i)"
            if slot := self.coded.get(name):
                here = f"decoded(codes_{slot} + i, steps_{slot}.of[first / kBlock])"
            self.put(3, f"const auto {text.name(node)} = {here};")
        self._compute(3, "auto")
        for name, node in loop.stores.items():
            value = text.name(node) if node.axes else f"all_of({text.name(node)})"
            way = "put_rounded" if node.op == "round_bfloat16" else "put_vector"
            self.put(3, f"{self.only.get(name, '')}{way}({value}, {name} + i);")
        for s, node in loop.sums.items():
            if s in loop.into:
                at = f"{loop.into[s]} + i"
                before = f"vector_at({at})"
                made = f"{before} + {text.name(node)}"
                made = text.fused(node, before) if s in self.unrounded else made
                self.put(3, f"put_vector({made}, {at});")
            else:
                self.put(3, self._taken(s, f"v{s.id}"))
        self.put(2, "}")
        self.put(1, "}", *(f"put_vector(v{s.id}, s{s.id}.of);" for s in loop.totals))
        self.put(0, "#endif")

    def _decode(self) -> None:
        """Print the decoding of the codes that are left, with prefetches of other arrays."""
        for i, x in enumerate(self.coded.values()):
            given = [f"codes_{x} + first", f"scales_{x} + first / kBlock", f"at_{x} + first"]
            given += ["count - first", *(f"{y} + first" for y in self.beside[i :: len(self.coded)])]
            self.put(1, f"dequantize({', '.join(given)});")

    def _one_by_one(self) -> None:
        """Print the loop over the elements that are left; or with totals, what it does for one."""
        loop, text = self.loop, self.text
        if loop.totals:
            given = "int64_t i, int64_t lane"
            self.put(1, f"const auto one = [&]({given}) __attribute__((always_inline)) {{")
        else:
            self.put(0, "#pragma omp simd")
            self.put(1, "for (int64_t i = first; i < count; ++i) {")
        if loop.position is not None:
            self.put(2, "const int64_t position = start + i * each;")
        for name, node in loop.loads.items():
            here = f"{name}[i]"
            if name in loop.storage:
                here = f"widen({here})"
            elif node.kind == "bool":
                here = f"{here} != 0"
            self.put(2, f"const {text.type_of(node)} {text.name(node)} = {here};")
        self._compute(2, "")
        for name, node in loop.stores.items():
            made = f"narrow({text.name(node)}, {name}[i]);"
            if name not in loop.storage:  # g++ makes no vectors of a conversion
                number = " ? (W)1 : (W)0" if node.kind == "bool" else ""
                made = f"{name}[i] = {text.name(node)}{number};"
            self.put(2, f"{self.only.get(name, '')}{made}")
        for s in loop.sums:
            into = f"{loop.into[s]}[i]" if s in loop.into else f"s{s.id}[lane]"
            self.put(2, self._taken(s, into))
        self.put(1, "};" if loop.totals else "}")

    def _in_lanes(self) -> None:
        """Print the loops over the elements that are left, and over halves of the lanes."""
        self.put(1, "for (; first + kSums <= count; first += kSums)")
        self.put(0, "#pragma omp simd")
        self.put(2, "for (int64_t lane = 0; lane < kSums; ++lane) one(first + lane, lane);")
        self.put(0, "#pragma omp simd")
        self.put(1, "for (int64_t lane = 0; lane < count - first; ++lane) one(first + lane, lane);")
        self.put(1, "for (int64_t half = kSums / 2; half > 0; half /= 2)")
        self.put(2, "for (int64_t lane = 0; lane < half; ++lane) {")
        for s in self.loop.totals:
            self.put(3, f"{self.text.take(s, f's{s.id}[lane]', f's{s.id}[lane + half]')};")
        self.put(2, "}")
        self.put(1, *(f"got[{i}] = s{s.id}[0];" for i, s in enumerate(self.loop.totals)))

    def _compute(self, depth: int, kind: str) -> None:
        """Print the operations on an element, or on vectors, whose C++ type is `kind`."""
        text = self.text
        for node in rounded_nodes(self.loop, self.unrounded):
            made = text.expression(node, self.unrounded.get(node))
            if kind and node.op == "uniform":
                made = f"vector_at(v{node.id}.of + i)"
            if node.op == "where" and node.kind == "real" and not node.args[0].axes:
                # g++ does not vectorize `?` if all elements have one condition
                made = f"chosen({', '.join(map(text.name, node.args))})"
            self.put(depth, f"const {kind or text.type_of(node)} {text.name(node)} = {made};")

    def _taken(self, s: Node, into: str) -> str:
        """Return the statement that takes a value into the partial result `into` of a reduction."""
        text, node = self.text, self.loop.sums[s]
        taken = text.take(s, into, text.name(node))
        if s in self.unrounded:
            taken = f"{into} = {text.fused(node, into)}"
        return f"{'if (all) ' * (s in self.spare)}{taken};"

    def _call_twice(self, declared: str, given: str) -> None:
        """Print the function that computes spare sums only if the plain ones need them."""
        function, totals = self.loop.function, self.loop.totals
        at = {s.args[0].id: i for i, s in enumerate(totals) if s not in self.spare}
        enough = dict[str, None]()
        for s in self.spare:
            i, low, high = at[s.data.plain], s.data.low, s.data.high
            enough[f"got[{i}] >= (W){low!r}"] = None
            if math.isfinite(high):
                enough[f"got[{i}] <= (W){high!r}"] = None
        self.put(0, "", f"static void {function}({declared}) {{")
        self.put(1, f"{function}_of<false>({given});")
        self.put(1, f"if (!({' && '.join(enough)})) {function}_of<true>({given});")
        self.put(0, "}")


def _spare_sums(loop: Elements) -> list[Node]:
    """Return the sums that are used only if a plain one, also in this loop, is out of range."""
    plain = {s.args[0].id for s in loop.totals if not isinstance(s.data, Spare)}
    return [s for s in loop.totals if isinstance(s.data, Spare) and s.data.plain in plain]


def _is_of_vectors(node: Node) -> bool:
    """Whether the headers have this operation for vectors, and an operand is one."""
    known = ARITHMETIC | SLOW if node.kind == "real" else COMPARISONS
    return node.op in known and any(a.axes for a in node.args)
