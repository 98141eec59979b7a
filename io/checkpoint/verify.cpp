#include "io/checkpoint/verify.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "core/base/error.h"
#include "io/safetensors/reader.h"

namespace tessera::io {
namespace {

// Index of the first element whose exponent bits are all ones (infinity or NaN), or -1.
template <typename Bits>
std::int64_t find_non_finite(const void* data, std::int64_t n, Bits exponent) {
  const auto* at = static_cast<const char*>(data);
  for (std::int64_t i = 0; i < n; ++i, at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, at, sizeof(Bits));
    if ((bits & exponent) == exponent) return i;
  }
  return -1;
}

std::int64_t find_non_finite(DType dtype, const void* data, std::int64_t n) {
  switch (dtype) {
    case DType::F64:
      return find_non_finite<std::uint64_t>(data, n, 0x7ff0000000000000ULL);
    case DType::F32:
      return find_non_finite<std::uint32_t>(data, n, 0x7f800000U);
    case DType::BF16:
      return find_non_finite<std::uint16_t>(data, n, 0x7f80U);
    case DType::F16:
      return find_non_finite<std::uint16_t>(data, n, 0x7c00U);
    default:
      return -1;
  }
}

void verify_chunk(const CheckpointReader& reader, const std::string& name,
                  const TensorRecord& tensor, const Chunk& chunk, VerifyReport& report) {
  std::int64_t non_finite = -1;
  try {
    const bool right = reader.scan(tensor, chunk, std::size_t{1} << 20,
                                   [&](std::int64_t begin, const void* data, std::int64_t n) {
                                     if (non_finite >= 0) return;
                                     const auto at = find_non_finite(tensor.dtype, data, n);
                                     if (at >= 0) non_finite = begin + at;
                                   });
    if (!right) {
      report.problems.push_back(
          {chunk.file, name, chunk.begin, chunk.end, "the checksum is wrong"});
    } else if (non_finite >= 0) {
      report.problems.push_back(
          {chunk.file, name, non_finite, non_finite + 1, "the value is not finite"});
    }
  } catch (const Error& error) {
    report.problems.push_back({chunk.file, name, chunk.begin, chunk.end, error.what()});
  }
  report.bytes += chunk.byte_end - chunk.byte_begin;
}

// Other tools read a shard by its own header: that must tell of the same tensors as the index.
void verify_header(const CheckpointReader& reader, const std::string& file, VerifyReport& report) {
  const auto problem = [&](const std::string& tensor, const std::string& what) {
    report.problems.push_back({file, tensor, 0, 0, what});
  };
  try {
    const SafetensorsReader shard(reader.path() / file, Links::Refuse);
    const auto rank = shard.header().metadata.find("rank");
    require<CorruptCheckpoint>(rank == shard.header().metadata.end() ||
                                   !file.starts_with("rank-") ||
                                   file.starts_with(fmt::format("rank-{:0>5}-", rank->second)),
                               "is of rank {}: shards were exchanged",
                               rank == shard.header().metadata.end() ? "" : rank->second);
    std::map<std::string, const SafetensorsEntry*> entries;
    for (const SafetensorsEntry& entry : shard.header().tensors) entries[entry.name] = &entry;
    std::map<std::string, std::int64_t> indexed;  // bytes of each entry that chunks lie in
    for (const Section section : kSections) {
      if (!reader.has(section)) continue;
      for (const auto& [name, tensor] : reader.tensors(section)) {
        const std::string full = fmt::format("{}/{}", section_name(section), name);
        for (const Chunk& chunk : tensor.chunks) {
          if (chunk.file != file || chunk.begin == chunk.end) continue;
          const auto found = entries.find(full);
          if (found == entries.end()) {
            problem(full, "the file's own header does not list it");
            continue;
          }
          const SafetensorsEntry* const entry = found->second;
          if (entry->dtype != tensor.dtype) {
            problem(full, fmt::format("the file's own header says {}, the index {}",
                                      entry->stored_dtype, tensor.dtype));
          } else if (chunk.byte_begin < entry->begin || entry->end < chunk.byte_end) {
            problem(full, fmt::format("the file's own header puts it at bytes {} to {}, the index "
                                      "at {} to {}",
                                      entry->begin, entry->end, chunk.byte_begin, chunk.byte_end));
          }
          indexed[full] += chunk.byte_end - chunk.byte_begin;
        }
      }
    }
    for (const SafetensorsEntry& entry : shard.header().tensors) {
      const std::int64_t bytes = indexed[entry.name];
      if (bytes == entry.end - entry.begin) continue;
      problem(entry.name, fmt::format("the file holds {} bytes of it, the index tells of {}",
                                      entry.end - entry.begin, bytes));
    }
  } catch (const Error& error) {
    problem("", error.what());
  }
}

}  // namespace

std::string VerifyProblem::str() const {
  if (tensor.empty()) return fmt::format("{}: {}", file, what);
  if (begin == end) return fmt::format("{}: tensor {}: {}", file, tensor, what);
  return fmt::format("{}: tensor {}, elements {} to {}: {}", file, tensor, begin, end, what);
}

VerifyReport verify_checkpoint(const CheckpointReader& reader) {
  VerifyReport report;
  for (const Section section : kSections) {
    if (!reader.has(section)) continue;
    for (const auto& [name, tensor] : reader.tensors(section)) {
      ++report.tensors;
      const std::string full = fmt::format("{}/{}", section_name(section), name);
      for (const Chunk& chunk : tensor.chunks) verify_chunk(reader, full, tensor, chunk, report);
    }
  }
  for (const auto& [file, size] : reader.index().files) verify_header(reader, file, report);
  if (reader.index().trainer) {
    try {
      reader.trainer_json();
    } catch (const Error& error) {
      report.problems.push_back({reader.index().trainer->file, "", 0, 0, error.what()});
    }
  }
  return report;
}

}  // namespace tessera::io
