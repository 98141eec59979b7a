#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/collective.h"
#include "comm/failure_report.h"

namespace tessera::comm {

/// Progress of a rank. Sent as raw bytes between processes of one build.
struct NcclPosition {
  std::uint64_t called = 0;      ///< number of launches made
  std::uint8_t unfinished = 0;   ///< 1: `oldest` is set
  std::uint8_t has_started = 0;  ///< 1: its device has reached `oldest`
  std::array<std::uint8_t, 6> reserved{};
  Signature oldest;  ///< oldest launch that the device has not finished

  std::string encode() const;
  /// @return nothing if the text is malformed
  static std::optional<NcclPosition> decode(std::string_view text);
};

/// A failure as one rank sees it.
struct NcclSuspicion {
  Collective collective;  ///< the one that is late or was running
  bool late = false;      ///< else `text` describes the failure
  bool remote = false;    ///< caused by a peer or the network
  std::string text = {};
  std::optional<CommError> found = {};  ///< the cause, if known without positions
};

/// Finds the culprit from the positions that ranks published within `answer_time`.
/// @param by_rank  nothing for a rank that did not answer
CommError judge(const NcclSuspicion& suspicion, int rank,
                std::span<const std::optional<NcclPosition>> by_rank, const FailureReport& report,
                std::chrono::milliseconds answer_time);

}  // namespace tessera::comm
