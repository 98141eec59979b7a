#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "io/base/file.h"

namespace tessera::io {

/// Files of a checkpoint, opened when they are first asked for. A checkpoint has as many as ranks,
/// a process may have fewer: only so many stay open. Threads may ask at once.
class OpenFiles {
 public:
  explicit OpenFiles(fs::path dir, Links links = Links::Refuse)
      : dir_(std::move(dir)), links_(links) {}

  /// @throws as File::open
  std::shared_ptr<const File> get(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(name);
    if (found != files_.end()) return found->second;
    if (files_.size() >= kMaxOpen) files_.clear();  // who reads one keeps it alive
    return files_[name] = std::make_shared<const File>(File::open(dir_ / name, links_));
  }

 private:
  static constexpr std::size_t kMaxOpen = 64;
  fs::path dir_;
  Links links_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const File>> files_;  // guarded by mutex_
};

}  // namespace tessera::io
