"""The loops of the page "Coming from Keras 3 and Flax", as they stand there, where these packages are installed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "keras-flax.md"
DATA = """
import numpy as np
import arrayopt as ao
x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
y = x[:, :1]
"""
JAX = "import jax\nimport jax.numpy as jnp\n"
KERAS = """
import keras
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
"""
FLAX = """
from flax import nnx
class MLP(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x)))
model = MLP(nnx.Rngs(0))
"""
LOSS = "first = float(np.mean((np.asarray({call}) - y) ** 2))\n"
LAST = "assert float(np.mean((np.asarray({call}) - y) ** 2)) < 0.05 * first\n"
PREDICT = {"call": "model.predict(x, verbose=0)"}
LOOPS = {
    "Flax NNX": ("flax", "", DATA + JAX + FLAX, {"call": "model(x)"}),
    "Keras 3, KERAS_BACKEND=jax": ("keras", "jax", DATA + JAX + KERAS, PREDICT),
    "Keras 3, KERAS_BACKEND=torch": (
        "keras",
        "torch",
        DATA + "import torch\n" + KERAS + "x, y = torch.tensor(x), torch.tensor(y)\n",
        {"call": "model.predict(np.asarray(x), verbose=0)"},
    ),
}


def block(caption):
    """The code of the page under a caption."""
    found = re.search(
        rf"```{{code-block}} python\n:caption: {re.escape(caption)};.*?\n\n(.*?)```", PAGE.read_text(), re.S
    )
    return found[1]


@pytest.mark.parametrize("caption", LOOPS)
def test_it_trains(caption):
    package, backend, before, call = LOOPS[caption]
    needed = [package, *([backend] if backend else ["jax"])]
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"{', '.join(lacking)} not installed")
    text = before + LOSS.format(**call).replace("- y)", "- np.asarray(y))") + block(caption)
    text += LAST.format(**call).replace("- y)", "- np.asarray(y))")
    env = {**os.environ, "KERAS_BACKEND": backend or "jax"}
    done = subprocess.run(
        [sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
