#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/shape.h"
#include "io/pickle/pickle_writer.h"
#include "io/torch/torch_archive.h"
#include "io/zip/zip_writer.h"

namespace tessera::io {

/// Row of a dtype by its name in safetensors. @throws Unsupported if PyTorch has none
const TorchDType& torch_from_safetensors(std::string_view name);

/// A storage of a torch.save archive: bytes that are known, or written later.
struct TorchStorage {
  std::int64_t bytes = 0;
  std::string content = {};  ///< empty: written later
};

/// Pickles the description of a contiguous tensor that is all of a storage.
/// @param storage  number of the storage in the archive, from 0
void pickle_tensor(PickleWriter& pickle, const TorchDType& dtype, std::int64_t width,
                   const Shape& shape, std::size_t storage);

/// Lays out an archive that torch.load(weights_only=True) opens, also with mmap. Its entries are in
/// the folder kExportFolder.
/// @param begin   offset of the archive in its file, a multiple of ZipWriter::kAlignment
/// @param pickle  of the object, with tensors from pickle_tensor()
/// @return finished; its data() are those of the storages that are written later and not empty
ZipWriter plan_torch_archive(std::int64_t begin, std::string_view pickle,
                             const std::vector<TorchStorage>& storages);

/// Folder in the archives of exports, which names tessera as their writer.
inline constexpr std::string_view kExportFolder = "tessera_export";
/// Whether a file begins with an archive of an export; false if it cannot be read.
bool is_torch_of_export(const fs::path& file);

}  // namespace tessera::io
