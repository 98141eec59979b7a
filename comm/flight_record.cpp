#include "comm/flight_record.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "comm/control/socket.h"
#include "comm/flight_layout.h"

namespace tessera::comm {
namespace {

static_assert(std::endian::native == std::endian::little);

using Image = std::vector<std::byte>;

// Replaces control characters, because records are printed on terminals.
template <std::size_t N>
void make_printable(std::array<char, N>& chars) {
  for (char& c : chars) {
    if ((static_cast<unsigned char>(c) < 0x20 && c != 0) || c == 0x7f) c = c == '\n' ? ' ' : '?';
  }
}

template <std::size_t N>
std::string text_of(std::array<char, N> chars) {
  make_printable(chars);
  return {chars.data(), strnlen(chars.data(), N)};
}

// Limits that keep sums of times from overflowing: 73 years (monotonic) and 146 years (wall).
bool is_time(std::int64_t ns) { return ns >= 0 && ns < std::int64_t{1} << 61; }
bool is_wall_time(std::int64_t ns) { return ns >= 0 && ns < std::int64_t{1} << 62; }

Image read_first(int fd, std::size_t bytes, const std::string& source) {
  Image image(bytes);
  for (std::size_t done = 0; done < image.size();) {
    const ssize_t n =
        ::pread(fd, image.data() + done, image.size() - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    require<IoError>(n >= 0, "cannot read {}: {}", source, std::strerror(errno));
    require<CorruptRecord>(n > 0, "{}: truncated while it was read", source);
    done += static_cast<std::size_t>(n);
  }
  return image;
}

template <typename T>
T load(const Image& image, std::size_t offset) {
  T value;
  std::memcpy(static_cast<void*>(&value), image.data() + offset, sizeof(T));
  return value;
}

constexpr std::uint64_t kTorn = 1;  // any odd version
constexpr std::uint32_t kOldestVersion = 1;

bool is_plausible(const FlightEntry& entry, std::size_t slot) {
  const Signature& s = entry.signature;
  return entry.number % kFlightEntries == slot &&
         s.kind <= static_cast<std::uint8_t>(CollectiveKind::Barrier) &&
         s.dtype <= static_cast<std::uint8_t>(DType::Bool) &&
         s.op <= static_cast<std::uint8_t>(ReduceOp::Max) && entry.state != 0 &&
         entry.state <= static_cast<std::uint64_t>(FlightState::Failed) &&
         is_time(entry.queued_ns) && is_time(entry.started_ns) && is_time(entry.ended_ns);
}

void check_header(const FlightHeader& header, std::size_t bytes, const std::string& source) {
  require<CorruptRecord>(header.magic == kFlightMagic, "{}: not a tessera flight record", source);
  require<Unsupported>(header.version <= kFlightVersion,
                       "{}: a flight record of version {}, this tessera reads up to {}; use the "
                       "one that wrote it",
                       source, header.version, kFlightVersion);
  require<CorruptRecord>(
      header.version >= kOldestVersion && header.header_bytes == sizeof(FlightHeader) &&
          header.entries == kFlightEntries && header.entry_bytes == sizeof(FlightEntry),
      "{}: version {} with {} entries of {} bytes after a header of {}: expected version {} to {}, "
      "{} of {} after {}",
      source, header.version, header.entries, header.entry_bytes, header.header_bytes,
      kOldestVersion, kFlightVersion, kFlightEntries, sizeof(FlightEntry), sizeof(FlightHeader));
  require<CorruptRecord>(bytes == kFlightBytes,
                         "{}: has {} bytes, expected {}: truncated or overwritten", source, bytes,
                         kFlightBytes);
  require<CorruptRecord>(header.world_size > 0 && header.world_size <= kFlightMaxWorldSize &&
                             header.rank >= 0 && header.rank < header.world_size,
                         "{}: invalid rank {} of {}", source, header.rank, header.world_size);
  require<CorruptRecord>(is_wall_time(header.start_wall_ns) && is_time(header.start_ns),
                         "{}: invalid start time", source);
  require<CorruptRecord>(header.ending.kind <= static_cast<std::uint64_t>(FlightEnd::CutOff),
                         "{}: unknown end kind {}", source, header.ending.kind);
}

FlightRecord decode(const Image& image, const std::string& source) {
  const auto header = load<FlightHeader>(image, 0);
  check_header(header, image.size(), source);
  FlightRecord record;
  record.rank = header.rank;
  record.world_size = header.world_size;
  record.host = text_of(header.host);
  record.run_id = text_of(header.run_id);
  record.boot_id = text_of(header.boot_id);
  record.pid = header.pid;
  record.pid_start = header.pid_start;
  record.pid_namespace = header.pid_namespace;
  record.start_id = header.start_id;
  record.start_wall_ns = header.start_wall_ns;
  record.start_ns = header.start_ns;
  if (header.phase.version % 2 == 0 && is_time(header.phase.entered_ns)) {
    record.phase = text_of(header.phase.name);
    record.step = header.phase.step;
    record.phase_entered_ns = header.phase.entered_ns;
  }
  record.end = static_cast<FlightEnd>(header.ending.kind);
  if (record.end != FlightEnd::Running) {
    record.end_text = text_of(header.ending.text);
    record.end_ns = is_time(header.ending.time_ns) ? header.ending.time_ns : 0;
    if (header.ending.culprit >= 0 && header.ending.culprit < header.world_size) {
      record.end_culprit = static_cast<int>(header.ending.culprit);
    }
  }
  const auto name_of = [&header](std::uint64_t id) -> std::string {
    if (id == 0) return {};
    for (const FlightGroup& group : header.groups) {
      if (group.id == id) return text_of(group.name);
    }
    return "another group";
  };
  for (std::size_t i = 0; i < kFlightEntries; ++i) {
    auto entry = load<FlightEntry>(image, entry_offset(i));
    if (entry.version == 0) continue;
    if (header.version == kOldestVersion) entry.number = entry.signature.sequence;
    if (entry.version % 2 != 0 || !is_plausible(entry, i)) {
      ++record.unreadable;
      continue;
    }
    make_printable(entry.signature.label);
    record.collectives.push_back({entry.signature, entry.bytes, entry.queued_ns, entry.started_ns,
                                  entry.ended_ns, static_cast<FlightState>(entry.state),
                                  entry.number, entry.group, name_of(entry.group)});
  }
  std::ranges::sort(record.collectives, {}, &FlightCollective::number);
  return record;
}

// Marks parts that changed between two reads as torn, because a single read is not atomic.
void mark_torn(const Image& before, Image& image, const Image& after) {
  const auto mark = [&](std::size_t offset) {
    const auto version = load<std::uint64_t>(image, offset);
    if (load<std::uint64_t>(before, offset) != version ||
        load<std::uint64_t>(after, offset) != version) {
      std::memcpy(image.data() + offset, &kTorn, sizeof(kTorn));
    }
  };
  mark(offsetof(FlightHeader, phase));
  for (std::size_t i = 0; i < kFlightEntries; ++i) mark(entry_offset(i));
}

// Takes the ending's kind from the earlier read. The kind is written last, so an ending with a kind
// in the earlier read is complete in the later one.
void hide_half_an_ending(const Image& before, Image& image) {
  constexpr std::size_t kAt = offsetof(FlightHeader, ending) + offsetof(FlightEnding, kind);
  std::memcpy(image.data() + kAt, before.data() + kAt, sizeof(std::uint64_t));
}

std::string describe(const FlightRecord& record, const FlightCollective& c) {
  const auto duration = [](std::int64_t from, std::int64_t to) {
    return fmt::format("{:.1f} ms", static_cast<double>(to - from) / 1e6);
  };
  const std::int64_t begin = c.started_ns != 0 ? c.started_ns : c.queued_ns;
  std::string text = fmt::format("{} {}: {}", format_wall_time(record.wall_ns(begin)), c.describe(),
                                 flight_state_name(c.state));
  if (c.ended_ns != 0 && c.started_ns != 0) {
    text += fmt::format(" {} {}", c.state == FlightState::Done ? "in" : "after",
                        duration(c.started_ns, c.ended_ns));
  } else if (c.state == FlightState::Failed) {
    text += ", did not run";
  }
  return text;
}

}  // namespace

std::string_view flight_state_name(FlightState state) {
  static constexpr std::array<std::string_view, 5> kNames = {"empty", "queued", "running", "done",
                                                             "failed"};
  return kNames[static_cast<std::size_t>(state)];
}

std::string_view flight_end_name(FlightEnd end) {
  static constexpr std::array<std::string_view, 9> kNames = {
      "running",   "done",     "error",   "out of memory", "timeout",
      "peer lost", "mismatch", "aborted", "cut off"};
  return kNames[static_cast<std::size_t>(end)];
}

std::string FlightCollective::describe() const {
  return signature.describe() + (group == 0 ? "" : " of the " + group_name);
}

std::int64_t FlightRecord::last_sign_ns() const {
  std::int64_t last = std::max({start_ns, phase_entered_ns, end_ns});
  for (const FlightCollective& c : collectives) {
    last = std::max({last, c.queued_ns, c.started_ns, c.ended_ns});
  }
  return last;
}

const FlightCollective* FlightRecord::newest_started() const {
  for (auto c = collectives.rbegin(); c != collectives.rend(); ++c) {
    if (c->state == FlightState::Running) return &*c;
  }
  for (auto c = collectives.rbegin(); c != collectives.rend(); ++c) {
    if (c->started_ns != 0 || c->state == FlightState::Done) return &*c;
  }
  return nullptr;
}

FlightRecord parse_flight_record(std::span<const std::byte> bytes, const std::string& source) {
  require<CorruptRecord>(bytes.size() >= sizeof(FlightHeader),
                         "{}: has {} bytes, less than the header of a flight record", source,
                         bytes.size());
  return decode(Image(bytes.begin(), bytes.end()), source);
}

FlightRecord read_flight_record(const std::filesystem::path& path) {
  const std::string source = path.string();
  const FileDescriptor file(
      ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  require<IoError>(file.get() >= 0, "cannot open {}: {}", source, std::strerror(errno));
  struct stat status {};
  require<IoError>(::fstat(file.get(), &status) == 0, "cannot stat {}: {}", source,
                   std::strerror(errno));
  require<CorruptRecord>(S_ISREG(status.st_mode), "{}: not a regular file", source);
  const auto bytes = static_cast<std::size_t>(status.st_size);
  require<CorruptRecord>(bytes >= sizeof(FlightHeader),
                         "{}: has {} bytes, less than the header of a flight record", source,
                         bytes);
  if (bytes != kFlightBytes) {
    const Image head = read_first(file.get(), sizeof(FlightHeader), source);
    check_header(load<FlightHeader>(head, 0), bytes, source);
  }
  // A running rank may change entries during a read.
  constexpr int kAttempts = 5;
  const auto read_all = [&] { return read_first(file.get(), kFlightBytes, source); };
  Image before = read_all();
  for (int attempt = 1;; ++attempt) {
    Image image = read_all();
    Image after = read_all();
    Image checked = image;
    mark_torn(before, checked, after);
    hide_half_an_ending(before, checked);
    const bool whole = std::memcmp(checked.data(), image.data(), image.size()) == 0;
    if (whole || attempt == kAttempts) return decode(checked, source);
    before = std::move(after);
  }
}

std::string format_wall_time(std::int64_t wall_ns) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  if (wall_ns < 0) return "an unknown time";
  const auto seconds = static_cast<std::time_t>(wall_ns / kSecond);
  std::tm utc{};
  if (gmtime_r(&seconds, &utc) == nullptr) return "an unknown time";
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", utc, wall_ns % kSecond / 1'000'000);
}

std::string describe(const FlightRecord& record, int last_n) {
  std::string text = fmt::format("rank {} of {} ({}, pid {})", record.rank, record.world_size,
                                 record.host, record.pid);
  if (!record.phase.empty()) {
    text += fmt::format(", phase {}", record.phase);
    if (record.step >= 0) text += fmt::format(", step {}", record.step);
    text += fmt::format(" since {}", format_wall_time(record.wall_ns(record.phase_entered_ns)));
  }
  text += record.end == FlightEnd::Running
              ? ": no end"
              : fmt::format(": ended, {}: {}", flight_end_name(record.end), record.end_text);
  const auto count = static_cast<std::size_t>(std::max(last_n, 0));
  const auto& all = record.collectives;
  for (std::size_t i = all.size() - std::min(count, all.size()); i < all.size(); ++i) {
    text += "\n  " + describe(record, all[i]);
  }
  return text;
}

}  // namespace tessera::comm
