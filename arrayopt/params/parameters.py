"""The parameters of an optimizer: the tree that the user gave, its tensors, and their groups."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from arrayopt.arrays import Array, size
from arrayopt.params.given import as_tree, extend, is_group_list, named_params, parse_group_list
from arrayopt.params.grads import GradMatcher
from arrayopt.params.groups import Group, Groups, assign, override, replace_rules
from arrayopt.params.parts import has_parts, local, localized, strays, with_array
from arrayopt.params.replaced import Lent, Replaced, check_slots_unshared, exchange, form
from arrayopt.params.trees import Held, flatten, leaves, rebuild, template
from arrayopt.params.watch import Watch, Writes
from arrayopt.rules.base import Rule
from arrayopt.state.first import FirstValues
from arrayopt.state.run import Run
from arrayopt.state.shares import Block
from arrayopt.state.tensors import Tensor

Divide = Callable[[list[Group]], None]
"""Gives the tensors of new groups their shares among ranks."""


class Parameters:
    """Parameters as tensors with state, in groups; both in the order in which they were given.

    Attributes
    ----------
    kinds : int
        How often a tensor's dtype, shape or device has changed: a version of these.
    replaced : Replaced
        What the user put in the place of parameters; ranks compare it.
    first : FirstValues
        Slots that follow parameters until the first update.
    lent : Lent or None
        Slots that the user has.
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
                    "Optimizer: pass `groups`, or params as a list of group dicts, not both"
                )
            named, assigned = parse_group_list(params)
            tree: Any = [leaf for _, leaf in named]
        else:
            tree = as_tree("Optimizer", params)
            named = named_params(tree)
            assigned = assign(rule, groups, named)
        tensors = {name: Tensor(name, leaf, block=blocks.get(id(leaf))) for name, leaf in named}
        if self._parted and self._by_position:
            part_of = {id(local(part)): part for _, part in flatten(given)}
            tree = [part_of.get(id(leaf), leaf) for leaf in tree]
        elif self._parted:
            tree = given
        self.all, self.groups = list(tensors.values()), list[Group]()
        for own in assigned:
            members = [tensors[name] for name in own.names]
            self.groups.append(Group(own.label, rule, own.given, members))
        self._has_state, self.kinds, self.replaced = False, 0, Replaced(self.all)
        self.lent: Lent | None = None
        self.first = FirstValues(self.groups)
        self._prepare(self.groups)
        self._join()
        self._expect(tree)

    def add(
        self, params: Any, rule: Rule, overrides: Mapping[str, Any]
    ) -> tuple[Group, Callable[[], None]]:
        """Return a new group of more parameters, checked and with state, and what takes it in."""
        self.take_up()
        who, names = "Optimizer.add_group", [tensor.name for tensor in self.all]
        params = as_tree(who, params)
        parted = self._parted or has_parts(params)
        tree, named = extend(who, self._tree, params, names, localized if parted else None)
        check_slots_unshared(who, named, self.all)
        blocks = localized(params)[1] if parted else {}
        tensors = [Tensor(name, leaf, block=blocks.get(id(leaf))) for name, leaf in named]
        group = Group(f"added {len(self.groups)}", rule, overrides, tensors)
        self._prepare([group])

        def put() -> None:
            self._parted = parted
            self.groups.append(group)
            self.all += group.tensors
            self._join()
            self._expect(tree)

        return group, put

    def _prepare(self, groups: list[Group]) -> None:
        """Divide the tensors of groups among ranks, and give them their first state."""
        self._divide(groups)
        for group in groups:
            for tensor in group.tensors:
                tensor.hold(*tensor.made(group.rule))

    def _join(self) -> None:
        """Give tensors their places, and one number of the run for each, or for each layer."""
        self.places = {tensor.name: place for place, tensor in enumerate(self.all)}
        stacked = set[str]()
        for group in self.groups:
            stacked |= set(group.names) if group.rule.stacked else set()
        counted = self._run.size
        for place, tensor in enumerate(self.all):
            has_layers = tensor.name in stacked and size(tensor.array)
            layers = int(tensor.array.shape[0]) if has_layers else 0
            if tensor.run is not self._run or tensor.layers != layers:
                tensor.run, tensor.place, tensor.number = self._run, place, counted
                tensor.layers = layers
                counted += max(1, layers)
            self._run.streams.note(tensor.array)
        self._run.extend(counted - self._run.size)
        self.first.note()

    def _expect(self, tree: Any) -> None:
        """Take a tree as the structure of parameters and gradients."""
        self._matcher = GradMatcher(tree, self.all, by_position=self._by_position)
        self._hold(tree)

    def follow(self, rule: Rule, change: Mapping[str, Any]) -> Rule:
        """Change a field of the optimizer's rule, and in groups that follow; return the rule."""
        new, (name,) = override(rule, change, "Optimizer"), change
        following = [group for group in self.groups if name not in group.overridden]
        rules = [group.checked(change, new if group.rule is rule else None) for group in following]
        replace_rules(following, rules)
        return new

    def match(self, grads: Any) -> list[Array | None]:
        """Return the tensors' gradients, checked."""
        self.take_up()
        if self._parted:
            grads = as_tree("Optimizer.step", grads)
            self._check_places("Optimizer.step: grads do not match params", self._leaves(grads))
            grads = rebuild(grads, local)
        matched, familiar = self._matcher.match(grads)
        if not familiar:
            self.keep_state()
        return matched

    def match_one(self, place: int, grad: Any) -> Array | None:
        """Return the gradient of one tensor, checked."""
        if self.all[place].block is None:
            return self._matcher.match_one(place, grad)
        return self.match_alone(place, grad)[place]

    def match_alone(self, place: int, grad: Any) -> list[Array | None]:
        """Return gradients, of which there is but one, checked: that of a tensor by itself."""
        if self.all[place].block is not None:
            return self.match({**dict.fromkeys(self.places), self.all[place].name: grad})
        if not self._stays(place):
            self.take_up()
        found: list[Array | None] = [None] * len(self.all)
        found[place] = self._matcher.match_alone(place, grad)
        self.keep_state()
        return found

    def keep_state(self) -> None:
        """Keep slots from now on, rather than make them anew."""
        self._has_state = True

    @property
    def params(self) -> Any:
        """The tree of the parameters, into which the user may put other arrays."""
        return self._tree

    def _hold(self, tree: Any) -> None:
        """Take a tree as the parameters' own, and note its arrays and their names."""
        local_leaves, tensors = flatten(self._local(tree)), iter(self.all)
        self._tree, self._held = tree, Held([leaf for _, leaf in local_leaves])
        self._names = [path if leaf is None else next(tensors).name for path, leaf in local_leaves]
        self._watch = Watch(leaf for leaf in self._held.leaves if leaf is not None)
        self._looks = list(map(form, self._watch.arrays))
        named = flatten(tree) if self._parted else local_leaves
        given = [leaf for _, leaf in named if leaf is not None]
        pairs = [(x, leaf) for x, leaf in zip(self.all, given, strict=True) if x.share is not None]
        self._shared = [tensor for tensor, _ in pairs]
        self._writes = Writes([leaf for _, leaf in pairs])

    def _local(self, tree: Any) -> Any:
        """Return a tree of what this rank has of its leaves."""
        return rebuild(tree, local) if self._parted else tree

    def take_up(self) -> None:
        """Check and use the arrays that the user has put into the tree of the parameters.

        A parameter or a slot may also be the same array, and have moved or become read-only. Before
        the first step, it may have another dtype, shape or device; then state is made anew. If
        arrays do not fit, a TypeError or ValueError lists all mismatches, and nothing has been
        changed.
        """
        if self.lent is not None:
            self.lent = self.lent.follow(self.all)
        same = self._held.same(self._matcher.template, self._local(self._tree))
        if not same or self._watch.changed():
            self.exchange(self._tree, "Optimizer")
        if written := self._writes.made():
            self.replaced.wrote(self._shared[i] for i in written)
            self._writes.reset()

    def _stays(self, place: int) -> bool:
        """Return whether the array of one tensor is where `take_up` found it, if its key tells."""
        key = self.all[place].name if isinstance(self._tree, dict) else place
        try:
            same = self._tree[key] is self._watch.arrays[place]
        except (LookupError, TypeError):
            same = False  # as where arrays cannot be written: then a step replaces all of them
        same = same and (self.lent is None or self.lent.stays(self.all[place]))
        return same and self._watch.in_place and self._watch.stays(place)

    def lend(self) -> None:
        """Watch slots from now on: the user has them, and may change them."""
        self.take_up()
        self.lent = self.lent or Lent(self.all)

    def exchange(self, tree: Any, who: str) -> None:
        """Use the arrays of a tree of the same structure or with the same names: all, or none.

        Raise as `take_up`.
        """
        tree = as_tree(who, tree)
        if self._by_position and is_group_list(tree):
            tree = [leaf for _, leaf in parse_group_list(tree)[0]]
        given = [(name, leaf) for name, leaf in self._leaves(tree) if leaf is not None]
        if self._parted:
            self._check_places(f"{who}: parts must stay where they were", given)
        named = [(name, local(leaf)) for name, leaf in given] if self._parted else given
        rules: dict[str, Rule] | None = None
        if not self._has_state and all(tensor.share is None for tensor in self.all):
            rules = {}  # else slots would be lost, or the division among ranks would not fit
            for group in self.groups:
                rules |= dict.fromkeys(group.names, group.rule)
        old, moved = self.replaced.before(named), self._watch.changed()
        if exchange(who, self.all, self._looks, named, rules):
            self.kinds += 1
            self._join()
        self.replaced.note(old)
        self.replaced.wrote(self.all[i] for i in moved)
        alike = type(tree) is type(self._tree) and template(tree) == self._matcher.template
        if tree is not self._tree and not alike:
            tree = self.tree_of(list(map(dict(given).__getitem__, self.places)))
        self._hold(tree)

    def _leaves(self, tree: Any) -> list[tuple[str, Any]]:
        """Return the leaves of a tree; named as the parameters if it has their structure."""
        found = leaves(self._matcher.template, tree)
        return flatten(tree) if found is None else list(zip(self._names, found, strict=True))

    def _check_places(self, what: str, given: list[tuple[str, Any]]) -> None:
        """Raise ValueError for parts whose places differ from the parameters'."""
        wrong = strays(given, {tensor.name: tensor.block for tensor in self.all})
        if wrong:
            raise ValueError(f"{what}: {'; '.join(wrong)}")

    def settle(self) -> None:
        """Make the tree anew if a step or a load has replaced arrays that cannot be written."""
        if not self._watch.in_place:
            arrays = [tensor.array for tensor in self.all]
            if not all(map(operator.is_, arrays, self._watch.arrays)):
                self._hold(self._with(arrays, with_array))
        self._writes.reset()

    def _with(self, arrays: list[Array], put: Callable[[Any, Array], Any]) -> Any:
        """Return the tree with `put(leaf, array)` in place of each leaf."""
        new = iter(arrays)
        return rebuild(self._tree, lambda leaf: leaf if leaf is None else put(leaf, next(new)))

    def tree_of(self, arrays: list[Array]) -> Any:
        """Return arrays, one for each tensor, in the structure of the parameters."""
        return self._with(arrays, lambda _, array: array)

    def __getstate__(self) -> dict[str, Any]:
        looks = [look[:2] for look in self._looks]  # not all libraries can pickle a device
        return {**self.__dict__, "lent": None, "_looks": looks}
