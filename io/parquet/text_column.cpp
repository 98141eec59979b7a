#include "io/parquet/text_column.h"

#include "core/base/error.h"
#include "core/base/plugin.h"
#include "io/base/file.h"

namespace tessera::io {

bool is_parquet_name(const std::string& path) { return path.ends_with(".parquet"); }

std::unique_ptr<TextColumn> open_text_column(const std::string& path, const std::string& column,
                                             std::int64_t first) {
  constexpr const char* kFile = "libtessera_parquet.so";
  constexpr const char* kVariable = "TESSERA_PARQUET_PLUGIN";
  File::open(path);  // for its errors
  require<Unsupported>(
      !Plugin::locate(kFile, kVariable).empty(),
      "{}: this build of tessera can't read Parquet, as it has no {}; run "
      "`tools/setup.sh --parquet` and build it again, or convert the file to .jsonl",
      path, kFile);
  const Plugin plugin("Parquet reader", kFile, kVariable, "");
  plugin.require_version("tessera_parquet_plugin_version", kParquetPluginVersion);
  const auto open =
      plugin.symbol<TextColumn* (*)(const std::string&, const std::string&, std::int64_t)>(
          "tessera_open_text_column");
  return std::unique_ptr<TextColumn>(open(path, column, first));
}

}  // namespace tessera::io
