#include "io/safetensors/directory.h"

#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/safetensors/header.h"

namespace tessera::io {
namespace {

// Maximum bytes of the index. It has one line per tensor, so this is enough for millions.
constexpr std::int64_t kMaxJson = std::int64_t{1} << 30;
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// @param map  of model.safetensors.index.json; null: single file
void add_file(ShardedSource& source, const std::string& name, std::uint32_t number,
              const WeightMap* map, std::unordered_set<std::string>& added) {
  for (const SafetensorsEntry& entry : read_safetensors_header(*source.file(name)).tensors) {
    if (map != nullptr) {
      const auto listed = map->file_of.find(entry.name);
      if (listed == map->file_of.end() || listed->second != name) continue;
    }
    const Box whole{Shape(std::vector<std::int64_t>(entry.shape.size())), entry.shape};
    source.add(entry.name, entry.stored_dtype, entry.stored_dtype, entry.shape,
               {{whole, number, entry.begin, entry.end - entry.begin}});
    added.insert(entry.name);
  }
}

}  // namespace

bool is_safetensors_directory(const fs::path& dir) {
  return is_there(dir / kSingle) || is_there(dir / kIndex);
}

std::unique_ptr<ShardedSource> open_safetensors_file(const fs::path& dir, const std::string& name,
                                                     const std::string& kind) {
  auto source = std::make_unique<ShardedSource>(dir, kind);
  std::unordered_set<std::string> added;
  add_file(*source, name, 0, nullptr, added);
  source->finish({name}, {}, false);
  return source;
}

WeightMap read_weight_map(const fs::path& index_path) {
  const Json index = parse_json(read_file(index_path, kMaxJson), index_path.string());
  const JsonReader map = JsonReader(index, index_path.string()).at("weight_map");
  WeightMap result;
  std::set<std::string> names;
  for (const auto& [name, value] : map.object().items()) {
    const std::string& file = map.at(name).string();
    require<CorruptCheckpoint>(is_plain_name(file), "{}: \"{}\" is not a plain file name",
                               map.where(), file);
    names.insert(file);
    result.file_of.emplace(name, file);
  }
  result.files.assign(names.begin(), names.end());
  return result;
}

std::unique_ptr<ShardedSource> open_safetensors_directory(const fs::path& dir) {
  constexpr const char* kKind = "Hugging Face model";
  if (is_there(dir / kSingle)) return open_safetensors_file(dir, kSingle, kKind);
  auto source = std::make_unique<ShardedSource>(dir, kKind);
  std::unordered_set<std::string> added;
  const WeightMap map = read_weight_map(dir / kIndex);
  for (std::uint32_t i = 0; i < map.files.size(); ++i)
    add_file(*source, map.files[i], i, &map, added);
  for (const auto& [name, file] : map.file_of)
    require<CorruptCheckpoint>(added.contains(name),
                               "{}: {} is not in {}, although the index says so", dir.string(),
                               name, file);
  source->finish(map.files, {}, false);
  return source;
}

}  // namespace tessera::io
