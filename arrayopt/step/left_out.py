"""Layers of stacked tensors that a step leaves out, for a gradient is not finite."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import layer_name
from arrayopt.state.tensors import Left

__all__ = ["left_out"]


def left_out(stacks: Sequence[Bucket], norms: dict[str, Any]) -> tuple[Left, dict[str, Any]]:
    """Which layers a step leaves out, and the norms of all others.

    Layers of one place belong together, in all stacked tensors with the same number of layers: they
    are one fit, or one layer of a model. None is left out by itself if something else is not finite
    either, or if nothing would be left.

    Parameters
    ----------
    stacks : sequence of Bucket
        The stacked tensors.
    norms : dict of str to float or 0-d array
        The norms of all gradients, by name of tensor or layer.
    """
    places = {}
    for bucket in stacks:
        for tensor in bucket.whole.tensors:
            for layer in range(tensor.layers):
                places[layer_name(tensor.name, layer)] = (tensor.layers, layer)
    left: Left = {}
    for name, norm in norms.items():
        if not math.isfinite(float(norm)):
            if name not in places:
                return {}, norms
            count, layer = places[name]
            left.setdefault(count, np.zeros(count, bool))[layer] = True
    rest = dict(norms)
    for name, (count, layer) in places.items():
        if count in left and left[count][layer]:
            rest.pop(name, None)
    return (left, rest) if rest else ({}, norms)
