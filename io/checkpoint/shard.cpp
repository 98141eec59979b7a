#include "io/checkpoint/shard.h"

#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "io/base/crc64.h"
#include "io/checkpoint/index.h"
#include "io/safetensors/dtype.h"
#include "io/safetensors/writer.h"

namespace tessera::io {
namespace {

// Checksum and write take turns on pieces that fit the cache.
constexpr std::size_t kPiece = std::size_t{4} << 20;
// Of a part in the rank's part of the index and in the index itself: about 250 bytes and 400.
constexpr std::int64_t kIndexBytesPerPart = 650;

const std::vector<TensorPart>& parts_of(const SaveRequest& request, Section section) {
  switch (section) {
    case Section::ExpAvg:
      return request.exp_avg;
    case Section::ExpAvgSq:
      return request.exp_avg_sq;
    case Section::Model:
      break;
  }
  return request.model;
}

void check_part(const TensorPart& part) {
  const std::int64_t size = numel(part.shape);
  require(part.begin >= 0 && part.begin <= part.end && part.end <= size,
          "part of {}: elements {} to {} are outside shape {}", part.name, part.begin, part.end,
          part.shape);
  require(part.data != nullptr || part.begin == part.end, "part of {}: no data", part.name);
}

std::uint64_t write_part(File& file, const TensorPart& part, const SaveRequest& request) {
  const auto* data = static_cast<const char*>(part.data);
  std::size_t left = static_cast<std::size_t>(part.end - part.begin) * dtype_size(part.dtype);
  std::uint64_t crc = 0;
  for (std::size_t n; left > 0; left -= n, data += n) {
    n = std::min(left, kPiece);
    crc = crc64(data, n, crc);
    file.write(data, n);
    if (request.pulse) request.pulse->fetch_add(1, std::memory_order_relaxed);
  }
  return crc;
}

}  // namespace

std::string shard_name(int rank, int world_size) {
  return fmt::format("rank-{:05}-of-{:05}.safetensors", rank, world_size);
}

ShardPlan plan_shard(const SaveRequest& request) {
  ShardPlan plan;
  plan.sections = Json::object();
  std::vector<SafetensorsSpec> specs;
  std::map<std::string, ShardPlan::Entry> stored;  // by name in the shard
  for (const Section section : kSections) {
    for (const TensorPart& part : parts_of(request, section)) {
      check_part(part);
      Json& tensor = plan.sections[std::string(section_name(section))][part.name];
      require(tensor.is_null(), "{} has two parts of {}",
              shard_name(request.rank, request.world_size), part.name);
      tensor = {{"dtype", safetensors_dtype_name(part.dtype)},
                {"shape", std::vector<std::int64_t>(part.shape.begin(), part.shape.end())},
                {"chunks", Json::array()}};
      plan.index_bytes += kIndexBytesPerPart + static_cast<std::int64_t>(part.name.size());
      if (part.begin == part.end) continue;
      const std::string name = fmt::format("{}/{}", section_name(section), part.name);
      specs.push_back({name, part.dtype, Shape{part.end - part.begin}});
      stored[name] = {section, &part, 0, 0};
    }
  }
  SafetensorsPlan file =
      plan_safetensors(specs, {{"step", std::to_string(request.step)},
                               {"run_id", request.run_id},
                               {"rank", std::to_string(request.rank)},
                               {"world_size", std::to_string(request.world_size)}});
  plan.preamble = std::move(file.preamble);
  plan.file_bytes = file.file_size;
  for (const SafetensorsEntry& entry : file.tensors) {
    ShardPlan::Entry& planned = plan.entries.emplace_back(stored.at(entry.name));
    planned.begin = entry.begin;
    planned.end = entry.end;
  }
  return plan;
}

Json write_shard(const SaveRequest& request, const ShardPlan& plan, const fs::path& dir) {
  const auto pass = [&](std::string_view point) {
    if (request.at_point) request.at_point(point);
  };
  const std::string name = shard_name(request.rank, request.world_size);
  Json sections = plan.sections;
  File file = File::create(dir / name);
  pass("shard-created");
  file.write(plan.preamble.data(), plan.preamble.size());
  for (const ShardPlan::Entry& entry : plan.entries) {
    const TensorPart& part = *entry.part;
    const std::uint64_t crc = write_part(file, part, request);
    sections[std::string(section_name(entry.section))][part.name]["chunks"].push_back(
        {{"file", name},
         {"bytes", {entry.begin, entry.end}},
         {"elements", {part.begin, part.end}},
         {"checksum", format_checksum(crc)}});
  }
  pass("shard-written");
  file.finish();
  sync_directory(dir);
  pass("shard-synced");
  return {{"size", plan.file_bytes},
          {"header",
           {{"size", plan.preamble.size()},
            {"checksum", format_checksum(crc64(plan.preamble.data(), plan.preamble.size()))}}},
          {"sections", std::move(sections)}};
}

}  // namespace tessera::io
