#include "io/checkpoint/shard.h"

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/checkpoint/merge_index.h"
#include "io/pump/box.h"

namespace tessera::io {
namespace {

// Bytes checksummed at once; they are still in the CPU cache when written.
constexpr std::int64_t kWriteAtOnce = std::int64_t{4} << 20;
constexpr std::int64_t kSmallestChunk = std::int64_t{256} << 10;
constexpr std::int64_t kUsualChunk = std::int64_t{16} << 20;
// Estimate: 250 bytes in the rank's part of the index and 400 in the merged index.
constexpr std::int64_t kIndexBytesPerChunk = 650;

void check_part(const TensorPart& part) {
  require(!part.box || is_inside(*part.box, part.shape),
          "part of {}: the box at {} of shape {} is outside shape {}", part.name,
          part.box.value_or(Box{}).offsets, part.box.value_or(Box{}).shape, part.shape);
  const std::int64_t size = numel(part.box ? part.box->shape : part.shape);
  require(part.begin >= 0 && part.begin <= part.end && part.end <= size,
          "part of {}: elements {} to {} exceed shape {}", part.name, part.begin, part.end,
          part.box ? part.box->shape : part.shape);
  require(part.data != nullptr || part.begin == part.end, "part of {}: no data", part.name);
}

std::int64_t byte_count(const TensorPart& part) {
  return (part.end - part.begin) * static_cast<std::int64_t>(dtype_size(part.dtype));
}

/// @param offset  offset of the part in the file
/// @param sent    end of the bytes whose writeback was started; updated
/// @return checksum of each chunk
std::vector<std::uint64_t> write_part(File& file, std::int64_t offset, std::int64_t& sent,
                                      const TensorPart& part, std::int64_t chunk_bytes,
                                      const SaveRequest& request) {
  const auto* const data = static_cast<const char*>(part.data);
  const std::int64_t bytes = byte_count(part);
  std::vector<std::uint64_t> crcs(
      static_cast<std::size_t>((bytes + chunk_bytes - 1) / chunk_bytes));
  for (std::int64_t begin = 0, end; begin < bytes; begin = end) {
    end = std::min(begin + kWriteAtOnce, bytes);
    for (std::int64_t at = begin, n; at < end; at += n) {
      n = std::min(chunk_bytes - at % chunk_bytes, end - at);
      std::uint64_t& crc = crcs[static_cast<std::size_t>(at / chunk_bytes)];
      crc = crc64(data + at, static_cast<std::size_t>(n), crc);
    }
    file.write(data + begin, static_cast<std::size_t>(end - begin));
    if (offset + end - sent >= kWriteAtOnce) {
      file.start_writeback(sent, offset + end - sent);
      sent = offset + end;
    }
    if (request.pulse) request.pulse->fetch_add(1, std::memory_order_relaxed);
  }
  return crcs;
}

}  // namespace

std::string shard_name(int rank, int world_size) {
  return fmt::format("rank-{:05}-of-{:05}.safetensors", rank, world_size);
}

SafetensorsPlan plan_shard_file(const std::vector<SafetensorsSpec>& tensors, std::int64_t step,
                                const std::string& run_id, int rank, int world_size) {
  return plan_safetensors(tensors, {{"step", std::to_string(step)},
                                    {"run_id", run_id},
                                    {"rank", std::to_string(rank)},
                                    {"world_size", std::to_string(world_size)}});
}

std::int64_t chunk_bytes_of(std::int64_t total, std::int64_t wanted) {
  require(wanted == 0 || (wanted >= 8 && std::has_single_bit(static_cast<std::uint64_t>(wanted))),
          "chunks of {} bytes: expected a power of two >= 8", wanted);
  if (wanted > 0) return wanted;
  std::int64_t bytes = kSmallestChunk;
  while (total / bytes > (bytes < kUsualChunk ? 1 << 14 : 1 << 17)) bytes *= 2;
  return bytes;
}

ShardPlan plan_shard(const SaveRequest& request) {
  const std::int64_t smallest = chunk_bytes_of(0, request.chunk_bytes);
  ShardPlan plan;
  std::vector<SafetensorsSpec> specs;
  std::vector<ShardPlan::Entry> stored;
  for (const auto& [section, parts] : request.parts) {
    require(section.is_model() || is_state_name(section.state),
            "optimizer state '{}': expected 1 to 100 letters, digits or '_'", section.state);
    for (const TensorPart& part : parts) {
      check_part(part);
      const TensorRecord tensor{part.dtype, part.shape, {}};
      require(plan.tensors[section].emplace(part.name, tensor).second, "{} has two parts of {}",
              shard_name(request.rank, request.world_size), part.name);
      plan.index_bytes += kIndexBytesPerChunk * (1 + byte_count(part) / smallest) +
                          static_cast<std::int64_t>(part.name.size());
      if (part.begin == part.end) continue;
      specs.push_back({fmt::format("{}/{}", section.name(), part.name), part.dtype,
                       Shape{part.end - part.begin}});
      stored.push_back({section, &part});
    }
  }
  SafetensorsPlan file =
      plan_shard_file(specs, request.step, request.run_id, request.rank, request.world_size);
  plan.preamble = std::move(file.preamble);
  plan.file_bytes = file.file_size;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    plan.entries.push_back(stored[file.order[i]]);
    plan.entries.back().begin = file.tensors[i].begin;
  }
  return plan;
}

std::string write_shard(const SaveRequest& request, const ShardPlan& plan, std::int64_t chunk_bytes,
                        const fs::path& dir) {
  const std::string name = shard_name(request.rank, request.world_size);
  std::map<Section, TensorMap> tensors = plan.tensors;
  File file = File::create(dir / name);
  request.pass("shard-created");
  file.write(plan.preamble.data(), plan.preamble.size());
  std::int64_t sent = 0;
  for (const ShardPlan::Entry& entry : plan.entries) {
    const TensorPart& part = *entry.part;
    const std::vector<std::uint64_t> crcs =
        write_part(file, entry.begin, sent, part, chunk_bytes, request);
    TensorRecord& tensor = tensors.at(entry.section).at(part.name);
    add_chunks(tensor, name, entry.begin, part.begin, part.end, chunk_bytes / tensor.width(), crcs);
    for (Chunk& chunk : tensor.chunks) chunk.box = part.box;
  }
  request.pass("shard-written");
  file.finish();
  sync_directory(dir);
  request.pass("shard-synced");
  Json sections = Json::object();
  for (const auto& [section, named] : tensors) {
    sections[section.name()] = tensors_to_json(named);
  }
  const std::uint64_t crc = crc64(plan.preamble.data(), plan.preamble.size());
  const Json part{{"size", plan.file_bytes},
                  {"header", {{"size", plan.preamble.size()}, {"checksum", format_checksum(crc)}}},
                  {"sections", std::move(sections)}};
  return part.dump();
}

}  // namespace tessera::io
