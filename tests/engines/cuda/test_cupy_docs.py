"""The examples of the page "On a GPU" run, over the stand-in for CuPy."""

import re
from pathlib import Path

import arrayopt as ao

PAGE = (Path(__file__).parents[3] / "docs" / "cuda.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```{code-block} python\n:caption:[^\n]*\n\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_examples_of_the_page(cupy):
    first, graphs, pytorch, source = EXAMPLES
    assert "torch" in pytorch  # which the stand-in cannot give a device
    known = {"print": lambda text: shown.append(text)}
    shown = []
    exec(first.replace("1024", "128"), known)
    assert "engine cupy" in shown[0]
    known["grads"] = {"w": cupy.ones((128, 128), cupy.float32), "b": cupy.ones(128, cupy.float32)}
    known["compute"] = lambda grads: None
    exec(graphs.replace("range(100)", "range(3)"), known)
    assert known["opt"].step_count == known["opt"].state["w"]["t"] == 1 + 1 + 1 + 3
    exec(source, known)
    assert shown[1] == ao.source(ao.LAMB(), engine="cupy")
