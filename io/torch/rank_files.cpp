#include "io/torch/rank_files.h"

#include <algorithm>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "io/pump/box.h"
#include "io/torch/saved_state.h"

namespace tessera::io {
namespace {

// Maximum number of parts that share a row of dim 0: of a tensor sharded along a later dim, one per
// rank.
constexpr std::size_t kMaxPartsOfRow = 4096;
constexpr std::int64_t kCompared = std::int64_t{1} << 20;  // bytes at once
constexpr const char* kConfigFolder = "huggingface";       // of verl

struct RankName {
  std::string prefix, suffix;        // around the rank
  std::int64_t rank = 0, world = 0;  // world 0: not in the name
};

std::optional<RankName> parse_rank_name(const std::string& name) {
  static const std::regex kPatterns[] = {
      std::regex(R"((model_world_size_(\d{1,9})_rank_)(\d{1,9})(\.pt))"),
      std::regex(R"((pytorch_model_fsdp(?:_\d{1,9})?()_rank)(\d{1,9})(\.bin))")};
  std::smatch match;
  for (const std::regex& pattern : kPatterns) {
    if (!std::regex_match(name, match, pattern)) continue;
    return RankName{match[1], match[4], std::stoll(match[3]),
                    match[2].length() == 0 ? 0 : std::stoll(match[2])};
  }
  return std::nullopt;
}

// Whether a name is that of one of several files: of Hugging Face, or of DeepSpeed.
bool is_part_name(const std::string& name) {
  static const std::regex kPart(
      R"(.*-\d{5}-of-(?!00001\b)\d{5}\..*|.*(mp_rank|layer)_\d+.*_(model|optim)_states\.pt)");
  return std::regex_match(name, kPart);
}

// Names of the files of ranks 0, 1, ...
std::vector<std::string> find_rank_files(const fs::path& dir) {
  std::map<std::int64_t, std::string> names;  // by rank
  std::optional<RankName> first;
  for (const fs::path& path : list_directory(dir)) {
    std::string name = path.filename().string();
    const auto parsed = parse_rank_name(name);
    if (!parsed) continue;
    if (!first) first = parsed;
    require<CorruptCheckpoint>(parsed->prefix == first->prefix,
                               "{} has files of several saves, {}*{} and {}*{}; give a directory "
                               "with one of them",
                               dir.string(), first->prefix, first->suffix, parsed->prefix,
                               parsed->suffix);
    require<CorruptCheckpoint>(parsed->world == 0 || parsed->rank < parsed->world,
                               "{}: rank {} of {} ranks", path.string(), parsed->rank,
                               parsed->world);
    const auto [same, is_new] = names.emplace(parsed->rank, std::move(name));
    require<CorruptCheckpoint>(is_new, "{} and {} are of one rank", path.string(), same->second);
  }
  const std::int64_t ranks = !first || first->world > 0 ? first->world : names.rbegin()->first + 1;
  std::vector<std::string> files;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto found = names.find(rank);
    require<CorruptCheckpoint>(found != names.end(),
                               "{}: {}{}{} is missing; {} of {} ranks have a file", dir.string(),
                               first->prefix, rank, first->suffix, names.size(), ranks);
    files.push_back(found->second);
  }
  return files;
}

/// Tensors assembled from the states of all ranks.
class Assembly {
 public:
  Assembly(std::unique_ptr<ShardedSource> source, std::vector<std::string> files)
      : source_(std::move(source)),
        files_(std::move(files)),
        where_(files_.size() == 1 ? path(0) : source_->path().string()) {}

  void add(std::uint32_t file, const SavedState& state) {
    if (file == 0)  // ranks have the same
      source_->set_hyperparameters([found = state.hyperparameters] { return found; });
    objects_.insert(state.objects.begin(), state.objects.end());
    for (const SavedTensor& tensor : state.tensors) {
      const auto [found, is_new] = wholes_.try_emplace(tensor.name, Whole{tensor, file, {}});
      Whole& whole = found->second;
      if (is_new) whole.tensor.stored.clear();
      require<CorruptCheckpoint>(
          whole.tensor.dtype == tensor.dtype && whole.tensor.shape == tensor.shape &&
              whole.tensor.is_part == tensor.is_part,
          "{}: tensor {} is {} {} of {}, but {} {} of {} in {}", path(file), tensor.name,
          form(tensor), tensor.dtype, tensor.shape, form(whole.tensor), whole.tensor.dtype,
          whole.tensor.shape, path(whole.file));
      for (const SavedTensor::Stored& stored : tensor.stored) add_block(whole, stored, file);
    }
  }

  std::unique_ptr<ShardedSource> finish() {
    const bool has_parts =
        std::ranges::any_of(wholes_, [](const auto& entry) { return entry.second.tensor.is_part; });
    require<CorruptCheckpoint>(
        different_.empty() || has_parts,
        "{}: {}, and may be parts of larger ones, which plain tensors do not say; save DTensors or "
        "whole tensors",
        where_, different_);
    if (!different_.empty()) {
      source_->warn({fmt::format("{}: {}; the first are written", where_, different_)});
    }
    for (auto& [name, whole] : wholes_) {
      const SavedTensor& tensor = whole.tensor;
      std::vector<const Box*> boxes;
      for (const StoredBlock& block : whole.blocks) boxes.push_back(&block.box);
      check_boxes(tensor.shape, boxes, kMaxPartsOfRow, fmt::format("{}: tensor {}", where_, name));
      source_->add(name, tensor.dtype, safetensors_from_torch(tensor.dtype), tensor.shape,
                   std::move(whole.blocks), tensor.top_key);
    }
    source_->finish(std::move(files_), {objects_.begin(), objects_.end()}, false);
    return std::move(source_);
  }

