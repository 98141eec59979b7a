#include "io/dcp/dcp_source.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/base/zstd.h"
#include "io/dcp/metadata.h"
#include "io/dcp/shard_names.h"
#include "io/safetensors/dtype.h"
#include "io/safetensors/header.h"
#include "io/torch/torch_archive.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxMetadata = std::int64_t{8} << 30;
constexpr const char* kMetadataFile = ".metadata";
constexpr const char* kLightningFile = "meta.pt";
// Folders of accelerate's save_state, for each model and optimizer.
constexpr const char* kAccelerateModel = "pytorch_model_fsdp_0";
constexpr const char* kAccelerateSecond = "pytorch_model_fsdp_1";
constexpr const char* kAccelerateOptimizer = "optimizer_0";
constexpr const char* kMegatronFile = "metadata.json";
constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";

std::vector<std::string> list_files(const fs::path& dir) {
  std::vector<std::string> names;
  for (const fs::path& path : list_directory(dir)) names.push_back(path.filename().string());
  return names;
}

bool is_megatron_format(const fs::path& dir) {
  constexpr std::int64_t kMost = 1 << 20;  // bytes
  const fs::path path = dir / kMegatronFile;
  return is_there(path) && fs::file_size(path) <= kMost &&
         read_file(path, kMost).find("\"sharded_backend\"") != std::string::npos;
}

// For each tensor name, the offsets of this file's part in the whole tensor.
Json sharding_info(const SafetensorsHeader& header, const std::string& path) {
  const auto found = header.metadata.find(kShardingInfo);
  require<CorruptCheckpoint>(found != header.metadata.end(),
                             "{}: its metadata has no {} (offsets of its parts)", path,
                             kShardingInfo);
  return parse_json(found->second, fmt::format("{}: {}", path, kShardingInfo));
}

Shape saved_offsets(const JsonReader& info, const SafetensorsEntry& entry) {
  const JsonReader list = info.at(entry.name).at("saved_offsets");
  require<CorruptCheckpoint>(list.array_size() == static_cast<std::size_t>(entry.shape.size()),
                             "{}: {} offsets for shape {}", list.where(), list.array_size(),
                             entry.shape);
  Shape offsets;
  for (int i = 0; i < entry.shape.size(); ++i) {
    offsets.push_back(list.at(static_cast<std::size_t>(i)).integer());
    std::int64_t end = 0;
    require<CorruptCheckpoint>(!__builtin_add_overflow(offsets[i], entry.shape[i], &end),
                               "{}: the chunk at {} of shape {} ends past 2^63", list.where(),
                               offsets, entry.shape);
  }
  return offsets;
}

/// Looks for shards that are missing after the last one. A vector (norm, bias) is as long as the
/// rows of some matrix that are not cut. If no vector is, but one would be with more shards of the
/// same size, shards are missing.
void check_last_shard(const std::map<std::string, DcpTensor>& tensors, std::size_t shards,
                      const fs::path& dir) {
  constexpr std::int64_t kLeastLength = 64;  // shorter ones agree by chance
  std::map<std::int64_t, std::string> rows;  // by length
  for (const auto& [name, tensor] : tensors) {
    for (int i = 1; i < tensor.shape.size() && !tensor.chunks.empty(); ++i) {
      if (tensor.chunks[0].box.shape[i] == tensor.shape[i]) rows.emplace(tensor.shape[i], name);
    }
  }
  std::string why;
  for (const auto& [name, tensor] : tensors) {
    const std::int64_t length = tensor.shape.size() == 1 ? tensor.shape[0] : 0;
    const auto n = static_cast<std::int64_t>(shards);
    if (length < kLeastLength || tensor.chunks.size() != shards || length % n != 0) continue;
    if (rows.contains(length)) return;
    const std::int64_t part = length / n;
    const bool is_even = std::ranges::all_of(
        tensor.chunks, [&](const StoredBlock& chunk) { return chunk.box.shape[0] == part; });
    for (auto row = rows.upper_bound(length); is_even && why.empty(); ++row) {
      if (row == rows.end() || row->first > 2 * length) break;
      if (row->first % part != 0) continue;
      why = fmt::format(
          "{} shards, in which {} has {} elements, but the rows of {} have {}, as it would with {} "
          "shards: find the missing ones, or, if all are there, confirm it with --shards {}",
          shards, name, length, row->second, row->first, row->first / part, shards);
    }
  }
  require<CorruptCheckpoint>(why.empty(), "{} holds {}", dir.string(), why);
}

