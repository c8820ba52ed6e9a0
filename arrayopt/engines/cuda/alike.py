"""Passes that differ in nothing but which scratch arrays they have, as those between products of matrices do."""

import re
from collections.abc import Mapping

from arrayopt.engines.cuda.text import CudaText
from arrayopt.fusion.graph import SCRATCH
from arrayopt.fusion.stages import Sweep

__all__ = ["bare", "scratch"]


def bare(text: str) -> str:
    """The text of a pass, with other names for what may have any: itself, its values and its scratch arrays."""
    names: dict[str, str] = {}

    def named(found: "re.Match[str]") -> str:
        return (found[1] or "") + names.setdefault(found[2], f"name{len(names)}")

    return re.sub(rf"\b(at_|column_|read_|write_|first_)?({SCRATCH}\d+|x_?\d+|Pass\d+)\b", named, text)


def scratch(m: CudaText, same: Mapping[int, Sweep]) -> str:
    """The arguments that say where the scratch arrays are, of the passes that some stages are."""
    text, last = "", [*same][-1]
    columns = {j: [f"AT_{x}" for x in p.arrays if x in m.plan.spilled] for j, p in same.items()}
    for i, x in enumerate(columns[last]):
        others = "".join(f"stage == {j} ? {each[i]} : " for j, each in columns.items() if each[i] != x)
        text += f", {others}{x}"
    return text
