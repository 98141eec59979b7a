#include "comm/nccl/inquiry.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/control/agreement.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

}  // namespace

NcclInquiry::NcclInquiry(std::shared_ptr<Store> store, int rank, int world_size,
                         const NcclOptions& options, CallComparison& comparison,
                         std::function<NcclPosition()> position)
    : store_(std::move(store)),
      rank_(rank),
      world_size_(world_size),
      options_(options),
      comparison_(comparison),
      position_(std::move(position)),
      verdict_key_(options_.verdict_key()),
      report_(store_, verdict_key_, world_size, options_.processes, options_.membership.group) {}

std::string NcclInquiry::key(std::string_view what) const {
  return fmt::format("{}/{}", options_.name, what);
}

std::optional<CommError> NcclInquiry::ask_peers() {
  if (store_is_lost_ || world_size_ == 1) return std::nullopt;
  try {
    comparison_.answer();
    if (!store_->has(key("alarm"))) return std::nullopt;
    publish_position();
    return await_verdict(store_->get(key("alarm"), kNcclVerdictTime));
  } catch (const std::exception&) {  // losing the store alone is no failure
    store_is_lost_ = true;
    return std::nullopt;
  }
}

CommError NcclInquiry::await_verdict(const std::string& who) {
  const CommError none(CommFailure::Aborted, {}, "rank {} raised an alarm but published no verdict",
                       who);
  const auto end = Clock::now() + options_.answer_time + kNcclVerdictTime;
  while (!store_->has(verdict_key_) && Clock::now() < end) {
    std::this_thread::sleep_for(std::min(options_.poll, milliseconds(20)));
  }
  return report_.verdict(none);
}

CommError NcclInquiry::investigate(const NcclSuspicion& suspicion) {
  if (suspicion.found) return report_.verdict(*suspicion.found);
  std::vector<std::optional<NcclPosition>> positions(static_cast<std::size_t>(world_size_));
  try {
    raise_alarm();
    publish_position();
    const auto end = Clock::now() + options_.answer_time;
    for (bool all = false; !all && Clock::now() < end && !store_->has(verdict_key_);) {
      all = true;
      for (int r = 0; r < world_size_; ++r) {
        auto& position = positions[static_cast<std::size_t>(r)];
        const std::string at = key(fmt::format("position/{}", r));
        if (!position && store_->has(at)) {
          position = NcclPosition::decode(store_->get(at, kNcclVerdictTime));
        }
        all = all && position;
      }
      if (!all) std::this_thread::sleep_for(std::min(options_.poll, milliseconds(20)));
    }
  } catch (const std::exception&) {
    store_is_lost_ = true;
    return CommError(suspicion.late ? CommFailure::Timeout : CommFailure::Aborted, {},
                     "{}: rank {}: {}; the store is lost too, so the ranks can't find the "
                     "culprit",
                     suspicion.collective.describe(), world_rank(options_.group(), rank_),
                     suspicion.late
                         ? "not done within " + format_seconds(suspicion.collective.deadline)
                         : suspicion.text);
  }
  return report_.verdict(judge(suspicion, rank_, positions, report_, options_.answer_time));
}

void NcclInquiry::raise_alarm() {
  set_or_get(*store_, key("alarm"), std::to_string(world_rank(options_.group(), rank_)));
}

void NcclInquiry::publish_position() {
  set_or_get(*store_, key(fmt::format("position/{}", rank_)), position_().encode());
}

void NcclInquiry::publish(const CommError& error) {
  if (store_is_lost_) return;
  try {
    report_.verdict(error);
    raise_alarm();
  } catch (const std::exception&) {
    store_is_lost_ = true;
  }
}

}  // namespace tessera::comm
