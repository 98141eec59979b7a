#include "io/data/token_index.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/data/token_file.h"

namespace tessera::io {
namespace {

constexpr const char* kIndexFormat = "tessera tokens";
constexpr int kIndexVersion = 1;
constexpr std::int64_t kMaxTokenIndex = std::int64_t{1} << 30;  // bytes

std::string checksum_of(const OrderedJson& json) {
  const std::string text = json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
  return format_checksum(crc64(text.data(), text.size()));
}

struct Part {
  int number = 0, count = 0;
};

/// Number and count in a name made by part_index_name().
std::optional<Part> part_of_name(const std::string& name) {
  Part part;
  if (std::sscanf(name.c_str(), "part-%5d-of-%5d.json", &part.number, &part.count) != 2 ||
      part.number < 1 || part.number > part.count ||
      name != part_index_name(part.number, part.count))
    return std::nullopt;
  return part;
}

/// Indexes of parts in a directory, in ascending order.
std::vector<Part> parts_in(const fs::path& dir) {
  std::vector<Part> parts;
  for (const fs::path& path : list_directory(dir))
    if (const auto part = part_of_name(path.filename().string())) parts.push_back(*part);
  return parts;
}

}  // namespace

std::int64_t TokenIndex::tokens() const {
  return std::accumulate(shards.begin(), shards.end(), std::int64_t{0},
                         [](std::int64_t sum, const TokenShard& s) { return sum + s.tokens; });
}

std::int64_t TokenIndex::documents() const {
  return std::accumulate(shards.begin(), shards.end(), std::int64_t{0},
                         [](std::int64_t sum, const TokenShard& s) { return sum + s.documents; });
}

std::int64_t TokenIndex::vocab_size() const {
  return command.at("tokenizer").at("vocab_size").get<std::int64_t>();
}

bool TokenIndex::is_wide() const { return needs_wide_tokens(vocab_size()); }

TokenIndex read_token_index(const fs::path& path) {
  const std::string name = path.string();
  const std::string text = read_file(path, kMaxTokenIndex);
  const Json json = parse_json(text, name);
  const JsonReader reader(json, name);
  require<CorruptCheckpoint>(reader.at("format").string() == kIndexFormat,
                             "{}: format \"{}\", expected \"{}\"", name,
                             reader.at("format").string(), kIndexFormat);
  const std::int64_t version = reader.at("version").integer();
  require<Unsupported>(version == kIndexVersion, "{}: version {}, this build reads {}", name,
                       version, kIndexVersion);
  OrderedJson ordered = parse_ordered_json(text, name);
  const std::string expected = reader.at("checksum").string();
  ordered.erase("checksum");
  require<CorruptCheckpoint>(checksum_of(ordered) == expected,
                             "{}: its checksum is {}, not {}: it was damaged or edited", name,
                             checksum_of(ordered), expected);
  reader.at("command").at("tokenizer").at("vocab_size").integer(1);
  TokenIndex index;
  index.command = std::move(ordered.at("command"));
  index.skipped = reader.at("skipped").integer();
  const JsonReader shards = reader.at("shards");
  for (std::size_t i = 0; i < shards.array_size(); ++i) {
    const JsonReader shard = shards.at(i);
    TokenShard& to = index.shards.emplace_back();
    to.file = shard.at("file").string();
    to.tokens = shard.at("tokens").integer(1);
    to.documents = shard.at("documents").integer();
    require<CorruptCheckpoint>(
        is_plain_name(to.file) && parse_checksum(shard.at("checksum").string(), to.crc64),
        "{}: malformed name or checksum", shard.where());
  }
  if (reader.has("next")) {
    const JsonReader next = reader.at("next");
    index.next = {{next.at("file").integer(), next.at("offset").integer(),
                   next.at("line").integer(), next.at("inside").integer(0, 1) == 1},
                  next.at("tokens").integer(),
                  index.skipped};
  }
  return index;
}

void write_token_index(const fs::path& path, const TokenIndex& index) {
  OrderedJson shards = OrderedJson::array();
  for (const TokenShard& shard : index.shards) {
    shards.push_back({{"file", shard.file},
                      {"tokens", shard.tokens},
                      {"documents", shard.documents},
                      {"checksum", format_checksum(shard.crc64)}});
  }
  OrderedJson json{{"format", kIndexFormat},
                   {"version", kIndexVersion},
                   {"dtype", index.is_wide() ? "uint32" : "uint16"},
                   {"tokens", index.tokens()},
                   {"documents", index.documents()},
                   {"skipped", index.skipped},
                   {"shards", std::move(shards)}};
  if (index.next)
    json["next"] = {{"file", index.next->at.file},
                    {"offset", index.next->at.offset},
                    {"line", index.next->at.line},
                    {"inside", index.next->at.inside ? 1 : 0},
                    {"tokens", index.next->tokens}};
  json["command"] = index.command;
  json["checksum"] = checksum_of(json);
  write_file_atomically(path,
                        json.dump(1, ' ', false, OrderedJson::error_handler_t::replace) + "\n");
}

std::string part_index_name(int part, int parts) {
  return fmt::format("part-{:05}-of-{:05}.json", part, parts);
}

std::vector<fs::path> part_indexes(const fs::path& dir) {
  std::vector<fs::path> paths;
  for (const Part& part : parts_in(dir))
    paths.push_back(dir / part_index_name(part.number, part.count));
  return paths;
}

std::string token_shard_name(int part, int parts, std::size_t number) {
  return parts == 1 ? fmt::format("shard-{:06}.bin", number)
                    : fmt::format("shard-{:05}-of-{:05}-{:06}.bin", part, parts, number);
}

std::string command_difference(const OrderedJson& before, const OrderedJson& now) {
  for (const auto& [key, value] : now.items()) {
    if (before.contains(key) && before.at(key) == value) continue;
    const OrderedJson old = before.contains(key) ? before.at(key) : OrderedJson();
    if (key != "sources")
      return fmt::format("{} was {}, and is {} now", key, old.dump(), value.dump());
    for (std::size_t i = 0; i < std::max(old.size(), value.size()); ++i) {
      const OrderedJson was = i < old.size() ? old[i] : OrderedJson("none");
      const OrderedJson is = i < value.size() ? value[i] : OrderedJson("none");
      if (was != is)
        return fmt::format("source {} was {}, and is {} now", i + 1, was.dump(), is.dump());
    }
  }
  return {};
}

TokenIndex read_token_directory(const fs::path& dir) {
  if (const fs::path path = dir / kTokenIndexName; is_there(path)) {
    TokenIndex index = read_token_index(path);
    require<CorruptCheckpoint>(!index.shards.empty(), "{}: no shards", path.string());
    return index;
  }
  const std::vector<Part> parts = parts_in(dir);
  require<IoError>(!parts.empty(),
                   "{} is a directory without {}, which `tessera data tokenize` writes",
                   dir.string(), kTokenIndexName);
  throw IoError("{} is unfinished: {}", dir.string(),
                parts.front().count == 1
                    ? "run the same `tessera data tokenize` again"
                    : "when all parts are done, run `tessera data commit` on it");
}

TokenIndex commit_token_parts(const fs::path& dir) {
  const std::vector<Part> parts = parts_in(dir);
  require<IoError>(!parts.empty(), "{} has no parts to commit{}", dir.string(),
                   is_there(dir / kTokenIndexName) ? "; it is complete" : "");
  const int count = parts.front().count;
  std::vector<int> missing(static_cast<std::size_t>(count));
  std::iota(missing.begin(), missing.end(), 1);
  std::vector<TokenIndex> indexes;
  for (const Part& part : parts) {
    require(part.count == count, "{} has parts of {} and of {}; remove those that are not wanted",
            dir.string(), count, part.count);
    indexes.push_back(read_token_index(dir / part_index_name(part.number, part.count)));
    if (!indexes.back().next) std::erase(missing, part.number);
    indexes.back().command.erase("part");
    const std::string other = command_difference(indexes.front().command, indexes.back().command);
    require(other.empty(), "{}: part {} is of another command than part {}: {}", dir.string(),
            part.number, parts.front().number, other);
  }
  require<IoError>(missing.empty(), "{}: not done: {} {} of {}", dir.string(),
                   missing.size() == 1 ? "part" : "parts", fmt::join(missing, ", "), count);
  TokenIndex whole;
  whole.command = indexes.front().command;
  for (TokenIndex& index : indexes) {
    whole.skipped += index.skipped;
    std::ranges::move(index.shards, std::back_inserter(whole.shards));
  }
  require<IoError>(!whole.shards.empty(), "{}: no document has any text", dir.string());
  for (const TokenShard& shard : whole.shards)
    require<IoError>(is_there(dir / shard.file), "{} is missing", (dir / shard.file).string());
  write_token_index(dir / kTokenIndexName, whole);
  std::error_code ignored;
  for (const fs::path& path : part_indexes(dir)) fs::remove(path, ignored);
  return whole;
}

}  // namespace tessera::io
