#include <arrow/memory_pool.h>
#include <fmt/ranges.h>
#include <parquet/column_reader.h>
#include <parquet/exception.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>
#include <parquet/properties.h>
#include <parquet/schema.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/base/error.h"
#include "io/parquet/text_column.h"

#define TESSERA_EXPORT extern "C" __attribute__((visibility("default")))

namespace tessera::io {
namespace {

constexpr std::int64_t kReadBytes = std::int64_t{256} << 10;
constexpr std::int64_t kRowsAtOnce = 64;

parquet::ReaderProperties reader_properties() {
  parquet::ReaderProperties properties(arrow::system_memory_pool());
  properties.enable_buffered_stream();  // else a row group's whole column is read at once
  properties.set_buffer_size(kReadBytes);
  properties.set_page_checksum_verification(true);
  return properties;
}

/// Rethrows the exception that is being handled as an error of tessera.
[[noreturn]] void rethrow(const std::string& place) {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const parquet::ParquetStatusException& error) {
    const auto& detail = error.status().detail();
    const bool of_system =
        detail != nullptr && std::string_view(detail->type_id()) == "arrow::ErrnoDetail";
    if (of_system) throw IoError("{}: {}", place, error.what());
    throw CorruptCheckpoint("{}: {}", place, error.what());
  } catch (const parquet::ParquetException& error) {
    throw CorruptCheckpoint("{}: {}", place, error.what());
  }
}

bool is_text(const parquet::ColumnDescriptor& column) {
  const auto& type = column.logical_type();
  return column.physical_type() == parquet::Type::BYTE_ARRAY &&
         column.max_repetition_level() == 0 &&
         (type == nullptr || type->is_none() || type->is_string() || type->is_JSON() ||
          type->is_enum());
}

int find_column(const parquet::SchemaDescriptor& schema, const std::string& path,
                const std::string& name) {
  std::vector<std::string> texts;
  for (int i = 0; i < schema.num_columns(); ++i) {
    const parquet::ColumnDescriptor& column = *schema.Column(i);
    const std::string here = column.path()->ToDotString();
    const bool is_list = column.max_repetition_level() > 0;
    if (is_text(column)) {
      if (here == name) return i;
      texts.push_back(here);
    } else if (here == name || (is_list && here.starts_with(name + "."))) {
      throw IoError("{}: column \"{}\" holds {}, not one text per row", path, name,
                    is_list ? "lists" : parquet::TypeToString(column.physical_type()));
    }
  }
  throw IoError("{} has no column \"{}\"; --field names another, of its text columns: {}", path,
                name, texts.empty() ? "none" : fmt::format("{}", fmt::join(texts, ", ")));
}

class ArrowTextColumn final : public TextColumn {
 public:
  ArrowTextColumn(const std::string& path, const std::string& name, std::int64_t first)
      : path_(path), name_(name) {
    try {
      reader_ = parquet::ParquetFileReader::OpenFile(path, false, reader_properties());
      column_ = find_column(*reader_->metadata()->schema(), path, name);
      max_level_ = reader_->metadata()->schema()->Column(column_)->max_definition_level();
      for (; next_group_ < groups() && first >= rows_of(next_group_); ++next_group_)
        first -= rows_of(next_group_);
    } catch (...) {
      rethrow(path + " can't be read as a Parquet file");
    }
    // Read rather than skipped, so that damage ends the texts after the same row.
    for (std::optional<std::string_view> ignored; first > 0 && next(ignored);) --first;
  }

  bool next(std::optional<std::string_view>& text) override {
    while (at_ == levels_read_)
      if (!read()) return false;
    text.reset();
    if (max_level_ == 0 || levels_[at_] == max_level_) {
      const parquet::ByteArray& value = values_[value_++];
      text = std::string_view(reinterpret_cast<const char*>(value.ptr), value.len);
    }
    ++at_;
    return true;
  }

  std::int64_t rows() const override { return reader_->metadata()->num_rows(); }

 private:
  int groups() const { return reader_->metadata()->num_row_groups(); }
  std::int64_t rows_of(int group) const {
    const std::int64_t rows = reader_->metadata()->RowGroup(group)->num_rows();
    if (rows < 0) throw parquet::ParquetException("a row group has ", rows, " rows");
    return rows;
  }

  /// Reads rows of the same page. @return false at the end
  bool read() {
    const std::string place =
        fmt::format("{}: column \"{}\" of row group {} can't be read after {} rows", path_, name_,
                    std::max(next_group_ - 1, 0), group_row_);
    try {
      while (left_ == 0) {
        if (next_group_ == groups()) return false;
        left_ = rows_of(next_group_);
        group_row_ = 0;
        chunk_ = std::static_pointer_cast<parquet::ByteArrayReader>(
            reader_->RowGroup(next_group_++)->Column(column_));
      }
      std::int64_t values = 0, levels = 0;
      if (chunk_->HasNext())
        levels = chunk_->ReadBatch(std::min(left_, kRowsAtOnce), levels_.data(), nullptr,
                                   values_.data(), &values);
      const auto given = max_level_ == 0
                             ? levels
                             : std::count(levels_.begin(), levels_.begin() + levels, max_level_);
      if (levels == 0 || values != given) throw parquet::ParquetException("values are missing");
      left_ -= levels;
      group_row_ += levels;
      levels_read_ = static_cast<std::size_t>(levels);
      at_ = value_ = 0;
    } catch (...) {
      rethrow(place);
    }
    return true;
  }

  const std::string path_, name_;
  std::unique_ptr<parquet::ParquetFileReader> reader_;
  int column_ = 0, next_group_ = 0;
  std::int16_t max_level_ = 0;                       // definition level of a value that is no null
  std::shared_ptr<parquet::ByteArrayReader> chunk_;  // of a row group
  std::int64_t left_ = 0, group_row_ = 0;            // rows of the row group
  std::array<std::int16_t, kRowsAtOnce> levels_{};   // of the rows read at once
  std::array<parquet::ByteArray, kRowsAtOnce> values_{};
  std::size_t levels_read_ = 0, at_ = 0, value_ = 0;
};

}  // namespace
}  // namespace tessera::io

TESSERA_EXPORT int tessera_parquet_plugin_version() { return tessera::io::kParquetPluginVersion; }

TESSERA_EXPORT tessera::io::TextColumn* tessera_open_text_column(const std::string& path,
                                                                 const std::string& column,
                                                                 std::int64_t first) {
  return new tessera::io::ArrowTextColumn(path, column, first);
}
