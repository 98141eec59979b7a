#include "tools/tessera/launch/line_prefixer.h"

#include <unistd.h>

#include <cerrno>

namespace tessera::tools {
namespace {

constexpr std::size_t kMaxLine = 64 * 1024;  // longer lines are split
constexpr int kReads = 16;                   // per pump(): the capacity of a pipe

}  // namespace

LinePrefixer::LinePrefixer(comm::FileDescriptor from, LogOutput& to, std::string prefix)
    : from_(std::move(from)), to_(to), prefix_(std::move(prefix)) {}

void LinePrefixer::write_line(std::string_view line) const {
  to_.write(prefix_ + std::string(line) + "\n");
}

void LinePrefixer::pump() {
  char bytes[4096];
  for (int i = 0; i < kReads && from_; ++i) {
    const ssize_t n = ::read(from_.get(), bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      finish();
      from_ = comm::FileDescriptor();
      return;
    }
    partial_.append(bytes, static_cast<std::size_t>(n));
    std::size_t begin = 0;
    for (std::size_t end; (end = partial_.find('\n', begin)) != partial_.npos; begin = end + 1) {
      write_line(std::string_view(partial_).substr(begin, end - begin));
    }
    partial_.erase(0, begin);
    if (partial_.size() > kMaxLine) finish();
  }
}

void LinePrefixer::finish() {
  if (!partial_.empty()) write_line(partial_);
  partial_.clear();
}

}  // namespace tessera::tools
