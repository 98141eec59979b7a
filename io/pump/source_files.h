#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "io/base/direct_file.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Cache of open files of sources, bounded in number. Thread-safe.
class SourceFiles {
 public:
  /// @param direct_io  bypass the page cache where the file system allows
  explicit SourceFiles(bool direct_io);
  /// @throws as TensorSource::open_file
  std::shared_ptr<const DirectFile> get(const TensorSource& source, const std::string& name);

 private:
  const bool direct_io_;
  const std::size_t max_open_;
  std::mutex mutex_;
  std::map<std::pair<const TensorSource*, std::string>, std::shared_ptr<const DirectFile>>
      files_;  // guarded by mutex_
};

}  // namespace tessera::io
