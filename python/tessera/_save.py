"""Checkpoints of tessera from any training loop."""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy

from . import _core
from ._errors import InvalidArgument, Unsupported
from ._tensor import SAFETENSORS_NAMES


def _bytes_of(array: Any, name: str) -> tuple[str, tuple[int, ...], numpy.ndarray]:
    """Dtype, shape and row-major bytes of an array on any device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous()
        dtype, shape = str(array.dtype).removeprefix("torch."), tuple(array.shape)
    else:
        array = numpy.asarray(array)
        dtype, shape = array.dtype.name, array.shape
        if array.dtype.byteorder == ">":
            raise Unsupported(f"{name} is big-endian; convert it", tensor=name)
    if dtype not in SAFETENSORS_NAMES:
        raise Unsupported(f"{name} has dtype {dtype}, which checkpoints lack", tensor=name)
    if 0 in shape:
        data = numpy.empty(0, numpy.uint8)
    elif isinstance(array, numpy.ndarray):
        data = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    else:
        data = array.reshape(-1).view(torch.uint8).numpy()
    return SAFETENSORS_NAMES[dtype], shape, data


def _own_part_of(tensor: Any, name: str) -> tuple[Any, tuple[int, ...], tuple[int, ...], bool]:
    """Local part, whole shape and offsets of a DTensor; whether this rank is the first with this part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    kinds = [type(placement).__name__ for placement in tensor.placements]
    if any(kind not in ("Shard", "Replicate") for kind in kinds):
        raise Unsupported(f"{name} has placements {kinds}; only Shard and Replicate are saved: redistribute it",
                          tensor=name)
    coordinate = tensor.device_mesh.get_coordinate()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    first = coordinate is not None and all(
        at == 0 for at, kind in zip(coordinate, kinds) if kind == "Replicate")
    return tensor.to_local(), tuple(tensor.shape), tuple(offsets), first


def _part(state: str | None, name: str, value: Any, rank: int) -> tuple:
    if hasattr(value, "placements") and hasattr(value, "to_local"):
        local, shape, offsets, writes = _own_part_of(value, name)
    elif isinstance(value, tuple):
        if len(value) != 3:
            raise InvalidArgument(f"{name}: expected (local part, whole shape, offsets)", tensor=name)
        local, shape, offsets = value
        writes = True
    else:
        local, shape, offsets, writes = value, None, None, rank == 0
    dtype, extents, data = _bytes_of(local, name)
    shape = extents if shape is None else tuple(operator.index(extent) for extent in shape)
    offsets = (0,) * len(shape) if offsets is None else tuple(operator.index(at) for at in offsets)
    if not len(shape) == len(offsets) == len(extents):
        raise InvalidArgument(f"{name}: the local part has shape {extents}, the whole {shape}, at {offsets}",
                              tensor=name)
    if len(data) == 0 or not writes:
        # Declares the tensor. One without dims has no empty part: rank 0 alone names it.
        extents, offsets, data = (0,) * len(shape), (0,) * len(shape), numpy.empty(0, numpy.uint8)
    return state, name, dtype, list(shape), list(offsets), list(extents), data


def save_checkpoint(
    dir: str | os.PathLike,
    tensors: Mapping[str, Any],
    *,
    step: int,
    rank: int = 0,
    world: int = 1,
    exchange: Callable[[bytes], Iterable[bytes]] | None = None,
    optimizer: Mapping[str, Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    run_id: str = "run",
) -> dict[str, Any]:
    """Saves a checkpoint as DIR/step-NNNNNNNN. All ranks call it.

    tensors    by name: a DTensor; or (local part, whole shape, offsets) of this rank; or a whole array,
               the same on all ranks, which rank 0 writes. The parts of all ranks must cover each tensor
               exactly once. Parts on a GPU are copied to host memory first.
    step       optimizer updates made so far
    exchange   all-gathers a bytes object: returns those of all ranks, in order. Needed if world > 1
    optimizer  state tensors, as `tensors`, by the name of the state and of the weight:
               {"exp_avg": {"wte.weight": ...}}
    config     describes the model; any JSON object
    trainer    state of the training loop; any JSON object
    run_id     equal on all ranks; letters, digits, '.', '_' and '-'

    The checkpoint is committed by one rename. If a rank fails, all raise an error that says which and
    why, and former checkpoints are unchanged.

    Returns path, bytes (of this rank), total_bytes and seconds.
    """
    options = [("rank", str(rank)), ("world", str(world)), ("step", str(step)), ("run-id", run_id)]
    parts: list[tuple] = []
    failed = None
    try:
        for state, named in [(None, tensors), *(optimizer or {}).items()]:
            for name, value in named.items():
                part = _part(state, name, value, rank)
                if part[3] or len(part[6]) > 0:
                    parts.append(part)
        options.append(("model", json.dumps(config or {})))
        if trainer is not None:
            options.append(("trainer", json.dumps(trainer)))
    except Exception as error:  # the other ranks must learn of it
        failed = error
        parts = []
        options.append(("failed", f"{type(error).__name__}: {error}"))
    try:
        return json.loads(_core.save(os.fspath(dir), options, parts, exchange))
    except InvalidArgument:
        if failed is not None:
            raise failed from None
        raise
