#include "io/consolidate/bin_files.h"

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "io/consolidate/optimizer_state.h"
#include "io/safetensors/dtype.h"
#include "io/torch/archive_writer.h"

namespace tessera::io {
namespace {

/// A file of torch.save: an object with tensors.
class BinFile {
 public:
  PickleWriter pickle;

  void add(const ExportTensor& tensor) {
    const std::string_view dtype = tensor.opaque_dtype.empty()
                                       ? safetensors_dtype_name(tensor.written)
                                       : std::string_view(tensor.opaque_dtype);
    pickle_tensor(pickle, torch_from_safetensors(dtype),
                  static_cast<std::int64_t>(dtype_size(tensor.written)), tensor.shape,
                  storages_.size());
    storages_.push_back({tensor.bytes()});
    (tensor.bytes() > 0 ? tensors_ : empty_).push_back(&tensor);
  }
  // A float32 scalar. @param bytes  its value
  void add_scalar(const std::string& bytes) {
    pickle_tensor(pickle, torch_from_safetensors("F32"), 4, {}, storages_.size());
    storages_.push_back({4, bytes});
  }

  ExportFile finish(const std::string& name) {
    ZipWriter zip = plan_torch_archive(0, pickle.finish(), storages_);
    ExportFile file;
    file.name = name;
    file.size = zip.end();
    for (const ExportTensor* tensor : empty_) file.add(*tensor, 0);
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const ZipData& data = zip.data()[i];
      file.add(*tensors_[i], data.begin, {data.crc32_at.begin(), data.crc32_at.end()});
    }
    file.literals = zip.take_literals();
    return file;
  }

 private:
  std::vector<TorchStorage> storages_;
  std::vector<const ExportTensor*> tensors_;  // of storages that are written later
  std::vector<const ExportTensor*> empty_;
};

ExportFile plan_optimizer(ConsolidateSource& source) {
  const std::string where = source.path.string();
  require<Unsupported>(
      !source.parameters.empty(),
      "{}: optimizer.bin numbers parameters in the order of the model's class, which "
      "is known for models of docs/models.md without experts only; write the state "
      "by names with --format dcp",
      where);
  const std::vector<WeightState> states = weight_states(source);
  std::vector<ParamGroup> groups = weight_groups(source, states);
  if (groups.empty()) groups.push_back({std::make_shared<const Json>(Json::object())});
  if (groups.size() > 1 && source.checkpoint) {
    groups.resize(1);
    source.warnings.push_back(
        fmt::format("{} has one group of parameters, so that AdamW(model.parameters()) loads it: "
                    "weight decay then also applies to tensors of one dim, which the run left out; "
                    "--format dcp has two groups",
                    kBinOptimizer));
  }
  if (groups.front().of != ParamGroup::Of::Named || source.checkpoint)
    groups.front().weights = source.parameters;
  std::map<std::string_view, std::int64_t> numbers;
  for (const ParamGroup& group : groups)
    for (const std::string& name : group.weights) numbers.emplace(name, numbers.size());
  const std::set<std::string_view> parameters(source.parameters.begin(), source.parameters.end());
  BinFile file;
  PickleWriter& pickle = file.pickle;
  pickle.begin_dict();
  pickle.text("state");
  pickle.begin_dict();
  for (const WeightState& state : states) {
    require<Unsupported>(
        parameters.contains(state.name),
        "{}: {} has optimizer state and is no parameter of the known part of the "
        "model, so its number is unknown; write the state by names with --format dcp",
        where, state.name);
    pickle.integer(numbers.at(state.name));
    pickle.begin_dict();
    for (const auto& [kind, tensor] : state.moments) {
      pickle.text(kind);
      file.add(*tensor);
    }
    if (source.optimizer_step) {
      pickle.text("step");
      file.add_scalar(step_bytes(*source.optimizer_step));
    }
    pickle.end_dict();
  }
  pickle.end_dict();
  pickle.text("param_groups");
  pickle.begin_list();
  for (const ParamGroup& group : groups) {
    pickle.begin_dict();
    for (const auto& [key, value] : group.settings->items()) {
      pickle.text(key);
      pickle_setting(pickle, value);
    }
    pickle.text("params");
    pickle.begin_list();
    for (const std::string& name : group.weights) pickle.integer(numbers.at(name));
    pickle.end_list();
    pickle.text("param_names");
    pickle_names(pickle, group.weights);
    pickle.end_dict();
  }
  pickle.end_list();
  pickle.end_dict();
  return file.finish(std::string(kBinOptimizer));
}

}  // namespace

void plan_bin_files(ConsolidateSource& source, const ConsolidateOptions& options,
                    ExportLayout& layout) {
  if (!source.weights.empty()) {
    const auto contents = fill_files(source.weights, options.max_shard_size);
    std::vector<ExportFile> files;
    for (std::size_t i = 0; i < contents.size(); ++i) {
      BinFile file;
      file.pickle.begin_dict();
      for (const ExportTensor* tensor : contents[i]) {
        require_utf8(tensor->name);
        file.pickle.text(tensor->name);
        file.add(*tensor);
      }
      file.pickle.end_dict();
      files.push_back(file.finish(numbered_name(kBinModel, ".bin", i, contents.size())));
    }
    layout.add(std::move(files), std::string(kBinModel) + ".bin");
  }
  if (!source.optimizer.empty()) layout.files.push_back(plan_optimizer(source));
}

}  // namespace tessera::io
