#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/source/names.h"
#include "io/source/tensor_source.h"

namespace tessera::io {

/// Tensors of somebody else's sharded checkpoint, by the names it has.
class ShardedSource : public TensorSource {
 public:
  /// What made the directory: "PyTorch DCP", "Lightning FSDP (PyTorch DCP)", "PyTorch DCP as
  /// safetensors".
  virtual const std::string& kind() const = 0;
  /// Names of entries that are no tensors.
  virtual const std::vector<std::string>& objects() const = 0;
  /// Names of tensors whose dtype tessera does not have, and that dtype. They are not in tensors().
  struct Unreadable {
    std::string name, dtype;
  };
  virtual const std::vector<Unreadable>& unreadable() const = 0;
  /// Outermost key of each tensor of tensors() in the dict of dicts that was saved; empty if it was
  /// flat or that is not known.
  virtual const std::vector<std::string>& top_keys() const = 0;
};

/// Whether a directory holds a PyTorch Distributed Checkpoint (`.metadata`, or `.distcp` files that
/// lack it), as FSDP, torchtitan and Lightning save it.
bool is_dcp(const fs::path& dir);
/// Opens one. Reads `.metadata` and looks whether all files are there and long enough. Each chunk's
/// archive is read when its data is first asked for, and its data verified against the checksum
/// that the archive has (PyTorch may leave it out) before a byte of it reaches the caller, or as
/// `stream` goes.
/// @throws CorruptCheckpoint, Unsupported as parse_dcp_metadata; IoError
std::unique_ptr<ShardedSource> open_dcp(const fs::path& dir);

/// Whether a directory holds a Distributed Checkpoint in safetensors form: files
/// `shard-...safetensors`, and no model.safetensors or index of one.
bool is_dcp_safetensors(const fs::path& dir);
/// Opens one. Nothing in this form says how large a tensor is: it ends where its last chunk does,
/// so a shard that is missing is noticed only if others surround what it held. There are no
/// checksums.
/// @throws CorruptCheckpoint naming file and tensor, IoError
std::unique_ptr<ShardedSource> open_dcp_safetensors(const fs::path& dir);

}  // namespace tessera::io
