#include "io/consolidate/diff_sources.h"

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/source.h"
#include "io/gguf/header.h"
#include "io/hf/config.h"
#include "io/hf/family.h"
#include "io/hf/lora.h"
#include "io/seal/seal.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"

namespace tessera::io {
namespace {

// Whether tessera knows the names of a model's tensors.
bool is_known(const Json* config, const std::string& file) {
  const HfFamily* const family = config == nullptr ? nullptr : hf_family_of(*config);
  if (family == nullptr) return false;
  try {
    family->config_from_hf(*config, file);
    return true;
  } catch (const Error&) {
    return false;
  }
}

struct ComparedSide {
  fs::path path;
  bool sharded = false, gguf = false, peft = false;
  ConsolidateSource source{};

  bool has_known_names() const {
    return is_known(source.hf_config.get(), source.hf_config_file.string());
  }
  bool is_directory_of_hf() const { return source.kind == "Hugging Face model"; }
};

class SourceComparison {
 public:
  SourceComparison(const fs::path& a, const fs::path& b, const SourceDiffOptions& options)
      : options_(options), config_file_(options.config_file), like_(options.like) {
    sides_[0].path = a;
    sides_[1].path = b;
  }

  SourceDiff run() {
    for (ComparedSide& side : sides_) {
      side.gguf = is_gguf(side.path);
      side.peft = is_adapter_directory(side.path);
      side.sharded = !side.gguf && !side.peft && is_sharded(side.path);
      if (side.gguf || side.peft || side.sharded)
        require_seal_intact(side.path,
                            {.threads = options_.diff.threads, .progress = options_.checked});
    }
    require<Unsupported>(!options_.diff.optimizer || (sides_[0].sharded && sides_[1].sharded),
                         "optimizer state is compared between two checkpoints of tessera, or two "
                         "of other programs, since its names and layout differ; use --what model");
    // The configuration of a GGUF file may be that of the other side.
    const std::size_t first = sides_[0].gguf ? 1 : 0;
    open(sides_[first]);
    const fs::path& found = sides_[first].source.hf_config_file;
    if (sides_[1 - first].gguf && !config_file_ && !found.empty()) config_file_ = found;
    open(sides_[1 - first]);
    if (!config_file_ && !like_ && options_.names.is_auto()) share_names();

    SourceDiff result;
    compare(result.report);
    result.a = describe(sides_[0]);
    result.b = describe(sides_[1]);
    return result;
  }

 private:
  void open(ComparedSide& side) const {
    ConsolidateOptions options;
    options.partial = true;
    if (side.peft) {
      side.source = {};
      side.source.kind = "LoRA adapters (PEFT)";
      side.source.path = side.path;
      side.source.sources.push_back(open_peft_tensors(side.path));
      const TensorSource* const tensors = side.source.sources.back().get();
      for (const TensorInfo& info : tensors->tensors())
        side.source.weights.push_back(
            {info.name, info.shape, info.dtype, info.dtype, tensors, info.name});
      return;
    }
    if (!side.gguf && !side.sharded) {
      options.step = options_.step;
      try {
        side.source = open_consolidate_source(side.path, options);
      } catch (const InvalidArgument&) {  // such as a model that tessera does not know
        options.format = ExportFormat::Safetensors;
        side.source = open_consolidate_source(side.path, options);
      }
      return;
    }
    options.config_file = config_file_;
    if (side.sharded) {
      options.format = ExportFormat::Safetensors;
      options.like = like_;
      options.names = options_.names;
      options.names.must_match = false;
      if (options_.diff.optimizer)
        options.what = options_.diff.model ? ExportWhat::All : ExportWhat::Optimizer;
    }
    side.source = open_consolidate_source(side.path, options);
  }

  // Gives a side without known names those of the other one.
  void share_names() {
    for (const std::size_t i : {0, 1}) {
      ComparedSide &side = sides_[i], &other = sides_[1 - i];
      if (!side.sharded || side.has_known_names()) continue;
      if (!other.source.hf_config_file.empty() && other.has_known_names()) {
        config_file_ = other.source.hf_config_file;
        open(side);
      } else if (other.is_directory_of_hf() && !side.is_directory_of_hf()) {
        like_ = other.path;
        open(side);
        open(other);
      }
    }
  }

  static std::map<std::string, const ExportTensor*> tensors_of(const ConsolidateSource& source) {
    std::map<std::string, const ExportTensor*> tensors;
    for (const ExportTensor& tensor : source.weights) tensors["model/" + tensor.name] = &tensor;
    for (const ExportTensor& tensor : source.optimizer)
      tensors["optimizer/" + tensor.name] = &tensor;
    return tensors;
  }

  static ComparedTensor stored(const ExportTensor& tensor) {
    return {tensor.source, tensor.source_name, tensor.swap, tensor.stored_encoding};
  }

  void compare(DiffReport& report) const {
    using Kind = TensorDifference::Kind;
    const auto as = tensors_of(sides_[0].source), bs = tensors_of(sides_[1].source);
    std::vector<ComparedPair> pairs;
    const auto difference = [](const std::string& name, Kind kind, const ExportTensor* a,
                               const ExportTensor* b) {
      TensorDifference result;
      result.name = name;
      result.kind = kind;
      if (a != nullptr) {
        result.dtype_a = a->stored;
        result.shape_a = a->shape;
        result.opaque_a = a->opaque_dtype;
      }
      if (b != nullptr) {
        result.dtype_b = b->stored;
        result.shape_b = b->shape;
        result.opaque_b = b->opaque_dtype;
      }
      return result;
    };
    for (const auto& [name, b] : bs)
      if (!as.contains(name))
        report.differences.push_back(difference(name, Kind::OnlyInB, nullptr, b));
    for (const auto& [name, a] : as) {
      const auto found = bs.find(name);
      if (found == bs.end()) {
        report.differences.push_back(difference(name, Kind::OnlyInA, a, nullptr));
        continue;
      }
      const ExportTensor* const b = found->second;
      ++report.compared;
      const bool same_dtype = a->stored == b->stored && a->opaque_dtype == b->opaque_dtype;
      TensorDifference pair = difference(name, same_dtype ? Kind::Values : Kind::Dtype, a, b);
      if (a->shape != b->shape) pair.kind = Kind::Shape;
      const bool has_values = same_dtype || (a->opaque_dtype.empty() && b->opaque_dtype.empty());
      if (pair.kind == Kind::Shape || !has_values) {
        report.differences.push_back(std::move(pair));
        continue;
      }
      pair.elements = numel(a->shape);
      pairs.push_back({stored(*a), stored(*b), std::move(pair)});
    }
    add_pairs(report, pairs, options_.diff);
  }

  static SourceDiff::Side describe(ComparedSide& side) {
    return {side.source.kind, side.source.path, std::move(side.source.skipped),
            std::move(side.source.warnings)};
  }

  const SourceDiffOptions& options_;
  std::optional<fs::path> config_file_, like_;
  ComparedSide sides_[2];
};

}  // namespace

SourceDiff diff_sources(const fs::path& a, const fs::path& b, const SourceDiffOptions& options) {
  return SourceComparison(a, b, options).run();
}

}  // namespace tessera::io
