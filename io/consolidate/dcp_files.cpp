// Source of the format: torch/distributed/checkpoint (metadata.py, filesystem.py) of PyTorch 2.4 to
// 2.15.

#include "io/consolidate/dcp_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/error.h"
#include "io/consolidate/optimizer_state.h"
#include "io/safetensors/dtype.h"
#include "io/torch/archive_writer.h"

namespace tessera::io {
namespace {

constexpr std::string_view kClasses = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kModelKey = "model", kOptimizerKey = "optimizer";
constexpr std::int64_t kOverhead = 4096;       // bytes of an archive besides its tensor, at most
constexpr std::int64_t kLeastChunk = 1 << 16;  // bytes: a chunk takes memory for its headers

constexpr std::string_view kFileBegin = "__0_", kFileEnd = ".distcp";

/// Key of an entry in the saved dicts and lists, from outermost: texts and positions.
using KeyPath = std::vector<std::variant<std::string, std::int64_t>>;

std::string name_of(const KeyPath& path) {
  std::string name;
  for (const auto& key : path) {
    if (!name.empty()) name += '.';
    if (const auto* const text = std::get_if<std::string>(&key))
      name += *text;
    else
      name += std::to_string(std::get<std::int64_t>(key));
  }
  return name;
}

/// An archive in a file.
struct ArchivePlace {
  std::size_t file = 0;
  std::int64_t offset = 0, length = 0;  ///< bytes
};

struct DcpChunk {
  Shape offsets, shape;
  ArchivePlace at;
};

/// A tensor, or an object with a single chunk without shape.
struct DcpEntry {
  KeyPath path;
  const TorchDType* dtype = nullptr;  ///< null: an object
  Shape shape;
  std::vector<DcpChunk> chunks;
};

Shape zeros_like(const Shape& shape) {
  Shape zeros = shape;
  for (int i = 0; i < zeros.size(); ++i) zeros[i] = 0;
  return zeros;
}

/// Pickles the entries as torch.distributed.checkpoint.metadata.Metadata.
class MetadataPickle {
 public:
  std::string run(const std::vector<DcpEntry>& entries, const std::vector<ExportFile>& files) {
    begin_object("Metadata");
    pickle_.text("state_dict_metadata");
    pickle_.begin_dict();
    for (const DcpEntry& entry : entries) put_description(entry);
    pickle_.end_dict();
    pickle_.text("planner_data");
    pickle_.begin_dict();
    for (const DcpEntry& entry : entries) put_path(entry.path);
    pickle_.end_dict();
    pickle_.text("storage_data");
    pickle_.begin_dict();
    for (const DcpEntry& entry : entries) put_locations(entry, files);
    pickle_.end_dict();
    end_object();
    return pickle_.finish();
  }

 private:
  // An object of a dataclass, whose state is the dict that follows.
  void begin_object(std::string_view name, std::string_view module = kClasses) {
    pickle_.global({module, name});
    pickle_.new_object();
    pickle_.begin_dict();
  }
  void end_object() {
    pickle_.end_dict();
    pickle_.build();
  }

  void put_size(const Shape& shape) {
    pickle_.global({"torch", "Size"});
    pickle_.begin_tuple();
    pickle_.sizes(shape);
    pickle_.end_tuple();
    pickle_.reduce();
  }

  void put_properties(const TorchDType& dtype) {
    pickle_.global({kClasses, "TensorProperties"});
    pickle_.new_object();
    pickle_.begin_tuple();
    pickle_.global({"torch", dtype.name});
    pickle_.global({"torch.serialization", "_get_layout"});
    pickle_.begin_tuple();
    pickle_.text("torch.strided");
    pickle_.end_tuple();
    pickle_.reduce();
    pickle_.boolean(false);  // requires_grad
    pickle_.global({kClasses, "_MEM_FORMAT_ENCODING"});
    pickle_.begin_tuple();
    pickle_.integer(0);  // contiguous
    pickle_.end_tuple();
    pickle_.reduce();
    pickle_.boolean(false);  // pin_memory
    pickle_.end_tuple();
    pickle_.build();
  }

  void put_description(const DcpEntry& entry) {
    pickle_.text(name_of(entry.path));
    if (entry.dtype == nullptr) {
      pickle_.global({kClasses, "BytesStorageMetadata"});
      pickle_.new_object();
      return;
    }
    begin_object("TensorStorageMetadata");
    pickle_.text("properties");
    put_properties(*entry.dtype);
    pickle_.text("size");
    put_size(entry.shape);
    pickle_.text("chunks");
    pickle_.begin_list();
    for (const DcpChunk& chunk : entry.chunks) {
      begin_object("ChunkStorageMetadata");
      pickle_.text("offsets");
      put_size(chunk.offsets);
      pickle_.text("sizes");
      put_size(chunk.shape);
      end_object();
    }
    pickle_.end_list();
    end_object();
  }

