"""Emitting Numba: a plan as the text of a Python module of fused loops.

For each pass k there is `pass_k`, the loop over a stretch of elements, and `units_k`, which runs it
over units of one tensor; for what comes before it `between_k`. `run` does stages of a list of
tensors, one tensor after the other: stage 2k is `between_k`, stage 2k + 1 one thread's share of
pass k.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

from arrayopt.codecs import BLOCK, STORED
from arrayopt.engines.native.columns import SHARE, native_columns
from arrayopt.engines.numba.header import DRAW, HALF, HEADER, PRODUCT, ROUND, SPLIT, TILE
from arrayopt.engines.numba.texts import CODES, COPIES, TOTALS
from arrayopt.engines.printer import Printer, rounded_nodes, unrounded_products
from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import CACHED, Node
from arrayopt.fusion.index import ONE, ZERO
from arrayopt.fusion.layout import layout
from arrayopt.fusion.lower_cpu import lowered
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Program
from arrayopt.fusion.segments import Segmented

REST = ("t", "scalars", "values", "work", "part")
"""Where everything of a tensor lies."""


def _arguments(function: program.Function, scratch: Iterable[str]) -> str:
    """What a function takes, with the columns of these scratch arrays."""
    return ", ".join([*SHARE[function.shared], *REST, *(f"AT_{x}" for x in scratch)])


class NumbaPrinter(Printer):
    """Prints a program as a Python module of loops."""

    language = "numba"
    infinity = "np.inf"

    # ---- values ----------------------------------------------------------------------------------

    def constant(self, node: Node) -> str:
        if node.kind == "bool":
            return repr(node.data)
        return f"W({node.data!r})" if math.isfinite(node.data) else f"W(float('{node.data}'))"

    def expression(self, node: Node, unrounded: Node | None = None) -> str:
        if (node.op, node.kind) != ("mul", "complex") or node.args[0].kind == node.args[1].kind:
            return super().expression(node, unrounded)
        scale, number = map(self.name, sorted(node.args, key=lambda x: x.kind == "complex"))
        return f"complex({scale} * {number}.real, {scale} * {number}.imag)"

    def fused(self, product: Node, other: str, sign: str = "") -> str:
        if product.kind == "real":
            return super().fused(product, other, sign)
        made = list[str]()
        for part in ("real", "imag"):
            given = [(self.name(x), x.kind) for x in product.args]
            *factors, last = [f"{x}.{part}" if kind == "complex" else x for x, kind in given]
            made.append(f"fused({sign}{' * '.join(factors)}, {last}, ({other}).{part})")
        return f"complex({', '.join(made)})"

    def _typed(self, n: Node, text: str, cast: str = "W") -> str:
        """What is read of a value that lies somewhere as a float, in the value's own type."""
        return f"{text} != 0" if n.kind == "bool" else f"{cast}({text})" if cast else text

    def _load(self, kind: str, stored: str) -> str:
        """What is stored in a dtype, in the dtype of arithmetic."""
        codec = STORED[kind]
        text = codec.numba_load.format(stored)
        if codec.working.startswith("complex"):
            working = "complex64" if self.real == "float32" else "complex128"
            return text if codec.working == working else f"np.{working}({text})"
        return text if codec.working == self.real else f"W({text})"

    def _store(self, kind: str, value: str) -> str:
        """A value as it is stored in a dtype."""
        return STORED[kind].numba_store.format(value)

    # ---- functions -------------------------------------------------------------------------------

    def copies(self) -> None:
        """Print what copies matrices into planes, and back, for each dtype that there is."""
        for kind in dict.fromkeys(self.storage.values()):
            load, store = self._load(kind, "x[i * count]"), self._store(kind, "y[i]")
            self.put_text(COPIES.format(kind=kind, load=load, store=store))

    def function(self, function: program.Function) -> None:
        """Print a function, after the loops over elements that it calls."""
        for elements in program.elements_of(function.body):
            self._elements(elements)
        given = _arguments(function, function.scratch)
        self.put(0, "", "", "@inner", f"def {function.name}({given}):")
        self.statements(1, function.body)
        self.put(1, "return")

    def statement(self, depth: int, statement: program.Statement) -> None:
        index = self.index
        match statement:
            case program.Let(name, value):
                self.put(depth, f"{name} = {index(value)}")
            case program.Array(name, size, address):
                kind = STORED[self.storage[name]].numba or self.storage[name]
                where = self.column(f"AT_{name}") if address is None else index(address)
                made = f"nb.carray(pointer({where}), ({index(size)},), np.{kind})"
                if size == ONE:  # which Numba compiles in a fraction of the time
                    made = f"cell({where}, np.{kind})"
                self.put(depth, f"at_{name} = {made}")
            case program.View(name, room, first, size):
                self.put(depth, f"{name} = {room}[{index(first)} : {index(first + size)}]")
            case program.Read(node, place, wide):
                cast, text = "" if wide else "W", self.value(place)
                if node.on_host:  # a scalar keeps its number, also where it is a truth value
                    self.put(depth, f"{self.bare(node)} = {f'{cast}({text})' if cast else text}")
                else:
                    self.put(depth, f"{self.name(node)} = {self._typed(node, text, cast)}")
            case program.Compute(node):
                self.put(depth, f"{self.name(node)} = {self.expression(node)}")
            case program.Start(into, reduction):
                self.put(depth, f"{self.value(into)} = {self.start(reduction)}")
            case program.Fill(view, size, reduction):
                self.put(depth, f"{view}[: {index(size)}] = W({self.start(reduction)})")
            case program.Take(reduction, into, value):
                self.put(depth, self.take(reduction, self.value(into), self.place(value)))
            case program.Write(place, value):
                self.put(depth, f"{self.place(place)} = {self.value(value)}")
            case program.Loop(name, first, end, inside, backwards):
                stretch = [*([] if first == ZERO else [index(first)]), index(end)]
                if backwards:
                    stretch = [index(end - 1), index(first - 1), "-1"]
                self.put(depth, f"for {name} in range({', '.join(stretch)}):")
                self.statements(depth + 1, inside)
            case program.When(left, right, then, otherwise):
                self.put(depth, f"if {index(left)} == {index(right)}:")
                self.statements(depth + 1, then)
                self.put(depth, "else:")
                self.statements(depth + 1, otherwise)
            case bulk.Buffer(name, size):
                self.put(depth, f"{name} = np.empty({size}, W)")
            case bulk.Codes():
                self.put(depth, self._codes(statement))
            case bulk.Elements():
                self.put(depth, *map(self._codes, statement.codes), self._call(statement))
            case bulk.Multiply(a, b, out, first, end, sides, factors):
                given = [self.column("BLAS")]
                for array, begin in (a, b, out):
                    given.append(f"{self.column(f'AT_{array}')} + {index(begin, 1)} * SIZE")
                given += map(index, (first, end, *sides))
                given += [str(int(flag)) for flag in factors[:3]]
                self.put(depth, f"multiply({', '.join(given)})")
            case bulk.Spread(back, array, first, end, planes, each):
                stretch_of = f"at_{array}[{index(first)} : {index(end)}]"
                way = f"{'give' if back else 'take'}_{self.storage[array]}"
                self.put(depth, f"{way}({stretch_of}, {planes}, {index(each)})")
            case _:
                super().statement(depth, statement)

    def _codes(self, codes: bulk.Codes) -> str:
        """The call that reads codes, or stores them."""
        block = codes.first // BLOCK
        blocks = (codes.count + (BLOCK - 1)) // BLOCK
        stretch = (
            f"at_{codes.array}[{self.index(codes.first)} : {self.index(codes.first + codes.count)}]"
        )
        scales = f"at_{codes.scale}[{self.index(block)} : {self.index(block + blocks)}]"
        top = f"np.float32({STORED[self.storage[codes.array]].top})"
        way = "quantize" if codes.store else "dequantize"
        return f"{way}({stretch}, {scales}, {codes.buffer}[: {self.index(codes.count)}], {top})"

    def _call(self, loop: bulk.Elements) -> str:
        """The call of a loop over elements."""
        given = []
        for array, first, end in loop.slices.values():
            given.append(f"{array}[{self.index(first)} : {self.index(end)}]")
        given += map(self.bare, loop.scalars)
        if loop.position is not None and loop.stride is not None:
            given.append(self.index(loop.position))
            given += [] if loop.stride == ONE else [self.index(loop.stride)]
        return f"{'got = ' if loop.totals else ''}{loop.function}({', '.join(given)})"

    def _elements(self, loop: bulk.Elements) -> None:
        """Print a loop over elements as a function, or two if it has totals: one for some elements,
        which adds each to its lane, and one that calls it.
        """
        totals, unrounded = loop.totals, unrounded_products(loop)
        each = loop.position is not None and loop.stride != ONE
        given = [*loop.slices, *map(self.bare, loop.scalars)]
        given += [*(["start"] if loop.position else []), *(["each"] if each else [])]
        self.position = "(start + i * each)" if each else "(start + i)"
        size, function = f"{next(iter(loop.slices))}.size", f"{loop.function}({', '.join(given)})"
        some = ", ".join([*(f"s{s.id}" for s in totals), *given])
        head = f"{loop.function}_of(first, count, {some})" if totals else function
        self.put(0, "", "", "@inner", f"def {head}:")
        self.put(1, f"for i in range({'first, first + count' if totals else size}):")
        for name, node in loop.loads.items():
            here, stored = f"{name}[i]", loop.storage.get(name)
            text = self._load(self.storage[stored], here) if stored else self._typed(node, here)
            self.put(2, f"{self.name(node)} = {text}")
        for node in rounded_nodes(loop, unrounded):
            self.put(2, f"{self.name(node)} = {self.expression(node, unrounded.get(node))}")
        for name, node in loop.stores.items():
            text, stored = self.name(node), loop.storage.get(name)
            text = self._store(self.storage[stored], text) if stored else text
            only = f"if {self.name(loop.guards[name])}: " if name in loop.guards else ""
            self.put(2, f"{only}{name}[i] = {text}")
        for s, node in loop.sums.items():
            into = f"{loop.into[s]}[i]" if s in loop.into else f"s{s.id}[i - first]"
            made = self.take(s, into, self.name(node))
            self.put(2, f"{into} = {self.fused(node, into)}" if s in unrounded else made)
        if not totals:
            self.put(1, "return")
            return
        self.put(1, "in_lanes()", "return")
        self.put(0, "", "", "@inner", f"def {function}:")
        self.put(1, *(f"s{s.id} = lanes(W({self.start(s)}))" for s in totals))
        self.put(1, f"left = {size} % LANES", f"for first in range(0, {size} - left, LANES):")
        self.put(2, f"{loop.function}_of(first, LANES, {some})")
        self.put(1, f"{loop.function}_of({size} - left, left, {some})")
        others = [s for s in totals if s.op != "sum"]
        if others:
            self.put(1, "half = LANES", "while half > 1:")
            self.put(2, "half //= 2", "for i in range(half):")
            self.put(3, *(self.take(s, f"s{s.id}[i]", f"s{s.id}[i + half]") for s in others))
        results = [f"s{s.id}[0]" if s in others else f"sum_of(s{s.id})" for s in totals]
        self.put(1, f"return ({', '.join(results)},)")


