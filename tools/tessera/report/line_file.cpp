#include "tools/tessera/report/line_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/file.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kMaxWaiting = std::size_t{1} << 20;

using Keep = std::function<bool(const nlohmann::json&)>;

void keep_lines(const std::filesystem::path& path, const Keep& keep) {
  std::ifstream old(path);
  if (!old) return;
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
}

}  // namespace

LineFile::LineFile(std::filesystem::path path, const Keep& keep) : path_(std::move(path)) {
  // Opening a FIFO would block.
  std::error_code absent;
  const auto type = std::filesystem::status(path_, absent).type();
  using enum std::filesystem::file_type;
  require<IoError>(type != fifo && type != socket && type != directory,
                   "cannot append to {}: it is no regular file; move it away", path_.string());
  if (type == regular) keep_lines(path_, keep);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
  require<IoError>(fd_ >= 0, "cannot open {}: {}", path_.string(), std::strerror(errno));
}

LineFile::~LineFile() { ::close(fd_); }

void LineFile::write(const nlohmann::ordered_json& line) {
  const bool waited = !waiting_.empty();
  waiting_ += line.dump() + '\n';
  const std::string error = write_waiting();
  require<IoError>(waiting_.size() <= kMaxWaiting, "{}", error);
  if (!error.empty() && !waited) warning_ = error;
}

// @return the error; empty if everything was written
std::string LineFile::write_waiting() {
  while (!waiting_.empty()) {
    const ssize_t n = ::write(fd_, waiting_.data(), waiting_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return fmt::format("cannot write to {}: {}", path_.string(), std::strerror(errno));
    waiting_.erase(0, static_cast<std::size_t>(n));
  }
  return {};
}

void LineFile::flush() {
  const std::string error = write_waiting();
  require<IoError>(error.empty(), "{}", error);
}

}  // namespace tessera::tools
