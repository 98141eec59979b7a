#include "comm/nccl/call_comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "comm/control/agreement.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kFirstWait{20}, kLongestWait{250}, kStoreTime{5000};

// Without the number, which is the same for all that are compared.
void append(std::string& call, const Collective& collective) {
  Signature signature(collective);
  signature.sequence = 0;
  call.append(reinterpret_cast<const char*>(&signature), sizeof signature);
}

// Signatures as bytes: of a launch, and if it consists of several, of each.
std::string call_of(const Collective& launch, std::span<const Collective> parts) {
  std::string call;
  call.reserve((parts.size() + 1) * sizeof(Signature));
  append(call, launch);
  if (parts.size() > 1) {
    for (const Collective& part : parts) append(call, part);
  }
  return call;
}

// @return the i-th signature of a call, or an empty one if it has fewer
Signature signature_of(const std::string& call, std::size_t i, std::uint64_t number) {
  Signature signature;
  if ((i + 1) * sizeof signature <= call.size()) {
    std::memcpy(static_cast<void*>(&signature), call.data() + i * sizeof signature,
                sizeof signature);
  }
  signature.sequence = number;
  return signature;
}

}  // namespace

std::string CallComparison::Stand::encode() const { return fmt::format("{}|{}", number, call); }

CallComparison::Stand CallComparison::Stand::decode(const std::string& text) {
  Stand stand;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, stand.number);
  if (parsed.ec == std::errc() && parsed.ptr != end) stand.call.assign(parsed.ptr + 1, end);
  return stand;
}

CallComparison::CallComparison(std::shared_ptr<Store> store, std::string prefix, int rank,
                               int world_size, milliseconds answer_time)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      rank_(rank),
      world_size_(world_size),
      answer_time_(answer_time) {}

std::string CallComparison::key(std::string_view what) const {
  return fmt::format("{}/{}/{}", prefix_, comparison_, what);
}

std::optional<NcclSuspicion> CallComparison::check(const Collective& launch,
                                                   std::span<const Collective> parts,
                                                   const std::function<bool()>& is_over) {
  if (world_size_ == 1) return std::nullopt;
  std::string call = call_of(launch, parts);
  const std::string* expected = history_.expected();
  if (expected != nullptr && *expected == call) {
    passed(std::move(call), false);
    return std::nullopt;
  }
  try {
    if (auto found = compare(launch, call, is_over)) return found;
  } catch (const CommError& error) {
    return NcclSuspicion{
        .collective = launch,
        .text = fmt::format("could not compare it with the other ranks: {}", error.what())};
  }
  if (!is_over()) passed(std::move(call), true);
  return std::nullopt;
}

void CallComparison::passed(std::string call, bool compared) {
  history_.add(std::move(call));
  const std::lock_guard lock(mutex_);
  if (compared) ++comparison_;
  ++passed_;
}

std::optional<NcclSuspicion> CallComparison::compare(const Collective& launch,
                                                     const std::string& call,
                                                     const std::function<bool()>& is_over) {
  const Stand own{launch.sequence, call};
  Stands stands(static_cast<std::size_t>(world_size_));
  // What stands there is another one if this rank has answered somebody who asked before.
  const std::string told = set_or_get(*store_, key(std::to_string(rank_)), own.encode());
  stands[static_cast<std::size_t>(rank_)] = Stand::decode(told);
  std::optional<Clock::time_point> disagreed;
  for (milliseconds wait = kFirstWait;; wait = std::min(2 * wait, kLongestWait)) {
    if (rank_ == 0 ? collect(stands, wait) : is_agreed(wait)) break;
    if (is_over()) return std::nullopt;
    // Some are only late, and need no question; so it is put now, and not at once.
    set_or_get(*store_, key("asked"), std::to_string(launch.sequence));
    if (rank_ != 0) collect(stands, milliseconds(0));
    const bool disagree =
        std::any_of(stands.begin(), stands.end(), [&](const auto& s) { return s && s != own; });
    if (!disagree) continue;
    if (!disagreed) disagreed = Clock::now();
    const bool complete =
        std::all_of(stands.begin(), stands.end(), [](const auto& s) { return s.has_value(); });
    if (complete || Clock::now() - *disagreed >= answer_time_) {
      return NcclSuspicion{.collective = launch, .found = mismatch(stands)};
    }
    wait = kFirstWait;
  }
  if (rank_ == 0) store_->set(key("agreed"), "yes");
  store_->leave(fmt::format("{}/{}", prefix_, comparison_), world_size_);
  return std::nullopt;
}

// @return whether all stand where this rank does
bool CallComparison::collect(Stands& stands, milliseconds wait) {
  for (std::size_t r = 0; r < stands.size(); ++r) {
    if (stands[r]) continue;
    const std::string at = key(std::to_string(r));
    try {
      if (wait.count() > 0) {
        stands[r] = Stand::decode(store_->get(at, wait));
      } else if (store_->has(at)) {
        stands[r] = Stand::decode(store_->get(at, kStoreTime));
      }
    } catch (const CommError& error) {
      if (error.failure() != CommFailure::Timeout) throw;
      wait = milliseconds(0);  // that was all of it; the rest is only looked at
    }
  }
  return std::all_of(stands.begin(), stands.end(),
                     [&](const auto& stand) { return stand && stand == stands[0]; });
}

bool CallComparison::is_agreed(milliseconds wait) {
  try {
    store_->get(key("agreed"), wait);
    return true;
  } catch (const CommError& error) {
    if (error.failure() != CommFailure::Timeout) throw;
    return false;
  }
}

// Of the first number about which ranks disagree.
CommError CallComparison::mismatch(const Stands& stands) const {
  std::uint64_t number = history_.size();
  for (const auto& stand : stands) {
    if (stand && !stand->call.empty()) number = std::min(number, stand->number);
  }
  // Who launched it did as was expected, by this rank too.
  const std::string* expected =
      number == history_.size() ? history_.expected() : history_.find(number);
  std::vector<std::string> calls;
  std::vector<int> ranks;
  std::size_t parts = 1;
  for (std::size_t r = 0; r < stands.size(); ++r) {
    if (!stands[r]) continue;
    const bool is_at_it = stands[r]->number == number && !stands[r]->call.empty();
    ranks.push_back(static_cast<int>(r));
    calls.push_back(is_at_it ? stands[r]->call : expected != nullptr ? *expected : std::string());
    parts = std::max(parts, calls.back().size() / sizeof(Signature));
  }
  for (std::size_t i = 0; i < parts; ++i) {
    std::vector<Signature> signatures;
    for (const std::string& call : calls) signatures.push_back(signature_of(call, i, number));
    if (const auto found = find_mismatch(signatures, ranks)) return *found;
  }
  return CommError(CommFailure::Mismatch, {}, "ranks disagree on collective #{}", number);
}

void CallComparison::answer() {
  if (world_size_ == 1) return;
  std::unique_lock lock(mutex_);
  const std::string asked_key = key("asked"), own_key = key(std::to_string(rank_));
  const std::uint64_t passed = passed_;
  lock.unlock();
  if (!store_->has(asked_key)) return;
  std::string asked;
  try {
    asked = store_->get(asked_key, kStoreTime);
  } catch (const CommError& error) {
    if (error.failure() != CommFailure::Timeout) throw;
    return;  // they have agreed meanwhile
  }
  // Not of what is compared now: the caller speaks for itself.
  if (passed > Stand::decode(asked).number)
    set_or_get(*store_, own_key, Stand{passed, ""}.encode());
}

}  // namespace tessera::comm
