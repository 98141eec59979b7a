#!/usr/bin/env python3
"""Writes tests/fuzz/seeds/dcp_metadata/plans: metadata that also hold the plans of all ranks, as Megatron saves them.

The classes are PyTorch's own (tested with 2.15). There are no files of data.
"""

import pathlib
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

properties = TensorProperties.create_from_tensor(torch.empty(1))
state, storage, plans = {}, {}, []
for rank in range(2):
    items = []
    for name in ("a.weight", "b.weight"):
        offsets, sizes = torch.Size([4 * rank, 0]), torch.Size([4, 300])
        chunk = ChunkStorageMetadata(offsets, sizes)
        index = MetadataIndex(name, offsets, rank)
        size = torch.Size([8, 300])
        state.setdefault(name, TensorStorageMetadata(properties, size, [])).chunks.append(chunk)
        storage[index] = _StorageInfo(f"__{rank}_0.distcp", 6000 * len(items), 6000)
        data = TensorWriteData(chunk, properties, size)
        items.append(WriteItem(index, WriteItemType.SHARD, data))
    plans.append(SavePlan(items, planner_data={"mapping": [slice(0, 4)]}))
metadata = Metadata(state, None, storage)
metadata.all_local_plans = plans
seeds = pathlib.Path(__file__).parents[2] / "fuzz" / "seeds" / "dcp_metadata"
(seeds / "plans").write_bytes(pickle.dumps(metadata))
