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

/// The rank that writes a record.
struct FlightIdentity {
  int rank = 0;
  int world_size = 1;
  std::string run_id = {};
  std::uint64_t start_id = 0;  ///< see FlightRecord; 0: not known yet
};

/// Records a rank's phase, its last 1000 collectives and its end, readable after the rank was
/// killed. Each rank maps its own file of a fixed size: the kernel keeps what was stored, however
/// the process ends. (A power cut loses what was not written back: nothing here syncs.) Layout:
/// comm/flight_layout.h.
///
/// Truncating the file while the rank runs, or removing it from another host of a network file
/// system, ends the rank by SIGBUS. Removing or replacing it by name on this host does no harm.
///
/// Thread-safe; nothing throws or blocks. A call costs about 0.1 us. Sequence numbers older than
/// the last 1000 are ignored.
class FlightRecorder {
 public:
  /// Creates the file in full size under a temporary name, and renames it: replaces an existing
  /// one. Creates its directory, but not that directory's parent. Follows no links. On failure
  /// records in memory, see why_not_in_file().
  /// @param path  empty: in memory
  /// @throws IoError if there is no memory either
  static std::shared_ptr<FlightRecorder> create(const std::filesystem::path& path,
                                                const FlightIdentity& identity);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  /// Why it records in memory; empty: it records in the file.
  const std::string& why_not_in_file() const { return why_not_in_file_; }

  /// Whether the file has not been removed or replaced.
  bool is_in_place() const;

  /// Number shared by all ranks of this start; the first call stands.
  void set_start_id(std::uint64_t id) noexcept;
  /// @param phase  cut to 31 bytes  @param step  -1: none
  void set_phase(std::string_view phase, std::int64_t step) noexcept;
  void queued(const Collective& collective) noexcept;
  void started(std::uint64_t sequence) noexcept;
  /// @param ok  false: it failed, or never ran
  void ended(std::uint64_t sequence, bool ok) noexcept;
  /// How the rank ends; the first call stands. @param text  cut to 400 bytes
  /// @param culprit  rank that is blamed, or -1
  void end(FlightEnd kind, std::string_view text, int culprit = -1) noexcept;
  /// The same for an error, with its kind and first culprit.
  void end(const std::exception& error) noexcept;

  /// The record so far.
  FlightRecord snapshot() const;

 private:
  /// A mapped file under its temporary name.
  struct Made {
    void* memory = nullptr;
    std::filesystem::path path = {};
    std::uint64_t device = 0, inode = 0;
  };
  static Made map_file(const std::filesystem::path& path);
  FlightRecorder(Made made, std::string why_not_in_file);
  void write_header(const FlightIdentity& identity);
  template <typename Change>
  void change(std::uint64_t sequence, const Change& change) noexcept;

  const Made made_;
  std::byte* const memory_;
  const std::string why_not_in_file_;
  mutable std::mutex mutex_;
};

/// "rank-00003.bin"
std::string flight_file_name(int rank);
/// The rank of such a name; nothing for other names, "rank-3.bin" included.
std::optional<int> rank_of_flight_file(std::string_view name);

/// Start of a process, in clock ticks since the host booted, and its state ('R', 'S', 'T' stopped,
/// 'Z' ended); {0, '-'} if there is none.
struct ProcessLook {
  std::uint64_t start = 0;
  char state = '-';
};
ProcessLook look_at_process(std::int64_t pid);
/// Boot id of this host and namespace of its process ids; empty and 0 if unknown. If they equal
/// those of a record, look_at_process() applies to its `pid`.
std::string this_boot_id();
std::uint64_t this_pid_namespace();

}  // namespace tessera::comm
