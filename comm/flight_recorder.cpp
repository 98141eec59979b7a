#include "comm/flight_recorder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>

#include "comm/control/socket.h"
#include "comm/flight_layout.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using Word = std::uint64_t;

template <typename Clock = std::chrono::steady_clock>
std::int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

template <std::size_t N>
void put(std::array<char, N>& to, std::string_view text) {
  std::copy_n(text.data(), std::min(text.size(), N), to.data());
}

// Stores with release order, so that a reader that sees a later store sees this one too.
void store(std::byte* to, Word value) {
  static_assert(std::atomic_ref<Word>::is_always_lock_free);
  std::atomic_ref<Word>(*reinterpret_cast<Word*>(to)).store(value, std::memory_order_release);
}

template <typename T>
void store_words(std::byte* to, const T& value, std::size_t begin, std::size_t end) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(Word) == 0);
  for (std::size_t at = begin; at < end; at += sizeof(Word)) {
    Word word = 0;
    std::memcpy(&word, reinterpret_cast<const std::byte*>(&value) + at, sizeof(Word));
    store(to + at, word);
  }
}

// The version is odd while the part is written.
template <typename T>
void store_guarded(std::byte* to, T value) {
  static_assert(offsetof(T, version) == 0);
  Word version = 0;
  std::memcpy(&version, to, sizeof(Word));
  store(to, version + 1);
  store_words(to, value, sizeof(Word), sizeof(T));
  store(to, version + 2);
}

// Maps kFlightBytes until the last owner is gone. @param fd  -1: memory without a file
// @return null, with errno set, on failure
std::shared_ptr<std::byte> map(int fd) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory = ::mmap(nullptr, kFlightBytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<std::byte*>(memory), [](std::byte* p) { ::munmap(p, kFlightBytes); }};
}

void rename_into_place(const fs::path& path) {
  const std::string temporary = path.string() + ".tmp";
  if (::rename(temporary.c_str(), path.c_str()) == 0) return;
  const int error = errno;
  ::unlink(temporary.c_str());
  throw IoError("cannot replace {}: {}", path.string(), std::strerror(error));
}

FlightEnd end_of(CommFailure failure) {
  static constexpr std::array kEnds = {FlightEnd::Timeout, FlightEnd::PeerLost, FlightEnd::Mismatch,
                                       FlightEnd::Aborted};
  return kEnds[static_cast<std::size_t>(failure)];
}

}  // namespace

