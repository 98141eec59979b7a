#include "io/checkpoint/verify.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "core/base/error.h"

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

}  // namespace

std::string VerifyProblem::str() const {
  if (tensor.empty()) return fmt::format("{}: {}", file, what);
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