// Checks that an archive is long enough for all elements of its chunk, unless it is compressed.
void check_length(const DcpTensor& tensor, const StoredBlock& chunk, const std::string& where) {
  const std::optional<DType> dtype = carrier_of_safetensors(safetensors_from_torch(tensor.dtype));
  std::int64_t bytes = 0;
  require<CorruptCheckpoint>(
      !dtype || chunk.zstd ||
          (!__builtin_mul_overflow(numel(chunk.box.shape),
                                   static_cast<std::int64_t>(dtype_size(*dtype)), &bytes) &&
           bytes <= chunk.length),
      "{}: the chunk at {} of shape {} does not fit in {} bytes", where, chunk.box.offsets,
      chunk.box.shape, chunk.length);
}

bool has_dcp(const fs::path& dir) {
  std::error_code none;
  if (is_there(dir / kMetadataFile)) return true;
  const std::vector<fs::path> paths = list_directory(dir, none);
  return std::ranges::any_of(paths,
                             [](const fs::path& path) { return path.extension() == ".distcp"; });
}

using StoredValues = std::vector<std::pair<std::string, StoredBlock>>;

// Adds what one .metadata lists. @param folder  of the source, where it is; may be empty
void add_dcp(ShardedSource& source, const fs::path& folder, std::vector<std::string>& files,
             std::vector<std::string>& objects, StoredValues& hyperparameters) {
  const fs::path metadata_path = source.path() / folder / kMetadataFile;
  require<CorruptCheckpoint>(is_there(metadata_path),
                             "{} has shards, but no {}: PyTorch writes it last, so this save was "
                             "not finished",
                             metadata_path.parent_path().string(), kMetadataFile);
  const File metadata_file = File::open(metadata_path);
  const std::int64_t bytes = metadata_file.size();
  require<CorruptCheckpoint>(bytes <= kMaxMetadata, "{} has {} bytes; at most {} are accepted",
                             metadata_path.string(), bytes, kMaxMetadata);
  DcpMetadata metadata =
      parse_dcp_metadata(ByteRange(metadata_file, 0, bytes), metadata_path.string());
  const auto first_file = static_cast<std::uint32_t>(files.size());
  std::vector<std::int64_t> needed(metadata.files.size());
  const auto use = [&](const std::string& name, StoredBlock& chunk) {
    std::int64_t end = 0;
    require<CorruptCheckpoint>(!__builtin_add_overflow(chunk.offset, chunk.length, &end),
                               "{}: {} has {} bytes at {}, past 2^63", metadata_path.string(), name,
                               chunk.length, chunk.offset);
    needed[chunk.file] = std::max(needed[chunk.file], end);
    chunk.file += first_file;
  };
  for (auto& [name, chunk] : metadata.hyperparameters) {
    use(name, chunk);
    hyperparameters.emplace_back(name, chunk);
  }
  for (auto& [name, tensor] : metadata.tensors) {
    for (StoredBlock& chunk : tensor.chunks) {
      check_length(tensor, chunk, fmt::format("{}: tensor {}", metadata_path.string(), name));
      use(name, chunk);
    }
    source.add(name, tensor.dtype, safetensors_from_torch(tensor.dtype), tensor.shape,
               std::move(tensor.chunks), tensor.top_key);
  }
  for (std::size_t i = 0; i < needed.size(); ++i) {
    const std::string name = (folder / metadata.files[i]).string();
    const fs::path path = source.path() / name;
    require<CorruptCheckpoint>(is_there(path), "{} is missing; {} lists it", path.string(),
                               metadata_path.string());
    const std::int64_t size = source.file(name)->size();
    require<CorruptCheckpoint>(size >= needed[i],
                               "{} has {} bytes, but {} needs at least {}: it was truncated or "
                               "replaced",
                               path.string(), size, metadata_path.string(), needed[i]);
    files.push_back(name);
  }
  objects.insert(objects.end(), metadata.objects.begin(), metadata.objects.end());
}

// Decodes all, or a little more than `most` bytes.
std::string read_whole(ZstdDecoder& decoder, std::int64_t most) {
  constexpr std::size_t kStep = std::size_t{1} << 20;
  std::string content;
  std::size_t end = 0;
  do {
    end = content.size();
    content.resize(end + kStep);
    content.resize(end + decoder.read(content.data() + end, kStep));
  } while (content.size() == end + kStep && std::ssize(content) <= most);
  return content;
}

// Each is an archive of its own. @throws CorruptCheckpoint naming a damaged one
Hyperparameters read_hyperparameters(const ShardedSource& source,
                                     const std::vector<std::string>& files,
                                     const StoredValues& stored) {
  constexpr std::int64_t kMostPickled = std::int64_t{32} << 20;  // bytes
  HyperparametersReader reader;
  for (const auto& [name, place] : stored) {
    const auto file = source.file(files[place.file]);
    std::string decoded;  // outlives the archive
    std::optional<TorchArchive> archive;
    try {
      ByteRange range(*file, place.offset, place.length);
      if (place.zstd) {
        ZstdDecoder decoder(file, {place.offset, place.length});
        decoded = read_whole(decoder, kMostPickled);
        range = ByteRange(decoded, decoder.name());
      }
      if (range.size() > kMostPickled) {
        reader.leave_out_all();
        break;
      }
      archive.emplace(range, kMostPickled, std::span<const PickleGlobal>(), UnknownGlobals::Inert);
    } catch (const CorruptCheckpoint& error) {
      throw CorruptCheckpoint("{}: {}: {}", source.where(), name, error.what());
    } catch (const Unsupported&) {
      reader.leave_out(name);
    }
    if (archive) reader.add(name, archive->root());
  }
  return reader.finish();
}

}  // namespace