// Maps a new file of full size. @throws IoError
FlightRecorder::Made FlightRecorder::map_file(const fs::path& path) {
  const fs::path folder = path.parent_path();
  if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) {
    throw IoError("cannot create {}: {}", folder.string(), std::strerror(errno));
  }
  const FileDescriptor dir(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  require<IoError>(dir.get() >= 0, "cannot open {}: {}", folder.string(), std::strerror(errno));
  const std::string name = path.filename().string();
  const std::string temporary = name + ".tmp";
  ::unlinkat(dir.get(), temporary.c_str(), 0);  // left by a rank that was killed here
  const FileDescriptor file(::openat(dir.get(), temporary.c_str(),
                                     O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  require<IoError>(file.get() >= 0, "cannot create {}: {}", path.string(), std::strerror(errno));
  try {
    int error = 0;
    do error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(kFlightBytes));
    while (error == EINTR);
    require<IoError>(error == 0, "no room for {} ({} bytes): {}", path.string(), kFlightBytes,
                     std::strerror(error));
    struct stat status {};
    require<IoError>(::fstat(file.get(), &status) == 0, "cannot stat {}: {}", path.string(),
                     std::strerror(errno));
    auto memory = map(file.get());
    require<IoError>(memory != nullptr, "cannot map {}: {}", path.string(), std::strerror(errno));
    return {std::move(memory), path, status.st_dev, status.st_ino};
  } catch (const IoError&) {
    ::unlinkat(dir.get(), temporary.c_str(), 0);
    throw;
  }
}

std::shared_ptr<FlightRecorder> FlightRecorder::create(const fs::path& path,
                                                       const FlightIdentity& identity) {
  std::string why;
  if (!path.empty()) {
    try {
      // Not make_shared, because the constructor is private.
      std::shared_ptr<FlightRecorder> recorder(new FlightRecorder(map_file(path), {}, identity));
      rename_into_place(path);
      return recorder;
    } catch (const IoError& error) {
      why = error.what();
    }
  }
  auto memory = map(-1);
  require<IoError>(memory != nullptr, "no memory for a flight record: {}", std::strerror(errno));
  return std::shared_ptr<FlightRecorder>(
      new FlightRecorder({std::move(memory)}, std::move(why), identity));
}

FlightRecorder::FlightRecorder(Made made, std::string why_not_in_file,
                               const FlightIdentity& identity)
    : made_(std::move(made)),
      memory_(made_.memory.get()),
      why_not_in_file_(std::move(why_not_in_file)) {
  FlightHeader header;
  header.rank = identity.rank;
  header.world_size = identity.world_size;
  header.pid = ::getpid();
  header.pid_start = look_at_process(header.pid).start;
  header.pid_namespace = this_pid_namespace();
  header.start_wall_ns = now_ns<std::chrono::system_clock>();
  header.start_ns = now_ns();
  put(header.boot_id, this_boot_id());
  put(header.host, this_host());
  put(header.run_id, identity.run_id);
  header.start_id = identity.start_id;
  std::memcpy(memory_, &header, sizeof(header));
}

bool FlightRecorder::is_in_place() const {
  struct stat status {};
  return !made_.path.empty() && ::lstat(made_.path.c_str(), &status) == 0 &&
         status.st_dev == made_.device && status.st_ino == made_.inode;
}

void FlightRecorder::set_start_id(std::uint64_t id) noexcept {
  std::byte* const at = memory_ + offsetof(FlightHeader, start_id);
  const std::lock_guard lock(mutex_);
  Word before = 0;
  std::memcpy(&before, at, sizeof(before));
  if (before == 0) store(at, id);
}

void FlightRecorder::set_phase(std::string_view phase, std::int64_t step) noexcept {
  FlightPhase value;
  put(value.name, phase.substr(0, value.name.size() - 1));
  value.step = step;
  value.entered_ns = now_ns();
  const std::lock_guard lock(mutex_);
  store_guarded(memory_ + offsetof(FlightHeader, phase), value);
}

// Writes the group's name to the header, if there is room.
void FlightRecorder::name_group(const Subgroup& group, std::uint64_t id) noexcept {
  const auto at = [this](std::size_t i) {
    return memory_ + offsetof(FlightHeader, groups) + i * sizeof(FlightGroup);
  };
  for (std::size_t i = 0; i < groups_; ++i) {
    Word known = 0;
    std::memcpy(&known, at(i) + offsetof(FlightGroup, id), sizeof(known));
    if (known == id) return;
  }
  if (groups_ == std::tuple_size_v<decltype(FlightHeader::groups)>) return;
  FlightGroup named;
  put(named.name, group.describe());
  named.id = id;
  store_words(at(groups_++), named, 0, sizeof(named));
}

std::uint64_t FlightRecorder::queued(const Collective& collective) noexcept {
  FlightEntry entry;
  entry.signature = Signature(collective);
  entry.bytes = collective.bytes();
  entry.queued_ns = now_ns();
  entry.state = static_cast<Word>(FlightState::Queued);
  entry.group = collective.group ? collective.group->id() : 0;
  const std::lock_guard lock(mutex_);
  if (collective.group) name_group(*collective.group, entry.group);
  entry.number = next_++;
  store_guarded(memory_ + entry_offset(entry.number % kFlightEntries), entry);
  return entry.number;
}

template <typename Change>
void FlightRecorder::change(std::uint64_t number, const Change& change) noexcept {
  const std::int64_t now = now_ns();
  std::byte* const at = memory_ + entry_offset(number % kFlightEntries);
  const std::lock_guard lock(mutex_);
  FlightEntry entry;
  std::memcpy(static_cast<void*>(&entry), at, sizeof(entry));
  if (entry.version == 0 || entry.number != number) return;
  change(entry, now);
  store_guarded(at, entry);
}

void FlightRecorder::started(std::uint64_t number) noexcept {
  change(number, [](FlightEntry& entry, std::int64_t now) {
    entry.started_ns = now;
    entry.state = static_cast<Word>(FlightState::Running);
  });
}

void FlightRecorder::ended(std::uint64_t number, bool ok) noexcept {
  change(number, [ok](FlightEntry& entry, std::int64_t now) {
    entry.ended_ns = now;
    entry.state = static_cast<Word>(ok ? FlightState::Done : FlightState::Failed);
  });
}

void FlightRecorder::end(FlightEnd kind, std::string_view text, int culprit) noexcept {
  FlightEnding ending;
  ending.time_ns = now_ns();
  ending.culprit = culprit;
  ending.kind = static_cast<Word>(kind);
  put(ending.text, text);
  std::byte* const at = memory_ + offsetof(FlightHeader, ending);
  const std::lock_guard lock(mutex_);
  Word before = 0;
  std::memcpy(&before, at + offsetof(FlightEnding, kind), sizeof(before));
  if (before == 0) store_words(at, ending, 0, sizeof(ending));
}

void FlightRecorder::end(const std::exception& error) noexcept {
  if (const auto* comm = dynamic_cast<const CommError*>(&error)) {
    return end(end_of(comm->failure()), error.what(),
               comm->culprits().empty() ? -1 : comm->culprits().front());
  }
  const bool memory = dynamic_cast<const OutOfMemory*>(&error) != nullptr ||
                      dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  end(memory ? FlightEnd::OutOfMemory : FlightEnd::Error, error.what());
}

FlightRecord FlightRecorder::snapshot() const {
  const std::lock_guard lock(mutex_);
  return parse_flight_record({memory_, kFlightBytes}, "this rank's record");
}

std::string flight_file_name(int rank) { return fmt::format("rank-{:05}.bin", rank); }

std::optional<int> rank_of_flight_file(std::string_view name) {
  constexpr std::string_view kPrefix = "rank-", kSuffix = ".bin";
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  int rank = -1;
  const char* const end = name.data() + name.size() - kSuffix.size();
  const auto parsed = std::from_chars(name.data() + kPrefix.size(), end, rank);
  // Rejects other spellings, such as "rank-3.bin".
  const bool is_exact = parsed.ec == std::errc() && rank >= 0 && flight_file_name(rank) == name;
  return is_exact ? std::optional<int>(rank) : std::nullopt;
}

ProcessLook look_at_process(std::int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  // "12 (a name (of any kind)) S 1 ...": the state is the third field, the start the 22nd.
  if (!std::getline(file, text) || text.rfind(')') == std::string::npos) return {};
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  ProcessLook look;
  std::string skipped;
  fields >> look.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> look.start;
  return fields ? look : ProcessLook{};
}

std::string this_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::uint64_t this_pid_namespace() {
  struct stat status {};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace tessera::comm
