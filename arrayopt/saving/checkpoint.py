"""Checkpoints: the state dict of an optimizer, and its parameters, in a safetensors file.

The arrays are the file's tensors. The rest is JSON, under the key ``arrayopt`` of the file's metadata: the state dict,
in which each array is described by the tensor's key, its dtype and shape, and a checksum of its bytes. What JSON does
not know is a dict with a key of its own: ``$array``; ``$values``, a sequence; ``$schedule``, the class of one of ours,
beside its fields; ``$function``, the name of another function, which the optimizer that loads must have too.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np

from arrayopt import schedules
from arrayopt._version import __version__
from arrayopt.arrays import REAL, Array, dtype_name, is_array, like, to_host
from arrayopt.hyper import Listed
from arrayopt.ranks.gather import Scattered
from arrayopt.saving.paths import checked_path, refuse_others
from arrayopt.saving.words import (
    ARRAY,
    CODES,
    FUNCTION,
    SCHEDULE,
    VALUES,
    checksum,
    digest,
    escaped,
    is_ours,
    item_size,
    length,
    name_of,
    plain,
    shown,
    stored,
)

__all__ = ["FORMAT", "File", "load"]

FORMAT = 1
"""The version of the document described above."""

PIECE = 1 << 20
"""So many bytes are copied, hashed and written at once."""

LONGEST = 100_000_000
"""The bytes of the longest header that safetensors reads."""

# ---- saving ---------------------------------------------------------------------------------------------------------


class File:
    """A checkpoint that is to be written: a state dict, and the tensors' parameters where given; see `Optimizer.save`.

    Attributes
    ----------
    head : bytes
        The file up to the first tensor's bytes, but for the checksums.
    """

    def __init__(self, path: str | os.PathLike[str], state: dict[str, Any], params: dict[str, Any] | None) -> None:
        _reader("Optimizer.save")  # what is saved here can be loaded here
        self._path = checked_path("Optimizer.save", path)
        document = {"checkpoint": FORMAT, "arrayopt": __version__, "state": state}
        if params is not None:
            document["params"] = params
        self._arrays: list[tuple[dict[str, Any], Any]] = []
        self._described = _encode(document, (), self._arrays)
        self._arrays.sort(key=lambda pair: -item_size(pair[0]["dtype"]))  # each lies at a multiple of its items' size
        self.head = _header(self._described, [about for about, _ in self._arrays])
        if len(self.head) > LONGEST:
            raise ValueError(
                f"Optimizer.save: names and hyper-parameters must fit in {LONGEST} bytes; got {len(self.head)}"
            )

    def write(self, rank: int) -> BaseException | None:
        """Write the file, on rank 0; the others hand their parts over. What went wrong, for all ranks to know of it."""
        values = self._values()
        try:
            if rank == 0:
                self._write(values)
        except BaseException as error:
            return error
        finally:
            for _ in values:  # others wait to hand over what is left
                pass
        return None

    def copy(self, rank: int) -> BaseException | None:
        """Copy all arrays to the host's memory, on rank 0, so that `write` can come later."""
        copies = list[tuple[dict[str, Any], Any]]()
        values = self._values()
        try:
            for about, array in values:
                if rank == 0:
                    copies.append((about, np.array(_bytes(array))))
        except BaseException as error:
            return error
        finally:
            for _ in values:  # others wait to hand over what is left
                pass
        self._arrays = copies
        return None

    def write_copy(self) -> None:
        """Write what was copied, or raise."""
        self._write(self._arrays)

    def _values(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """The arrays with their descriptions; what is scattered over ranks comes to rank 0."""
        for about, array in self._arrays:
            yield about, array.collect() if isinstance(array, Scattered) else array

    def _write(self, values: Iterable[tuple[dict[str, Any], Any]]) -> None:
        """See `write`."""
        from arrayopt.saving.atomic import replacing  # for POSIX systems only

        with replacing("Optimizer.save", self._path) as file:
            file.write(self.head)
            for about, array in values:
                about["blake2b"], written = _write(file, array)
                if written != length(about):
                    raise _torn()
            file.seek(0)
            file.write(_header(self._described, [about for about, _ in self._arrays]))  # as long as before


def _write(file: IO[bytes], array: Array) -> tuple[str, int]:
    """Write an array's bytes; their checksum and number. Each byte is read once: another thread may be writing it."""
    data, found = _bytes(array), checksum()
    for start in range(0, len(data), PIECE):
        piece = bytes(data[start : start + PIECE])
        found.update(piece)
        file.write(piece)
    return found.hexdigest(), len(data)


def _torn() -> RuntimeError:
    """What to raise where a checkpoint would be half of one step and half of another."""
    return RuntimeError(
        "Optimizer.save: the state must stay as it is while it is saved, and it has changed, as by a step in another"
        " thread; save between steps. An old file has been left as it was"
    )


def _encode(node: Any, path: tuple[str, ...], arrays: list[tuple[dict[str, Any], Array]]) -> Any:
    """A part of the document as what JSON knows; its arrays are described, and added to `arrays`."""
    if is_array(node) or isinstance(node, Scattered):
        if REAL.get(dtype_name(node), dtype_name(node)) not in CODES:
            raise ValueError(f"Optimizer.save: {'.'.join(path)} is of dtype {node.dtype}, which cannot be saved")
        key = "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)  # as in JSON pointers, RFC 6901
        about = {ARRAY: key, "dtype": dtype_name(node), "shape": list(node.shape), "blake2b": digest(b"")}
        arrays.append((about, node))
        return about
    if node is None or isinstance(node, bool | int | float | str):  # np.float64, which is a float too, is an array
        return node
    if isinstance(node, Listed):
        return {VALUES: list(node.values)}
    if is_ours(type(node)):
        fields = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
        return {SCHEDULE: type(node).__name__, **_encode(fields, path, arrays)}
    if callable(node):
        return {FUNCTION: name_of(node)}
    if isinstance(node, Mapping):
        return {escaped(key): _encode(child, (*path, key), arrays) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_encode(child, (*path, str(i)), arrays) for i, child in enumerate(node)]
    raise ValueError(f"Optimizer.save: {'.'.join(path)} is a {type(node).__name__}, which cannot be saved")


def _header(described: dict[str, Any], arrays: list[dict[str, Any]]) -> bytes:
    """The file up to the first tensor's bytes."""
    text = json.dumps(described, ensure_ascii=False, allow_nan=False)
    entries: dict[str, Any] = {"__metadata__": {"arrayopt": text, "blake2b": digest(text.encode())}}
    end = 0
    for about in arrays:
        start, end = end, end + length(about)
        code, shape = stored(about)
        entries[about[ARRAY]] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def _bytes(x: Array) -> memoryview:
    """The values of an array in C order, little-endian, as bytes."""
    values = to_host(x)
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


# ---- loading --------------------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str], live: dict[str, Any], params: dict[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Array], list[str], str]:
    """Read a file: what errors begin with, the state dict, the parameters, what is known not to fit, and a checksum.

    Parameters
    ----------
    path
        The file; see `Optimizer.load`.
    live
        The state dict of the optimizer, without copies: it says which library each array goes to, and which part of it
        this rank takes.
    params
        The parameters, in the same way.
    """
    safetensors = _reader("Optimizer.load")
    path = checked_path("Optimizer.load", path)
    who = f"Optimizer.load: {path}"
    refuse_others("Optimizer.load", path)
    with open(path, "rb"):  # the system's own words for what is missing, or a folder
        pass
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return who, *_read(file, live, params)
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{who}: is damaged, or no checkpoint: {error}") from error
    except (AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"{who}: is made by another program: {error!r}") from error


def _reader(who: str) -> Any:
    """The library that reads files; or raise ImportError."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(f"{who}: needs safetensors; pip install 'arrayopt[checkpoint]'") from error
    return safetensors


def _read(
    file: Any, live: dict[str, Any], live_params: dict[str, Array]
) -> tuple[dict[str, Any], dict[str, Array], list[str], str]:
    """The state dict and the parameters of a file, what is known not to fit, and the checksum of all checksums."""
    metadata = file.metadata() or {}
    text = metadata.get("arrayopt")
    if text is None:
        raise ValueError("its metadata has no 'arrayopt', which Optimizer.save writes")
    if metadata.get("blake2b") != digest(text.encode()):
        raise ValueError("its description does not have the checksum that it should have")
    document = json.loads(text)
    if document["checkpoint"] != FORMAT:
        raise ValueError(f"format must be {FORMAT}; got {document['checkpoint']!r}")
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
        was, mine = shown(params[name]), live_params[name]
        now = shown(mine.mine if isinstance(mine, Scattered) else mine)
        if was != now:
            wrong.append(f"parameter {name!r} is {was}, expected {now}")
    return state, params, wrong, metadata["blake2b"]


class _Decoder:
    """Makes of JSON what it was; `wrong` lists functions that are not there, `seen` the keys of the tensors met."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.keys = set(file.keys())
        self.wrong: list[str] = []
        self.seen: set[str] = set()

    def decode(self, node: Any, live: Any, path: tuple[str, ...]) -> Any:
        """What a part of the document says, `live` being the optimizer's own object in its place, or None."""
        if isinstance(node, list):
            own: Any = live if isinstance(live, list | tuple) else ()
            return [self.decode(x, own[i] if i < len(own) else None, (*path, str(i))) for i, x in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if ARRAY in node:
            x = self._tensor(node)
            if shown(live) != shown(x):
                return x
            return live.own(x) if isinstance(live, Scattered) else like(live, x)
        if VALUES in node:
            return node[VALUES]
        if FUNCTION in node:
            if not callable(live) or name_of(live) != node[FUNCTION]:
                self.wrong.append(f"{'.'.join(path)} was the function {node[FUNCTION]}, here {live!r}")
                return lambda step: 0.0  # in its place until that is said
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
        """A tensor of the file, compared with its description."""
        key, expected = about[ARRAY], stored(about)
        if key in self.seen or key not in self.keys:
            raise ValueError(f"tensor {key!r} is not there, or named twice")
        self.seen.add(key)
        piece = self.file.get_slice(key)
        found = piece.get_dtype(), piece.get_shape()
        if found != expected:
            raise ValueError(f"tensor {key!r} is {found}, and should be {expected}")
        x: np.ndarray[Any, Any] = self.file.get_tensor(key)
        if digest(_bytes(x)) != about["blake2b"]:
            raise ValueError(f"tensor {key!r} does not have the checksum that it should have")
        return x.view(about["dtype"]).reshape(about["shape"]) if about["dtype"] in REAL else x
