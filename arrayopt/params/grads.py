"""Gradients, matched to parameters by their names and checked."""

import operator
from collections.abc import Sequence
from typing import Any

import array_api_compat

from arrayopt.arrays import Array, array_namespace, is_array, kind, library, look, place
from arrayopt.foreign import listed_names
from arrayopt.params.aliasing import WrittenMemory
from arrayopt.params.given import as_tree
from arrayopt.params.headers import Locations, form_checker
from arrayopt.params.kinds import refusal, resolved
from arrayopt.params.located import LocatedGrads
from arrayopt.params.trees import LONE, flatten, leaves, template
from arrayopt.state.tensors import Tensor


class GradMatcher:
    """Matches the gradients of a step to tensors.

    It remembers the types and forms of the last gradients. Those of the same types and forms are
    not checked again. Gradients have the structure of the parameters, `tree`; `by_position`, a list
    of them is in their order, whatever their names.
    """

    def __init__(self, tree: Any, tensors: list[Tensor], *, by_position: bool) -> None:
        self.template, self._tensors, self._by_position = template(tree), tensors, by_position
        self._by_name = [tensor.name for tensor in tensors], None  # the template of a flat dict
        self._written: tuple[int, WrittenMemory] | None = None
        self._forget()

    def _forget(self) -> None:
        self._kind: Any = None
        self._dtype: Any = None  # of all gradients, if they have just one
        self._forms: list[Any] = []
        self._checker: Any = None  # of forms, where headers can be read
        self._complete = False
        self._plain = self._real = False  # whether none may be a view to resolve, or a conjugate

    def match(self, grads: Any) -> tuple[LocatedGrads, bool]:
        """Return the tensors' gradients, checked, and whether they were familiar."""
        given = leaves(self.template, grads, LocatedGrads())
        if given is None:
            given = leaves(self._by_name, grads, LocatedGrads())
        familiar, locations = (False, None) if given is None else self._familiar(given)
        if given is None or not familiar:
            named = [(tensor.name, tensor.array) for tensor in self._tensors]
            matched = match_grads("Optimizer.step", named, grads, by_position=self._by_position)
            given = list(matched.values())
        found = given if familiar and self._plain else resolved(given, familiar and self._real)
        written = self._written_memory()
        if not familiar:
            written.forget()
        locations = written.check(found, alike=familiar, complete=self._complete, found=locations)
        if not familiar:
            self._remember(given)
        if not isinstance(found, LocatedGrads):
            found = LocatedGrads(found)
        found.locations, found.dtype = locations, self._dtype if familiar else None
        return found, familiar

    def match_one(self, place: int, grad: Any) -> Array | None:
        """Return the gradient of one tensor that is copied, checked."""
        tensor = self._tensors[place]
        named = match_grads("Optimizer.give", [(tensor.name, tensor.array)], {tensor.name: grad})
        return resolved(list(named.values()))[0]

    def match_alone(self, place: int, grad: Any) -> Array | None:
        """Return the gradient of one tensor that is updated by itself, checked as all are."""
        found = self.match_one(place, grad)
        self._written_memory().compare({place: found}, [place])
        return found

    def _written_memory(self) -> WrittenMemory:
        version = self._tensors[0].run.arrays
        version_then, written = self._written or (-1, None)
        if written is None or (version_then != version and not written.always_empty):
            written = WrittenMemory(self._tensors)
            self._written = version, written
        return written

    def _familiar(self, given: list[Any]) -> tuple[bool, Locations | None]:
        """Return whether gradients have the forms of earlier ones, and locations if known.

        It also notes whether no gradient is None.
        """
        if self._checker is not None and len(given) == len(self._forms):
            locations = self._checker(given)
            self._complete = locations is not None and locations.complete
            return locations is not None, locations
        kinds = set(map(type, given))
        self._complete = type(None) not in kinds
        kinds.discard(type(None))
        if kinds != {self._kind} or len(given) != len(self._forms):
            return False, None
        form_of = look(self._kind)
        if self._complete:
            return all(map(operator.eq, map(form_of, given), self._forms)), None
        pairs = zip(given, self._forms, strict=True)
        return all(grad is None or form_of(grad) == form for grad, form in pairs), None

    def _remember(self, given: list[Array | None]) -> None:
        """Remember the forms of gradients that are of one type and can be asked."""
        some = [grad for grad in given if grad is not None]
        kinds = set(map(type, some))
        if len(kinds) != 1 or not all(hasattr(grad, "device") for grad in some):
            return
        (owner,) = kinds
        if owner is not self._kind:
            self._kind, self._forms = owner, [None] * len(given)
        form_of, same, forms = look(owner), dict[Any, Any](), []
        for grad, old in zip(given, self._forms, strict=True):
            form = old if grad is None else form_of(grad)
            forms.append(same.setdefault(form, form))  # one object each, which stays in the cache
        self._forms = forms
        dtypes = {form[0] for form in forms if form is not None}
        self._plain = not array_api_compat.is_torch_array(some[0])
        self._real = not any("complex" in str(dtype) for dtype in dtypes)  # of those left out, too
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        self._checker = form_checker(owner, forms)

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"_written": None, "_kind": None, "_forms": [], "_checker": None}
        return {**self.__dict__, **fresh}  # not all libraries can pickle forms


