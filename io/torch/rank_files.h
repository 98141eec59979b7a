#pragma once

#include <memory>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory has files of a torch.save per rank: `model_world_size_W_rank_R.pt` (verl,
/// SkyRL) or `pytorch_model_fsdp[_N]_rankR.bin` (accelerate).
bool is_rank_files(const fs::path& dir);
/// Opens such a directory: DTensors of FSDP2 and tensor parallelism, and ShardedTensors of FSDP1,
/// assembled from their parts; of equal parts and of plain tensors, those of the first rank. Reads
/// all pickles, one at a time, and keeps about 0.6 KiB per part.
/// @throws CorruptCheckpoint on a missing rank, files of several saves, tensors that differ between
///         ranks in dtype or shape, parts that do not cover a tensor exactly once, or different
///         plain tensors without any part; as read_saved_state
std::unique_ptr<ShardedSource> open_rank_files(const fs::path& dir);

/// Whether a path is a file with an extension that torch.save's users choose: .ckpt, .pt, .pth, .bin.
bool is_saved_file(const fs::path& path);
/// Opens a file of one torch.save: a state dict, or a checkpoint of PyTorch Lightning or of a
/// program's own with one in it. @throws InvalidArgument on the file of one rank of several; as
/// read_saved_state
std::unique_ptr<ShardedSource> open_saved_file(const fs::path& file);

}  // namespace tessera::io
