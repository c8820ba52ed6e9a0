"""The house: imports point one way, take what a module offers, and code stays plain."""

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "arrayopt").rglob("*.py")
}
UP = (  # from the lowest room to the highest; a room may import from those before it, and the last ones from all
    ("_version", "codecs", "foreign_names", "html", "randomness"),
    ("arrays", "foreign"),
    ("hyper", "streams", "interrupts"),
    ("rules",),
    ("schedules",),
    ("projections",),
    ("state",),
    ("params",),
    ("fusion",),
    ("engines",),
    ("ranks",),
    ("step",),
    ("saving",),
    ("functional", "settings"),
    ("optimizer",),
    ("solving",),
    ("exchange", "libraries", "monitor", "optax", "torch"),
    ("arrayopt",),
    ("testing", "demo"),
    ("cli",),
    ("__main__",),
)


class Plain(NamedTuple):
    """What is counted in the files of a room."""

    wide_lines: int = 0  # of more than 100 characters
    nested: int = 0  # comprehensions that have another one within, or go over several ranges
    tall: int = 0  # comprehensions over more than two lines
    long_files: int = 0  # of more than 300 lines
    letters: int = 0  # names of one letter that live over more than five lines of a function


AT_MOST = {  # how often each may be there; numbers here may only fall
    "ranks": Plain(nested=2, letters=2),  # the `n` of `threads` and of `run`
    "params": Plain(nested=3),
    "fusion": Plain(letters=1),  # the `t` of `scalars`
    "engines": Plain(letters=13),  # the p, g and t of a rule
    "step": Plain(nested=1),
}
LINES = {
    "fusion": 6119,
    "engines": 10644,
    "ranks": 3572,
    "params": 2646,
    "step": 1641,
    "testing": 3791,
    "rules": 5851,
    "state": 1686,
    "saving": 1458,
    "torch": 2189,
}
"""Of a room; they may only fall.

Engines: 130 more for `numpy` to take kernels of convolutions in groups, without which CAME's values between passes
took fourteen times the tensor. Fusion and engines: 108 and 178 more for loops over members of rings on devices, without
which registers and spills grew with their number. Both: 247 and 63 more for numbers in waves, without which code
between passes grew with the square of the memory of L-BFGS, and for loops over members in 8 bits or complex. Fusion: 44
more for questions about what is traced, such as `isinstance`, of which 25 in 80 were answered otherwise than where a
rule runs as written. Step: 70 more for a short way through `give`, which is called for each tensor, and for what a
failed micro-step has added; ranks and params have 30 fewer for it.
Fusion and engines: 119 and 11 more for few stages between the passes on devices, without which blocks
wait for each other 18 times in a step of CAME, in place of 10. Fusion: 15 more so that `self.lr` of a rule is `h.lr`,
and not the number of the first group and step for all; 43 more, and 79 fewer in engines, for types in place of tuples
by number, closures and options that were handed on. Engines: 13 more for products that compilers round in one program
and not in another, so that a norm over ranks was another one, and 5 for products in threads; 31 more so that
compiled engines are told where blocks lie, without which 1,000 of many lengths took ten times the time of as many
tensors. Params: 83 more so that a look at memory tells that nothing has changed since the last step, without which the
host took twice (a step) and five times (a captured one) as long over 10,000 tensors of CuPy; 10 more so that `give`
looks at the slots of its tensor alone where users have them, and that these are no lazy views; 116 more so that
PyTorch's tensors are read as NumPy's arrays are: to ask them took a quarter of a step over 300 small tensors, and half
of one where users have slots. Rules and torch: 27 and 3 more so that a
number that is set is read by what its field was found to need once, without which it took as long as a step over few
tensors. Saving: 9 more for checksums of two kinds, the older of which took most of the time. Engines: 1 more so that
`numpy` does not copy large tensors of one size. Torch: 8 more so that parameters of ranks arrive as a forward pass
needs them.
Rules: 3 more so that norms as written are one sum. State: 1 more so that codes make no NaN in JAX. Rules, torch and
state: 19, 30 and 4 more for errors that name the way where a transformation of optax, or several rules are passed, and
for what public methods take, return and raise.
Engines: 25 more so that threads that help flush subnormal numbers if the calling thread does, without which bits
depended on their number; 5 more so that Ctrl-C leaves no half of a step's numbers. Params: 20 more to refuse tensors
whose storage was freed, which crashed the process, nested ones, and those that become lazy views. Rules: 3
more for norms of infinite complex numbers; 128 more so that a rule is traced again where its code was edited, or a
tuple, an object or a module that the code names. Step: 25 more
so that handlers of signals can save in the middle of a step, and that locks work after a fork. Engines, fusion and
state: 60, 11 and 36 more so that unequal blocks run as batches in `array_api`, that errors name the line of a rule that
cannot be traced, and that whole rings can be set. Ranks: 36 more to send sums in groups of buckets, without which an
overlapped step of Llama 7 B over 64 ranks takes 2.4 times as long, by the model of `benchmarks/scale.py`; 6 more to
refuse captures of messages that go through the host, which ended in the middle of a step's writes.
Engines: 26 more so that `numba` adds the same products unrounded as `cpp`, and 85 more so that both add up elements in
the same order, with all compilers and vectors, which gives the same bits. Ranks: 2
more so that a failed call of NCCL leaves no group open. Step and engines: 28 and 15 more so that steps that clip or
check gradients prepare the launches that measure them once, which took half of a small step. Fusion, engines and
rules: 4, 4 and 0 more so that a first step plans what it runs alone, and does not import all of NumPy's modules.
Torch: 17 more so that of two optimizers that release gradients of the same parameters the one made last makes the
steps: the other one made them, and nothing was said. State: 1 more so that a wrong result of `refuses` is told, and 1
so that slots wait for the stream of the last call. State, params and torch: 21, 2 and 4 more so that no signal ends a
change of settings in its middle, and that nobody converts the state while a step writes to it, which then wrote to
memory that was freed. Params and state: 6 and 5 more so that the storage of all groups changes, or of none where
memory runs out. Torch: 2 more for a state that is none."""
FLOOR = {room: i for i, rooms in enumerate(UP) for room in rooms}


