#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "comm/collective.h"
#include "comm/flight_record.h"

namespace tessera::comm {

struct FlightIdentity {
  int rank = 0;
  int world_size = 1;
  std::string run_id = {};
  std::uint64_t start_id = 0;  ///< see FlightRecord; 0: not known yet
};

/// Records a rank's phase, last 1000 collectives and end in a memory-mapped file of fixed size. The
/// record survives a killed process, but not a power cut, because nothing is synced to disk.
/// Layout: comm/flight_layout.h.
///
/// Truncating the file of a running rank, or removing it from another host of a network file
/// system, kills the rank with SIGBUS. Removing or replacing it on this host is safe.
///
/// Thread-safe; recording neither throws nor blocks, and costs about 0.1 us a call. Updates of
/// collectives older than the last 1000 are ignored.
class FlightRecorder {
 public:
  /// Creates the file under a temporary name and renames it over an existing one. Creates its
  /// directory, but no parents. Follows no symlinks. On failure records in memory: see
  /// why_not_in_file().
  /// @param path  empty: in memory
  /// @throws IoError if memory can't be mapped either
  static std::shared_ptr<FlightRecorder> create(const std::filesystem::path& path,
                                                const FlightIdentity& identity);

  /// Why the record is in memory; empty: it is in the file.
  const std::string& why_not_in_file() const { return why_not_in_file_; }

  /// False if the file was removed or replaced.
  bool is_in_place() const;

  /// Id shared by all ranks of this start; only the first call counts.
  void set_start_id(std::uint64_t id) noexcept;
  /// @param phase  truncated to 31 bytes  @param step  -1: none
  void set_phase(std::string_view phase, std::int64_t step) noexcept;
  /// @return the collective's number in this record
  std::uint64_t queued(const Collective& collective) noexcept;
  void started(std::uint64_t number) noexcept;
  /// @param ok  false: the collective failed or never ran
  void ended(std::uint64_t number, bool ok) noexcept;
  /// Records how the rank ends; only the first call counts. @param text  truncated to 400 bytes
  /// @param culprit  blamed rank, or -1
  void end(FlightEnd kind, std::string_view text, int culprit = -1) noexcept;
  /// The same for an error, with its kind and first culprit.
  void end(const std::exception& error) noexcept;

  FlightRecord snapshot() const;

 private:
  /// Mapped memory. `path`: final name of the mapped file, created as PATH.tmp; empty: no file.
  struct Made {
    std::shared_ptr<std::byte> memory = {};
    std::filesystem::path path = {};
    std::uint64_t device = 0, inode = 0;
  };
  static Made map_file(const std::filesystem::path& path);
  FlightRecorder(Made made, std::string why_not_in_file, const FlightIdentity& identity);
  template <typename Change>
  void change(std::uint64_t number, const Change& change) noexcept;
  void name_group(const Subgroup& group, std::uint64_t id) noexcept;

  const Made made_;
  std::byte* const memory_;
  const std::string why_not_in_file_;
  mutable std::mutex mutex_;
  std::uint64_t next_ = 0;  // number of the next collective
  std::size_t groups_ = 0;  // named in the header
};

/// "rank-00003.bin"
std::string flight_file_name(int rank);
/// Inverse of flight_file_name(); nothing for any other name, "rank-3.bin" included.
std::optional<int> rank_of_flight_file(std::string_view name);

/// Start of a process, in clock ticks since boot, and its state ('R', 'S', 'T' stopped, 'Z' ended);
/// {0, '-'}: no such process.
struct ProcessLook {
  std::uint64_t start = 0;
  char state = '-';
};
ProcessLook look_at_process(std::int64_t pid);
/// Boot id of this host and pid namespace of this process; empty and 0 if unknown.
/// look_at_process() applies to a record's `pid` only if both match the record's.
std::string this_boot_id();
std::uint64_t this_pid_namespace();

}  // namespace tessera::comm
