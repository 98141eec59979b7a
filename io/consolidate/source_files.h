#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "io/base/direct_file.h"
#include "io/source/tensor_source.h"

namespace tessera::io {

/// Files of sources, opened when they are first asked for; only so many stay open. Threads may ask
/// at once.
class SourceFiles {
 public:
  explicit SourceFiles(bool direct_io) : direct_io_(direct_io) {}

  /// @throws as TensorSource::open_file
  std::shared_ptr<const DirectFile> get(const TensorSource& source, const std::string& name) {
    const std::lock_guard lock(mutex_);
    const std::pair key(&source, name);
    const auto found = files_.find(key);
    if (found != files_.end()) return found->second;
    if (files_.size() >= max_open_) files_.clear();  // who reads one keeps it alive
    auto file = std::make_shared<const DirectFile>(source.open_file(name), direct_io_);
    return files_[key] = std::move(file);
  }

 private:
  /// Each takes two descriptors, and the outputs and others want some too.
  static std::size_t max_open() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 16;
    return std::clamp<std::size_t>(static_cast<std::size_t>(limit.rlim_cur) / 8, 1, 256);
  }

  const bool direct_io_;
  const std::size_t max_open_ = max_open();
  std::mutex mutex_;
  std::map<std::pair<const TensorSource*, std::string>, std::shared_ptr<const DirectFile>>
      files_;  // guarded by mutex_
};

}  // namespace tessera::io
