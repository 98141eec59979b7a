#include "comm/nccl/call_comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "comm/control/agreement.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// A rank that has waited this long asks the others for their signatures.
constexpr milliseconds kPatience{100};

// Appends the signature without its sequence number, which all compared signatures share.
void append(std::string& signatures, const Collective& collective) {
  Signature signature(collective);
  signature.sequence = 0;
  signatures.append(reinterpret_cast<const char*>(&signature), sizeof signature);
}

// Signature of the launch as a whole, then of each part if there are several.
std::string signatures_of(const Collective& launch, std::span<const Collective> parts) {
  std::string signatures;
  append(signatures, launch);
  if (parts.size() > 1) {
    for (const Collective& part : parts) append(signatures, part);
  }
  return signatures;
}

// The i-th signature, with `number`; an empty one if there are fewer.
Signature signature_at(const std::string& signatures, std::size_t i, std::uint64_t number) {
  Signature signature;
  if ((i + 1) * sizeof signature <= signatures.size()) {
    std::memcpy(static_cast<void*>(&signature), signatures.data() + i * sizeof signature,
                sizeof signature);
  }
  signature.sequence = number;
  return signature;
}

}  // namespace

std::string CallComparison::Call::encode() const {
  return fmt::format("{}|{}", number, signatures);
}

CallComparison::Call CallComparison::Call::decode(const std::string& text) {
  Call call;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, call.number);
  if (parsed.ec == std::errc() && parsed.ptr != end) call.signatures.assign(parsed.ptr + 1, end);
  return call;
}

CallComparison::CallComparison(std::shared_ptr<Store> store, std::string prefix, int rank,
                               int world_size, SubgroupPtr group)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      rank_(rank),
      world_size_(world_size),
      group_(std::move(group)) {}

std::string CallComparison::key(std::string_view what) const {
  return fmt::format("{}/{}/{}", prefix_, comparison_, what);
}

std::optional<NcclSuspicion> CallComparison::check(const Collective& launch,
                                                   std::span<const Collective> parts,
                                                   const std::function<bool()>& is_over) {
  if (world_size_ == 1) return std::nullopt;
  std::string signatures = signatures_of(launch, parts);
  const std::string* const expected = history_.expected();
  const bool is_expected = expected != nullptr && *expected == signatures;
  if (!is_expected) {
    try {
      if (auto found = compare(launch, signatures, is_over)) return found;
    } catch (const CommError& error) {
      return NcclSuspicion{
          .collective = launch,
          .text = fmt::format("could not compare it with the other ranks: {}", error.what())};
    }
    if (is_over()) return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  history_.add(std::move(signatures));
  if (!is_expected) ++comparison_;
  return std::nullopt;
}

std::optional<NcclSuspicion> CallComparison::compare(const Collective& launch,
                                                     const std::string& signatures,
                                                     const std::function<bool()>& is_over) {
  // If answer() has published this rank's call already, that call stays.
  set_or_get(*store_, key(std::to_string(rank_)), Call{launch.sequence, signatures}.encode());
  std::vector<Call> calls;
  while (calls.size() < static_cast<std::size_t>(world_size_)) {
    if (is_over()) return std::nullopt;
    if (const auto call = get_if_set(*store_, key(std::to_string(calls.size())), kPatience)) {
      calls.push_back(Call::decode(*call));
    } else {
      set_or_get(*store_, key("asked"), std::to_string(launch.sequence));
    }
  }
  if (std::ranges::adjacent_find(calls, std::not_equal_to()) != calls.end())
    return NcclSuspicion{.collective = launch, .found = mismatch(calls)};
  store_->leave(fmt::format("{}/{}", prefix_, comparison_), world_size_);
  return std::nullopt;
}

// Reports the call with the lowest number. Ranks past this number made the predicted call there.
CommError CallComparison::mismatch(const std::vector<Call>& calls) const {
  const std::uint64_t number = std::ranges::min_element(calls, {}, &Call::number)->number;
  const std::string* expected =
      number == history_.size() ? history_.expected() : history_.find(number);
  std::vector<std::string> made;
  std::size_t parts = 1;
  for (const Call& call : calls) {
    made.push_back(call.number == number ? call.signatures
                   : expected != nullptr ? *expected
                                         : std::string());
    parts = std::max(parts, made.back().size() / sizeof(Signature));
  }
  for (std::size_t i = 0; i < parts; ++i) {
    std::vector<Signature> signatures;
    for (const std::string& call : made) signatures.push_back(signature_at(call, i, number));
    if (const auto found = find_mismatch(signatures, group_.get())) return *found;
  }
  return CommError(CommFailure::Mismatch, {}, "ranks disagree on collective #{}", number);
}

void CallComparison::answer() {
  if (world_size_ == 1) return;
  std::unique_lock lock(mutex_);
  const std::string asked_key = key("asked"), own_key = key(std::to_string(rank_));
  lock.unlock();
  const auto asked = get_if_set(*store_, asked_key, milliseconds(0));
  if (!asked) return;
  Call call = Call::decode(*asked);
  lock.lock();
  // A launch that is not in the history yet is published by check().
  const std::string* const made = history_.find(call.number);
  if (made == nullptr || key("asked") != asked_key) return;
  call.signatures = *made;
  lock.unlock();
  set_or_get(*store_, own_key, call.encode());
}

}  // namespace tessera::comm
