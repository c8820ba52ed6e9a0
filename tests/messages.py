"""Prints the messages of all errors and warnings, to be read as one text: `make messages`.

Each message stands beside its file and line. A value is written as its expression in braces.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def text(node):
    """The text of an expression: strings as they are, and all else in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    return f"{{{ast.unparse(node)}}}"


def made(tree):
    """The lines and messages of a module's `raise` statements and warnings."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if isinstance(node, ast.Raise) or ast.unparse(call.func) == "warnings.warn":
            yield node.lineno, " ".join(text(call.args[0]).split())


def messages():
    """All messages of the package: file, line, text."""
    found = []
    for path in sorted((ROOT / "arrayopt").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for line, message in sorted(made(tree)):
            found.append((str(path.relative_to(ROOT)), line, message))
    return found


if __name__ == "__main__":
    for file, line, message in messages():
        print(f"{message}\n    {file}:{line}")
