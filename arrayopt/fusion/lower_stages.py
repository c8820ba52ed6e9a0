"""Lowering a plan to a program for devices: `in_stages`, which the engine `cupy` calls.

Blocks synchronize after each stage. A stage is divided into pieces, one for each block.
`Function.shared` says what a piece is:

- ``tiles`` of the tensor, or ``squares`` of the product of a matrix with its own transpose: a
  pass. Its one statement is a `Body`; the loops over rows and columns are in ``kernels/``. A pass
  over rings has more statements, which a block runs for its piece.
- ``positions``: some of the positions of a loop between passes. A thread runs the statements for
  one of them, ``i``.
- ``folds``: some of the positions of a reduction. One thread, or many, run a `Fold`.
- ``block``: the whole stage. All threads run the folds of a tensor, and one runs the rest.
- ``library``: a product, which a library computes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from arrayopt.fusion import bulk, program
from arrayopt.fusion.graph import CACHED, Node, operands
from arrayopt.fusion.index import ONE, ZERO, Index, Place, name, number, product, ranges_of
from arrayopt.fusion.layout import device_layout
from arrayopt.fusion.lower_between import Statements
from arrayopt.fusion.lower_rings import buffers_of, turns_over
from arrayopt.fusion.lower_waves import Waving
from arrayopt.fusion.lowering import Lowering, scratch_of
from arrayopt.fusion.passes import Pass, SmallLoop
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.rings import Rolled
from arrayopt.fusion.staging import Staging
from arrayopt.fusion.waves import in_waves
from arrayopt.state.quantized import scale_of

MOST_SUMS = 640
"""The most sums of a pass over rings: they must fit into a block's shared memory."""


@lru_cache(maxsize=CACHED)
def in_stages(plan: Plan) -> program.Program:
    """The program of a plan. Passes that differ only in scratch arrays share a function."""
    lowering = Stages(plan)
    for index, stages in enumerate(lowering.staging.gaps):
        for stage in stages:
            lowering.add_between(stage)
        if index < len(plan.passes):
            lowering.add_pass(index, plan.passes[index])
    return program.Program(tuple(lowering.made))