bool is_accelerate(const fs::path& dir) { return !has_dcp(dir) && has_dcp(dir / kAccelerateModel); }

bool is_dcp(const fs::path& dir) { return has_dcp(dir) || is_accelerate(dir); }

std::unique_ptr<ShardedSource> open_dcp(const fs::path& dir) {
  std::vector<fs::path> folders{""};
  std::string kind = is_there(dir / kLightningFile) ? "Lightning FSDP (PyTorch DCP)"
                     : is_megatron_format(dir)      ? "Megatron-core (PyTorch DCP)"
                                                    : "PyTorch DCP";
  if (is_accelerate(dir)) {
    kind = "checkpoint of accelerate's FSDP (PyTorch DCP)";
    folders = {kAccelerateModel};
    if (has_dcp(dir / kAccelerateOptimizer)) folders.push_back(kAccelerateOptimizer);
    require(!has_dcp(dir / kAccelerateSecond), "{} holds several models; give one, such as {}",
            dir.string(), (dir / kAccelerateModel).string());
  }
  auto source = std::make_unique<ShardedSource>(dir, kind);
  std::vector<std::string> files, objects;
  StoredValues hyperparameters;
  for (const fs::path& folder : folders) add_dcp(*source, folder, files, objects, hyperparameters);
  if (!hyperparameters.empty()) {
    source->set_hyperparameters([of = source.get(), files, stored = std::move(hyperparameters)] {
      return read_hyperparameters(*of, files, stored);
    });
  }
  source->finish(std::move(files), std::move(objects), true);
  return source;
}

bool is_dcp_safetensors(const fs::path& dir) {
  if (is_there(dir / "model.safetensors") || is_there(dir / "model.safetensors.index.json")) {
    return false;
  }
  return std::ranges::any_of(list_files(dir), is_dcp_shard_name);
}

std::unique_ptr<ShardedSource> open_dcp_safetensors(const fs::path& dir,
                                                    std::optional<std::int64_t> shards) {
  std::map<std::string, DcpTensor> tensors;  // shapes grow with their chunks
  DcpShards found_shards = find_dcp_shards(list_files(dir), dir, shards);
  auto source = std::make_unique<ShardedSource>(dir, "PyTorch DCP as safetensors");
  source->warn_of_loss(std::move(found_shards.warnings));
  const std::vector<std::string>& files = found_shards.names;
  for (std::size_t f = 0; f < files.size(); ++f) {
    const std::string& name = files[f];
    const std::string path = (dir / name).string();
    const SafetensorsHeader header = read_safetensors_header(*source->file(name));
    const Json info = sharding_info(header, path);
    const JsonReader offsets(info, fmt::format("{}: {}", path, kShardingInfo));
    for (const SafetensorsEntry& entry : header.tensors) {
      const Box box{saved_offsets(offsets, entry), entry.shape};
      const auto [found, is_new] =
          tensors.try_emplace(entry.name, DcpTensor{entry.stored_dtype, entry.shape, {}, ""});
      DcpTensor& tensor = found->second;
      require<CorruptCheckpoint>(
          tensor.dtype == entry.stored_dtype && tensor.shape.size() == box.shape.size(),
          "{}: tensor {} is {} of {} dims, but {} of {} in another file", path, entry.name,
          entry.stored_dtype, box.shape.size(), tensor.dtype, tensor.shape.size());
      for (int i = 0; i < box.shape.size(); ++i) {
        tensor.shape[i] = std::max(tensor.shape[i], box.offsets[i] + box.shape[i]);
      }
      tensor.chunks.push_back(
          {box, static_cast<std::uint32_t>(f), entry.begin, entry.end - entry.begin});
    }
  }
  for (auto& [name, tensor] : tensors)
    check_boxes(tensor.shape, tensor.chunks, fmt::format("{}: tensor {}", dir.string(), name));
  if (!shards) check_last_shard(tensors, found_shards.count, dir);
  for (auto& [name, tensor] : tensors) {
    source->add(name, tensor.dtype, tensor.dtype, tensor.shape, std::move(tensor.chunks), "");
  }
  source->finish(std::move(found_shards.names), {}, false);
  return source;
}

}  // namespace tessera::io
