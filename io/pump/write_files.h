#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "io/pump/layout.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// A range of elements of a tensor in an output file.
struct OutputPart {
  const TensorSource* source = nullptr;  ///< outlives write_files
  std::string source_name;               ///< name of the tensor in `source`
  std::int64_t begin = 0, end = 0;       ///< elements, row-major
  DType dtype = DType::F32;              ///< in the output
  std::int64_t offset = 0;            ///< byte in the file, a multiple of the dtype's size if Plain
  std::int64_t sum_elements = 0;      ///< elements per checksum; 0: no checksums
  std::vector<std::uint64_t> sums{};  ///< CRC-64 of each run of sum_elements; set by write_files
  std::optional<Swap> swap{};         ///< of all elements of the tensor; begin is 0. No checksums
  Encoding encoding = Encoding::Plain;  ///< Q8_0 of elements as `dtype`, F32. No checksums
  /// Q8_0: the source's tensor is the bytes of its blocks, as U8 without checksums.
  Encoding stored = Encoding::Plain;
  /// Offsets in the file that receive the CRC-32 of the part's bytes, in 4 bytes. Zeros in literals.
  std::vector<std::int64_t> crc32_at{};

  std::int64_t width() const { return static_cast<std::int64_t>(dtype_size(dtype)); }
  EncodingUnit unit() const { return encoding_unit(encoding, dtype); }
  std::int64_t bytes() const { return (end - begin) / unit().elements * unit().bytes; }
};

/// A file to write: a preamble, then parts and literals. Gaps become zeros.
struct OutputFile {
  std::string name;
  std::string preamble;
  std::int64_t size = 0;
  std::vector<OutputPart> parts;    ///< in file order
  std::vector<Literal> literals{};  ///< in file order, between parts
};

struct WriteOptions {
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes of all buffers
  int jobs = 1;                                   ///< threads
  bool direct_io = true;  ///< bypass the page cache where the file system allows
  /// Called after each block; calls are serialized. Returning false stops write_files.
  std::function<bool(std::int64_t bytes)> wrote{};
  /// Called for each complete and synced file with its CRC-64; calls are serialized.
  std::function<void(std::size_t file, std::uint64_t crc64)> finished{};
};

/// Minimum memory per thread, in bytes.
inline constexpr std::int64_t kLeastJobMemory = std::int64_t{128} << 10;

/// Writes files into a directory and syncs them. Replaces existing files. Works in blocks of up to
/// 4 MiB, gathered from verified and converted chunks. Uses fewer than `jobs` threads if `memory`
/// is less than kLeastJobMemory for each.
/// @param chosen  indices of the files to write, ascending
/// Elements are read once each, also those of swapped parts.
/// @return false if `wrote` stopped it; unfinished files are then incomplete
/// @throws IoError, CorruptCheckpoint naming file, tensor and elements; InvalidArgument naming a
///         tensor with values that F16, or a scale of Q8_0, cannot hold; errors of the sources
bool write_files(const fs::path& dir, std::vector<OutputFile>& files,
                 const std::vector<std::size_t>& chosen, const WriteOptions& options);

/// CRC-64 of a file. Uses only memory, jobs and direct_io of the options.
/// @throws IoError, CorruptCheckpoint if it is not a regular file
std::uint64_t sum_file(const fs::path& path, const WriteOptions& options);

}  // namespace tessera::io
