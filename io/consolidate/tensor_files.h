#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/base/file.h"
#include "io/pump/layout.h"
#include "io/pump/tensor_source.h"
#include "io/safetensors/writer.h"

namespace tessera::io {

struct ExportTensor {
  std::string name;  ///< in the output
  Shape shape;
  DType stored = DType::F32;             ///< dtype at the source
  DType written = DType::F32;            ///< dtype in the output
  const TensorSource* source = nullptr;  ///< outlives the export
  std::string source_name;               ///< name at the source
  /// safetensors name of a dtype that tessera lacks and copies unchanged; `stored` and `written`
  /// are then the integer dtype of the same size. Else empty.
  std::string opaque_dtype = {};
  std::optional<Swap> swap = {};        ///< order in the output
  Encoding encoding = Encoding::Plain;  ///< of `written`
  /// Q8_0: the source has the bytes of blocks, as U8. `stored` is then F32.
  Encoding stored_encoding = Encoding::Plain;
  std::string kind = {};  ///< "exp_avg" of "exp_avg/NAME"; empty: not optimizer state of a weight

  /// Name of the weight, also of one that this is state of.
  std::string weight() const { return kind.empty() ? name : name.substr(kind.size() + 1); }
  std::int64_t bytes_of(std::int64_t elements) const {
    const EncodingUnit unit = encoding_unit(encoding, written);
    return elements / unit.elements * unit.bytes;
  }
  std::int64_t bytes() const { return bytes_of(numel(shape)); }
};

/// Elements of a tensor in a file.
struct ExportPart {
  const ExportTensor* tensor = nullptr;
  std::int64_t offset = 0;                  ///< byte in the file
  std::int64_t begin = 0, end = 0;          ///< elements, row-major
  std::vector<std::int64_t> crc32_at = {};  ///< see OutputPart

  std::int64_t bytes() const { return tensor->bytes_of(end - begin); }
};

/// A file with tensors of an export.
struct ExportFile {
  std::string name;
  std::string preamble;  ///< first bytes
  std::int64_t size = 0;
  std::vector<ExportPart> parts;  ///< in file order
  std::vector<Literal> literals;  ///< in file order, between parts

  /// Adds a whole tensor.
  void add(const ExportTensor& tensor, std::int64_t offset,
           std::vector<std::int64_t> crc32_at = {}) {
    parts.push_back({&tensor, offset, 0, numel(tensor.shape), std::move(crc32_at)});
  }
};

/// Tensors of files of at most max_shard_size bytes of tensors, filled greedily in order of names. A
/// larger tensor is alone.
std::vector<std::vector<const ExportTensor*>> fill_files(const std::vector<ExportTensor>& tensors,
                                                         std::int64_t max_shard_size);
/// @throws InvalidArgument if a name is not UTF-8, which programs that read exports need
void require_utf8(const std::string& name);
/// STEM.EXTENSION or, of several files, STEM-00001-of-0000N.EXTENSION. @param extension  with dot
std::string numbered_name(std::string_view stem, std::string_view extension, std::size_t i,
                          std::size_t files);
/// Whether a name is one of numbered_name(), or of the index of such files.
bool is_file_of(std::string_view name, std::string_view stem, std::string_view extension);

/// Lays out STEM.safetensors or, if the tensors exceed max_shard_size bytes,
/// STEM-00001-of-0000N.safetensors and so on, filled greedily in order of names. A larger tensor
/// has its own file. Writes nothing.
/// @param tensors   at least one; they outlive the result
/// @param metadata  metadata of each file; the key "writer" is added
std::vector<ExportFile> plan_tensor_files(const std::vector<ExportTensor>& tensors,
                                          const std::string& stem, std::int64_t max_shard_size,
                                          std::map<std::string, std::string> metadata = {});

/// Whether a safetensors file names tessera as its writer; false if it cannot be read.
bool is_written_by_export(const fs::path& file);

/// Content of an index, such as model.safetensors.index.json.
std::string tensor_files_index(std::span<const ExportFile> files);

}  // namespace tessera::io
