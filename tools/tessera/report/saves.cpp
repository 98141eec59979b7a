#include "tools/tessera/report/saves.h"

#include <nlohmann/json.hpp>

namespace tessera::tools {

SavesWriter::SavesWriter(std::filesystem::path path, std::int64_t resume_step)
    : lines_(std::move(path), [resume_step](const nlohmann::json& line) {
        return line["step"].get<std::int64_t>() <= resume_step;
      }) {}

void SavesWriter::write(const SaveMetrics& save) {
  nlohmann::ordered_json line;
  line["step"] = save.step;
  line["bytes"] = save.bytes;
  line["seconds"] = save.seconds;
  line["gb_per_s"] = static_cast<double>(save.bytes) / 1e9 / save.seconds;
  line["stall_ms"] = save.stall_ms;
  lines_.write(line);
}

}  // namespace tessera::tools
