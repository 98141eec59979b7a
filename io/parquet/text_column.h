#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::io {

inline constexpr int kParquetPluginVersion = 1;

/// Texts of a column of a Parquet file, one per row. Memory: a page of the column, decompressed.
class TextColumn {
 public:
  virtual ~TextColumn() = default;
  /// Reads the next row.
  /// @param text  nullopt for a null; valid until the next call
  /// @return false at the end
  /// @throws CorruptCheckpoint on a damaged file: after the same row, wherever reading began
  virtual bool next(std::optional<std::string_view>& text) = 0;
  virtual std::int64_t rows() const = 0;
};

/// Reads by the plugin libtessera_parquet.so, or TESSERA_PARQUET_PLUGIN, which needs Apache Arrow.
/// @param first  row at which to begin
/// @throws Unsupported without the plugin, or on an encrypted file; IoError if the file has no text
///   column of this name, or cannot be opened; CorruptCheckpoint if it is no Parquet file, or damaged
std::unique_ptr<TextColumn> open_text_column(const std::string& path, const std::string& column,
                                             std::int64_t first);

/// Whether the name of a file ends in .parquet.
bool is_parquet_name(const std::string& path);

}  // namespace tessera::io
