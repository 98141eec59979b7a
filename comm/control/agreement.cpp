#include "comm/control/agreement.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "comm/collective.h"
#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::string_view kAgreed = "agreed";
// Minimum wait, so that the store is read once more after the deadline.
constexpr std::chrono::milliseconds kLastLook{1};
// Interval at which a waiting rank checks for the outcome or a verdict.
constexpr std::chrono::milliseconds kSlice{250};
// Time to read a key that is set.
constexpr std::chrono::milliseconds kRead{5000};

std::string outcome_key(const std::string& name) { return name + "/outcome"; }

// Maximum number of processes in a message.
constexpr int kProcessesShown = 8;

std::chrono::milliseconds remaining(Clock::time_point deadline) {
  return std::max(kLastLook, time_until(deadline));
}

}  // namespace

std::optional<std::string> get_if_set(Store& store, const std::string& key,
                                      std::chrono::milliseconds at_most) {
  try {
    return store.get(key, at_most);
  } catch (const CommError& error) {
    if (error.failure() != CommFailure::Timeout) throw;
    return std::nullopt;
  }
}

std::string set_or_get(Store& store, const std::string& key, std::string_view value) {
  try {
    store.set(key, value);
    return std::string(value);
  } catch (const InvalidArgument&) {
    if (!store.has(key)) throw;  // the value was refused
    return store.get(key, kRead);
  }
}

CommError publish_verdict(Store& store, const CommError& error) {
  return decode_error(set_or_get(store, kVerdict, encode_error(error)));
}

CommError publish_verdict(TcpStoreServer& server, const CommError& error) {
  return decode_error(server.set_or_get(kVerdict, encode_error(error)));
}

std::optional<CommError> find_verdict(const TcpStoreServer& server) {
  const auto text = server.find(kVerdict);
  return text ? std::optional(decode_error(*text)) : std::nullopt;
}

std::optional<CommError> find_failure(const TcpStoreServer& server, const std::string& name) {
  const auto text = server.find(outcome_key(name));
  return text && *text != kAgreed ? std::optional(decode_error(*text)) : std::nullopt;
}

std::optional<CommError> find_verdict(Store& store, std::chrono::milliseconds at_most,
                                      const std::string& key) {
  const auto text = get_if_set(store, key, at_most);
  return text ? std::optional(decode_error(*text)) : std::nullopt;
}

std::string get_or_verdict(Store& store, const std::string& key,
                           std::chrono::milliseconds deadline) {
  const auto end = Clock::now() + deadline;
  for (;;) {
    if (auto value = get_if_set(store, key, std::min(kSlice, remaining(end)))) {
      return *std::move(value);
    }
    if (const auto verdict = find_verdict(store, std::chrono::milliseconds(0)))
      throw CommError(*verdict);
    if (Clock::now() >= end) {
      throw CommError(CommFailure::Timeout, {}, "store key '{}' was not set within {}", key,
                      format_seconds(deadline));
    }
  }
}

std::string encode_error(const CommError& error) {
  std::string fate = error.fate();
  std::replace(fate.begin(), fate.end(), '|', '/');
  return fmt::format("{}|{}|{}|{}", static_cast<int>(error.failure()),
                     fmt::join(error.culprits(), ","), fate, error.what());
}

CommError decode_error(std::string_view text) {
  const std::size_t first = text.find('|');
  const std::size_t second = first == text.npos ? first : text.find('|', first + 1);
  const std::size_t third = second == text.npos ? second : text.find('|', second + 1);
  int failure = -1;
  std::vector<int> culprits;
  if (third != text.npos) {
    std::from_chars(text.data(), text.data() + first, failure);
    const char* at = text.data() + first + 1;
    const char* const end = text.data() + second;
    for (int rank = 0; at < end; ++at) {
      const auto result = std::from_chars(at, end, rank);
      if (result.ec != std::errc()) break;
      culprits.push_back(rank);
      at = result.ptr;
    }
  }
  if (failure < 0 || failure > static_cast<int>(CommFailure::Aborted)) {
    return CommError(CommFailure::Mismatch, {},
                     "expected an error of another rank in the store, found '{}'; do all ranks "
                     "run the same build?",
                     text.substr(0, 200));
  }
  CommError error(static_cast<CommFailure>(failure), culprits, "{}", text.substr(third + 1));
  return error.set_fate(std::string(text.substr(second + 1, third - second - 1)));
}

namespace {

class Agreement {
 public:
  Agreement(Store& store, const AgreementOptions& options, int rank, int world_size,
            std::chrono::milliseconds deadline)
      : store_(store),
        options_(options),
        rank_(rank),
        world_(world_size),
        deadline_(deadline),
        end_(Clock::now() + deadline),
        outcome_(outcome_key(options.name)) {}

  std::vector<std::string> run(std::string_view value) {
    publish(value);
    std::vector<std::string> values;
    for (int r = 0; r < world_;) {
      auto found = get_if_set(store_, key(r), std::min(kSlice, remaining(end_)));
      if (!found) {
        end_if_over(r);
        continue;
      }
      values.push_back(*std::move(found));
      if (options_.check) check(r, values.back());
      ++r;
    }
    conclude(std::string(kAgreed));
    return values;
  }

