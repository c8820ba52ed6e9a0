"""Imports SciPy's copy of array-api-compat under that name, if the package is not installed.

Importing this module is enough.
"""

import importlib.util
import sys
from pathlib import Path

__all__ = []


def _take():
    scipy = importlib.util.find_spec("scipy")
    places = Path(scipy.origin).parent.glob("*/array_api_compat/__init__.py") if scipy else ()
    for place in places:
        found = importlib.util.spec_from_file_location(
            "array_api_compat", place, submodule_search_locations=[str(place.parent)]
        )
        sys.modules["array_api_compat"] = made = importlib.util.module_from_spec(found)
        found.loader.exec_module(made)
        return


if "array_api_compat" not in sys.modules and importlib.util.find_spec("array_api_compat") is None:
    _take()
