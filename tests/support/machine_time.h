#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::test {

/// CPU time that a virtual machine's host withheld since boot, per processor; zero on physical
/// hardware. Tests subtract it from measured times.
class StolenTime {
 public:
  static StolenTime now() {
    StolenTime result;
    std::ifstream in("/proc/stat");
    for (std::string line; std::getline(in, line) && line.starts_with("cpu");) {
      std::istringstream words(line);
      std::string name;
      std::int64_t ticks[8] = {};  // user, nice, system, idle, iowait, irq, softirq, steal
      words >> name;
      for (std::int64_t& value : ticks) words >> value;
      if (name != "cpu") result.ticks_.push_back(ticks[7]);  // skips the total
    }
    return result;
  }
  /// The largest increase over all processors.
  std::chrono::milliseconds since(const StolenTime& before) const {
    std::int64_t most = 0;
    for (std::size_t i = 0; i < std::min(ticks_.size(), before.ticks_.size()); ++i)
      most = std::max(most, ticks_[i] - before.ticks_[i]);
    return std::chrono::milliseconds(most * 1000 / ::sysconf(_SC_CLK_TCK));
  }

 private:
  friend class Stopwatch;
  std::vector<std::int64_t> ticks_;  // by processor
};

class Stopwatch {
 public:
  /// For another process of this machine, which reads on.
  void save(const char* file) const {
    std::ofstream out(file);
    out << start_.time_since_epoch().count();
    for (const std::int64_t ticks : stolen_.ticks_) out << ' ' << ticks;
  }
  /// @return empty if the file does not exist
  static std::optional<Stopwatch> load(const std::string& file) {
    std::ifstream in(file);
    std::chrono::steady_clock::rep start = 0;
    if (!(in >> start)) return {};
    Stopwatch watch;
    watch.start_ =
        std::chrono::steady_clock::time_point(std::chrono::steady_clock::duration(start));
    watch.stolen_.ticks_.assign(std::istream_iterator<std::int64_t>(in), {});
    return watch;
  }
  std::chrono::milliseconds wall() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                                 start_);
  }
  /// Without stolen time: for upper bounds on durations.
  std::chrono::milliseconds elapsed() const {
    const auto all = wall();
    return all - std::min(all, StolenTime::now().since(stolen_));
  }

 private:
  StolenTime stolen_ = StolenTime::now();
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace tessera::test
