#include "comm/control/agreement.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "comm/collective.h"
#include "comm/control/tcp_store.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::string_view kAgreed = "agreed";
// Grace for a last look at the store once the deadline has passed.
constexpr std::chrono::milliseconds kLastLook{1};
// A waiting rank looks this often whether somebody has ended the agreement, or the run.
constexpr std::chrono::milliseconds kSlice{250};

std::string outcome_key(const std::string& name) { return name + "/outcome"; }

// Ranks whose processes a failure tells.
constexpr int kProcessesShown = 8;

std::chrono::milliseconds remaining(Clock::time_point deadline) {
  return std::max(kLastLook,
                  std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
}

}  // namespace

std::string set_or_get(Store& store, const std::string& key, std::string_view value) {
  try {
    store.set(key, value);
    return std::string(value);
  } catch (const InvalidArgument&) {
    if (!store.has(key)) throw;  // refused for the value's sake
    return store.get(key, std::chrono::seconds(5));
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

std::optional<CommError> find_verdict(Store& store, std::chrono::milliseconds at_most) {
  try {
    return decode_error(store.get(kVerdict, at_most));
  } catch (const CommError& error) {
    if (error.failure() != CommFailure::Timeout) throw;
    return std::nullopt;
  }
}

std::string get_or_verdict(Store& store, const std::string& key,
                           std::chrono::milliseconds deadline) {
  const auto end = Clock::now() + deadline;
  for (;;) {
    try {
      return store.get(key, std::min(kSlice, remaining(end)));
    } catch (const CommError& error) {
      if (error.failure() != CommFailure::Timeout) throw;
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
                     "expected a verdict of another rank in the store, found '{}'; do all ranks "
                     "run the same build?",
                     text.substr(0, 200));
  }
  CommError error(static_cast<CommFailure>(failure), culprits, "{}", text.substr(third + 1));
  return error.set_fate(std::string(text.substr(second + 1, third - second - 1)));
}

std::vector<std::string> agree(Store& store, const AgreementOptions& options, int rank,
                               int world_size, std::string_view value,
                               std::chrono::milliseconds deadline) {
  const std::string& name = options.name;
  const std::string outcome_at = outcome_key(name);
  const auto end = Clock::now() + deadline;
  const auto key = [&](int r) { return fmt::format("{}/{}", name, r); };
  const auto conclude = [&](const CommError& error) {
    const std::string outcome = set_or_get(store, outcome_at, encode_error(error));
    if (outcome != kAgreed) throw decode_error(outcome);
  };

  // "; arrived: rank 0 (host, pid 12), rank 2 (host, pid 14)": what is known of those who came.
  const auto who_came = [&]() -> std::string {
    if (!options.describe) return {};
    std::vector<std::string> told;
    int more = 0;
    for (int r = 0; r < world_size; ++r) {
      if (!store.has(key(r))) continue;
      if (static_cast<int>(told.size()) == kProcessesShown) {
        ++more;
        continue;
      }
      told.push_back(fmt::format("rank {} ({})", r,
                                 options.describe(store.get(key(r), std::chrono::seconds(5)))));
    }
    return fmt::format("; {}: {}{}", options.verb, fmt::join(told, ", "),
                       more > 0 ? fmt::format(" and {} more", more) : "");
  };

  // "; of rank 3: the launcher started it as pid 12"
  const auto known_of = [&](const std::vector<int>& missing) {
    std::string text;
    if (!options.describe_missing) return text;
    for (std::size_t i = 0; i < missing.size() && i < std::size_t{kProcessesShown}; ++i) {
      const std::string known = options.describe_missing(missing[i]);
      if (!known.empty()) text += fmt::format("; of rank {}: {}", missing[i], known);
    }
    return text;
  };

  try {
    store.set(key(rank), value);
  } catch (const InvalidArgument&) {
    if (!store.has(key(rank))) throw;  // refused for the value's sake
    const auto told = [&](const std::string& text) {
      return options.describe ? options.describe(text) : text;
    };
    throw CommError(CommFailure::Mismatch, {rank},
                    "{}: rank {} is already taken by '{}'; this process is '{}'. Start every rank "
                    "once, each with its own number",
                    name, rank, told(store.get(key(rank), std::chrono::seconds(5))),
                    told(std::string(value)));
  }

  std::vector<std::string> values;
  for (int r = 0; r < world_size;) {
    try {
      values.push_back(store.get(key(r), std::min(kSlice, remaining(end))));
    } catch (const CommError& error) {
      if (error.failure() != CommFailure::Timeout) throw;
      if (store.has(outcome_at)) {
        const std::string outcome = store.get(outcome_at, std::chrono::seconds(5));
        if (outcome != kAgreed) throw decode_error(outcome);
      } else if (const auto verdict = find_verdict(store, std::chrono::milliseconds(0))) {
        const std::string came = who_came();
        CommError told(verdict->failure(), verdict->culprits(), "{}{}{}",
                       came.empty() ? "" : name + ": ", verdict->what(), came);
        conclude(told.set_fate(verdict->fate()));
      }
      if (Clock::now() < end) continue;
      std::vector<int> missing;
      for (int other = r; other < world_size; ++other) {
        if (!store.has(key(other))) missing.push_back(other);
      }
      if (missing.empty()) continue;
      const CommError late(
          CommFailure::Timeout, missing, "{}: {} of {} ranks {} within {}, missing: {}{}{}", name,
          world_size - static_cast<int>(missing.size()), world_size, options.verb,
          format_seconds(deadline), rank_list(missing), known_of(missing), who_came());
      conclude(late);
      // The others have agreed, so all values are there, unless their world is another one.
      if (!store.has(key(missing.front()))) throw CommError(late);
      continue;
    }
    if (options.check) {
      try {
        options.check(r, values.back());
      } catch (const CommError& error) {
        conclude(error);
        throw;
      }
    }
    ++r;
  }
  const std::string outcome = set_or_get(store, outcome_at, kAgreed);
  if (outcome != kAgreed) throw decode_error(outcome);
  return values;
}

std::vector<std::string> exchange(Store& store, const std::string& name, int rank, int world_size,
                                  std::string_view value, std::chrono::milliseconds deadline) {
  AgreementOptions options;
  options.name = name;
  auto values = agree(store, options, rank, world_size, value, deadline);
  try {
    store.leave(name, world_size);
  } catch (const CommError&) {
    // The agreement stands whatever becomes of the store; who needs the store next will learn it.
  }
  return values;
}

}  // namespace tessera::comm
