"""A small classifier in plain array API, its backward pass written by hand.

A stack of blocks and a linear head, on a batch ``x`` of shape (n, features):

    block   z = x Wᵀ;   ẑ = (z - mean z) / √(var z + ε), each row by itself;   y = tanh(gain · ẑ + bias)
    head    scores = x Wᵀ + bias
    loss    mean over the batch of  -Σ target · log softmax(scores)

The namespace is taken from the arrays, so the same lines run on NumPy, CuPy, PyTorch, JAX and the strict namespace.

Parameters are a tree, ``{"blocks": [{"weight", "gain", "bias"}, ...], "head": {"weight", "bias"}}``: an optimizer names
its leaves ``blocks.0.weight``, ``blocks.0.gain``, and so on.

With parameters in float16, activations and their own gradients are stored in float16 too; sums and products are made in
float32, as on the matrix units of a GPU. Small gradients underflow then, unless the loss is scaled.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

Array = Any
Params = dict[str, Any]

_EPS = 1e-5


class _Saved(NamedTuple):
    """What the backward pass of one block needs from its forward pass."""

    x: Array
    normed: Array
    inverse_deviation: Array
    y: Array


def init_params(xp: Any, sizes: Sequence[int], *, seed: int, dtype: str = "float32") -> Params:
    """Draw the initial parameters.

    The numbers come from NumPy's generator, so that a seed means the same network in every library.

    Parameters
    ----------
    xp : array namespace
        Where the parameters are to live.
    sizes : sequence of int
        Width of the input, of each block, and of the output: ``(64, 128, 64, 10)`` has two blocks and a head.
    seed : int
        Seed of the generator.
    dtype : str
        Name of a real floating dtype.

    Returns
    -------
    dict
        Weights ~ N(0, 1/inputs), gains one, biases zero.
    """
    rng = np.random.default_rng(seed)

    def weight(outputs: int, inputs: int) -> Array:
        return xp.asarray((rng.standard_normal((outputs, inputs)) / inputs**0.5).astype(dtype))

    def constant(value: float, outputs: int) -> Array:
        return xp.asarray(np.full(outputs, value, dtype))

    blocks = [
        {"weight": weight(outputs, inputs), "gain": constant(1.0, outputs), "bias": constant(0.0, outputs)}
        for inputs, outputs in pairwise(sizes[:-1])
    ]
    return {"blocks": blocks, "head": {"weight": weight(sizes[-1], sizes[-2]), "bias": constant(0.0, sizes[-1])}}


def scores(params: Params, x: Array) -> Array:
    """Return the scores of each class, shape (n, classes): the larger, the likelier."""
    return _forward(params, x)[0]


def loss_and_grads(params: Params, x: Array, targets: Array, *, scale: float = 1.0) -> tuple[Array, Params]:
    """Return the mean cross-entropy, and the gradient of `scale` times it.

    Parameters
    ----------
    params : dict
        As `init_params` makes them.
    x : array, shape (n, features)
        A batch.
    targets : array, shape (n, classes)
        The wanted probabilities; a row with a single 1 for a known class.
    scale : float
        The loss scale.

    Returns
    -------
    loss : array, 0-d
        On the device of the parameters: nothing here waits for it.
    grads : dict
        The gradient, a tree like `params`.
    """
    xp = array_namespace(x, targets)
    outputs, saved = _forward(params, x)
    shifted = outputs - xp.max(outputs, axis=1, keepdims=True)
    surprise = xp.log(xp.sum(xp.exp(shifted), axis=1, keepdims=True)) - shifted
    loss = xp.sum(targets * surprise) / x.shape[0]

    d = (xp.exp(-surprise) - targets) * (scale / x.shape[0])
    head_input, head_weight = _wide(saved[-1].y if saved else x), params["head"]["weight"]
    head = _like({"weight": d.T @ head_input, "bias": xp.sum(d, axis=0)}, head_weight)
    d = d @ _wide(head_weight)
    blocks = []
    for block, kept in zip(reversed(params["blocks"]), reversed(saved), strict=True):
        grads, d = _block_backward(xp, block, kept, d)
        blocks.append(grads)
    return loss, {"blocks": blocks[::-1], "head": head}


def _forward(params: Params, x: Array) -> tuple[Array, list[_Saved]]:
    """Scores, and what each block keeps for the way back."""
    xp = array_namespace(x)
    saved = []
    for block in params["blocks"]:
        weight, gain, bias = (_wide(block[name]) for name in ("weight", "gain", "bias"))
        z = _wide(x) @ weight.T
        centred = z - xp.mean(z, axis=1, keepdims=True)
        inverse_deviation = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=1, keepdims=True) + _EPS)
        normed = centred * inverse_deviation
        y = xp.tanh(gain * normed + bias)
        kept = {"x": x, "normed": normed, "inverse_deviation": inverse_deviation, "y": y}
        saved.append(_Saved(**_like(kept, block["weight"])))
        x = saved[-1].y
    return _wide(x) @ _wide(params["head"]["weight"]).T + _wide(params["head"]["bias"]), saved


def _block_backward(xp: Any, block: Params, kept: _Saved, dy: Array) -> tuple[Params, Array]:
    """Gradient of one block's parameters, and of its input, from the gradient `dy` of its output."""
    kept = _Saved(*map(_wide, kept))
    da = dy * (1.0 - kept.y * kept.y)
    dn = da * _wide(block["gain"])
    # The normalisation takes out the mean and the scale of each row: so must its gradient.
    along = kept.normed * xp.mean(dn * kept.normed, axis=1, keepdims=True)
    dz = kept.inverse_deviation * (dn - xp.mean(dn, axis=1, keepdims=True) - along)
    grads = {"weight": dz.T @ kept.x, "gain": xp.sum(da * kept.normed, axis=0), "bias": xp.sum(da, axis=0)}
    return _like(grads, block["weight"]), dz @ _wide(block["weight"])


def _wide(x: Array) -> Array:
    """An array as it is computed with: half precision in float32."""
    xp = array_namespace(x)
    return x if x.dtype in (xp.float32, xp.float64) else xp.astype(x, xp.float32)


def _like(arrays: Params, like: Array) -> Params:
    """Arrays as they are stored beside another one: in its dtype."""
    xp = array_namespace(like)
    return {name: xp.astype(x, like.dtype, copy=False) for name, x in arrays.items()}
