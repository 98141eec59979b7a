#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace tessera::comm {

/// A store's contents. Not thread-safe; never blocks.
class KeyValues {
 public:
  /// @return false if the key has another value
  bool set(const std::string& key, std::string_view value) {
    const auto [entry, added] = values_.try_emplace(key, value);
    return added || entry->second == value;
  }
  /// @return null if the key is not set
  const std::string* find(std::string_view key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : &found->second;
  }
  /// See Store::leave.
  void leave(const std::string& name, int readers) {
    if (++left_[name] < readers) return;
    left_.erase(name);
    const std::string prefix = name + "/";
    for (auto entry = values_.lower_bound(prefix);
         entry != values_.end() && entry->first.starts_with(prefix);) {
      const bool direct = entry->first.find('/', prefix.size()) == std::string::npos;
      entry = direct ? values_.erase(entry) : std::next(entry);
    }
  }
  std::size_t size() const { return values_.size() + left_.size(); }

 private:
  std::map<std::string, std::string, std::less<>> values_;
  std::map<std::string, int, std::less<>> left_;  // number of leave() calls, by name
};

}  // namespace tessera::comm
