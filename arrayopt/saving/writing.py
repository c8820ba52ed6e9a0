"""Writing of checkpoints, by one process, or by all ranks into one file."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import IO, Any
from zlib import crc32

import numpy as np

from arrayopt._version import __version__
from arrayopt.arrays import REAL, Array, dtype_name, is_array
from arrayopt.codecs import item_size
from arrayopt.hyper import Listed
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.collect import Scattered
from arrayopt.saving.paths import checked_path
from arrayopt.saving.words import (
    ARRAY,
    CODES,
    FORMAT,
    FUNCTION,
    SCHEDULE,
    VALUES,
    as_memory,
    digest,
    escaped,
    is_ours,
    length,
    name_of,
    reader,
    shown_crc,
    stored,
)

PIECE = 1 << 20
"""The number of bytes that are copied, hashed and written at once."""

LONGEST = 100_000_000
"""The number of bytes of the longest header that safetensors reads."""


class File:
    """A checkpoint to be written: a state dict, and parameters unless None; see `Optimizer.save`.

    `head` is the file up to the first tensor's bytes, with zeros for checksums.
    """

    def __init__(self, path: str | os.PathLike[str], state: dict[str, Any], params: dict[str, Any] | None) -> None:
        reader("Optimizer.save")  # so that the file can be loaded here
        self.path = checked_path("Optimizer.save", path)
        self._place = os.path.realpath(self.path)  # the working directory may change before a thread writes
        document = {"checkpoint": FORMAT, "arrayopt": __version__, "state": state}
        if params is not None:
            document["params"] = params
        self._arrays: list[tuple[dict[str, Any], Any]] = []
        self._described = _encode(document, (), self._arrays)
        self._arrays.sort(key=lambda pair: -item_size(pair[0]["dtype"]))  # so that each array is aligned
        self.head = _header(self._described, [about for about, _ in self._arrays])
        if len(self.head) > LONGEST:
            raise ValueError(
                f"Optimizer.save: names and hyper-parameters must fit in {LONGEST} bytes; got {len(self.head)}"
            )

    def write(self, team: Alone) -> BaseException | None:
        """Write the file, and return the error, if any, which all ranks then get.

        If all ranks can open the file of rank 0, each writes the arrays that it has; else rank 0 writes all.
        """
        try:
            with ExitStack() as stack:
                self._write_together(team, stack)
        except BaseException as error:
            return error
        return None

    def _write_together(self, team: Alone, stack: ExitStack) -> None:
        files, _, shared = self.begin(team, stack)
        writers = self.writers(team.size if shared else 1)
        for written in team.hear("Optimizer.save", lambda: self._write_own(team.rank, writers, files)):
            self.note(written)
        if team.rank == 0:
            self.finish(files[0])

    def begin(self, team: Alone, stack: ExitStack) -> tuple[list[IO[bytes]], str, bool]:
        """Begin the file. Return this rank's handle (in a list), the temporary path, and whether all ranks have one."""
        from arrayopt.saving.atomic import replacing  # for POSIX systems only

        who = "Optimizer.save"
        files: list[IO[bytes]] = []

        def first() -> str | None:
            if team.rank:
                return None
            files.append(stack.enter_context(replacing(who, self._place)))
            files[0].write(self.head)
            files[0].flush()
            return str(files[0].name)

        def join() -> bool:
            try:
                if team.rank:
                    files.append(stack.enter_context(_joined(temporary)))
                    return files[0].read(len(self.head)) == self.head
            except OSError:
                return False
            return True

        temporary = team.hear(who, first)[0]
        return files, temporary, all(team.hear(who, join))

    def note(self, written: Iterable[tuple[int, str]]) -> None:
        """Put the checksums of arrays that were written into their descriptions."""
        for i, found in written:
            self._arrays[i][0]["crc32"] = found

    def writers(self, ranks: int) -> list[int]:
        """Return which rank writes each array: of those that have it, the one with the least to write so far."""
        holders = []
        for _, array in self._arrays:
            some = array.holders if isinstance(array, Scattered) and ranks > 1 else ()
            holders.append(some or tuple(range(ranks)))
        sizes = [length(about) for about, _ in self._arrays]
        loads, writers = [0] * ranks, [0] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: (len(holders[i]), -sizes[i])):
            writers[i] = min(holders[i], key=loads.__getitem__)
            loads[writers[i]] += sizes[i]
        return writers

    def _write_own(self, rank: int, writers: list[int], files: list[IO[bytes]]) -> list[tuple[int, str]]:
        """Write this rank's arrays, and return the checksum of each."""
        found = list[tuple[int, str]]()
        self.visit(rank, writers, lambda i, at, value: found.append((i, self.put(files[0], i, at, value))))
        if rank and found:  # rank 0 calls fsync after all have written
            files[0].flush()
            os.fsync(files[0].fileno())
        return found

    def put(self, file: IO[bytes], i: int, at: int, value: Any) -> str:
        """Write an array at a position of the file, and return its checksum."""
        file.seek(at)
        made, written = _write(file, value)
        if written != length(self._arrays[i][0]):
            raise _torn()
        return made

    def visit(self, rank: int, writers: list[int], take: Callable[[int, int, Any], object]) -> None:
        """Call `take` with the number, the position and the values of each array that this rank writes."""
        error, at = None, len(self.head)
        for i, ((about, array), writer) in enumerate(zip(self._arrays, writers, strict=True)):
            value = array.collect(writer) if isinstance(array, Scattered) else array
            if writer == rank and error is None:
                try:
                    take(i, at, value)
                except BaseException as caught:
                    error = caught  # go on, since other ranks wait for this rank's parts
            at += length(about)
        if error is not None:
            raise error

    def copy(self, rank: int) -> BaseException | None:
        """Copy all arrays to host memory on rank 0, for a later `write`."""
        copies = list[tuple[dict[str, Any], Any]]()

        def take(i: int, at: int, value: Any) -> None:
            copies.append((self._arrays[i][0], np.array(as_memory(value))))

        try:
            self.visit(rank, self.writers(1), take)
        except BaseException as error:
            return error
        self._arrays = copies
        return None

    def write_copy(self) -> None:
        """Write the copies, or raise."""
        error = self.write(Alone())
        if error is not None:
            raise error

    def finish(self, file: IO[bytes]) -> None:
        """Write the header again, with checksums."""
        file.seek(0)
        file.write(_header(self._described, [about for about, _ in self._arrays]))  # of the same length


