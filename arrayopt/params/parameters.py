"""The parameters of an optimizer: the tree that they were given in, their tensors, and the groups that these are in."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from arrayopt.arrays import Array, look, size
from arrayopt.params.apart import Apart
from arrayopt.params.given import (
    as_tree,
    extend,
    is_group_list,
    match_grads,
    named_params,
    parse_group_list,
)
from arrayopt.params.groups import Group, Groups, assign, override
from arrayopt.params.heads import checker, objects
from arrayopt.params.kinds import plain
from arrayopt.params.known import Found, Known
from arrayopt.params.parts import has_parts, local, localized, strays, with_array
from arrayopt.params.replaced import Lent, Replaced, check_apart, exchange, form
from arrayopt.params.trees import flatten, leaves, rebuild, template
from arrayopt.params.watch import Watch, Writes
from arrayopt.rules.base import Rule
from arrayopt.state.run import Run
from arrayopt.state.shares import Block
from arrayopt.state.tensors import Tensor

__all__ = ["Parameters"]

_ARRAY = operator.attrgetter("array")

Divide = Callable[[list[Group]], None]
"""What gives the tensors of new groups their shares among ranks."""


class Parameters:
    """Parameters as tensors with state, in groups.

    Attributes
    ----------
    all : list of Tensor
        The tensors, in the order of the parameters.
    groups : list of Group
        The groups, in order.
    kinds : int
        How often a tensor's dtype, shape or device became another: a version of these.
    replaced : Replaced
        What the user put in the place of parameters, which ranks compare.
    """

    def __init__(
        self, params: Any, rule: Rule, groups: Groups | None, run: Run, divide: Divide
    ) -> None:
        self._run, self._divide = run, divide
        self._parted = has_parts(params)
        given, blocks = params, dict[int, Block]()
        if self._parted:
            given = as_tree("Optimizer", params)
            params, blocks = localized(given)
        self._by_position = is_group_list(params)
        if self._by_position:
            if groups is not None:
                raise ValueError(
                    "Optimizer: give `groups`, or params as a list of group dicts, not both"
                )
            named, entries = parse_group_list(params)
            made: Any = [(str(i), overrides, names) for i, (overrides, names) in enumerate(entries)]
            tree: Any = [leaf for _, leaf in named]
        else:
            tree = as_tree("Optimizer", params)
            named = named_params(tree)
            made = assign(rule, groups, named)
        tensors = {name: Tensor(name, leaf, block=blocks.get(id(leaf))) for name, leaf in named}
        if self._parted and self._by_position:
            whose = {id(local(x)): x for _, x in flatten(given)}
            tree = [whose.get(id(leaf), leaf) for leaf in tree]
        elif self._parted:
            tree = given
        self._tree, self.all = tree, list(tensors.values())
        self.groups = [
            Group(label, rule, over, [tensors[name] for name in names])
            for label, over, names in made
        ]
        self._begun, self.kinds, self.replaced = False, 0, Replaced(self.all)
        self._lent: Lent | None = None
        self._apart: tuple[int, Apart] | None = None
        self._expect()
        self._prepare(self.groups)
        self._join()
        self._hold(self._tree)

    def add(
        self, params: Any, rule: Rule, overrides: Mapping[str, Any]
    ) -> tuple[Group, Callable[[], None]]:
        """More parameters as a new group, checked and with its first state; what is returned with it takes it in."""
        self.take_up()
        who, names, params = (
            "Optimizer.add_group",
            [x.name for x in self.all],
            as_tree("Optimizer.add_group", params),
        )
        parted = self._parted or has_parts(params)
        tree, named = extend(who, self._tree, params, names, localized if parted else None)
        check_apart(who, named, self.all)
        blocks = localized(params)[1] if parted else {}
        tensors = [Tensor(name, leaf, block=blocks.get(id(leaf))) for name, leaf in named]
        group = Group(f"added {len(self.groups)}", rule, overrides, tensors)
        self._prepare([group])

        def put() -> None:
            self._parted, self._tree = parted, tree
            self.groups.append(group)
            self.all += group.tensors
            self._join()
            self._expect()

        return group, put

    def _prepare(self, groups: list[Group]) -> None:
        """Divide the tensors of groups among ranks, and give them their first state."""
        self._divide(groups)
        for group in groups:
            for tensor in group.tensors:
                tensor.slots = tensor.fresh(group.rule)

    def _join(self) -> None:
        """Give tensors their places, and among the numbers of the run one each, or one for each layer of a stack."""
        stacked = {x.name for group in self.groups if group.rule.stacked for x in group.tensors}
        counted = self._run.size
        for place, x in enumerate(self.all):
            layers = int(x.array.shape[0]) if x.name in stacked and size(x.array) else 0
            if x.run is not self._run or x.layers != layers:
                x.run, x.place, x.number, x.layers = self._run, place, counted, layers
                counted += max(1, layers)
            self._run.streams.note(x.array)
        self._run.extend(counted - self._run.size)

    def _expect(self) -> None:
        """Take down how gradients are to come; nothing of what they look like is known yet."""
        self._template, self._flat = template(self._tree), ([x.name for x in self.all], None)
        self._hold(self._tree)
        self._kind: Any = None
        self._dtype: Any = None  # of all gradients, if they have but one
        self._forms: list[Any] = []
        self._checker: Any = (
            None  # of forms, where there is a quicker way than to ask each gradient
        )
        self._complete, self._apart = False, None

    def follow(self, rule: Rule, change: Mapping[str, Any]) -> Rule:
        """The optimizer's rule with a field changed, as it is then for all groups that do not set it for themselves."""
        new, (name,) = override(rule, change, "Optimizer"), change
        following = [group for group in self.groups if name not in group.overridden]
        rules = [group.checked(group.rule, change) for group in following]
        for group, own in zip(following, rules, strict=True):
            group.replace_rule(own)
        return new

    def match(self, grads: Any) -> list[Array | None]:
        """The tensors' gradients, checked."""
        self.take_up()
        if self._parted:
            grads = as_tree("Optimizer.step", grads)
            self._check_places("Optimizer.step: grads do not match params", self._leaves(grads))
            grads = rebuild(grads, local)
        given = leaves(self._template, grads)
        if given is None:
            given = leaves(self._flat, grads)
        familiar, lie = (False, None) if given is None else self._familiar(given)
        if given is None or not familiar:
            named = [(tensor.name, tensor.array) for tensor in self.all]
            given = list(
                match_grads("Optimizer.step", named, grads, by_position=self._by_position).values()
            )
        found = plain(given)
        if self._apart is None or (
            self._apart[0] != self._run.arrays and not self._apart[1].always
        ):
            self._apart = self._run.arrays, Apart(self.all)
        if not familiar:
            self._apart[1].forget()
        lie = self._apart[1].check(found, alike=familiar, complete=self._complete, found=lie)
        if not familiar:
            self.begin()
            self._remember(given)
        return Known(found, lie, self._dtype if familiar else None)

    def _familiar(self, given: list[Any]) -> tuple[bool, Found | None]:
        """Whether gradients look like those of an earlier step, about which all was checked; where they lie, if known.

        Whether none is None is noted, too.
        """
        if self._checker is not None and len(given) == len(self._forms):
            lie = self._checker(given)
            self._complete = lie is not None and lie.complete
            return lie is not None, lie
        kinds = set(map(type, given))
        self._complete = type(None) not in kinds
        kinds.discard(type(None))
        if kinds != {self._kind} or len(given) != len(self._forms):
            return False, None
        form_of = look(self._kind)
        if self._complete:
            return all(map(operator.eq, map(form_of, given), self._forms)), None
        return all(
            g is None or form_of(g) == form for g, form in zip(given, self._forms, strict=True)
        ), None

    def _remember(self, given: list[Array | None]) -> None:
        """Keep what gradients look like, where they are all of one type and can be asked."""
        kinds = {type(g) for g in given if g is not None}
        if len(kinds) != 1 or not all(hasattr(g, "device") for g in given if g is not None):
            return
        (kind,) = kinds
        if kind is not self._kind:
            self._kind, self._forms = kind, [None] * len(given)
        form_of, same = look(kind), dict[Any, Any]()
        forms = [
            form if g is None else form_of(g) for g, form in zip(given, self._forms, strict=True)
        ]
        self._forms = [
            same.setdefault(form, form) for form in forms
        ]  # one object each, which stays in the cache
        dtypes = {form[0] for form in self._forms if form is not None}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        self._checker = checker(kind, self._forms)

    def begin(self) -> None:
        """There is state from now on that would be lost if slots were made anew."""
        self._begun = True

    # ---- the tree of the parameters, which is the user's ------------------------------------------------------------

    @property
    def params(self) -> Any:
        """The parameters, in the structure given: the tree in which the user may put other arrays."""
        return self._tree

    def _hold(self, tree: Any) -> None:
        """Have a tree as the parameters' own, and take down which arrays it holds, under which names."""
        pairs, tensors = flatten(self._local(tree)), iter(self.all)
        self._tree, self._held = tree, [leaf for _, leaf in pairs]
        self._names = [path if leaf is None else next(tensors).name for path, leaf in pairs]
        self._watch = Watch(leaf for leaf in self._held if leaf is not None)
        self._looks = list(map(form, self._watch.arrays))
        self._objects: bytes | None = objects(self._held).tobytes()
        given = (leaf for _, leaf in (flatten(tree) if self._parted else pairs) if leaf is not None)
        shared = [(x, leaf) for x, leaf in zip(self.all, given, strict=True) if x.share is not None]
        self._shared, self._writes = [x for x, _ in shared], Writes(leaf for _, leaf in shared)

    def _local(self, tree: Any) -> Any:
        """A tree of what this rank has of its leaves."""
        return rebuild(tree, local) if self._parted else tree

    def _found(self, tree: Any) -> list[Any]:
        """The leaves of a tree, in the order of the parameters' where it has their structure."""
        tree = self._local(tree)
        found = leaves(self._template, tree)
        return [leaf for _, leaf in flatten(tree)] if found is None else found

    def take_up(self) -> None:
        """Go on from the arrays that the user has put into the tree of the parameters, once they are checked.

        So, too, where a parameter or a slot is the same array, but lies elsewhere, or has become read-only. Before the
        first step it may also be of another dtype, shape or device; then state is made anew.

        Raises
        ------
        TypeError, ValueError
            If arrays do not fit, listing every mismatch. Nothing has been changed then.
        """
        if self._lent is not None:
            self._lent = self._lent.follow(self.all)
        now = self._found(self._tree)
        if self._objects is None:  # of a copy
            self._objects = objects(self._held).tobytes()
        if objects(now).tobytes() != self._objects or self._watch.changed():
            self.exchange(self._tree, "Optimizer")
        written = self._writes.made()
        if written:
            self.replaced.wrote(self._shared[i] for i in written)
            self._writes.begin()

    def lend(self) -> None:
        """From now on slots may be changed by the user, and are watched."""
        self.take_up()
        self._lent = self._lent or Lent(self.all)

    def exchange(self, tree: Any, who: str) -> None:
        """Go on from the arrays of a tree of the same structure, or with the same names: all of them, or none.

        Raises
        ------
        TypeError, ValueError
            As `take_up`.
        """
        tree = as_tree(who, tree)
        if self._by_position and is_group_list(tree):
            tree = [leaf for _, leaf in parse_group_list(tree)[0]]
        given = [(name, leaf) for name, leaf in self._leaves(tree) if leaf is not None]
        if self._parted:
            self._check_places(f"{who}: parts must stay where they were", given)
        named = [(name, local(leaf)) for name, leaf in given] if self._parted else given
        fixed = self._begun or any(
            x.share is not None for x in self.all
        )  # which tensors were divided by
        rules = (
            None if fixed else {x.name: group.rule for group in self.groups for x in group.tensors}
        )
        old, moved = self.replaced.before(named), self._watch.changed()
        if exchange(who, self.all, self._looks, named, rules):
            self.kinds += 1
            self._join()
        self.replaced.note(old)
        self.replaced.wrote(self.all[i] for i in moved)
        alike = type(tree) is type(self._tree) and template(tree) == self._template
        leaf_of = dict(given)
        self._hold(
            tree
            if tree is self._tree or alike
            else self.tree_of([leaf_of[tensor.name] for tensor in self.all])
        )

    def _leaves(self, tree: Any) -> list[tuple[str, Any]]:
        """The leaves of a tree with the names of the parameters where it has their structure, else with its own."""
        found = leaves(self._template, tree)
        return flatten(tree) if found is None else list(zip(self._names, found, strict=True))

    def _check_places(self, what: str, given: list[tuple[str, Any]]) -> None:
        """Raise ValueError for parts of other places than the parameters."""
        wrong = strays(given, {tensor.name: tensor.block for tensor in self.all})
        if wrong:
            raise ValueError(f"{what}: {'; '.join(wrong)}")

    def settle(self) -> None:
        """After a step, or a load: arrays that cannot be written have been replaced, and the tree is made anew."""
        if not self._watch.in_place and not all(
            map(operator.is_, map(_ARRAY, self.all), self._watch.arrays)
        ):
            new = iter(self.all)
            self._hold(
                rebuild(
                    self._tree,
                    lambda leaf: leaf if leaf is None else with_array(leaf, next(new).array),
                )
            )
        self._writes.begin()

    def tree_of(self, arrays: list[Array]) -> Any:
        """Arrays, one for each tensor, in the structure of the parameters."""
        new = iter(arrays)
        return rebuild(self._tree, lambda leaf: leaf if leaf is None else next(new))

    def __getstate__(self) -> dict[str, Any]:
        looks = [
            x[:2] for x in self._looks
        ]  # dtype and shape: not all libraries can pickle a device
        anew: dict[str, Any] = {
            "_lent": None,
            "_apart": None,
            "_kind": None,
            "_forms": [],
            "_checker": None,
        }
        return {**self.__dict__, **anew, "_objects": None, "_looks": looks}