def match_grads(
    who: str,
    params: list[tuple[str, Array]],
    grads: Any,
    *,
    by_position: bool = False,
    devices: bool = True,
) -> dict[str, Array | None]:
    """Return the gradient of each parameter by name, or None where left out, all checked.

    With `by_position`, a list of gradients is in the order of the parameters, whatever their names.
    A ValueError lists all mismatches of names, shapes, dtype kinds, libraries and devices.
    """
    grads = as_tree(who, grads)
    given, names = dict(flatten(grads)), dict(params)
    if by_position and not isinstance(grads, dict):
        if len(given) != len(params):
            raise ValueError(f"{who}: the number of grads must be {len(params)}; got {len(given)}")
        given = dict(zip(names, given.values(), strict=True))
    strange = {x: _above(x, names) for x in given if x not in names and given[x] is not None}
    split = dict.fromkeys(above for above in strange.values() if above is not None)
    wrong = [f"missing {name!r}" for name in names if name not in given and name not in split]
    wrong += [f"unexpected {name!r}" for name, above in strange.items() if above is None]
    wrong += [f"a list, tuple or dict at {name!r}, expected an array or None" for name in split]
    for name, param in params:
        grad = given.get(name)
        reason = refusal(grad, functional=not devices)
        if reason is not None:
            wrong.append(f"{name!r} is {reason}")
        elif grad is not None:
            for what, expected in _differences(param, grad, devices):
                wrong.append(f"{what} at {name!r}, expected {expected}")
    if given.get(LONE) is grads and LONE not in names:
        wrong = [f"{type(grads).__name__} in place of a tree of arrays; {listed_names(names)}"]
    if wrong:
        todo = "; pass gradients, not a function that computes them" if callable(grads) else ""
        if any(type(x) in (int, float, complex) for x in given.values()):
            todo = "; make arrays of numbers, such as numpy.asarray([1.0, 2.0])"
        if isinstance(grads, list | tuple) and len(given) == len(names) and not {*given} & {*names}:
            todo = "; pass a dict by name: dict(zip(names, grads))"
        elif isinstance(grads, dict) and not by_position and all(map(str.isdigit, names)):
            todo = "; pass a list in the order of the parameters"
        raise ValueError(f"{who}: grads do not match params: {'; '.join(wrong)}{todo}")
    return {name: given[name] for name in names}


def _above(name: str, names: dict[str, Array]) -> str | None:
    """Return the parameter in whose place a container with this leaf is, if there is one."""
    while "." in name and name not in names:
        name = name.rpartition(".")[0]
    return name if name in names else LONE if list(names) == [LONE] else None


def _differences(param: Array, grad: Any, devices: bool) -> Sequence[tuple[str, Any]]:
    """Return how a gradient differs from its parameter: (what came, what was expected)."""
    if not is_array(grad):
        return [(type(grad).__name__, "an array or None")]
    if array_namespace(grad) is not array_namespace(param):
        return [(f"{library(grad)} array", f"{library(param)} array")]
    found: list[tuple[str, Any]] = []
    if tuple(grad.shape) != tuple(param.shape):
        found.append((f"shape {tuple(grad.shape)}", tuple(param.shape)))
    if kind(grad) != kind(param):
        found.append((f"dtype {grad.dtype}", f"a {kind(param)} floating dtype like {param.dtype}"))
    if devices and place(grad)[1] != place(param)[1]:
        found.append((f"device {place(grad)[1]}", place(param)[1]))
    return found