class Stages(Lowering):
    """Makes a program for devices: `made` has its stages so far."""

    def __init__(self, plan: Plan) -> None:
        laid_out, self.staging = device_layout(plan), Staging(plan)
        super().__init__(plan, laid_out, {*laid_out.tensor, *self.staging.needed})
        self.made: list[program.Stage] = []
        self.functions: dict[Any, program.Function] = {}
        self.of_rings = set[Node]()  # reductions in passes over rings
        self.tables = 0  # the number of `Waves` statements so far

    def add_pass(self, index: int, pass_: Pass) -> None:
        """Add the stage of a pass, or of a product."""
        if pass_.multiplies:
            library = program.Function(f"product{index}", "library", ())
            self.made.append(program.Stage(library, axes=pass_.axes))
            return
        body, scratch = self.body(index, pass_), scratch_of(pass_, self.plan)
        read_again = tuple(x in body.again for x in body.arrays)
        key: Any = self.described(pass_), read_again
        turns: Statements = []
        rings = self.rings(pass_, body) if len(pass_.sums) <= MOST_SUMS else None
        if rings is not None and (turns := self._turns(index, pass_, rings, body)):
            key = index
            self.of_rings |= {*pass_.sums}
        if key not in self.functions:
            shared = "squares" if pass_.axes != self.plan.element else "tiles"
            whole = (body, *turns)
            self.functions[key] = program.Function(f"Pass{index}", shared, whole, scratch)
        self.made.append(program.Stage(self.functions[key], scratch, pass_.axes))

    def _turns(self, index: int, pass_: Pass, rings: Rolled, body: program.Body) -> Statements:
        """What a block does with a piece of a pass over rings; an empty list if not supported."""
        first = min((self.partial[s] for s in pass_.sums), default=0)

        def into(reduction: Node, after: Index | None) -> Place:
            own = number(self.partial[reduction] - first)
            return Place("sums", own if after is None else own + after)

        made: Statements = []
        for one, values in rings.own_values.items():
            if all(n.op == "const" for n in values):
                made.append(bulk.Listed(str(one.data), values))
            elif any(n.op == "const" for n in values):
                return []
            else:
                made.append(bulk.Listed(str(one.data), tuple(map(self.place, values))))
        members = {*rings.member_of, *map(scale_of, rings.member_of)}
        for x, size in body.arrays.items():
            if x not in members:
                made.append(program.Array(x, size))
        turn = turns_over(index, pass_, rings, into, body.codes)
        read = dict[Node, None]()
        for elements in program.elements_of([turn]):
            read |= {n: None for n in elements.scalars if n not in rings.own_values}
        return [*made, *self.reads(read), *buffers_of(rings), turn]

    def add_between(self, loops: Sequence[SmallLoop]) -> None:
        """Add independent loops between passes as one stage with siblings."""
        own = f"stage{len(self.made)}"
        names = [f"{own}_{i}" for i in range(len(loops))] if loops[1:] else [own]
        first, *others = map(self._of_loop, names, loops)
        self.made.append(replace(first, siblings=tuple(others)))

    def _of_loop(self, own: str, loop: SmallLoop) -> program.Stage:
        """The stage of a loop between passes: its reductions, then operations, then stores."""
        reductions = [n for n in loop.nodes if n.reduces]
        nodes = [n for n in loop.nodes if not n.reduces]
        small = [n for n in reductions if n.args[0].axes != self.plan.element]
        body, made = self._reductions(loop, reductions, small)
        in_tables = not loop.nodes or in_waves(nodes, loop.axes, self.plan.element)
        if self.staging.waving and in_tables:
            waves = self._waves(nodes, loop.stores)
            return self._between(own, "positions", loop.axes, [*body, waves])
        # read values just before they are needed: some rules have too many for the registers
        for node in nodes:
            read = dict.fromkeys(a for a in node.args if a not in made)
            body += [] if loop.axes else self._arrays(read)
            body += self.reads(read, wide=not loop.axes)
            body += [program.Compute(node), *self._stored(node)]
            made |= {*read, node}
        body += self._stores(loop, made)
        if loop.axes:
            reads = [*operands([*nodes, *small]), *loop.stores.values()]
            arrays = {x.name: x for x in self._arrays(reads)}
            arrays |= {x: program.Array(x, product(loop.axes)) for x in loop.stores}
            body = [*arrays.values(), *body]
        return self._between(own, "folds" if loop.reduces else "positions", loop.axes, body)

    def _reductions(
        self, loop: SmallLoop, reductions: Sequence[Node], small: Sequence[Node]
    ) -> tuple[Statements, set[Node]]:
        """Return statements that reduce values, and the reductions that are then in variables.

        Those in `small` reduce values over fewer axes than the elements.
        """
        body, variables = Statements(), dict[Node, str]()
        if loop.reduces:  # one reduction for each position
            body.append(self.folded("sum", small[0]))
            variables[small[0]] = "sum"
        elif not loop.axes:
            body += self._arrays(operands(small))
            for node in small:
                fold = self.folded("sum", node), program.Write(self.place(node), "sum")
                body.append(program.Loop("which", ZERO, ONE, fold))
        for run in self.runs(n for n in reductions if n in self.of_rings):
            body.append(program.Loop("which", ZERO, number(len(run)), self.combined_all(run)))
        for node in reductions:
            if node not in (*small, *self.of_rings):
                variables[node] = f"sum{node.id}"
                body.append(self.combined(variables[node], node))
        for node, variable in variables.items():
            body += [program.Read(node, variable, not node.axes), *self._stored(node)]
        return body, {*variables}

    def _stores(self, loop: SmallLoop, made: set[Node]) -> Statements:
        """Return the statements that write slots. The nodes in `made` are in variables."""
        body, there = Statements(), {*made}
        arrays, at = {n.data for n in made if n.op == "input"}, name("i") if loop.axes else ZERO
        for slot, value in loop.stores.items():
            read = {value} - there
            if not loop.axes:
                body += self._arrays(read)
                body += [] if slot in arrays else [program.Array(slot, ONE)]
            body += self.reads(read, wide=not loop.axes)
            body.append(program.Write(Place(f"at_{slot}", at), value))
            there.add(value)
        return body

    def _stored(self, node: Node) -> Statements:
        """Return the statement that stores a value, if something outside of its loop reads it."""
        return [program.Write(self.place(node, name("i")), node)] if node in self.outliving else []

    def _waves(self, nodes: Iterable[Node], stores: Mapping[str, Node]) -> bulk.Waves:
        """Return a statement that computes values in waves. The first one also reads leaves."""
        self.tables += 1
        made = Waving(f"numbers{self.tables}", self.layout, self.plan.storage)
        if self.tables == 1:
            made.read()
        made.make(nodes)
        made.keep(stores)
        return made.made

    def _arrays(self, reads: Iterable[Node]) -> list[program.Array]:
        """Return the definitions of the arrays among the values that are read."""
        arrays = {n.data: n.axes for n in reads if n.op == "input"}
        return [program.Array(x, product(axes)) for x, axes in arrays.items()]

    def _between(self, own: str, how: str, over: str, body: Statements) -> program.Stage:
        """A stage between passes, which begins with arrays and the position along each axis."""
        how = "block" if how == "positions" and not over else how
        first = next((i for i, x in enumerate(body) if not isinstance(x, program.Array)), len(body))
        whole = (*body[:first], *split_position(ranges_of(over), name("i")), *body[first:])
        return program.Stage(program.Function(own, how, whole), axes=over)


def turns_of(stage: program.Stage) -> tuple[program.Statement, ...]:
    """What a block does with a piece of a pass over rings; an empty tuple for other stages."""
    return stage.function.body[1:] if stage.kind == "pass" else ()


def split_position(ranges: Sequence[tuple[str, Index]], position: Index) -> list[program.Let]:
    """Define the position in each of some nested ranges, given the position among all."""
    made = []
    for i, (along, end) in reversed(list(enumerate(ranges))):
        made.append(program.Let(along, position % end if i else position))
        position = position // end
    return made
