#pragma once

#include <condition_variable>
#include <mutex>
#include <string>

#include "comm/control/key_values.h"
#include "comm/control/store.h"

namespace tessera::comm {

/// Store for ranks that are threads of one process.
class MemoryStore final : public Store {
 public:
  void set(const std::string& key, std::string_view value) override;
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override;
  bool has(const std::string& key) override;
  void leave(const std::string& name, int readers) override;
  std::size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  KeyValues values_;
};

}  // namespace tessera::comm
