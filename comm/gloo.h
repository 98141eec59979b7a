#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/control/store.h"
#include "comm/queued_communicator.h"

namespace tessera::comm {

struct GlooOptions {
  CommunicatorOptions communicator = {};
  /// Time for all ranks to connect to each other: half of it to say where they listen, half to
  /// connect, and half of it more where more than 64 can't be reached. Why they can't be is found
  /// within watched_within, or the time that those take, and half a second more.
  std::chrono::milliseconds connect_timeout{60'000};
  /// Who watches processes, if ends_run, finds one that has ended or is stopped within this.
  std::chrono::milliseconds watched_within{2000};
  /// Address or host name on which this rank listens for its peers.
  std::string address = "127.0.0.1";
  /// Prefix of the keys in the store; new for each communicator.
  std::string name = "gloo";
  /// How messages call each rank's process ("host, pid 12"), by rank; may be empty.
  std::vector<std::string> processes = {};
};

/// Ranks that are processes, over TCP (Gloo's transport, own collectives). Called by all ranks.
///
/// Before the data of a collective is taken for good, each rank compares the signatures of all, so
/// a mismatch ends in CommError(Mismatch) on every rank. When a rank fails, it leaves a verdict in
/// the store, and the first one stands: all survivors throw the same error with the same culprit.
/// Data goes straight from buffer to buffer; reductions stage world_size - 1 parts, booked as
/// Communication if options.communicator.context is set, and kept for the next collective.
///
/// @param store  outlives the connection; also carries verdicts
/// @throws CommError if not all ranks connect in time
std::unique_ptr<Communicator> make_gloo_communicator(const std::shared_ptr<Store>& store, int rank,
                                                     int world_size, const GlooOptions& options);

}  // namespace tessera::comm