ALL = "table, numbers, results, work, part"
"""Where everything lies, of all tensors."""


@lru_cache(maxsize=CACHED)
def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    segmented: Segmented | None = None,
    about: str = ".",
) -> str:
    """The text of a module that runs a plan, for parameters and gradients stored in these dtypes.

    With `segmented` it is the plan in segments, for small matrices side by side. `about` is
    said in the first line.
    """
    plan.check_wide()
    laid_out = segmented.layout if segmented else layout(plan)
    columns = native_columns(plan, laid_out)
    text = NumbaPrinter(plan, dtype, grad_dtype or dtype, laid_out, columns)
    text.put_text(HEADER.format(about=about, real=text.real, lanes=text.lanes))
    text.put_text(TOTALS)
    if any(STORED[kind].numba for kind in text.storage.values()):
        text.put_text(HALF)
    if "low8" in plan.storage.values():
        text.put_text(SPLIT)
    if plan.quantized:
        text.put_text(CODES)
    if plan.draws:
        text.put_text(DRAW)
        text.put_text(ROUND if STORED[dtype].rounds else "")
    if plan.multiplies:
        text.put_text(PRODUCT.format(real=text.real, tile=TILE))
    text.put(0, f"{', '.join(text.columns)} = range({len(text.columns)})")
    if segmented:
        text.copies()
    program = lowered(plan, segmented)
    for function in program.functions:
        text.function(function)
    _entry(text, program)
    return text.text()


def _entry(text: NumbaPrinter, program: Program) -> None:
    """The one entry, with the call of each stage.

    There is one only, so that each loop is compiled once and sums in the same order for everyone.
    """
    text.put(0, "", "", "@jit", f"def run({ALL}, rows, first, last, thread, threads):")
    text.put(1, "for row in rows:")
    text.put(2, "t, scalars, values = table[row], numbers[row], results[row]")
    text.put(2, "f, n = t[FIRST], t[LAST] - t[FIRST]")
    text.put(2, "lo, hi = f + n * thread // threads, f + n * (thread + 1) // threads")
    text.put(2, "for stage in range(first, last):")
    for number, stage in enumerate(program.stages):
        if stage.function.body:
            given = _arguments(stage.function, stage.scratch)
            text.put(3, f"if stage == {number}:")
            text.put(4, f"{stage.function.name}({given})")
