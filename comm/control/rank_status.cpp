#include "comm/control/rank_status.h"

#include <fmt/format.h>

#include <utility>

#include "comm/control/socket.h"
#include "core/base/fault_point.h"

namespace tessera::comm {

std::string RankState::where() const {
  std::string text = phase;
  if (step >= 0)
    text += phase == "step" ? fmt::format(" {}", step) : fmt::format(" of step {}", step);
  if (!collective.empty()) text += ", " + collective;
  return text;
}

std::string RankState::encode() const {
  return Message{'B',
                 {process, phase, std::to_string(step), collective, std::to_string(busy_us),
                  std::to_string(busy_steps), leaving ? "1" : "0"}}
      .encode_body();
}

std::optional<RankState> RankState::decode(std::string_view text) {
  Message message;
  if (!Message::decode(text, message) || message.type != 'B' || message.fields.size() != 7)
    return std::nullopt;
  RankState state;
  if (!parse_number(message.fields[2], state.step) ||
      !parse_number(message.fields[4], state.busy_us) ||
      !parse_number(message.fields[5], state.busy_steps))
    return std::nullopt;
  state.process = message.fields[0];
  state.phase = message.fields[1];
  state.collective = message.fields[3];
  state.leaving = message.fields[6] == "1";
  return state;
}

void RankStatus::enter(const char* phase, std::int64_t step) {
  {
    const std::lock_guard lock(mutex_);
    state_.phase = phase;
    state_.step = step;
    if (listener_) listener_(state_.phase, step);
  }
  fault_point(phase);
}

void RankStatus::on_enter(std::function<void(const std::string&, std::int64_t)> listener) {
  const std::lock_guard lock(mutex_);
  listener_ = std::move(listener);
  if (listener_) listener_(state_.phase, state_.step);
}

void RankStatus::worked(double seconds) {
  const std::lock_guard lock(mutex_);
  state_.busy_us += static_cast<std::int64_t>(seconds * 1e6);
  ++state_.busy_steps;
}

void RankStatus::leave() {
  const std::lock_guard lock(mutex_);
  state_.leaving = true;
}

void RankStatus::set_collective(std::function<std::string()> describe) {
  const std::lock_guard lock(mutex_);
  collective_ = std::move(describe);
}

RankState RankStatus::state() const {
  const std::lock_guard lock(mutex_);
  RankState state = state_;
  if (collective_) state.collective = collective_();
  return state;
}

}  // namespace tessera::comm
