"""Values of messages between the processes of a run, as msgpack: dataclasses, structs, numpy arrays.

The reader names the type that it expects and rejects others; nothing that is read is executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

_ARRAY = 1
"""Number of msgpack's extension type for a numpy array: (dtype, bytes, shape)."""

_NUMBERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_DTYPES = {np.dtype(n).str: np.dtype(n) for n in ("bool", *_NUMBERS, "float16", "float32", "float64")}
"""The types of arrays in messages. Numpy would parse any text, with errors of any kind."""


def _pack(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray):
        packed = value.dtype.str, value.tobytes(), value.shape
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(packed))
    raise TypeError(f"a message cannot hold {type(value)}")


def _unpack_array(code: int, data: memoryview) -> Any:
    dtype, values, shape = msgspec.msgpack.decode(data, type=tuple[str, bytes, tuple[int, ...]])
    if code != _ARRAY or dtype not in _DTYPES:
        raise ValueError(f"extension {code} of type {dtype[:20]!r}")
    return np.frombuffer(values, _DTYPES[dtype]).reshape(shape).copy()  # arrays over bytes are read-only


def _unpack(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else value


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


def encode(value: Any) -> bytes:
    """Encode a value as msgpack. Raises TypeError for unsupported types."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """Decode a value of type ``kind``; for ``Any``, sequences are lists. Raises msgspec.DecodeError."""
    try:
        return msgspec.msgpack.Decoder(kind, ext_hook=_unpack_array, dec_hook=_unpack).decode(data)
    except (ValueError, TypeError, RecursionError) as e:  # an array of an impossible type or shape; nesting
        raise msgspec.DecodeError(str(e)) from None