 private:
  struct Whole {
    SavedTensor tensor;               // without `stored`
    std::uint32_t file = 0;           // the first with it
    std::vector<StoredBlock> blocks;  // by offsets
  };
  static const char* form(const SavedTensor& tensor) {
    return tensor.is_part ? "a part of" : "a whole";
  }
  std::string path(std::uint32_t file) const { return (source_->path() / files_[file]).string(); }

  void add_block(Whole& whole, const SavedTensor::Stored& stored, std::uint32_t file) {
    const auto place = std::ranges::lower_bound(
        whole.blocks, stored.box.offsets,
        [](const Shape& a, const Shape& b) { return std::ranges::lexicographical_compare(a, b); },
        [](const StoredBlock& block) { return block.box.offsets; });
    if (place == whole.blocks.end() || place->box != stored.box) {
      whole.blocks.insert(
          place, {stored.box, file, 0, 0, std::make_shared<const TorchTensor>(stored.tensor)});
    } else if (different_.empty() && differ(*place->known, place->file, stored.tensor, file)) {
      different_ = fmt::format(
          "ranks saved different data for the same elements, such as those of "
          "{} at {} in {} and {}",
          whole.tensor.name, stored.box.offsets, files_[place->file], files_[file]);
    }
  }

  // Whether two copies of elements differ. Compares their bytes only where the checksums of the
  // storages around them differ, and only if they are contiguous.
  bool differ(const TorchTensor& a, std::uint32_t file_a, const TorchTensor& b,
              std::uint32_t file_b) const {
    const auto size_of = [](const TorchTensor& t) { return t.storage_end - t.storage_begin; };
    if (a.strides != b.strides || a.strides != contiguous_strides(a.shape)) return false;
    if (a.crc32 && a.crc32 == b.crc32 && a.begin - a.storage_begin == b.begin - b.storage_begin &&
        size_of(a) == size_of(b)) {
      return false;
    }
    const auto bytes = numel(a.shape) * static_cast<std::int64_t>(dtype_size(a.carrier));
    if (a.crc32 && b.crc32 && size_of(a) == bytes && size_of(b) == bytes) return a.crc32 != b.crc32;
    const auto first = source_->file(files_[file_a]), second = source_->file(files_[file_b]);
    const ByteRange one(*first, a.begin, bytes), other(*second, b.begin, bytes);
    for (std::int64_t at = 0; at < bytes; at += kCompared) {
      const std::int64_t n = std::min(kCompared, bytes - at);
      if (one.read(at, n) != other.read(at, n)) return true;
    }
    return false;
  }

  std::unique_ptr<ShardedSource> source_;
  std::vector<std::string> files_;
  const std::string where_;
  std::map<std::string, Whole> wholes_;
  std::set<std::string> objects_;
  std::string different_;
};

}  // namespace

bool is_rank_files(const fs::path& dir) {
  return std::ranges::any_of(list_directory(dir), [](const fs::path& path) {
    return parse_rank_name(path.filename().string()).has_value();
  });
}

std::unique_ptr<ShardedSource> open_rank_files(const fs::path& dir) {
  auto source = std::make_unique<ShardedSource>(dir, "PyTorch FSDP checkpoint of rank files");
  if (is_there(dir / kConfigFolder)) source->set_config_dir(dir / kConfigFolder);
  ShardedSource& files = *source;
  const std::vector<std::string> names = find_rank_files(dir);
  Assembly assembly(std::move(source), names);
  for (std::uint32_t rank = 0; rank < names.size(); ++rank) {
    const auto file = files.file(names[rank]);
    assembly.add(rank, read_saved_state(ByteRange(*file, 0, file->size())));
  }
  return assembly.finish();
}

bool is_saved_file(const fs::path& path) {
  constexpr std::string_view kExtensions[] = {".ckpt", ".pt", ".pth", ".bin"};
  std::error_code error;
  return fs::is_regular_file(path, error) &&
         std::ranges::find(kExtensions, path.extension().string()) != std::end(kExtensions);
}

std::unique_ptr<ShardedSource> open_saved_file(const fs::path& file) {
  const std::string name = file.filename().string();
  require(!parse_rank_name(name) && !is_part_name(name),
          "{} is one of several files of a model; give the directory with all of them",
          file.string());
  const File opened = File::open(file);
  const SavedState state = read_saved_state(ByteRange(opened, 0, opened.size()));
  const fs::path dir = file.has_parent_path() ? file.parent_path() : fs::path(".");
  auto source = std::make_unique<ShardedSource>(
      dir, state.lightning ? "PyTorch Lightning checkpoint" : "PyTorch file");
  source->set_where(file.string());
  Assembly assembly(std::move(source), {file.filename().string()});
  assembly.add(0, state);
  return assembly.finish();
}

}  // namespace tessera::io