  void put_path(const KeyPath& path) {
    pickle_.text(name_of(path));
    pickle_.begin_tuple();
    for (const auto& key : path) {
      if (const auto* const text = std::get_if<std::string>(&key))
        pickle_.text(*text);
      else
        pickle_.integer(std::get<std::int64_t>(key));
    }
    pickle_.end_tuple();
  }

  void put_locations(const DcpEntry& entry, const std::vector<ExportFile>& files) {
    for (std::size_t i = 0; i < entry.chunks.size(); ++i) {
      const DcpChunk& chunk = entry.chunks[i];
      begin_object("MetadataIndex");
      pickle_.text("fqn");
      pickle_.text(name_of(entry.path));
      pickle_.text("offset");
      entry.dtype == nullptr ? pickle_.none() : put_size(chunk.offsets);
      pickle_.text("index");
      entry.dtype == nullptr ? pickle_.none() : pickle_.integer(static_cast<std::int64_t>(i));
      end_object();
      begin_object("_StorageInfo", "torch.distributed.checkpoint.filesystem");
      pickle_.text("relative_path");
      pickle_.text(files[chunk.at.file].name);
      pickle_.text("offset");
      pickle_.integer(chunk.at.offset);
      pickle_.text("length");
      pickle_.integer(chunk.at.length);
      end_object();
    }
  }

  PickleWriter pickle_;
};

/// Lays out archives in files.
class DcpPlan {
 public:
  DcpPlan(ConsolidateSource& source, std::int64_t max_file)
      : source_(source), max_file_(max_file) {}

  void add_weights() {
    // In the running model, a tied head is a second name of the embedding.
    constexpr std::string_view kHead = "lm_head.weight";
    const bool has_head =
        std::ranges::find(source_.weights, kHead, &ExportTensor::name) != source_.weights.end();
    const auto is_expert = [](const ExportTensor& tensor) {
      return tensor.name.find(".experts.") != std::string::npos;
    };
    if (std::ranges::any_of(source_.weights, is_expert)) {
      source_.warnings.push_back(
          "experts are named one by one, as in files and in transformers 4; models of transformers "
          "5 stack them, and do not find these names");
    }
    for (const ExportTensor& tensor : source_.weights) {
      add({std::string(kModelKey), tensor.name}, tensor);
      const bool is_embedding =
          tensor.name == "model.embed_tokens.weight" || tensor.name == "transformer.wte.weight";
      if (source_.parameters.empty() || has_head || !is_embedding) continue;
      DcpEntry head = entries_.back();
      head.path.back() = std::string(kHead);
      entries_.push_back(std::move(head));
    }
  }

  void add_optimizer() {
    const std::vector<WeightState> states = weight_states(source_);
    for (const WeightState& state : states) {
      const auto path_of = [&](const std::string& kind) {
        return KeyPath{std::string(kOptimizerKey), "state", state.name, kind};
      };
      for (const auto& [kind, tensor] : state.moments) add(path_of(kind), *tensor);
      if (source_.optimizer_step) add_step(path_of("step"), *source_.optimizer_step);
    }
    add_groups(weight_groups(source_, states));
  }

  void finish(ExportLayout& layout) {
    layout.others.push_back({std::string(kDcpMetadata), MetadataPickle().run(entries_, files_)});
    std::ranges::move(files_, std::back_inserter(layout.files));
  }

 private:
  // Appends an archive. @param tensor  whose elements [begin, end) are the archive's storage; null: none
  ArchivePlace append(const std::string& pickle, const std::vector<TorchStorage>& storages,
                      const ExportTensor* tensor = nullptr, std::int64_t begin = 0,
                      std::int64_t end = 0) {
    ZipWriter zip = plan_torch_archive(next_, pickle, storages);
    if (!files_.empty() && next_ > 0 && zip.end() > max_file_) {
      next_ = 0;
      zip = plan_torch_archive(next_, pickle, storages);
    }
    if (next_ == 0) {
      files_.emplace_back();
      files_.back().name = fmt::format("{}{}{}", kFileBegin, files_.size() - 1, kFileEnd);
    }
    ExportFile& file = files_.back();
    const ArchivePlace location{files_.size() - 1, next_, zip.end() - next_};
    if (!zip.data().empty()) {
      const ZipData& data = zip.data().front();
      file.parts.push_back(
          {tensor, data.begin, begin, end, {data.crc32_at.begin(), data.crc32_at.end()}});
    } else if (tensor != nullptr) {
      file.parts.push_back({tensor, zip.end(), begin, end});
    }
    std::ranges::move(zip.take_literals(), std::back_inserter(file.literals));
    file.size = zip.end();
    constexpr std::int64_t kUnit = ZipWriter::kAlignment;
    next_ = (zip.end() + kUnit - 1) / kUnit * kUnit;
    return location;
  }

