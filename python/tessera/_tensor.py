"""Checkpoints as mappings of lazy tensors."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping

import numpy

from . import _core
from ._errors import Unsupported

# Names of NumPy and torch, by those of safetensors.
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
}
SAFETENSORS_NAMES = {name: stored for stored, name in _NAMES.items()}
# Type codes and bits of DLPack for dtypes that NumPy itself lacks.
_DLPACK_TYPES = {
    "bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8), "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8), "float8_e8m0fnu": (14, 8),
}
# Bytes that one call reads at most, if a row is smaller, except with verify="whole", as only chunks inside of what one
# call reads are then verified. Python handles Ctrl-C between calls.
_PIECE = 256 << 20
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def _numpy_dtype(name: str, tensor: str) -> numpy.dtype:
    if name not in _DLPACK_TYPES:
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported(
            f"tensor {tensor} is {name}, which NumPy has only with the package ml_dtypes; install it, or read "
            'the values by .astype("float32"), the bits by .raw, or all by torch.from_dlpack',
            tensor=tensor,
        ) from None
    return numpy.dtype(getattr(ml_dtypes, name))


class Tensor:
    """A tensor in a checkpoint. Indexing reads a slice as a NumPy array.

    t[0], t[2:8, ::2], t[..., -1] read the bytes of the smallest box with these elements. t.numpy() and
    numpy.asarray(t) read all of it, as does torch.from_dlpack(t), which needs no ml_dtypes.
    """

    def __init__(self, source, index: int, name: str, stored: str, shape: tuple[int, ...], width: int,
                 is_whole: bool, dtype: str | None = None):
        self._source, self._index, self._stored, self._width = source, index, stored, width
        self._is_whole = is_whole  # verify="whole"
        self.name = name
        self.shape = shape
        #: NumPy's and torch's name of the dtype: "float32", "bfloat16", "float8_e4m3fn"
        self.dtype = dtype or _NAMES.get(stored, stored)

    def __repr__(self) -> str:
        return f"<tessera.Tensor {self.name} {self.dtype} {list(self.shape)}>"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    @property
    def raw(self) -> Tensor:
        """The same tensor as unsigned integers with the bits of its elements."""
        return self._as(_UNSIGNED.get(self._width, self.dtype))

    def astype(self, dtype) -> Tensor:
        """The same tensor, converted on reading to "float32", "float16" or "bfloat16"."""
        name = dtype if isinstance(dtype, str) else numpy.dtype(dtype).name
        if name not in ("float32", "float16", "bfloat16"):
            raise Unsupported(
                f"tensor {self.name} does not convert to {name} on reading; read it, and convert the array",
                self._source.path, self.name)
        return self._as(name)

    def _as(self, dtype: str) -> Tensor:
        return Tensor(self._source, self._index, self.name, self._stored, self.shape, self._width, self._is_whole,
                      dtype)

    def _read(self, begin: list[int], end: list[int]) -> tuple[numpy.ndarray, list[int]]:
        """The bytes of a box, and its shape."""
        shape = [b - a for a, b in zip(begin, end)]
        as_stored = self.dtype in (_NAMES.get(self._stored, self._stored), _UNSIGNED.get(self._width))
        wanted = None if as_stored else SAFETENSORS_NAMES[self.dtype]
        width = self._width if as_stored else 4 if self.dtype == "float32" else 2
        data = numpy.empty(width * int(numpy.prod(shape, dtype=numpy.int64)), numpy.uint8)
        row = len(data) // shape[0] if shape and data.size else 0
        if row == 0 or self._is_whole:
            self._source.read(self._index, begin, end, wanted, data)
            return data, shape
        step = max(1, _PIECE // row)
        for at in range(0, shape[0], step):
            stop = min(at + step, shape[0])
            self._source.read(self._index, [begin[0] + at, *begin[1:]], [begin[0] + stop, *end[1:]], wanted,
                              data[at * row:stop * row])
        return data, shape

    def __getitem__(self, key) -> numpy.ndarray:
        begin, end, rest = _box_of(key, self.shape)
        dtype = _numpy_dtype(self.dtype, self.name) if self._width else numpy.dtype("uint8")
        data, shape = self._read(begin, end)
        return data.view(dtype).reshape(shape)[rest]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dims has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[numpy.ndarray]:
        return (self[i] for i in range(len(self)))

    def numpy(self) -> numpy.ndarray:
        """Reads the whole tensor."""
        return numpy.asarray(self[...])

    def __array__(self, dtype=None, copy=None) -> numpy.ndarray:
        if copy is False:
            raise ValueError("reading a tensor copies it")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Reads the whole tensor into new host memory."""
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"tensors are read into host memory, not onto device {dl_device}")
        if self.dtype not in _DLPACK_TYPES:
            return self.numpy().__dlpack__()
        data, shape = self._read([0] * self.ndim, list(self.shape))
        return _core.as_dlpack(data, shape, *_DLPACK_TYPES[self.dtype])

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # memory of the CPU


def _box_of(key, shape: tuple[int, ...]) -> tuple[list[int], list[int], tuple]:
    """Begin and end of the smallest box, and the index of the wanted elements in it."""
    keys = key if isinstance(key, tuple) else (key,)
    if sum(item is Ellipsis for item in keys) == 0:
        keys += (Ellipsis,)
    at = next(i for i, item in enumerate(keys) if item is Ellipsis)
    missing = len(shape) - (len(keys) - 1)
    if missing < 0 or any(item is Ellipsis for item in keys[at + 1:]):
        raise IndexError(f"{len(keys) - 1} indices for a tensor of shape {list(shape)}")
    keys = keys[:at] + (slice(None),) * missing + keys[at + 1:]
    begin, end, rest = [], [], []
    for dim, (item, extent) in enumerate(zip(keys, shape)):
        if isinstance(item, slice):
            wanted = range(extent)[item]
            low, high = (min(wanted), max(wanted) + 1) if wanted else (0, 0)
            begin.append(low)
            end.append(high)
            rest.append(slice(None, None, wanted.step))
            continue
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise TypeError(f"index {item!r}: expected integers, slices and ...; read a slice, and index the array")
        number = operator.index(item)
        if not -extent <= number < extent:
            raise IndexError(f"index {number} is outside dim {dim} of size {extent}")
        begin.append(number % extent)
        end.append(number % extent + 1)
        rest.append(0)
    return begin, end, tuple(rest)


class Checkpoint(Mapping):
    """Tensors of a checkpoint by name. Opening reads metadata only."""

    def __init__(self, path, options: list[tuple[str, str]]):
        self._source = _core.Source(os.fspath(path), options)
        is_whole = ("verify", "whole") in options
        self._tensors = {
            name: Tensor(self._source, index, name, dtype, shape, width, is_whole)
            for index, (name, dtype, shape, width) in enumerate(self._source.tensors())
        }

    @property
    def kind(self) -> str:
        """"tessera checkpoint", "Hugging Face model", "PyTorch DCP", "DeepSpeed ZeRO-3 checkpoint", ..."""
        return self._source.kind

    @property
    def path(self) -> str:
        """The directory or file that was opened: of a run, its checkpoint."""
        return self._source.path

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<tessera.Checkpoint {self.path}: {self.kind}, {len(self)} tensors>"
