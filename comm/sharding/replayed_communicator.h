#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/base/context.h"

namespace tessera::comm {

/// Another communicator, whose collectives may be started while a context's work is captured.
///
/// They are no part of the captured work then: they lie between its parts, and each run of it
/// starts them anew by the other communicator, which numbers, compares, records and bounds them as
/// any others. So ranks that replay meet ranks that do not. Without a capture, calls go straight
/// on.
///
/// A collective that was started in a capture is waited for in the same. Buffers are those of the
/// capture, or outlive it. Collectives of a group are all started where it ends.
class ReplayedCommunicator final : public Communicator {
 public:
  /// Both must outlive this, and what is captured.
  ReplayedCommunicator(Communicator& communicator, Context& context)
      : communicator_(communicator), context_(context) {}

  int rank() const override { return communicator_.rank(); }
  int world_size() const override { return communicator_.world_size(); }
  std::string_view backend() const override { return communicator_.backend(); }

  WorkPtr start_all_gather(const TensorView& buffer, CollectiveOptions options) override;
  WorkPtr start_reduce_scatter(const TensorView& in, const TensorView& out,
                               CollectiveOptions options) override;
  WorkPtr start_all_reduce(const TensorView& buffer, ReduceOp op,
                           CollectiveOptions options) override;
  WorkPtr start_broadcast(const TensorView& buffer, int root, CollectiveOptions options) override;
  WorkPtr start_barrier(CollectiveOptions options) override;
  void begin_group() override;
  void end_group() override;
  void drop_group() noexcept override;

  void check() override { communicator_.check(); }
  std::string under_way() const override { return communicator_.under_way(); }
  std::int64_t waited_ns() const override { return communicator_.waited_ns(); }
  void set_recorder(std::shared_ptr<FlightRecorder> recorder) override {
    communicator_.set_recorder(std::move(recorder));
  }
  void abort(std::string_view reason) noexcept override { communicator_.abort(reason); }
  void fail(const CommError& reason) noexcept override { communicator_.fail(reason); }

 private:
  WorkPtr start(std::function<WorkPtr()> start);

  Communicator& communicator_;
  Context& context_;
  // What starts a captured group's collectives; a group of none ends no part.
  std::optional<std::vector<std::function<void()>>> group_;
};

}  // namespace tessera::comm
