// Source of the names: _gen_file_name in torch/distributed/checkpoint/_hf_utils.py. PyTorch's
// HuggingFaceStorageWriter numbers ranks from 1 and writes no file for a rank without data.

#include "io/dcp/shard_names.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::size_t kLeastDigits = 5, kMostDigits = 9;

struct Numbers {
  std::int64_t shard = 0, model = 0, models = 0;
};

bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

/// Removes and returns a number >= 1, padded with zeros to five digits; 0 if there is none.
std::int64_t take_number(std::string_view& text) {
  const std::size_t n = std::min(text.find_first_not_of("0123456789"), text.size());
  if (n < kLeastDigits || n > kMostDigits || (n > kLeastDigits && text[0] == '0')) return 0;
  std::int64_t number = 0;
  std::from_chars(text.data(), text.data() + n, number);
  text.remove_prefix(n);
  return number;
}

std::optional<Numbers> parse(std::string_view name) {
  Numbers numbers;
  const bool fits = take(name, "shard-") && (numbers.shard = take_number(name)) > 0 &&
                    take(name, "-model-") && (numbers.model = take_number(name)) > 0 &&
                    take(name, "-of-") && (numbers.models = take_number(name)) > 0 &&
                    name == ".safetensors" && numbers.model <= numbers.models;
  return fits ? std::optional(numbers) : std::nullopt;
}

std::string file_name(std::int64_t shard, std::int64_t model, std::int64_t models) {
  return fmt::format("shard-{:05}-model-{:05}-of-{:05}.safetensors", shard, model, models);
}

/// Smallest number >= 1 that is not in the set.
std::int64_t first_gap(const std::set<std::int64_t>& numbers) {
  std::int64_t gap = 1;
  while (numbers.contains(gap)) ++gap;
  return gap;
}

void check_shards(const std::set<std::int64_t>& found, std::int64_t models, const fs::path& dir,
                  std::optional<std::int64_t> shards) {
  const auto n = static_cast<std::int64_t>(found.size());
  const std::int64_t gap = first_gap(found);
  const std::string missing = (dir / file_name(gap, 1, models)).string();
  if (shards) {
    require(*shards >= n, "{} holds {} shards, but --shards says {}", dir.string(), n, *shards);
    require<CorruptCheckpoint>(*shards == n, "{} is missing: found {} shards, but --shards says {}",
                               missing, n, *shards);
    return;
  }
  require<CorruptCheckpoint>(gap > *found.rbegin(),
                             "{} is missing, but shard {} exists; find it, or, if its rank had "
                             "nothing to save, `tessera consolidate` the others with --shards {}",
                             missing, *found.rbegin(), n);
}

}  // namespace

bool is_dcp_shard_name(std::string_view name) {
  return name.starts_with("shard-") && name.ends_with(".safetensors");
}

DcpShards find_dcp_shards(const std::vector<std::string>& names, const fs::path& dir,
                          std::optional<std::int64_t> shards) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::string> files;  // by shard and model file
  std::set<std::int64_t> found, models;
  std::int64_t model_count = 0;
  for (const std::string& name : names) {
    if (!is_dcp_shard_name(name)) continue;
    const auto numbers = parse(name);
    require<CorruptCheckpoint>(
        numbers.has_value(),
        "{} does not have the name of a shard (shard-00001-model-00001-of-00001.safetensors); move "
        "it away if it is not one",
        (dir / name).string());
    require<CorruptCheckpoint>(files.empty() || numbers->models == model_count,
                               "{} is one of {} model files, but {} is one of {}: they belong to "
                               "two checkpoints",
                               (dir / name).string(), numbers->models, files.begin()->second,
                               model_count);
    model_count = numbers->models;
    found.insert(numbers->shard);
    models.insert(numbers->model);
    files.emplace(std::pair(numbers->shard, numbers->model), name);
  }
  DcpShards result;
  if (files.empty()) return result;
  check_shards(found, model_count, dir, shards);
  const std::int64_t no_model = first_gap(models);
  require<CorruptCheckpoint>(
      no_model > model_count || shards,
      "{} is missing, as are other shards of model file {} of {}; find them, or, if no rank had "
      "anything to save in it, confirm with --shards {} that no shard is missing",
      (dir / file_name(1, no_model, model_count)).string(), no_model, model_count, found.size());

  result.count = found.size();
  const auto n = static_cast<std::int64_t>(found.size());
  if (!shards) {
    result.warnings.push_back(fmt::format(
        "{} shards; their number is not recorded: if the last ones are missing, tensors are "
        "shorter or absent; give the number of ranks that saved with --shards",
        n));
  }
  const std::int64_t absent = n * model_count - static_cast<std::int64_t>(files.size());
  for (auto shard = found.begin(); absent > 0 && shard != found.end(); ++shard) {
    std::int64_t model = 1;
    while (model <= model_count && files.contains({*shard, model})) ++model;
    if (model > model_count) continue;
    result.warnings.push_back(
        fmt::format("{} is missing{}: either its rank had nothing to save in it, or it was lost",
                    file_name(*shard, model, model_count),
                    absent == 1   ? ""
                    : absent == 2 ? ", as is another"
                                  : fmt::format(", as are {} others", absent - 1)));
    break;
  }
  for (auto& [numbers, name] : files) result.names.push_back(std::move(name));
  return result;
}

}  // namespace tessera::io
