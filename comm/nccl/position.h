#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/collective.h"
#include "comm/failure_report.h"

namespace tessera::comm {

/// How far a rank has come with its collectives. Plain data: sent between processes of one build.
struct NcclPosition {
  std::uint64_t called = 0;      ///< launches that it has made
  std::uint8_t unfinished = 0;   ///< whether `oldest` is one
  std::uint8_t has_started = 0;  ///< whether its device has reached `oldest`
  std::array<std::uint8_t, 6> reserved{};
  Signature oldest;  ///< of those that its device is not done with

  std::string encode() const;
  /// @return nothing if the text is none
  static std::optional<NcclPosition> decode(std::string_view text);
};

/// Why a rank takes its communication for broken.
struct NcclSuspicion {
  Collective collective;  ///< that is late, or was under way
  bool late = false;      ///< else `text` says what failed
  bool remote = false;    ///< it failed for a peer's sake
  std::string text = {};
  std::optional<CommError> found = {};  ///< what is broken is known: nothing is to be asked
};

/// Who is to blame, from what each rank said of itself within `answer_time`.
/// @param by_rank  nothing for a rank that did not answer
CommError judge(const NcclSuspicion& suspicion, int rank,
                std::span<const std::optional<NcclPosition>> by_rank, const FailureReport& report,
                std::chrono::milliseconds answer_time);

}  // namespace tessera::comm
