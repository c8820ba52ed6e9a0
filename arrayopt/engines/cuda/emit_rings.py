"""`RingsPrinter`: prints passes over rings as functions that run a piece; `emit.py` uses it.

In each turn, a thread processes one vector of elements. It keeps values of these in registers
between the loops over members; the sums of members are in shared memory (``turns.cuh``).
"""

from collections.abc import Iterable
from itertools import chain

from arrayopt.engines.cuda.printer import CudaPrinter
from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import Place
from arrayopt.fusion.lower_rings import STRETCH
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.state.quantized import scale_of

EACH = "for (int j = 0; j < kVector; ++j)"


class RingsPrinter(CudaPrinter):
    """A `CudaPrinter` that also prints passes over rings.

    Attributes
    ----------
    got : str
        The name of the array with the reductions of a thread's elements.
    """

    listed: dict[str, str]
    """By the name of a list, the expression of its i-th value, with a place for i."""
    early: dict[str, None]
    """Arrays that are not members of rings, which a turn reads once, before loops over members."""
    got = ""

    def place(self, place: Place, *, wide: bool = False) -> str:
        at = self.index(place.index)
        if place.room == "got":
            return f"{self.got}[{at}]"
        if place.room.startswith("_each"):
            return self.listed[place.room].format(at)
        return super().place(place, wide=wide)

    def rings(self, number: int, function: program.Function) -> None:
        """Print the functions of a pass over rings, which is the stage of this number."""
        body, *room, turn = function.body
        assert isinstance(body, program.Body)
        assert isinstance(turn, program.Loop)
        self.listed, lists = {}, [x for x in room if isinstance(x, bulk.Listed)]
        for x in lists:
            self._list(f"{function.name}{x.name}", x)
        self.put(0, "template <bool kAligned>")
        self.open(f"turns{number}")
        self.put(1, f'static_assert(kThreads * kVector == {STRETCH}, "a turn");')
        self.put(1, "const long long o = (long long)piece * t[IN_TC];")
        self.put(1, "const long long e = minimum(t[IN_SIZE], o + t[IN_TC]);")
        sums = [s for s in self.layout.partials if s in body.sums["tensor"]]
        if sums:
            self.fold(1, "Of", sums)
            self.put(1, f"begin_sums<Of>({len(sums)});")
        self.statements(1, [x for x in room if x not in lists])
        head = f"for (long long turn = 0; turn < {self.index(turn.end)}; ++turn) {{"
        self.put(1, "#pragma unroll 1", head)
        self.statements(2, turn.body[:2])
        self.put(2, "const long long i = first + (long long)threadIdx.x * kVector;")
        self.put(2, "const int n = (int)minimum((long long)kVector, end - i);")
        loads = chain.from_iterable(x.loads for x in program.elements_of([turn]))
        alone = {f"at_{x.name}" for x in room if isinstance(x, program.Array)}
        self.early = dict.fromkeys(at for at in loads if at in alone)
        self._load(2, self.early)
        self.statements(2, turn.body[2:])
        self.put(1, "}")
        if sums:
            first = f"t + PART{[*self.layout.partials].index(sums[0])}"
            self.put(1, f"keep_all<Of>({len(sums)}, step.work, {first}, piece);")
        self.put(0, "}", "")
        self.open(f"stage{number}")
        self.put(1, f"if (t[IN_ALIGNED] != 0) turns{number}<true>(given);")
        self.put(1, f"else turns{number}<false>(given);")
        self.put(0, "}", "")

    def _list(self, name: str, listed: bulk.Listed) -> None:
        """Print a constant array with the values of a list, or with their indices in `working`."""
        kind, made, texts = "W", f"{name}[{{}}]", list[str]()
        for x in listed.values:
            if isinstance(x, Node):
                texts.append(self.constant(x))
            else:
                kind, made = "int", f"working[{name}[{{}}]]"
                texts.append(f"{'kScalars + ' * (x.room == 'values')}{self.index(x.index)}")
        self.put(0, f"__constant__ {kind} {name}[] = {{{', '.join(texts)}}};")
        self.listed[listed.name] = made

    def _load(self, depth: int, arrays: Iterable[str]) -> None:
        """Print statements that read a vector of each array."""
        for at in arrays:
            self.put(depth, f"const auto read_{at} = read<kVector, kAligned, false>({at} + i, n);")
            if scale := self._scale(at):
                kind = self.stored(at.removeprefix("at_"))
                here = f"n > 0 ? {scale}[i / kBlock] : BFloat16{{}}"
                self.put(depth, f"const float step_{at} = step_of<{kind}>({here});")

    def _scale(self, at: str) -> str:
        """The name of the scales of an array of codes; an empty string for other arrays."""
        array = at.removeprefix("at_")
        return f"at_{scale_of(array)}" if array in self.plan.quantized else ""

    def statement(self, depth: int, statement: program.Statement) -> None:
        match statement:
            case bulk.Buffer(name, _, kind):
                self.put(depth, f"{'Complex' if kind == 'complex' else 'W'} {name}[kVector];")
            case program.Fill(view):
                self.put(depth, "#pragma unroll", f"{EACH} {view}[j] = {{}};  // a sum of none")
            case program.Take(reduction, Place("sums", index), got):
                kind = REDUCTIONS[reduction.op].struct
                into = f"(int)({self.index(index)})"
                self.put(depth, f"take_in<{kind}>({into}, {self.place(got)});")
            case bulk.Elements():
                self._elements(depth, statement)
            case program.Loop("several" | "rest" as name, _, end, body):
                # without `anew`, a loop of one turn is joined to later code, in more registers
                head = f"for (int {name} = anew(0); {name} < {self.index(end)}; ++{name})"
                self.put(0, "#pragma unroll 1")
                self.block(depth, head, body)
            case _:
                super().statement(depth, statement)

    def _elements(self, depth: int, loop: bulk.Elements) -> None:
        """Print the work of a thread on its elements, in braces, as more such loops may follow."""
        if loop.sums:
            self.got = f"got_{loop.function}"
            self.put(depth, f"W {self.got}[{len(loop.sums)}];")
        for number, reduction in enumerate(loop.sums):
            begin = f"{REDUCTIONS[reduction.op].struct}::start(0, W())"
            self.put(depth, f"{self.got}[{number}] = {begin};")
        self.put(depth, "{")
        depth += 1
        self._load(depth, [at for at in loop.loads if at in loop.storage and at not in self.early])
        written = [at for at in loop.stores if at in loop.storage]
        for at in written:
            packed = f"Pack<{self.stored(loop.storage[at])}, kVector> write_{at};"
            self.put(depth, f"float write_{at}[kVector];" if self._scale(at) else packed)
        self.put(depth, "#pragma unroll", f"{EACH} {{")
        for at, node in loop.loads.items():
            here = f"widen(read_{at}.value[j])" if at in loop.storage else f"{at}[j]"
            if at in loop.storage and self._scale(at):
                here = f"((float)read_{at}.value[j] * step_{at})"
            here += " != 0" if node.kind == "bool" else ""
            self.put(depth + 1, self.declare(node, f"({self.type_of(node)})({here})"))
        for node in loop.nodes:
            self.put(depth + 1, self.declare(node, self.expression(node)))
        for at, node in loop.stores.items():
            made, there = self.name(node), f"write_{at}.value[j]"
            kept = f"narrow({made}, {there});" if at in written else f"{at}[j] = {made};"
            coded = at in written and self._scale(at)
            self.put(depth + 1, f"write_{at}[j] = (float){made};" if coded else kept)
        for number, (reduction, node) in enumerate(loop.sums.items()):
            made = self.take(reduction, f"{self.got}[{number}]", self.name(node))
            self.put(depth + 1, f"if (j < n) {made};")
        self.put(depth, "}")
        for at in written:
            if scale := self._scale(at):
                there = f"write_codes<kVector, false>({at}, {scale}, i, n, kAligned, write_{at});"
                self.put(depth, f"if (i - i % kBlock < end) {there}")
                continue
            only = f"if ({self.name(loop.guards[at])}) " if at in loop.guards else ""
            self.put(depth, f"{only}write<kVector, false>({at} + i, write_{at}, n, kAligned);")
        self.put(depth - 1, "}")
