"""What a rule makes of a trajectory's gradients, for many sets of hyper-parameters at once.

Each step starts from the parameters that the optimizer really had, so that one step's difference is not the next one's.
The rule's traced graph is evaluated in float64, with an axis for the sets and one for the tensors before those of the
elements; what cannot be traced runs as it is written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW, array_namespace
from arrayopt.fusion.graph import UPDATES, Node, reachable
from arrayopt.fusion.ops import OPS
from arrayopt.fusion.trace import Trace
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.rules.names import Values as Hypers
from arrayopt.rules.namespace import rule_namespace
from arrayopt.testing.diagnosis.graphs import graph_of
from arrayopt.testing.diagnosis.sweep import Sweep, rounded
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = ["Simulation"]

AT_ONCE = 2**16
"""So many elements are evaluated at once."""


@dataclass(frozen=True, eq=False)
class _Block:
    """Tensors that one evaluation takes, shorter ones filled up with zeros.

    Attributes
    ----------
    index : list of int
        Which tensors of the trajectory.
    sweep : Sweep or None
        What is computed of arrays; None where the rule runs as written.
    host : list of Node
        What follows from numbers alone.
    mask : array of bool, optional
        The elements that are not filled up.
    p, g : array
        Parameters before each step and gradients, of shape (1, steps, tensors, *elements).
    slots : dict of str to array
        Before the first step, of shape (1, 1, tensors, *elements).
    """

    index: list[int]
    sweep: Sweep | None
    host: list[Node]
    mask: Values | None
    p: Values
    g: Values
    slots: dict[str, Values]
    counts: dict[str, Values]

    @property
    def rank(self) -> int:
        return self.p.ndim - 3


class Simulation:
    """A rule on the gradients of a trajectory.

    Parameters
    ----------
    rule : Rule
        Of its numbers only matters which are None or zero.
    trajectory : Trajectory
        Where each step starts, and its gradients.
    state : str
        What slots are stored in, if not in what the rule says.
    """

    def __init__(self, rule: Rule, trajectory: Trajectory, state: str = "") -> None:
        self.rule, self.trajectory, self.state = rule, trajectory, state
        narrow = {x for x in trajectory.dtypes.values() if x in NARROW}
        self.dtype = narrow.pop() if len(narrow) == 1 else "float64"
        self.blocks = list(self._blocks())

    def run(self, hypers: Mapping[str, Any]) -> list[Values]:
        """The parameters after each step: for each tensor an array of shape (sets, steps, elements).

        Parameters
        ----------
        hypers : dict of str to array
            Each broadcasts to (sets, steps, tensors); ``t`` is the number of updates, and gradients are multiplied by
            ``grad_factor``.
        """
        steps, names = self.trajectory.steps, self.trajectory.names
        whole = (max(len(x) for x in hypers.values()), steps, len(names))
        numbers = {k: np.broadcast_to(x, whole if k != "t" else (1, *whole[1:])) for k, x in hypers.items()}
        found: list[Values] = [np.empty(0)] * len(names)
        with np.errstate(all="ignore"):
            for block in self.blocks:
                at, ones = block.index, (1,) * block.rank
                took = self.trajectory.took[:, at].reshape(steps, len(at), *ones)
                laid = {k: x[:, :, at].reshape(-1, steps, len(at), *ones) for k, x in numbers.items()}
                laid[UPDATES] = laid.pop("t")
                made = np.empty((whole[0], *block.p.shape[1:]))
                few = max(1, AT_ONCE // block.p.size)
                for i in range(0, whole[0], few):
                    own = {k: x if k == UPDATES else x[i : i + few] for k, x in laid.items()}
                    made[i : i + few] = self._block(block, own, took)
                for k, i in enumerate(at):
                    size = self.trajectory.params[0][names[i]].size
                    found[i] = made[:, :, k].reshape(whole[0], steps, -1)[:, :, :size]
        return found

    def _block(self, block: _Block, own: dict[str, Values], took: Values) -> Values:
        g = block.g * own.pop("grad_factor", np.ones(1))
        if block.sweep is None:
            new = self._written(block, g, own, took)
        else:
            new = block.sweep.run(block.p, g, block.slots, self._scalars(block, own), took, block.mask, self.state)
        return np.where(took, new, block.p)

    def _scalars(self, block: _Block, own: dict[str, Values]) -> dict[Node, Values]:
        """What follows from numbers of each step alone."""
        made: dict[Node, Values] = {}
        for n in block.host:
            if n.op == "host":
                made[n] = block.counts[n.data] if n.data.startswith("count:") else own[n.data]
            elif n.op == "const":
                made[n] = np.full((1,) * (block.rank + 3), n.data)
            else:
                made[n] = np.asarray(OPS[n.op].numpy(*(made[a] for a in n.args)))
        return made

    def _written(self, block: _Block, g: Values, own: dict[str, Values], took: Values) -> Values:
        """All steps of one tensor, by the rule as it is written, one set after the other."""
        sets, steps = max(len(x) for x in (g, *own.values())), g.shape[1]
        xp, made = rule_namespace(array_namespace(g)), np.empty((sets, *g.shape[1:]))
        off: dict[str, Any] = {name: None for name in hypers(type(self.rule)) if name not in own}
        for i in range(sets):
            slots = {name: x[0, 0, 0] for name, x in block.slots.items()}
            for s in range(steps):
                h = {k: x[min(i, len(x) - 1), s].item() for k, x in own.items()}
                h["t"] = int(h.pop(UPDATES))
                made[i, s, 0], new = self.rule(
                    xp, block.p[0, s, 0], g[min(i, len(g) - 1), s, 0], slots, Hypers(**off, **h)
                )
                if self.state:
                    new = {name: rounded(x, self.state) for name, x in new.items()}
                slots = {name: new[name] for name in slots} if took[s].all() else slots
        return made

    def _blocks(self) -> Iterable[_Block]:
        """The tensors, sorted by the graph that they need; where that sees no rows or columns, all in one block."""
        together: dict[Any, list[tuple[int, Trace, list[Node]]]] = {}
        for i, name in enumerate(self.trajectory.names):
            made = graph_of(self.rule, self.trajectory.params[0][name].shape, self.dtype)
            if made is None:
                yield self._make([i], None, [], flat=False)
                continue
            nodes = reachable(made.outputs.values())
            flat = made.element == "C"
            place = {n: k for k, n in enumerate(nodes)}
            key = tuple((n.op, tuple(place[a] for a in n.args), n.axes, repr(n.data)) for n in nodes)
            together.setdefault((key, None if flat else i), []).append((i, made, nodes))
        for (_, alone), found in together.items():
            yield self._make([i for i, _, _ in found], found[0][1], found[0][2], flat=alone is None)

    def _make(self, index: list[int], made: Trace | None, nodes: list[Node], *, flat: bool) -> _Block:
        names = [self.trajectory.names[i] for i in index]
        first = self.trajectory.params[0]
        longest = max(first[name].size for name in names)

        def laid(x: Values) -> Values:
            """A tensor as the graph sees it."""
            if flat:
                return np.pad(x.ravel(), (0, longest - x.size))
            if made is not None and made.element == "RC":
                return x.reshape(x.shape[0], -1)
            if x.ndim > 4 and made is not None:
                x = x.reshape(x.shape[0], -1, *x.shape[-2:])
            return x.reshape(-1) if x.ndim == 0 else x

        def lay(values: Mapping[str, Values | None]) -> Values:
            given = [(first[name], values[name]) for name in names]
            return np.stack([laid(np.zeros(p.shape) if x is None else x) for p, x in given])

        mask = None
        if flat and len({first[name].size for name in names}) > 1:
            mask = np.stack([laid(np.ones(first[name].shape)) for name in names]).astype(bool)[None, None]
        fresh = [self.rule.all_slots(array_namespace(first[n]), first[n], self.dtype) for n in names]
        slots: dict[str, Values] = {}
        for slot, axes in (dict.fromkeys(fresh[0]) if made is None else made.slots).items():
            whole_ones = made is None or axes in ("C", made.element)
            laid_out = [laid(x[slot]) if whole_ones else x[slot] for x in fresh]
            if flat:
                laid_out = [np.reshape(x, -1) for x in laid_out]
            if made is not None and not flat:  # with a one for each axis that the slot does not have
                whole = laid(first[names[0]]).shape
                sizes = dict(zip(made.element, whole, strict=True))
                laid_out = [np.reshape(x, [sizes[a] if a in str(axes) else 1 for a in made.element]) for x in laid_out]
            slots[slot] = np.stack(laid_out)[None, None]
        counts = {}
        for n in nodes:
            if n.op == "host" and n.data.startswith("count:"):
                over = n.data.removeprefix("count:")
                if flat:
                    sizes_of = [first[name].size if over else 1 for name in names]
                else:
                    sizes = dict(zip(made.element, laid(first[names[0]]).shape, strict=True)) if made else {}
                    sizes_of = [int(np.prod([sizes[a] for a in over]))]
                rank = 1 if flat else len(made.element if made else "")
                counts[n.data] = np.reshape(np.array(sizes_of, float), (1, 1, len(names), *(1,) * rank))
        p = np.stack([lay(values) for values in self.trajectory.params[:-1]])[None]
        g = np.stack([lay(values) for values in self.trajectory.grads])[None]
        host = [n for n in nodes if n.on_host]
        sweep = None if made is None else Sweep(made, [n for n in nodes if not n.on_host])
        return _Block(index, sweep, host, mask, p, g, slots, counts)
