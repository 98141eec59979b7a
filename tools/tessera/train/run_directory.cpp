#include "tools/tessera/train/run_directory.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <unistd.h>

#include <chrono>

#include "core/base/error.h"
#include "io/base/file.h"
#include "tools/tessera/report/utf8.h"
#include "train/run_lock.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

}  // namespace

comm::FileDescriptor open_run_directory(const fs::path& path) {
  try {
    io::make_directories_durably(path / "logs");
  } catch (const IoError& error) {
    throw IoError("cannot create the run directory {}: {}", path.string(), error.what());
  }
  return train::lock_run_directory(path, "choose another --run.out");
}

RankLog::RankLog(const fs::path& run_dir, int rank)
    : path_(run_dir / "logs" / fmt::format("rank-{}.log", rank)) {}

void RankLog::write(const std::string& line) const {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  const std::string text = fmt::format("{:%Y-%m-%dT%H:%M:%SZ} {}\n", utc, escaped_lines(line));
  // O_NONBLOCK, because opening a FIFO could block.
  const comm::FileDescriptor file(
      ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666));
  [[maybe_unused]] const ssize_t written = ::write(file.get(), text.data(), text.size());
}

}  // namespace tessera::tools
