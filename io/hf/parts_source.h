#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/hf/family.h"
#include "io/hf/model_source.h"
#include "io/pump/tensor_source.h"
#include "io/source/load_policy.h"

namespace tessera::io {

/// Concatenation of tensors along dim 0. @param parts  not empty, of one dtype
TensorRecord join_records(const std::vector<std::shared_ptr<const TensorRecord>>& parts);

/// Rows [begin, begin + rows) of a tensor. Reading a chunk of it verifies the whole stored chunk,
/// once for all records that are made with the same `checks`.
/// @param name  of the tensor, for messages
TensorRecord rows_of_record(const TensorRecord& whole, std::int64_t begin, std::int64_t rows,
                            StorageChecks& checks, const std::string& name);

/// whole[item], without dim 0.
TensorRecord item_of_record(const TensorRecord& whole, std::int64_t item, StorageChecks& checks,
                            const std::string& name);

/// The transpose of a tensor of two dims, whose chunks have all elements of their boxes.
TensorRecord transpose_record(const TensorRecord& whole, StorageChecks& checks);

/// Rows of a tensor, or of one item of it.
struct TensorSlice {
  std::string of;                    ///< name of the tensor
  std::int64_t item = -1;            ///< position in dim 0, which the part then lacks; -1: none
  std::int64_t begin = 0, rows = 0;  ///< along dim 0 of the tensor or item
};

/// Parts of another source's tensors, as tensors.
class PartsSource final : public TensorSource {
 public:
  /// @param whole  outlives this
  explicit PartsSource(const TensorSource& whole) : whole_(whole) {}

  /// @param info  name of the part; the dtype and shape that it has
  void add(const TensorInfo& info, const TensorSlice& part);

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const fs::path& path() const override { return whole_.path(); }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override;
  File open_file(const std::string& name) const override { return whole_.open_file(name); }

 private:
  const TensorSource& whole_;
  std::map<std::string, TensorSlice> parts_;
  std::vector<TensorInfo> tensors_;
  mutable StorageChecks checks_;
};

/// The Hugging Face tensors of a model of tessera: rows of its weights or of their moments.
/// @param config  tessera's "model" section
/// @param model   tensors with names and shapes of its weights; outlives the result
/// @param policy  Exact: all weights must be there
/// @throws InvalidArgument if one is missing
std::unique_ptr<PartsSource> split_model(const HfFamily& family, const Json& config,
                                         const TensorSource& model,
                                         LoadPolicy policy = LoadPolicy::Exact);

}  // namespace tessera::io
