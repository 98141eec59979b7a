// A Hugging Face model directory as a source of weights.

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "core/base/error.h"
#include "io/hf/model_source.h"
#include "io/safetensors/reader.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxJson = std::int64_t{64} << 20;
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "wte.weight";

class HfModel : public ModelSource {
 public:
  explicit HfModel(const fs::path& dir) : dir_(dir) {
    const fs::path config_path = dir / "config.json";
    config_ = gpt2_config_from_hf(
        parse_json(read_file(config_path, kMaxJson), config_path.string()), config_path.string());
    open_files();
    drop_tied_head();
    for (const auto& [name, place] : places_) {
      tensors_.push_back({name, place.entry->shape, *place.entry->dtype});
    }
    match_tensors(gpt2_tensors(config_), tensors_, dir.string());
  }

  const Json& config() const override { return config_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const fs::path& path() const override { return dir_; }

  void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
            DType dtype) const override {
    const Place& place = find(name);
    place.file->read(place.entry->name, begin, end, out, dtype);
  }

  void stream(const std::string& name, std::size_t buffer_bytes, const Sink& sink) const override {
    const Place& place = find(name);
    const DType dtype = *place.entry->dtype;
    const std::int64_t size = numel(place.entry->shape);
    const auto per_piece =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(buffer_bytes / dtype_size(dtype)));
    std::vector<char> buffer(static_cast<std::size_t>(std::min(size, per_piece)) *
                             dtype_size(dtype));
    for (std::int64_t begin = 0; begin < size; begin += per_piece) {
      const std::int64_t n = std::min(per_piece, size - begin);
      place.file->read(place.entry->name, begin, begin + n, buffer.data(), dtype);
      sink(begin, buffer.data(), n);
    }
  }

  std::optional<TensorLayout> layout(const std::string& name) const override {
    const Place& place = find(name);
    const SafetensorsEntry& entry = *place.entry;
    return TensorLayout{{{place.file->file().path().filename().string(), entry.begin, entry.end, 0,
                          numel(entry.shape), std::nullopt, 0}},
                        false};
  }

 private:
  struct Place {
    const SafetensorsReader* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };

  const Place& find(const std::string& name) const {
    const auto found = places_.find(name);
    require(found != places_.end(), "{} holds no tensor {}", dir_.string(), name);
    return found->second;
  }

  void open_files() {
    const fs::path single = dir_ / "model.safetensors";
    const fs::path index_path = dir_ / "model.safetensors.index.json";
    std::error_code error;
    if (fs::exists(single, error)) {
      add_file(single, nullptr);
      return;
    }
    const Json index = parse_json(read_file(index_path, kMaxJson), index_path.string());
    const JsonReader map = JsonReader(index, index_path.string()).at("weight_map");
    std::set<std::string> files;
    for (const auto& [name, value] : map.object().items()) {
      const std::string& file = map.at(name).string();
      require<CorruptCheckpoint>(
          !file.empty() && file != ".." && file.find('/') == std::string::npos,
          "{}: \"{}\" is not a plain file name", map.where(), file);
      files.insert(file);
    }
    for (const std::string& file : files) add_file(dir_ / file, &map.value());
    for (const auto& [name, value] : map.object().items()) {
      const std::string ours = gpt2_name_from_hf(name);
      require<CorruptCheckpoint>(ours.empty() || places_.contains(ours),
                                 "{}: {} is not in {}, where the index has it", dir_.string(), name,
                                 value.get<std::string>());
    }
  }

  // @param weight_map  names that the index has in each file; null for a single file
  void add_file(const fs::path& path, const Json* weight_map) {
    files_.push_back(std::make_unique<SafetensorsReader>(path));
    for (const SafetensorsEntry& entry : files_.back()->header().tensors) {
      if (weight_map && weight_map->value(entry.name, "") != path.filename().string()) continue;
      const std::string ours = gpt2_name_from_hf(entry.name);
      if (ours.empty()) continue;
      require<Unsupported>(entry.dtype.has_value(),
                           "{}: tensor {} is stored as {}, which tessera does not read",
                           path.string(), entry.name, entry.stored_dtype);
      require<CorruptCheckpoint>(places_.emplace(ours, Place{files_.back().get(), &entry}).second,
                                 "{}: {} stands twice, with and without \"transformer.\"",
                                 dir_.string(), ours);
    }
  }

  // Some writers store the tied head a second time. It is dropped if it equals the embedding; one
  // that differs would be lost silently.
  void drop_tied_head() {
    const auto head = places_.find(kHead);
    const auto embedding = places_.find(kEmbedding);
    if (head == places_.end() || embedding == places_.end()) return;
    const SafetensorsEntry& a = *head->second.entry;
    const SafetensorsEntry& b = *embedding->second.entry;
    bool equal = a.shape == b.shape && a.dtype == b.dtype;
    std::vector<char> left(std::size_t{1} << 20), right(left.size());
    for (std::int64_t done = 0; equal && done < a.end - a.begin;) {
      const auto n = static_cast<std::size_t>(
          std::min<std::int64_t>(a.end - a.begin - done, static_cast<std::int64_t>(left.size())));
      head->second.file->file().read(a.begin + done, left.data(), n);
      embedding->second.file->file().read(b.begin + done, right.data(), n);
      equal =
          std::equal(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(n), right.begin());
      done += static_cast<std::int64_t>(n);
    }
    require<Unsupported>(equal,
                         "{}: lm_head.weight differs from wte.weight; tessera's GPT-2 ties "
                         "the head to the embedding",
                         dir_.string());
    places_.erase(head);
  }

  fs::path dir_;
  Json config_;
  std::vector<std::unique_ptr<SafetensorsReader>> files_;
  std::map<std::string, Place> places_;  // by our names
  std::vector<TensorInfo> tensors_;
};

}  // namespace

std::unique_ptr<ModelSource> open_hf_model(const fs::path& dir) {
  return std::make_unique<HfModel>(dir);
}

}  // namespace tessera::io
