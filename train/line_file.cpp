#include "train/line_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/file.h"

namespace tessera::train {
namespace {

using Keep = std::function<bool(const nlohmann::json&)>;

// @return path
std::filesystem::path keep_lines(std::filesystem::path path, const Keep& keep) {
  if (!std::filesystem::is_regular_file(path)) return path;
  std::ifstream old(path);
  if (!old) return path;
  errno = 0;
  std::string kept;
  bool all = true;
  for (std::string text; std::getline(old, text);) {
    const auto line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    const bool whole =
        line.is_object() && line.contains("step") && line["step"].is_number_integer();
    const bool stays = whole && keep(line);
    if (stays) kept += text + '\n';
    all = all && stays && !old.eof();  // eof: the line has no newline
  }
  require<IoError>(!old.bad(), "cannot read {}: {}", path.string(), std::strerror(errno));
  old.close();
  if (!all) io::write_file_atomically(path, kept);
  return path;
}

}  // namespace

LineFile::LineFile(std::filesystem::path path, const Keep& keep)
    : file_(keep_lines(std::move(path), keep)) {}

void LineFile::write(const nlohmann::ordered_json& line) { file_.write(line.dump() + '\n'); }

}  // namespace tessera::train
