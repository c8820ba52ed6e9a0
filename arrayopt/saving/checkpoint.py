"""Checkpoints: the state dict of an optimizer, and its parameters, in a safetensors file.

The arrays are the file's tensors. The rest is JSON, under the key ``arrayopt`` of the file's metadata: the state dict,
in which each array is described by the tensor's key, its dtype and shape, and a checksum of its bytes. Values that JSON
lacks are dicts with a special key: ``$array``; ``$values`` for a sequence; ``$schedule`` for one of our schedules, with
its fields; ``$function`` with the name of another function, which the optimizer that loads the file must have too.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from arrayopt import schedules
from arrayopt.arrays import Array, like
from arrayopt.ranks.collect import Scattered
from arrayopt.saving.paths import checked_path, refuse_others
from arrayopt.saving.words import (
    ARRAY,
    FORMAT,
    FUNCTION,
    SCHEDULE,
    VALUES,
    as_memory,
    digest,
    is_ours,
    is_whole,
    name_of,
    plain,
    reader,
    shown,
    stored,
)


def load(
    path: str | os.PathLike[str], live: dict[str, Any], params: dict[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Array], list[str], str]:
    """Read a file. Return a prefix for errors, the state dict, the parameters, a list of mismatches, and a checksum.

    `live` is the optimizer's own state dict, without copies: it tells the library of each array, and the part that this
    rank needs. `params` does the same for the parameters.
    """
    safetensors = reader("Optimizer.load")
    path = checked_path("Optimizer.load", path)
    who = f"Optimizer.load: {path}"
    refuse_others("Optimizer.load", path)
    with open(path, "rb"):  # raises the system's error for a missing file, or a folder
        pass
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return who, *_read(file, live, params)
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{who}: the file is damaged or not a checkpoint: {error}") from error
    except (AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"{who}: the file was written by another program: {error!r}") from error


def _read(
    file: Any, live: dict[str, Any], live_params: dict[str, Array]
) -> tuple[dict[str, Any], dict[str, Array], list[str], str]:
    """Return the state dict, the parameters, a list of mismatches, and a checksum that covers all checksums."""
    metadata = file.metadata() or {}
    text = metadata.get("arrayopt")
    if text is None:
        raise ValueError("its metadata has no 'arrayopt', which Optimizer.save writes")
    if metadata.get("blake2b") != digest(text.encode()):
        raise ValueError("the checksum of its description does not match")
    document = json.loads(text)
    if document["checkpoint"] not in (1, FORMAT):
        raise ValueError(f"format must be 1 or {FORMAT}; got {document['checkpoint']!r}")
    decoder = _Decoder(file)
    state = decoder.decode(document["state"], live, ())
    params = decoder.decode(document.get("params", {}), live_params, ("params",))
    strange = sorted(set(file.keys()) - decoder.seen)
    if strange:
        raise ValueError(f"its description does not name its tensors {', '.join(map(repr, strange))}")
    wrong = decoder.wrong
    if params and params.keys() != live_params.keys():
        wrong.append(f"saved parameters {list(params)}, here {list(live_params)}")
    for name in live_params.keys() & params.keys():
        was, param = shown(params[name]), live_params[name]
        now = shown(param.part if isinstance(param, Scattered) else param)
        if was != now:
            wrong.append(f"parameter {name!r} is {was}, expected {now}")
    return state, params, wrong, metadata["blake2b"]


class _Decoder:
    """Decodes the JSON. `wrong` lists functions that are missing here, and `seen` has the keys of the tensors read."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.keys = set(file.keys())
        self.wrong: list[str] = []
        self.seen: set[str] = set()

    def decode(self, node: Any, live: Any, path: tuple[str, ...]) -> Any:
        """Decode a part of the document. `live` is the optimizer's own object in its place, or None."""
        if isinstance(node, list):
            own: Any = live if isinstance(live, list | tuple) else ()
            return [self.decode(x, own[i] if i < len(own) else None, (*path, str(i))) for i, x in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if ARRAY in node:
            x = self._tensor(node)
            if shown(live) != shown(x):
                return x
            if isinstance(live, np.ndarray) and x.flags.writeable:
                return x  # already a copy
            return live.own(x) if isinstance(live, Scattered) else like(live, x)
        if VALUES in node:
            return node[VALUES]
        if FUNCTION in node:
            if not callable(live) or name_of(live) != node[FUNCTION]:
                self.wrong.append(f"{'.'.join(path)} was the function {node[FUNCTION]}, here {live!r}")
                return lambda step: 0.0  # a placeholder until the error is raised
            return live
        if SCHEDULE in node:
            made: Any = getattr(schedules, node[SCHEDULE]) if node[SCHEDULE] in schedules.__all__ else None
            if not is_ours(made):
                raise ValueError(f"there is no schedule {node[SCHEDULE]!r}")
            fields = {k: self.decode(x, getattr(live, k, None), (*path, k)) for k, x in node.items() if k != SCHEDULE}
            return made(**fields)
        own = live if isinstance(live, Mapping) else {}
        return {plain(k): self.decode(x, own.get(plain(k)), (*path, plain(k))) for k, x in node.items()}

    def _tensor(self, about: dict[str, Any]) -> "np.ndarray[Any, Any]":
        """Read a tensor of the file, and compare it with its description."""
        key, expected = about[ARRAY], stored(about)
        if key in self.seen or key not in self.keys:
            raise ValueError(f"tensor {key!r} is missing, or named twice")
        self.seen.add(key)
        piece = self.file.get_slice(key)
        found = piece.get_dtype(), piece.get_shape()
        if found != expected:
            raise ValueError(f"tensor {key!r} is {found}, but must be {expected}")
        x: np.ndarray[Any, Any] = self.file.get_tensor(key)
        if not is_whole(as_memory(x), about):
            raise ValueError(f"the checksum of tensor {key!r} does not match")
        made: np.ndarray[Any, Any] = x.view(about["dtype"])  # complex numbers are stored as pairs
        return made.reshape(about["shape"])