def _joined(temporary: str) -> IO[bytes]:
    """Open the file that rank 0 has begun, for writing."""
    return open(temporary, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC))


def _write(file: IO[bytes], array: Array) -> tuple[str, int]:
    """Write an array's bytes; return checksum and length. Each byte is read once, as another thread may change it."""
    data, found = as_memory(array), 0
    for start in range(0, len(data), PIECE):
        piece = bytes(data[start : start + PIECE])
        found = crc32(piece, found)
        file.write(piece)
    return shown_crc(found), len(data)


def _torn() -> RuntimeError:
    """Return the error for a state that has changed while it was saved."""
    return RuntimeError(
        "Optimizer.save: the state must stay as it is while it is saved, and it has changed, as by a step in another"
        " thread; save between steps. An old file has been left as it was"
    )


def _encode(node: Any, path: tuple[str, ...], arrays: list[tuple[dict[str, Any], Array]]) -> Any:
    """Convert a part of the document for JSON. Arrays are replaced by descriptions, and added to `arrays`."""
    if is_array(node) or isinstance(node, Scattered):
        if REAL.get(dtype_name(node), dtype_name(node)) not in CODES:
            raise ValueError(f"Optimizer.save: {'.'.join(path)} is of dtype {node.dtype}, which cannot be saved")
        key = "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)  # as in JSON pointers, RFC 6901
        about = {ARRAY: key, "dtype": dtype_name(node), "shape": list(node.shape), "crc32": shown_crc(0)}
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
    """Return the file up to the first tensor's bytes."""
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
