#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/base/error.h"
#include "io/base/file.h"

namespace tessera::io {

/// Files of a checkpoint, opened on first use. Keeps at most 64 open, because a checkpoint may have
/// more files than a process may open. Detects a file replaced between two opens. Thread-safe.
class OpenFiles {
 public:
  explicit OpenFiles(fs::path dir) : dir_(std::move(dir)) {}

  /// @throws as File::open; CorruptCheckpoint if the file was replaced
  std::shared_ptr<const File> get(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(name);
    if (found != files_.end()) return found->second;
    if (files_.size() >= kMaxOpen) files_.clear();  // files in use stay open
    return files_[name] = std::make_shared<const File>(open_checked(name));
  }
  /// Opens the file anew, outside the cache. @throws as get
  File open(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return open_checked(name);
  }

 private:
  static constexpr std::size_t kMaxOpen = 64;
  File open_checked(const std::string& name) {
    File file = File::open(dir_ / name);
    const FileIdentity found = file.identity();
    const FileIdentity& first = identities_.emplace(name, found).first->second;
    require<CorruptCheckpoint>(
        found == first,
        "{} was replaced while it was read: it has {} bytes (inode {}), and had {} (inode {})",
        file.path().string(), found.size, found.inode, first.size, first.inode);
    return file;
  }
  fs::path dir_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const File>> files_;  // guarded by mutex_
  std::map<std::string, FileIdentity> identities_;            // guarded by mutex_
};

}  // namespace tessera::io
