#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/shape.h"
#include "io/base/byte_range.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

struct DcpTensor {
  std::string dtype;  ///< PyTorch's name: "float32", "float8_e4m3fn"
  Shape shape;
  std::vector<StoredBlock> chunks;  ///< non-empty, sorted by offsets
  std::string top_key;  ///< outermost key in the saved dict of dicts; "" for a flat dict
};

/// Content of a `.metadata` file of PyTorch Distributed Checkpoint.
struct DcpMetadata {
  std::map<std::string, DcpTensor> tensors;
  std::vector<std::string> objects;  ///< names of entries that are not tensors
  /// Entries of `objects` with hyperparameters, which are archives of torch.save.
  std::vector<std::pair<std::string, StoredBlock>> hyperparameters;
  std::vector<std::string> files;  ///< names of the files that hold chunks or hyperparameters
};

/// Parses and validates a `.metadata` file of PyTorch 2 (tested with 2.1 and 2.15; accepts the
/// module names of 1.13). Chunks must cover every tensor exactly once, and each must be stored.
/// Objects of other classes, such as the plans that Megatron adds, are dropped where they are not
/// needed. Memory: 130 bytes per chunk besides the result, at most 16 times the size of the file.
/// @param bytes   of the file; read twice
/// @param source  named in errors
/// @throws Unsupported naming a class where another one is expected, or on compressed data;
///         CorruptCheckpoint naming the tensor; errors of ByteRange::read
DcpMetadata parse_dcp_metadata(const ByteRange& bytes, const std::string& source);
DcpMetadata parse_dcp_metadata(std::string_view text, const std::string& source);

/// Sorts chunks by offsets, drops empty ones, and checks that the rest covers a tensor of `shape`
/// exactly once.
/// @param where  named in errors
/// @throws CorruptCheckpoint on a gap, an overlap, or a chunk with elements outside the shape
void check_boxes(const Shape& shape, std::vector<StoredBlock>& chunks, const std::string& where);

}  // namespace tessera::io