@cache
def text(module):
    return FILES[module].read_text("utf-8")


@cache
def tree(module):
    return ast.parse(text(module))


@cache
def imported(module):
    """The modules of the package that a module imports, at its top or in a function, and the names that it takes."""
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names if alias.name in FILES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "arrayopt":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole, None) if whole in FILES else (node.module, alias.name))
    return found


def room(module):
    return module.split(".")[1] if "." in module else module


def circle(arrows):
    """A way from a node back to itself, or None."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_file_imports_itself_by_way_of_others():
    assert circle({module: {other for other, _ in imported(module)} for module in FILES}) is None


def test_no_room_imports_itself_by_way_of_others():
    arrows = defaultdict(set)
    for module in FILES:
        arrows[room(module)] |= {room(other) for other, _ in imported(module)} - {room(module)}
    assert circle(arrows) is None


@pytest.mark.parametrize("module", FILES)
def test_imports_point_to_lower_rooms(module):
    assert room(module) in FLOOR, "a new room has a place in UP"
    above = [o for o, _ in imported(module) if room(o) != room(module) and FLOOR[room(o)] >= FLOOR[room(module)]]
    assert not above


def test_what_is_imported_is_offered():
    """A name that another module takes has no underscore before it."""
    taken = [f"{module}: {other}.{name}" for module in FILES for other, name in imported(module) if name]
    assert taken
    assert not [x for x in taken if x.rpartition(".")[2].startswith("_") and "__version__" not in x]


def test_a_circle_is_found():
    assert circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert circle({"a": ["b", "c"], "b": ["d"], "c": ["d"]}) is None


# ---- plain code --------------------------------------------------------------------------------

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def counted(code):
    """What is counted in a file."""
    lines, nodes = code.splitlines(), list(ast.walk(ast.parse(code)))
    comprehensions = [node for node in nodes if isinstance(node, COMPREHENSIONS)]
    nested = 0
    for node in comprehensions:
        inside = [x for x in ast.walk(node) if isinstance(x, COMPREHENSIONS)]
        nested += len(inside) > 1 or len(node.generators) > 1
    return Plain(
        wide_lines=sum(len(line) > 100 for line in lines),
        nested=nested,
        tall=sum(node.end_lineno > node.lineno + 1 for node in comprehensions),
        long_files=int(len(lines) > 300),
        letters=sum(long_letters(node) for node in nodes if isinstance(node, FUNCTIONS)),
    )


def long_letters(function):
    """How many names of one letter live over more than five lines of a function."""
    found, bound, todo = defaultdict(list), set(), list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, (*COMPREHENSIONS, *FUNCTIONS, ast.Lambda)):
            continue  # names of their own
        name = getattr(node, "id", getattr(node, "arg", None))
        if isinstance(node, ast.Name | ast.arg) and len(name) == 1:
            found[name].append(node.lineno)
            if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store):
                bound.add(name)
        todo += ast.iter_child_nodes(node)
    return sum(max(found[name]) - min(found[name]) > 5 for name in bound)


@pytest.mark.parametrize("name", AT_MOST)
def test_code_stays_plain(name):
    """What is counted does not become more; where it has become less, `AT_MOST` can say so."""
    files = {module: counted(text(module)) for module in FILES if room(module) == name}
    for kind, most in AT_MOST[name]._asdict().items():
        found = {module: getattr(count, kind) for module, count in files.items()}
        where = {module: count for module, count in found.items() if count}
        assert sum(found.values()) <= most, f"{kind} in {name}: {where}"


@pytest.mark.parametrize("name", LINES)
def test_a_room_does_not_grow(name):
    """Who adds to a room takes as much away, or says why not where the number is raised."""
    lines = sum(len(text(module).splitlines()) for module in FILES if room(module) == name)
    assert lines <= LINES[name], f"{name} has {lines} lines"


def test_what_is_not_plain_is_counted():
    code = """
def f(a, n):
    wide = [x for x in a if x]  # {comment}
    both = [[y for y in x] for x in a]
    tall = [
        x
        for x in a
    ]
    g = [n for n in tall]
    pairs = [(x, y) for x in a for y in x]
    return n, a
"""
    assert counted(code.format(comment="-" * 70)) == Plain(1, 2, 1, 0, 2)
    assert counted("\n" * 301) == Plain(long_files=1)
