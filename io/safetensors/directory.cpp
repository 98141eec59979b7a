#include "io/safetensors/directory.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/base/open_files.h"
#include "io/safetensors/dtype.h"
#include "io/safetensors/header.h"

namespace tessera::io {
namespace {

// One line per tensor: enough for millions.
constexpr std::int64_t kMaxJson = std::int64_t{1} << 30;
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

class Directory final : public ShardedSource {
 public:
  explicit Directory(const fs::path& dir) : dir_(dir), open_files_(dir, Links::Follow) {
    if (is_there(dir / kSingle)) {
      add_file(kSingle, nullptr);
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

  std::shared_ptr<const TensorRecord> record(const std::string& name) const override {
    const Place& place = find(name);
    const auto& [shape, dtype] = contents(place, name);
    Chunk chunk;
    chunk.file = files_[place.file];
    chunk.byte_begin = place.begin;
    chunk.byte_end = place.end;
    chunk.end = numel(shape);
    chunk.checksum = Checksum::None;
    return std::make_shared<const TensorRecord>(TensorRecord{dtype, shape, {std::move(chunk)}});
  }

  File open_file(const std::string& name) const override { return open_files_.open(name); }

 private:
  struct Place {
    std::size_t file = 0;        // of files_
    bool is_unreadable = false;  // tessera lacks its dtype
    std::size_t number = 0;      // index into infos_ or unreadable_
    std::int64_t begin = 0, end = 0;
  };
  struct Contents {
    const Shape& shape;
    DType dtype;  // its dtype, or the integer of its size if tessera lacks it
  };

  const Place& find(const std::string& name) const {
    const auto found = places_.find(name);
    require(found != places_.end(), "{} holds no tensor {}", dir_.string(), name);
    return found->second;
  }

  Contents contents(const Place& place, const std::string& name) const {
    if (!place.is_unreadable) return {infos_[place.number].shape, infos_[place.number].dtype};
    const Unreadable& tensor = unreadable_[place.number];
    if (!tensor.carrier) refuse(place, name);
    return {tensor.shape, *tensor.carrier};
  }
  [[noreturn]] void refuse(const Place& place, const std::string& name) const {
    throw Unsupported("{}: tensor {} is stored as {}, which tessera does not read",
                      (dir_ / files_[place.file]).string(), name, unreadable_[place.number].dtype);
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
    for (const std::string& file : files) add_file(file, &map.value());
    for (const auto& [name, value] : map.object().items()) {
      require<CorruptCheckpoint>(places_.contains(name),
                                 "{}: {} is not in {}, although the index says so", dir_.string(),
                                 name, value.get<std::string>());
    }
  }

  // @param weight_map  file of each tensor by the index; null for a single file
  void add_file(const std::string& name, const Json* weight_map) {
    files_.push_back(name);
    SafetensorsHeader header = read_safetensors_header(*open_files_.get(name));
    for (SafetensorsEntry& entry : header.tensors) {
      if (weight_map) {
        const auto listed = weight_map->find(entry.name);
        if (listed == weight_map->end() || *listed != name) continue;
      }
      places_.emplace(entry.name, Place{files_.size() - 1, !entry.dtype,
                                        entry.dtype ? infos_.size() : unreadable_.size(),
                                        entry.begin, entry.end});
      if (entry.dtype) {
        infos_.push_back({std::move(entry.name), entry.shape, *entry.dtype});
      } else {
        unreadable_.push_back({std::move(entry.name), entry.stored_dtype, "", entry.shape,
                               entry.stored_dtype, carrier_of_safetensors(entry.stored_dtype)});
      }
    }
  }

  fs::path dir_;
  std::string kind_ = "Hugging Face model";
  mutable OpenFiles open_files_;
  std::vector<std::string> files_;
  std::unordered_map<std::string, Place> places_;
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
