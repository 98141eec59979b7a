#pragma once

#include <string>
#include <vector>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Tensors of somebody else's sharded checkpoint, by the names it has.
class ShardedSource : public TensorSource {
 public:
  /// Format of the directory: "Hugging Face model", "PyTorch DCP", "Lightning FSDP (PyTorch DCP)",
  /// "PyTorch DCP as safetensors".
  virtual const std::string& kind() const = 0;
  /// Names of entries that are no tensors.
  virtual const std::vector<std::string>& objects() const = 0;
  /// A tensor whose dtype tessera does not have.
  struct Unreadable {
    std::string name, dtype, top_key;  ///< dtype: as in the source; key: as in top_keys()
    Shape shape;
    std::string safetensors_dtype;  ///< its dtype's name in safetensors; empty: it has none
    /// Dtype as which read() and record() copy the elements unchanged; empty: they refuse it.
    std::optional<DType> carrier;
  };
  /// They are not in tensors().
  virtual const std::vector<Unreadable>& unreadable() const = 0;
  /// Outermost key of each tensor of tensors() in the dict of dicts that was saved; empty if it was
  /// flat or that is not known.
  virtual const std::vector<std::string>& top_keys() const = 0;
  /// Data that may be missing from the shards unnoticed, as sentences.
  virtual std::vector<std::string> warnings() const { return {}; }
};

}  // namespace tessera::io