 private:
  int world(int r) const {
    return options_.world_ranks.empty() ? r : options_.world_ranks.at(static_cast<std::size_t>(r));
  }
  std::string key(int r) const { return fmt::format("{}/{}", options_.name, r); }
  std::string value_of(int r) { return store_.get(key(r), kRead); }
  std::string describe(const std::string& value) const {
    return options_.describe ? options_.describe(value) : value;
  }

  void publish(std::string_view value) {
    try {
      store_.set(key(rank_), value);
    } catch (const InvalidArgument&) {
      if (!store_.has(key(rank_))) throw;  // the value was refused
      throw CommError(CommFailure::Mismatch, {world(rank_)},
                      "{}: rank {} is already taken by '{}'; this process is '{}'. Start every "
                      "rank once, each with its own number",
                      options_.name, world(rank_), describe(value_of(rank_)),
                      describe(std::string(value)));
    }
  }

  // Writes the outcome, or throws the failure that another rank wrote first.
  void conclude(const std::string& outcome) {
    const std::string stands = set_or_get(store_, outcome_, outcome);
    if (stands != kAgreed) throw decode_error(stands);
  }
  void conclude(const CommError& error) { conclude(encode_error(error)); }

  void check(int r, const std::string& value) {
    try {
      options_.check(r, value);
    } catch (const CommError& error) {
      conclude(error);
      throw;
    }
  }

  // @param next  the first rank whose value has not arrived
  void end_if_over(int next) {
    if (store_.has(outcome_)) {
      conclude(std::string(kAgreed));
    } else if (const auto verdict =
                   find_verdict(store_, std::chrono::milliseconds(0), options_.verdict)) {
      const std::string arrived = arrived_ranks();
      CommError error(verdict->failure(), verdict->culprits(), "{}{}{}",
                      arrived.empty() ? "" : options_.name + ": ", verdict->what(), arrived);
      conclude(error.set_fate(verdict->fate()));
    }
    if (Clock::now() < end_) return;
    std::vector<int> missing;  // ranks of the world
    int first = -1;
    for (int r = next; r < world_; ++r) {
      if (store_.has(key(r))) continue;
      if (missing.empty()) first = r;
      missing.push_back(world(r));
    }
    if (missing.empty()) return;
    const CommError late(
        CommFailure::Timeout, missing, "{}: {} of {} ranks {} within {}, missing: {}{}{}",
        options_.name, world_ - static_cast<int>(missing.size()), world_, options_.verb,
        format_seconds(deadline_), rank_list(missing), details_of(missing), arrived_ranks());
    conclude(late);
    // The other ranks agreed, so all values are set, unless they have another world size.
    if (!store_.has(key(first))) throw CommError(late);
  }

  // "; arrived: rank 0 (host, pid 12), rank 2 (host, pid 14)"
  std::string arrived_ranks() {
    if (!options_.describe) return {};
    std::vector<std::string> shown;
    int more = 0;
    for (int r = 0; r < world_; ++r) {
      if (!store_.has(key(r))) continue;
      if (std::ssize(shown) == kProcessesShown) {
        ++more;
      } else {
        shown.push_back(fmt::format("rank {} ({})", world(r), describe(value_of(r))));
      }
    }
    return fmt::format("; {}: {}{}", options_.verb, fmt::join(shown, ", "),
                       more > 0 ? fmt::format(" and {} more", more) : "");
  }

  // "; of rank 3: the launcher started it as pid 12"
  std::string details_of(const std::vector<int>& missing) const {
    std::string text;
    if (!options_.describe_missing) return text;
    for (std::size_t i = 0; i < missing.size() && i < std::size_t{kProcessesShown}; ++i) {
      const std::string known = options_.describe_missing(missing[i]);
      if (!known.empty()) text += fmt::format("; of rank {}: {}", missing[i], known);
    }
    return text;
  }

  Store& store_;
  const AgreementOptions& options_;
  const int rank_, world_;
  const std::chrono::milliseconds deadline_;
  const Clock::time_point end_;
  const std::string outcome_;
};

}  // namespace

std::vector<std::string> agree(Store& store, const AgreementOptions& options, int rank,
                               int world_size, std::string_view value,
                               std::chrono::milliseconds deadline) {
  return Agreement(store, options, rank, world_size, deadline).run(value);
}

std::vector<std::string> exchange(Store& store, const std::string& name, int rank, int world_size,
                                  std::string_view value, std::chrono::milliseconds deadline) {
  return exchange(store, AgreementOptions{.name = name}, rank, world_size, value, deadline);
}

std::vector<std::string> exchange(Store& store, const AgreementOptions& options, int rank,
                                  int world_size, std::string_view value,
                                  std::chrono::milliseconds deadline) {
  auto values = agree(store, options, rank, world_size, value, deadline);
  try {
    store.leave(options.name, world_size);
  } catch (const CommError&) {
    // The agreement stands; the next request reports the lost store.
  }
  return values;
}

}  // namespace tessera::comm
