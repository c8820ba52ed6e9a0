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
    "fusion": 6116,
    "engines": 10675,
    "ranks": 3624,
    "params": 2648,
    "step": 1655,
    "testing": 3791,
    "rules": 5851,
    "state": 1688,
    "saving": 1458,
    "torch": 2189,
}
"""Of a room. A limit rises only with a reason, which the commit that raises it states."""
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
