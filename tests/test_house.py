"""The house: imports point one way, between files and between rooms, and take what a module offers."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "arrayopt").rglob("*.py")
}
UP = (  # from the lowest room to the highest; a room may import from those before it, and the last ones from all
    ("_version", "codecs", "foreign", "randomness"),
    ("arrays",),
    ("hyper", "streams"),
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
    ("exchange", "libraries", "monitor", "optax", "torch"),
    ("arrayopt",),
    ("testing", "demo"),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: i for i, rooms in enumerate(UP) for room in rooms}


def imported(module):
    """The modules of the package that a module imports, at its top or in a function, and the names that it takes."""
    for node in ast.walk(ast.parse(FILES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "arrayopt":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole, None) if whole in FILES else (node.module, alias.name)


IMPORTS = {module: list(imported(module)) for module in FILES}


def room(module):
    return module.split(".")[1] if "." in module else module


def circle(arrows):
    """A way from a node back to itself, or None."""
    done = set()
    for start in arrows:
        path, stack = [], [(start, 0)]
        while stack:
            node, depth = stack.pop()
            del path[depth:]
            if node in path:
                return [*path[path.index(node) :], node]
            if node not in done:
                path.append(node)
                stack += [(other, depth + 1) for other in arrows.get(node, ())]
        done |= set(path) | {start}
    return None


def test_no_file_imports_itself_by_way_of_others():
    assert circle({module: {other for other, _ in found} for module, found in IMPORTS.items()}) is None


def test_no_room_imports_itself_by_way_of_others():
    arrows = defaultdict(set)
    for module, found in IMPORTS.items():
        arrows[room(module)] |= {room(other) for other, _ in found} - {room(module)}
    assert circle(arrows) is None


@pytest.mark.parametrize("module", FILES)
def test_imports_point_to_lower_rooms(module):
    assert room(module) in FLOOR, "a new room has a place in UP"
    above = [o for o, _ in IMPORTS[module] if room(o) != room(module) and FLOOR[room(o)] >= FLOOR[room(module)]]
    assert not above


def test_what_is_imported_is_offered():
    """A name that another module takes stands in `__all__`."""
    offered = {}
    for module, path in FILES.items():
        lists = [
            node.value
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        offered[module] = set(ast.literal_eval(lists[0])) if lists else set()
    missing = [
        f"{module}: {other}.{name}"
        for module, found in IMPORTS.items()
        for other, name in found
        if name is not None and name not in offered[other] and name != "__version__"
    ]
    assert not missing


def test_a_circle_is_found():
    assert circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert circle({"a": ["b", "c"], "b": ["d"], "c": ["d"]}) is None