  void add(KeyPath path, const ExportTensor& tensor) {
    require_utf8(tensor.name);
    const std::string_view name = tensor.opaque_dtype.empty()
                                      ? safetensors_dtype_name(tensor.written)
                                      : std::string_view(tensor.opaque_dtype);
    const TorchDType& dtype = torch_from_safetensors(name);
    const auto width = static_cast<std::int64_t>(dtype_size(tensor.written));
    DcpEntry& entry = entries_.emplace_back(DcpEntry{std::move(path), &dtype, tensor.shape, {}});
    const std::int64_t rows = tensor.shape.empty() ? 1 : tensor.shape[0];
    const std::int64_t row_elements = rows > 0 ? numel(tensor.shape) / rows : 0;
    const std::int64_t room = std::max(max_file_ - kOverhead, kLeastChunk);
    const std::int64_t most = tensor.bytes() <= room
                                  ? std::max<std::int64_t>(rows, 1)
                                  : std::max<std::int64_t>(room / (row_elements * width), 1);
    std::int64_t row = 0;
    do {
      const std::int64_t n = std::min(most, rows - row);
      DcpChunk chunk{zeros_like(tensor.shape), tensor.shape, {}};
      if (!tensor.shape.empty()) {
        chunk.offsets[0] = row;
        chunk.shape[0] = n;
      }
      PickleWriter pickle;
      pickle_tensor(pickle, dtype, width, chunk.shape, 0);
      const std::int64_t begin = row * row_elements, end = (row + n) * row_elements;
      chunk.at = append(pickle.finish(), {{(end - begin) * width}}, &tensor, begin, end);
      entry.chunks.push_back(chunk);
      row += n;
    } while (row < rows);
  }

  void add_step(KeyPath path, std::int64_t step) {
    PickleWriter pickle;
    const TorchDType& dtype = torch_from_safetensors("F32");
    pickle_tensor(pickle, dtype, 4, {}, 0);
    const ArchivePlace at = append(pickle.finish(), {{4, step_bytes(step)}});
    entries_.push_back({std::move(path), &dtype, {}, {{{}, {}, at}}});
  }

  template <typename F>
  ArchivePlace add_object(F&& push) {
    PickleWriter pickle;
    push(pickle);
    return append(pickle.finish(), {});
  }

  void add_groups(const std::vector<ParamGroup>& groups) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::vector<std::string>& weights = groups[g].weights;
      const auto add_setting = [&](const std::string& key, const ArchivePlace& at) {
        entries_.push_back(
            {{std::string(kOptimizerKey), "param_groups", static_cast<std::int64_t>(g), key},
             nullptr,
             {},
             {{{}, {}, at}}});
      };
      for (const auto& [key, value] : groups[g].settings->items()) {
        const ArchivePlace at =
            add_object([&, &of = value](PickleWriter& pickle) { pickle_setting(pickle, of); });
        add_setting(key, at);
        for (const std::string& name : weights) {
          entries_.push_back(
              {{std::string(kOptimizerKey), fmt::format("param_groups.{}.{}", name, key)},
               nullptr,
               {},
               {{{}, {}, at}}});
        }
      }
      const ArchivePlace names =
          add_object([&](PickleWriter& pickle) { pickle_names(pickle, weights); });
      for (const char* key : {"params", "param_names"}) add_setting(key, names);
    }
  }

  ConsolidateSource& source_;
  const std::int64_t max_file_;
  std::vector<ExportFile> files_;
  std::vector<DcpEntry> entries_;
  std::int64_t next_ = 0;  // offset of the next archive in the last file; 0: in a new one
};

}  // namespace

bool is_dcp_name(std::string_view name) {
  if (name == kDcpMetadata) return true;
  if (!name.starts_with(kFileBegin) || !name.ends_with(kFileEnd)) return false;
  const std::string_view number =
      name.substr(kFileBegin.size(), name.size() - kFileBegin.size() - kFileEnd.size());
  return !number.empty() && number.find_first_not_of("0123456789") == std::string_view::npos;
}

void plan_dcp_files(ConsolidateSource& source, const ConsolidateOptions& options,
                    ExportLayout& layout) {
  DcpPlan plan(source, options.max_shard_size);
  plan.add_weights();
  if (!source.optimizer.empty()) plan.add_optimizer();
  plan.finish(layout);
}

}  // namespace tessera::io
