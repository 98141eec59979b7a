#pragma once

#include <string>
#include <vector>

#include "io/pump/chunk.h"
#include "io/source/hyperparameters.h"
#include "io/torch/torch_archive.h"

namespace tessera::io {

/// A tensor in a saved state, or the part of it that one rank saved.
struct SavedTensor {
  std::string name;      ///< keys on the path to it, joined by dots
  std::string top_key;   ///< outermost key of a nested dict; empty for a flat one
  std::string dtype;     ///< PyTorch's name
  Shape shape;           ///< of the whole tensor
  bool is_part = false;  ///< of a DTensor or ShardedTensor
  struct Stored {
    Box box;
    TorchTensor tensor;
  };
  std::vector<Stored> stored;  ///< non-empty boxes that this archive holds
};

/// A state that torch.save wrote: dicts of strings, nested or not.
struct SavedState {
  std::vector<SavedTensor> tensors;
  std::vector<std::string> objects;  ///< names of other values
  bool lightning = false;            ///< a checkpoint of PyTorch Lightning
  Hyperparameters hyperparameters;   ///< of its optimizer
};

/// Reads the descriptions of all tensors: plain ones, DTensors (Shard, _StridedShard, Replicate on
/// meshes of up to 16 axes) and ShardedTensors (tested with PyTorch 2.6 and 2.15). Executes nothing;
/// objects of unknown classes are inert (see UnknownGlobals), so hyperparameters may be of any kind.
/// Lists, dicts without tensors, and dicts with other keys than strings count as one object each.
/// @throws Unsupported on FSDP's flat parameters (LOCAL_STATE_DICT), an unknown tensor class or
///         placement, or another root than a dict; CorruptCheckpoint naming file and tensor if a
///         description contradicts itself; as TorchArchive
SavedState read_saved_state(const ByteRange& archive);

}  // namespace tessera::io
