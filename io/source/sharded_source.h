#pragma once

#include <string>
#include <vector>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Tensors of another program's sharded checkpoint, with the names in it.
class ShardedSource : public TensorSource {
 public:
  /// Format of the directory: "Hugging Face model", "PyTorch DCP", "Lightning FSDP (PyTorch DCP)",
  /// "PyTorch DCP as safetensors".
  virtual const std::string& kind() const = 0;
  /// Names of entries that are not tensors.
  virtual const std::vector<std::string>& objects() const = 0;
  /// A tensor of a dtype that tessera lacks.
  struct Unreadable {
    std::string name, dtype, top_key;  ///< dtype: as in the source; key: as in top_keys()
    Shape shape;
    std::string safetensors_dtype;  ///< safetensors name of the dtype; empty if there is none
    /// Integer dtype for copying the elements unchanged; empty: read() and record() throw.
    std::optional<DType> carrier;
  };
  /// Tensors that tensors() lacks because of their dtype.
  virtual const std::vector<Unreadable>& unreadable() const = 0;
  /// Outermost key of each tensor of tensors() in the saved nested dict; empty for a flat dict or
  /// if unknown.
  virtual const std::vector<std::string>& top_keys() const = 0;
  /// Sentences about data whose loss cannot be detected.
  virtual std::vector<std::string> warnings() const { return {}; }
};

}  // namespace tessera::io
