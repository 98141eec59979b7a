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

/// Who writes a record.
struct FlightIdentity {
  int rank = 0;
  int world_size = 1;
  std::string run_id = {};
  std::uint64_t start_id = 0;  ///< see FlightRecord; 0: not known yet
};

/// Writes down what a rank does, so that it can be read after the rank was killed: its phase, its
/// last 1000 collectives, and how it ended. Each rank has a file of its own, of a fixed size, that
/// is mapped into memory: the kernel keeps what was stored, however the process ends. (A power cut
/// loses what was not written back: nothing here syncs.) comm/flight_layout.h says what is where.
///
/// A mapped file has one price: who cuts it while the rank runs (truncate, a shell's >), or a
/// network file system from which another host removes it, takes the pages away, and the rank's
/// next word ends the process by SIGBUS. Removing or replacing the file by name on this host does
/// no harm. The other ways cost more: a system call for each word, or a signal handler for the
/// whole process.
///
/// Thread-safe; nothing throws, and nothing waits but for the other threads of the same recorder,
/// which hold it for less than a microsecond. A call costs about 0.1 us. Numbers that are not among
/// the last 1000 are passed over.
class FlightRecorder {
 public:
  /// Makes the file in full size, under another name first, and renames it: one that stands there
  /// is replaced, and never seen half made. Makes its directory, too, but not that one's parent.
  /// Links are not followed. If it can't be made, records in the memory of this process, and
  /// why_not_in_file() says why.
  /// @param path  empty: in memory
  /// @throws IoError only if there is no memory either
  static std::shared_ptr<FlightRecorder> create(const std::filesystem::path& path,
                                                const FlightIdentity& identity);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  /// Empty if it records into the file.
  const std::string& why_not_in_file() const { return why_not_in_file_; }

  /// Whether the file still stands where it was made: nobody has removed or replaced it.
  bool is_in_place() const;

  /// This rank has met the others of its start; the first call stands.
  void set_start_id(std::uint64_t id) noexcept;
  /// What the rank does from now on. @param phase  31 bytes of it are kept  @param step  -1: none
  void set_phase(std::string_view phase, std::int64_t step) noexcept;
  void queued(const Collective& collective) noexcept;
  void started(std::uint64_t sequence) noexcept;
  /// @param ok  false: it failed, or never ran
  void ended(std::uint64_t sequence, bool ok) noexcept;
  /// How the rank ends; the first call stands. @param text  400 bytes of it are kept
  /// @param culprit  the rank that it blames, or -1
  void end(FlightEnd kind, std::string_view text, int culprit = -1) noexcept;
  /// The same of an error: its type says the kind, and its first culprit is the one blamed.
  void end(const std::exception& error) noexcept;

  /// What is recorded by now.
  FlightRecord snapshot() const;

 private:
  /// A file with its memory, before it has its name.
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
/// Back; nothing of any other name, not even of "rank-3.bin".
std::optional<int> rank_of_flight_file(std::string_view name);

/// When the process began, in clock ticks since the host's start, and its state as the system calls
/// it ('R', 'S', 'T' for stopped, 'Z' for one that has ended); of none, {0, '-'}.
struct ProcessLook {
  std::uint64_t start = 0;
  char state = '-';
};
ProcessLook look_at_process(std::int64_t pid);
/// Of this process's host and of the place where its numbers of processes count; empty and 0 if
/// unknown. Equal to those of a record: its `pid` can be looked at here.
std::string this_boot_id();
std::uint64_t this_pid_namespace();

}  // namespace tessera::comm
