"""Details of the checkpoint format: names of dtypes, special keys of the JSON, checksums, descriptions of arrays."""

import math
from hashlib import blake2b
from typing import Any
from zlib import crc32

import numpy as np

from arrayopt import schedules
from arrayopt.arrays import REAL, Array, dtype_name, is_array, to_host
from arrayopt.codecs import item_size
from arrayopt.ranks.collect import Scattered

FORMAT = 2
"""The version of the format that `arrayopt.saving.checkpoint` describes. In version 1, checksums were BLAKE2b."""

ARRAY, VALUES, SCHEDULE, FUNCTION = "$array", "$values", "$schedule", "$function"  # other keys' leading $ is doubled

CODES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
"""safetensors' names of dtypes. Complex arrays are stored as pairs of real numbers, along an additional last axis."""


def stored(about: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the dtype and shape that a described array has in the file."""
    name = about["dtype"]
    return (CODES[REAL[name]], [*about["shape"], 2]) if name in REAL else (CODES[name], about["shape"])


def length(about: dict[str, Any]) -> int:
    """Return the number of bytes of a described array."""
    n: int = math.prod(about["shape"]) * item_size(about["dtype"])
    return n


def shown(x: Any) -> str:
    """Return the dtype and shape of an array, for messages."""
    return f"{dtype_name(x)} {tuple(x.shape)}" if is_array(x) or isinstance(x, Scattered) else type(x).__name__


def digest(data: bytes | memoryview) -> str:
    """Return the checksum of a description."""
    return blake2b(data, digest_size=16).hexdigest()


def shown_crc(crc: int) -> str:
    """Return the checksum of an array's bytes as text of fixed length."""
    return f"{crc:08x}"


def is_whole(data: memoryview, about: dict[str, Any]) -> bool:
    """Return whether an array's bytes have the checksum in its description."""
    if "blake2b" in about:
        return bool(digest(data) == about["blake2b"])
    return bool(shown_crc(crc32(data)) == about["crc32"])


def is_ours(kind: Any) -> bool:
    """Return whether `kind` is a schedule class of this package."""
    return isinstance(kind, type) and issubclass(kind, schedules.Schedule) and kind.__name__ in schedules.__all__


def name_of(function: Any) -> str:
    """Return the qualified name of a function, or of the class of another callable."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def escaped(key: str) -> str:
    """Return a key of the user's such that it differs from the special keys."""
    return f"${key}" if key.startswith("$") else key


def plain(key: str) -> str:
    """Return the key that was escaped."""
    return key.removeprefix("$")


def as_memory(x: Array) -> memoryview:
    """Return the values of an array in C order, little-endian, as bytes."""
    values = to_host(x)
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def reader(who: str) -> Any:
    """Return safetensors, which reads files, or raise ImportError."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(f"{who}: needs safetensors; pip install 'arrayopt[checkpoint]'") from error
    return safetensors
