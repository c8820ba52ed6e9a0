"""`CudaPrinter`: prints a program's statements, and stages between passes, as CUDA for `emit.py`.
`emit_pass.py` and `emit_rings.py` print passes with it."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from arrayopt.engines.cplusplus import CPlusPlusLines, CPlusPlusPrinter
from arrayopt.engines.cuda.columns import table_columns
from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import POSITION, Node, reachable
from arrayopt.fusion.index import Place, name
from arrayopt.fusion.layout import device_layout
from arrayopt.fusion.lower_stages import split_position
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.plan import Plan

EACH = {"positions": "kOutputs", "folds": "kResults"}
"""The constant with the number of positions of a piece, by the way in which blocks share a loop."""


class CudaLines(CPlusPlusLines):
    """Lines of CUDA."""

    type = "double"
    special: ClassVar[dict[str, str]] = {
        "nan": "(0.0 / 0.0)",  # constant arrays cannot be initialized by calls
        "inf": "(1.0 / 0.0)",
        "-inf": "(-1.0 / 0.0)",
    }

    def straight(self, nodes: Sequence[Node], given: Callable[[str], str]) -> dict[Node, str]:
        """Print definitions of scalars and of all that they depend on; return the names of all."""
        known: dict[Node, str] = {}
        for node in reachable(nodes):
            if node.op == "const":
                known[node] = self.constant(node)
                continue
            leaf = node.op == "host"
            args = [known[a] for a in node.args]
            text = given(node.data) if leaf else self.operation(node, args)
            known[node] = f"s{node.id}"
            self.put(1, f"const {self.type_of(node)} s{node.id} = {text};")
        return known


class CudaPrinter(CudaLines, CPlusPlusPrinter):
    """Prints a program as CUDA; with `windows`, for parts of matrices that the user divided."""

    words: ClassVar[dict[str, str]] = {"min": "minimum", "//": "/"}
    integer = "long long"

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, *, windows: bool = False) -> None:
        laid_out = device_layout(plan)
        names = table_columns(plan, laid_out, windows=windows)
        super().__init__(plan, dtype, grad_dtype, laid_out, names)
        self.windows, self.type = windows, "W"
        self.sums: dict[str, str] = {}  # the results of folds by all threads, by name

    # ---- values ----------------------------------------------------------------------------------

    def name(self, node: Node) -> str:
        if node.op == POSITION:
            return f"({'of_row.' if self.windows else ''}origin + i + j)"
        return self.constant(node) if node.op == "const" else self.bare(node)

    def place(self, place: Place, *, wide: bool = False) -> str:
        at = self.index(place.index)
        if place.room == "scalars":
            return f"scalar[{at}]" if wide else f"working[{at}]"
        if place.room == "values":
            return f"value[{at}]" if wide else f"working[kScalars + {at}]"
        if place.room in ("work", "part"):
            return f"step.work[{at}]"
        return f"widen({place.room}[{at}])"

    def read(self, node: Node, place: Place | str, *, wide: bool = False) -> str:
        """An expression that reads a real number, and converts it to the type of the value."""
        text = (
            self.sums.get(place, place) if isinstance(place, str) else self.place(place, wide=wide)
        )
        return f"{text} != 0" if node.kind == "bool" else f"({self.type}){text}"

    def declare(self, n: Node, text: str) -> str:
        """The definition of a value by an expression."""
        return f"const {self.type_of(n)} {self.name(n)} = {text};"

    def fold(self, indent: int, name: str, reductions: Sequence[Node]) -> None:
        """Print a type that combines two values of the k-th reduction; see ``sums.cuh``."""
        kinds = [REDUCTIONS[r.op].struct for r in reductions]
        if len(set(kinds)) <= 1:
            self.put(indent, f"typedef {kinds[0] if kinds else 'Sum'} {name};")
            return
        self.put(indent, f"struct {name} {{")
        for given, call in (
            (f"start(int k, {self.type} a)", "start(k, a)"),
            (f"fold(int k, {self.type} a, {self.type} b)", "fold(k, a, b)"),
        ):
            choice = ""
            for j, (kind, following) in enumerate(pairwise(kinds), 1):
                choice += f"k < {j} ? {kind}::{call} : " if kind != following else ""
            body = f"{{ return {choice}{kinds[-1]}::{call}; }}"
            inline = "static __device__ __forceinline__"
            self.put(indent + 1, f"{inline} {self.type} {given} {body}")
        self.put(indent, "};")

    # ---- statements ------------------------------------------------------------------------------

    def statement(self, depth: int, statement: program.Statement) -> None:
        match statement:
            case program.Let(name, value):
                self.put(depth, f"[[maybe_unused]] const long long {name} = {self.index(value)};")
            case program.Array(name, _, address):
                kind = self.stored(name)
                where = f"t[AT_{name}]" if address is None else self.index(address)
                where = f"global(reinterpret_cast<{kind}*>({where}))"
                self.put(depth, f"{kind}* const at_{name} = {where};")
            case program.Read(node, place, wide):
                self.put(depth, self.declare(node, self.read(node, place, wide=wide)))
            case program.Compute(node):
                self.put(depth, self.declare(node, self.expression(node)))
            case program.Start(into, reduction):
                kind = REDUCTIONS[reduction.op].struct
                self.put(depth, f"double {self.value(into)} = {kind}::start(0, 0.0);")
            case program.Take(reduction, into, value):
                term = f"(double){self.place(value)}"
                self.put(depth, f"{self.take(reduction, self.value(into), term)};")
            case program.Write(place, value):
                self._write(depth, place, self.value(value), cast=isinstance(value, str))
            case _:
                if isinstance(statement, program.Loop):
                    self.put(0, "#pragma unroll 1")
                super().statement(depth, statement)

    def _write(self, depth: int, place: Place, value: str, *, cast: bool) -> None:
        """Print a store of a value for later stages; a value per tensor is stored in both types."""
        if place.room == "values":
            wide = self.place(place, wide=True)
            self.put(depth, f"{self.place(place)} = (W)({wide} = {value});")
        elif place.room == "work":
            self.put(depth, f"{self.place(place)} = {'(W)' if cast else ''}{value};")
        else:
            self.put(depth, f"narrow({value}, {place.room}[{self.index(place.index)}]);")

    # ---- stages ----------------------------------------------------------------------------------

    def open(self, name: str, *parameters: str) -> None:
        """Print the head of a stage's function, with integer parameters; it looks up the tensor."""
        more = "".join(f", int {parameter}" for parameter in parameters)
        self.put(0, f"__device__ __forceinline__ void {name}(const Step& given{more}) {{")
        before = " - before" * ("before" in parameters)  # the pieces of a stage's parts before it
        self.put(1, f"const int tensor = now().tensor, piece = now().piece{before};")
        self.put(1, "const Step step = located(given);")
        self.put(1, "const long long* const t = step.table + (long long)tensor * kColumns;")
        self.put(1, "const double* const scalar = step.scalars + (long long)tensor * kScalars;")
        self.put(1, "double* const value = step.values + (long long)tensor * kValues;")
        self.put(1, "W* const working = step.working + (long long)tensor * (kScalars + kValues);")
        self.put(1, "const long long A = t[IN_A], B = t[IN_B], R = t[IN_R], C = t[IN_C];")
        self.put(1, "const long long NR = t[IN_NR], NC = t[IN_NC];")
        self.put(1, "(void)scalar, (void)value, (void)working, (void)piece;")
        self.put(1, "(void)A, (void)B, (void)R, (void)C, (void)NR, (void)NC;")

    def between(self, stage: program.Stage) -> None:
        """Print a stage between passes. If each part has one piece, one block runs all parts."""
        parts = (stage, *stage.siblings)
        for part in parts:
            self._part(part, *(["before"] if stage.siblings else []))
        if not stage.siblings:
            return
        self.open(stage.function.name.rpartition("_")[0])
        for i, part in enumerate(parts):
            size, count = EACH.get(part.function.shared, "1"), " * ".join(part.axes) or "1"
            self.put(1, f"const int pieces{i} = (int)(({count} + {size} - 1) / {size});")
        one = " && ".join(f"pieces{number} == 1" for number in range(len(parts)))
        self.put(1, f"const bool all = {one};", "int before = 0;")
        for number, part in enumerate(parts):
            self.put(1, f"if (all || (piece >= before && piece < before + pieces{number}))")
            self.put(2, f"{part.function.name}(given, all ? 0 : before);")
            self.put(1, f"before += pieces{number};")
        self.put(0, "}", "")

    def _part(self, stage: program.Stage, *parameters: str) -> None:
        """Print the function of a part of a stage."""
        body, shared = list(stage.function.body), stage.function.shared
        # values per tensor are computed in double precision
        self.type = "double" if shared == "block" else "W"
        self._tables(body)
        self.open(stage.function.name, *parameters)
        while body and isinstance(body[0], program.Array):
            self.statement(1, body.pop(0))
        if shared == "block":
            self._block(body)
        else:
            self.put(1, f"const long long begin = (long long)piece * {EACH[shared]};")
            self.put(1, f"const long long count = {' * '.join(stage.axes)};")
            end = f"begin + {EACH[shared]} < count ? begin + {EACH[shared]} : count"
            self.put(1, f"const long long end = {end};")
        if shared == "folds":
            self._fold_over("begin, end", "i", body)
        elif shared == "positions":
            head = "for (long long i = begin + threadIdx.x; i < end; i += kThreads)"
            self.put(0, "#pragma unroll 1")
            self.block(1, head, body)
        self.put(0, "}", "")
        self.type = "W"

    def _fold_over(self, span: str, at: str, body: Sequence[program.Statement]) -> None:
        """Print a loop with a reduction for each index in `span`, which is named `at`."""
        at_fold = next(i for i, x in enumerate(body) if isinstance(x, program.Fold))
        position, fold, keep = body[:at_fold], body[at_fold], body[at_fold + 1 :]
        assert isinstance(fold, program.Fold)
        kind = REDUCTIONS[fold.reduction.op].struct
        width = " * ".join(self.index(end) for _, end in fold.ranges)
        self.put(1, f"fold_over<{kind}>({span}, {width}, [&](long long {at}, long long j) {{")
        self.statements(2, [*position, *split_position(fold.ranges, name("j"))])
        self.put(2, f"(void){at};", f"return (double){self.place(fold.place)};")
        self.put(1, f"}}, [&](long long {at}, double {fold.name}) {{")
        self.statements(2, [*position, *keep])
        self.put(2, f"(void){at};")
        self.put(1, "});")

    def _block(self, body: Sequence[program.Statement]) -> None:
        """Print work on values per tensor: all threads reduce, warps run waves, one the rest."""
        loops = [x for x in body if isinstance(x, program.Loop)]
        for loop in loops:
            self._fold_over(f"0, {self.index(loop.end)}", loop.name, loop.body)
        self.put(1, *(["__syncthreads();"] if loops else []))
        body = [x for x in body if not isinstance(x, program.Loop)]
        folds = [x for x in body if isinstance(x, program.Fold)]
        if folds:
            self.fold(1, "Of", [x.reduction for x in folds])
            self.sums = {x.name: f"sum[{i}]" for i, x in enumerate(folds)}
            self.put(1, f"double sum[{len(folds)}];", "start<Of>(sum);")
            ((unit, end),) = folds[0].ranges
            each = f"long long {unit} = threadIdx.x; {unit} < {self.index(end)}; {unit} += kThreads"
            takes = [program.Take(x.reduction, self.sums[x.name], x.place) for x in folds]
            self.block(1, f"for ({each})", takes)
            self.put(1, "block_fold<Of>(sum);")
        waves = [x for x in body if isinstance(x, bulk.Waves)]
        if body := [x for x in body if not isinstance(x, program.Fold | bulk.Waves)]:
            self.block(1, "if (threadIdx.x == 0)", body)
        if body and waves:
            self.put(1, "__syncthreads();")
        for x in waves:
            self._waves(x)

    def _tables(self, body: Iterable[program.Statement]) -> None:
        """Print the tables of the waves among a function's statements, before it."""
        for waves in body:
            if isinstance(waves, bulk.Waves):
                name = waves.name
                rows = ", ".join(f"{{{', '.join(map(str, row))}}}" for row in waves.waves)
                self.put(0, f"__device__ const int {name}_waves[][4] = {{{rows}}};")
                self._table("int", f"{name}_levels", waves.levels)
                self._table("int", f"{name}_sources", waves.sources)
                self._table("double", f"{name}_constants", map(self.constant, waves.constants))

    def _table(self, kind: str, name: str, values: Iterable[Any]) -> None:
        if text := ", ".join(map(str, values)):
            self.put(0, f"__device__ const {kind} {name}[] = {{{text}}};")

    def _wave(self, depth: int, waves: bulk.Waves) -> None:
        """Print the work of a warp on the wave with the number `wave`."""
        self.put(depth, f"const int* const made = {waves.name}_waves[wave];")
        self.put(depth, "const int n = made[1], first = made[2], begin = made[3];")
        self.put(depth, "(void)first;", "switch (made[0]) {")
        for number, body in enumerate(waves.cases):
            self.put(depth, f"case {number}:")
            self.block(depth + 1, "for (int i = threadIdx.x % 32; i < n; i += 32)", body)
            self.put(depth + 1, "break;")
        self.put(depth, "}")

    def _waves(self, waves: bulk.Waves) -> None:
        """Print a loop over waves: a warp runs one, and a level ends before the next begins."""
        head = f"for (int level = 0; level < {len(waves.levels) - 1}; ++level) {{"
        self.put(0, "#pragma unroll 1")
        self.put(1, head)
        self.put(2, f"const int end = {waves.name}_levels[level + 1];")
        self.put(2, f"int wave = {waves.name}_levels[level] + threadIdx.x / 32;")
        self.put(0, "#pragma unroll 1")
        self.put(2, "for (; wave < end; wave += kWarps) {")
        self._wave(3, waves)
        self.put(2, "}", "__syncthreads();")
        self.put(1, "}")
