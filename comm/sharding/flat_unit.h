#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/base/shard_layout.h"
#include "core/optim/adamw.h"
#include "core/parameter.h"

namespace tessera::comm {

/// How parameters, gradients and optimizer state are spread over ranks.
enum class ShardMode : std::uint8_t {
  None,  ///< every rank holds everything; gradients are summed over ranks
  Full,  ///< every rank holds an equal segment of everything
};

/// "full" or "none". @throws InvalidArgument for other names
ShardMode parse_shard_mode(const std::string& name);

/// How a unit's parameters lie in its flat buffer, split over so many ranks.
ShardLayout layout_of(const Unit& unit, int world_size);

/// One unit's parameters as a flat buffer split over the ranks of a communicator.
///
/// Holds this rank's master values and their float32 gradient, `segment()` elements each (the whole
/// buffer in mode None), and the gathered parameters in the compute dtype, which the model's
/// tensors are windows of. With masters of that dtype and nothing to gather, the gathered buffer is
/// the master itself, and with one rank the gradient buffer is the gradient segment: nothing is
/// held twice.
///
/// State: Sharded -> start_gather -> Gathering -> finish_gather -> Gathered -> release -> Sharded;
/// independently, gradients: prepare_gradients -> (backward) -> start_reduce -> finish_reduce.
/// start_gather and release are idempotent; finish_gather without a start, and new gradients while
/// the last are being reduced, throw InternalError naming the unit.
class FlatUnit {
 public:
  enum class State : std::uint8_t { Sharded, Gathering, Gathered };

  /// Binds the unit's parameters. `communicator` and `context` must outlive this.
  /// @param master_dtype  f32, or bf16 to compute in bf16
  FlatUnit(const Unit& unit, ShardMode mode, DType compute_dtype, DType master_dtype,
           const std::shared_ptr<Context>& context, Communicator& communicator);
  /// A collective still under way is aborted: its buffers are about to go.
  ~FlatUnit();
  FlatUnit(const FlatUnit&) = delete;
  FlatUnit& operator=(const FlatUnit&) = delete;

  const std::string& name() const { return layout_.unit(); }
  const ShardLayout& layout() const { return layout_; }
  const std::vector<Parameter*>& parameters() const { return parameters_; }
  State state() const { return state_; }
  /// Whether each rank holds a segment only.
  bool is_scattered() const { return scatters_; }
  /// First flat element and number of elements of what this rank holds.
  std::int64_t segment_begin() const;
  std::int64_t segment_size() const;
  const Tensor& master() const { return master_; }
  /// Gradient of master(), complete after finish_reduce of the step's last micro-batch.
  const Tensor& gradient() const { return gradient_; }

  void start_gather();
  void finish_gather();
  /// Gives the gathered copy back, if there is one. The parameters can't be read until the next
  /// gather.
  void release();

  /// Makes the gradient buffer ready for a backward pass. `first`: of the step's first micro-batch.
  void prepare_gradients(bool first);
  /// Adds zeros for parameters without gradient and starts the sum over ranks. `last`: of the
  /// step's last micro-batch.
  void start_reduce(bool last);
  void finish_reduce();
  /// As if nothing had been gathered and reduced, by collectives that were captured and never ran.
  void forget_pass();

  /// Where an update may write the master, rounded to the compute dtype, in the same pass: the
  /// gathered copy, if it is whole and another buffer; else undefined.
  Tensor copy_of_master() const;
  /// Values changed: the gathered copy, if any, is stale, unless `copied` into copy_of_master().
  void master_changed(bool copied = false);

 private:
  void zero_gaps();
  CollectiveOptions options(const char* operation) const;

  std::vector<Parameter*> parameters_;
  DType compute_dtype_;
  std::shared_ptr<Context> context_;
  Communicator& communicator_;
  ShardLayout layout_;

  Tensor master_;                      // [segment] master dtype
  std::shared_ptr<Storage> gathered_;  // [padded] compute dtype; the master's storage if aliased
  bool gather_is_master_ = false;
  Tensor gathered_view_;
  bool fresh_ = false;  // mode None: the gathered copy holds the master's values

  std::shared_ptr<Storage> full_gradient_;  // [padded] f32
  Tensor full_gradient_view_;
  Tensor gradient_;        // [segment] f32; a window of full_gradient_ if nothing is scattered
  Tensor scattered_;       // [segment] f32: what later micro-batches add
  bool scatters_ = false;  // mode Full on more than one rank
  bool first_ = true;      // micro-batch of this step

  State state_ = State::Sharded;
  WorkPtr gathering_, reducing_;
};

}  // namespace tessera::comm
