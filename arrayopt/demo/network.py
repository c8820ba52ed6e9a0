"""A small classifier in plain array API, with a hand-written backward pass.

It is a stack of blocks and a linear head, for a batch ``x`` of shape (n, features):

    block   z = x Wᵀ;   ẑ = (z - mean z) / √(var z + ε) for each row;   y = tanh(gain · ẑ + bias)
    head    scores = x Wᵀ + bias
    loss    mean over the batch of  -Σ target · log softmax(scores)

The namespace comes from the arrays, so the same code runs on NumPy, CuPy, PyTorch, JAX and array-api-strict.

Parameters are a tree, ``{"blocks": [{"weight", "gain", "bias"}, ...], "head": {"weight", "bias"}}``. An optimizer names
its leaves ``blocks.0.weight``, ``blocks.0.gain``, and so on.

If parameters are float16, activations and gradients of parameters are stored in float16 too; sums and products are
computed in float32, as on the matrix units of a GPU. Small gradients then underflow, unless the loss is scaled.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import array_namespace

Array = Any
Params = dict[str, Any]

_EPS = 1e-5


class _Saved(NamedTuple):
    """The values of a block's forward pass that its backward pass needs."""

    x: Array
    normed: Array
    inverse_deviation: Array
    y: Array


def init_params(xp: Any, sizes: Sequence[int], *, seed: int, dtype: str = "float32") -> Params:
    """Draw the initial parameters.

    The numbers come from NumPy's generator, so that a seed gives the same network in every library.

    Parameters
    ----------
    xp : array namespace
        The library of the parameters.
    sizes : sequence of int
        The widths of the input, of each block, and of the output: ``(64, 128, 64, 10)`` has two blocks and a head.
    seed : int
        The seed of the generator.
    dtype : str
        The name of a real floating-point dtype.

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
    """Return the scores (logits) of the classes, of shape (n, classes)."""
    return _forward(params, x)[0]


def loss_and_grads(params: Params, x: Array, targets: Array, *, scale: float = 1.0) -> tuple[Array, Params]:
    """Return the mean cross-entropy, and the gradient of `scale` times it.

    Parameters
    ----------
    params : dict
        Parameters from `init_params`.
    x : array, shape (n, features)
        A batch.
    targets : array, shape (n, classes)
        The target probabilities; one-hot rows for known classes.
    scale : float
        The loss scale.

    Returns
    -------
    loss : array, 0-d
        The loss, on the device of the parameters. The function does not wait for the device.
    grads : dict
        The gradients, a tree like `params`.
    """
    xp = array_namespace(x, targets)
    outputs, saved = _forward(params, x)
    shifted = outputs - xp.max(outputs, axis=1, keepdims=True)
    surprise = xp.log(xp.sum(xp.exp(shifted), axis=1, keepdims=True)) - shifted
    loss = xp.sum(targets * surprise) / x.shape[0]

    d = (xp.exp(-surprise) - targets) * (scale / x.shape[0])
    head_input, head_weight = _wide(xp, saved[-1].y if saved else x), params["head"]["weight"]
    head = _like(xp, {"weight": d.T @ head_input, "bias": xp.sum(d, axis=0)}, head_weight)
    d = d @ _wide(xp, head_weight)
    blocks = []
    for block, kept in zip(reversed(params["blocks"]), reversed(saved), strict=True):
        grads, d = _block_backward(xp, block, kept, d)
        blocks.append(grads)
    return loss, {"blocks": blocks[::-1], "head": head}


def _forward(params: Params, x: Array) -> tuple[Array, list[_Saved]]:
    """Return the scores, and the values of each block for the backward pass."""
    xp = array_namespace(x)
    saved = []
    for block in params["blocks"]:
        weight, gain, bias = (_wide(xp, block[name]) for name in ("weight", "gain", "bias"))
        z = _wide(xp, x) @ weight.T
        centred = z - xp.mean(z, axis=1, keepdims=True)
        inverse_deviation = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=1, keepdims=True) + _EPS)
        normed = centred * inverse_deviation
        y = xp.tanh(gain * normed + bias)
        kept = {"x": x, "normed": normed, "inverse_deviation": inverse_deviation, "y": y}
        saved.append(_Saved(**_like(xp, kept, block["weight"])))
        x = saved[-1].y
    return _wide(xp, x) @ _wide(xp, params["head"]["weight"]).T + _wide(xp, params["head"]["bias"]), saved


def _block_backward(xp: Any, block: Params, kept: _Saved, dy: Array) -> tuple[Params, Array]:
    """Return the gradients of a block's parameters and of its input, from the gradient `dy` of its output."""
    kept = _Saved(*(_wide(xp, value) for value in kept))
    da = dy * (1.0 - kept.y * kept.y)
    dn = da * _wide(xp, block["gain"])
    # The normalization removes the mean and the scale of each row, and so does its gradient.
    along = kept.normed * xp.mean(dn * kept.normed, axis=1, keepdims=True)
    dz = kept.inverse_deviation * (dn - xp.mean(dn, axis=1, keepdims=True) - along)
    grads = {"weight": dz.T @ kept.x, "gain": xp.sum(da * kept.normed, axis=0), "bias": xp.sum(da, axis=0)}
    return _like(xp, grads, block["weight"]), dz @ _wide(xp, block["weight"])


def _wide(xp: Any, x: Array) -> Array:
    """Convert arrays in half precision to float32, for computation."""
    return x if x.dtype in (xp.float32, xp.float64) else xp.astype(x, xp.float32)


def _like(xp: Any, arrays: Params, like: Array) -> Params:
    """Convert arrays to the dtype of another one, for storage."""
    return {name: xp.astype(x, like.dtype, copy=False) for name, x in arrays.items()}
