"""`diagnose` says what published optimizers do, of whose runs the golden files are."""

import json
from pathlib import Path

import numpy as np
import pytest

from arrayopt.testing import Trajectory, diagnose
from tests.support.slow import marked

FOLDER = Path(__file__).parents[1] / "goldens"


def load(file):
    with np.load(FOLDER / f"{file}.npz") as saved:
        arrays = dict(saved)
    meta = json.loads(str(arrays["meta"]))
    shapes = dict(zip(meta["names"], map(tuple, meta["shapes"]), strict=True))
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])[:-1]
    skip = meta.get("skip") or {}

    def tensors(flat):
        return {n: x.reshape(shapes[n]).astype(float) for n, x in zip(shapes, np.split(flat, ends), strict=True)}

    grads = [
        {name: None if step in skip.get(name, ()) else x for name, x in tensors(row).items()}
        for step, row in enumerate(arrays["g"])
    ]
    dtypes = dict.fromkeys(shapes, str(arrays["p0"].dtype))
    return Trajectory(dtypes, [tensors(arrays["p0"]), *map(tensors, arrays["p"])], grads, file)


FILES = [
    ("torch_adamw/default_f64", "AdamW", "as documented"),
    ("torch_sgd/nesterov_f64", "SGD", "Nesterov's momentum"),
    ("optax_lamb/default", "LAMB", "as documented"),
    ("optax_lars/nesterov", "LARS", "the norm of the decayed gradient"),
    ("timm_lamb/default_f64", "LAMB", "as documented"),
    ("mx_lamb/fused_default", "LAMB", "as documented"),
    ("mx_lans/fused_default", "LANS", "zerograd.weight, lategrad.weight holds values that are no finite numbers"),
    ("ms_lamb_ascend/default", "LAMB", "as documented"),
    ("ms_momentum/default", "SGD", "weight_decay is not the same for all tensors"),
    ("ms_adam/default", "Adam", "eps is added to √v before the bias correction of v"),
    ("came_ms/default", "CAME", "decay_rate 0.8"),
    ("po_came/default_f64", "CAME", "as documented"),
    ("tf_lamb/exclude", "LAMB", "no bias correction"),
]


@pytest.mark.parametrize(("file", "name", "words"), marked(FILES, lambda file, name, words: "torch_sgd" in file))
def test_published_systems_are_recognised(file, name, words):
    found = diagnose(load(file), depth=1)
    assert found.matches, str(found)
    assert found.name == name
    assert words in str(found)
