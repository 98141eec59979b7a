#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "comm/control/store.h"

namespace tessera::comm {

/// A store for ranks that are threads of one process.
class MemoryStore final : public Store {
 public:
  void set(const std::string& key, std::string_view value) override;
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override;
  bool has(const std::string& key) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string, std::less<>> values_;
};

}  // namespace tessera::comm
