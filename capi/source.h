#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "io/checkpoint/reader.h"
#include "io/source/sharded_source.h"

namespace tessera::capi {

/// A tensor of a source, and how to read it.
struct ListedTensor {
  std::string name, dtype;  ///< as in c_api.h
  Shape shape;
  const io::TensorSource* source = nullptr;
  std::string stored_name;        ///< in `source`
  std::optional<DType> stored{};  ///< dtype in `source`; empty: not readable
  bool converts = true;           ///< whether it is the dtype of that name, not only of its size
};

/// The tensors of any source that consolidation recognizes.
struct OpenedSource {
  std::string kind;
  io::fs::path path;
  std::vector<ListedTensor> tensors;  ///< by name
  std::optional<io::CheckpointReader> checkpoint;
  std::vector<std::unique_ptr<const io::TensorSource>> owned;
};

/// @throws InvalidArgument if the path is no source; as the open functions of each form
OpenedSource open_source(const io::fs::path& path, std::optional<std::int64_t> step,
                         std::optional<std::int64_t> shards);

}  // namespace tessera::capi
