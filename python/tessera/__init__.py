"""Reads sharded checkpoints lazily, writes whole models from them, and saves checkpoints.

    import tessera

    checkpoint = tessera.open("runs/a")              # or shards of FSDP, DeepSpeed, torchtitan, ...
    rows = checkpoint["wte.weight"][:8]              # reads these rows only, as a NumPy array
    tessera.consolidate("runs/a", "model-hf")        # a whole Hugging Face model
"""

from __future__ import annotations

import json
import os
import warnings as _warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _core
from ._errors import (
    Communication,
    Corrupt,
    Error,
    Internal,
    InvalidArgument,
    Io,
    OutOfMemory,
    Unsupported,
)
from ._save import save_checkpoint
from ._tensor import Checkpoint, Tensor

__version__: str = _core.version
__all__ = [
    "Checkpoint", "Communication", "Corrupt", "Error", "Internal", "InvalidArgument", "Io", "OutOfMemory",
    "Problem", "Tensor", "Unsupported", "consolidate", "open", "save_checkpoint", "verify",
]

Progress = Callable[[int, int], object]


class Problem(NamedTuple):
    """A problem that verify() found."""

    file: str  #: name inside the checkpoint
    tensor: str  #: "" if it concerns the whole file
    begin: int  #: first element, row-major in its chunk
    end: int  #: equal to begin if unknown
    what: str


def _options(**given: Any) -> list[tuple[str, str]]:
    options = []
    for name, value in given.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is None:
                continue
            text = str(item).lower() if isinstance(item, bool) else os.fspath(item) if hasattr(
                item, "__fspath__") else str(item)
            options.append((name, text))
    return options


def open(path: str | os.PathLike, *, step: int | None = None, shards: int | None = None,
         jobs: int | None = None, verify: str = "chunks") -> Checkpoint:
    """Opens a checkpoint of any kind that consolidate() takes, as a mapping of names to tensors.

    step    of a run; its newest checkpoint by default
    shards  expected number of PyTorch's shard-*.safetensors, which do not record it
    jobs    threads that read a tensor
    verify  "chunks": the first read of a part of a checksummed chunk verifies all of the chunk; "whole":
            reads wanted elements only, and verifies chunks that are read completely
    """
    jobs = jobs or min(4, os.cpu_count() or 1)
    return Checkpoint(path, _options(step=step, shards=shards, jobs=jobs, verify=verify))


def consolidate(source: str | os.PathLike, out: str | os.PathLike, *, progress: Progress | None = None,
                **options: Any) -> dict[str, Any]:
    """Writes a checkpoint as a whole model into directory `out`.

    Options are those of `tessera consolidate`: format, what, weights, dtype, max_shard_size, memory, step, jobs,
    buffered, overwrite, part, merge_lora, base, config, like, strip, rename, select, exclude, shards,
    tensors. A list repeats an option. Warnings are issued by Python's warnings.

    progress(done, total) is called a few times a second, with bytes. An exception in it, or Ctrl-C,
    stops the work and is raised; the same call then continues.

    Returns source, kind, step, committed, waiting, files, tensors, parameters, bytes, reused_bytes,
    skipped and seconds. With part="K/N", `committed` is False for all parts but the last to finish, and
    `waiting` lists the parts that are not done.
    """
    options.setdefault("jobs", min(16, max(4, 4 * (os.cpu_count() or 1))))
    return json.loads(_core.consolidate(
        os.fspath(source), os.fspath(out), _options(**options), progress,
        lambda text: _warnings.warn(text, stacklevel=3)))


def verify(path: str | os.PathLike, *, step: int | None = None, jobs: int | None = None,
           progress: Progress | None = None) -> dict[str, Any]:
    """Reads all of a checkpoint and checks files, coverage, checksums and finite values.

    Of another program's shards: the checksums that they have.

    Returns path, tensors, bytes, unverifiable_bytes (without a checksum) and problems, which is 0.
    Raises Corrupt, whose `problems` lists all problems.
    """
    jobs = jobs or min(8, os.cpu_count() or 1)
    report, problems = _core.verify(os.fspath(path), _options(step=step, jobs=jobs), progress)
    if not problems:
        return json.loads(report)
    found = tuple(Problem(*problem) for problem in problems)
    more = f" (and {len(found) - 1} more problems)" if len(found) > 1 else ""
    first = found[0]
    error = Corrupt(f"{os.fspath(path)}: {first.file}: {first.tensor and f'tensor {first.tensor}: '}{first.what}{more}",
                    os.path.join(json.loads(report)["path"], first.file), first.tensor or None)
    error.problems = found
    raise error
