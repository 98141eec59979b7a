#include "io/safetensors/directory.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/safetensors/reader.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxJson = std::int64_t{64} << 20;
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

class Directory final : public ShardedSource {
 public:
  explicit Directory(const fs::path& dir) : dir_(dir) {
    if (is_there(dir / kSingle)) {
      add_file(dir / kSingle, nullptr);
    } else {
      open_indexed();
    }
    top_keys_.resize(infos_.size());
  }

  const fs::path& path() const override { return dir_; }
  const std::string& kind() const override { return kind_; }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  const std::vector<std::string>& objects() const override { return objects_; }
  const std::vector<Unreadable>& unreadable() const override { return unreadable_; }
  const std::vector<std::string>& top_keys() const override { return top_keys_; }

  void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
            DType dtype) const override {
    find(name).file->read(name, begin, end, out, dtype);
  }

  void stream(const std::string& name, std::size_t buffer_bytes, const Sink& sink) const override {
    const Place& place = find(name);
    require<Unsupported>(place.entry->dtype.has_value(),
                         "{}: tensor {} is stored as {}, which tessera does not read",
                         place.file->file().path().string(), name, place.entry->stored_dtype);
    const DType dtype = *place.entry->dtype;
    const std::int64_t size = numel(place.entry->shape);
    const auto per_piece =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(buffer_bytes / dtype_size(dtype)));
    std::vector<char> buffer(static_cast<std::size_t>(std::min(size, per_piece)) *
                             dtype_size(dtype));
    for (std::int64_t begin = 0; begin < size; begin += per_piece) {
      const std::int64_t n = std::min(per_piece, size - begin);
      place.file->read(name, begin, begin + n, buffer.data(), dtype);
      sink(begin, buffer.data(), n);
    }
  }

  std::optional<TensorLayout> layout(const std::string& name) const override {
    const Place& place = find(name);
    TensorLayout layout;
    layout.chunks.push_back({place.file->file().path().filename().string(), place.entry->begin,
                             place.entry->end, 0, numel(place.entry->shape), std::nullopt, 0});
    return layout;
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

  void open_indexed() {
    const fs::path index_path = dir_ / kIndex;
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
      require<CorruptCheckpoint>(places_.contains(name),
                                 "{}: {} is not in {}, where the index has it", dir_.string(), name,
                                 value.get<std::string>());
    }
  }

  // @param weight_map  names that the index has in each file; null for a single file
  void add_file(const fs::path& path, const Json* weight_map) {
    files_.push_back(std::make_unique<SafetensorsReader>(path));
    for (const SafetensorsEntry& entry : files_.back()->header().tensors) {
      if (weight_map && weight_map->value(entry.name, "") != path.filename().string()) continue;
      places_.emplace(entry.name, Place{files_.back().get(), &entry});
      if (entry.dtype) {
        infos_.push_back({entry.name, entry.shape, *entry.dtype});
      } else {
        unreadable_.push_back({entry.name, entry.stored_dtype});
      }
    }
  }

  fs::path dir_;
  std::string kind_ = "Hugging Face model";
  std::vector<std::unique_ptr<SafetensorsReader>> files_;
  std::map<std::string, Place> places_;
  std::vector<TensorInfo> infos_;
  std::vector<std::string> objects_, top_keys_;
  std::vector<Unreadable> unreadable_;
};

}  // namespace

bool is_safetensors_directory(const fs::path& dir) {
  return is_there(dir / kSingle) || is_there(dir / kIndex);
}

std::unique_ptr<ShardedSource> open_safetensors_directory(const fs::path& dir) {
  return std::make_unique<Directory>(dir);
}

}  // namespace tessera::io
