#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/base/shard_layout.h"
#include "core/optim/adamw.h"
#include "core/parameter.h"

namespace tessera::comm {

/// Distribution of parameters, gradients and optimizer state over ranks.
enum class ShardMode : std::uint8_t {
  None,  ///< every rank holds everything; gradients are summed over ranks
  Full,  ///< every rank holds an equal segment of everything
};

/// "full" or "none". @throws InvalidArgument for other names
ShardMode parse_shard_mode(const std::string& name);

/// One unit's parameters as a flat buffer split over the ranks of a communicator.
///
/// Holds this rank's segment of master values and of their float32 gradient (the whole buffer in
/// mode None), and the gathered parameters in the compute dtype, which the model's tensors view.
/// If nothing is gathered and masters have the compute dtype, the gathered buffer is the master
/// itself; if nothing is scattered, the gradient buffer is the gradient segment.
///
/// State: Sharded -> start_gather -> Gathering -> finish_gather -> Gathered -> release -> Sharded;
/// independently, gradients: prepare_gradients -> (backward) -> start_reduce -> finish_reduce.
/// start_gather and release are idempotent. finish_gather without a start, and new gradients during
/// a reduction, throw InternalError naming the unit.
class FlatUnit {
 public:
  enum class State : std::uint8_t { Sharded, Gathering, Gathered };

  /// Binds the unit's parameters. `communicator` and `context` must outlive this.
  /// @param master_dtype  f32, or bf16 if that is the compute dtype
  FlatUnit(const Unit& unit, ShardMode mode, DType compute_dtype, DType master_dtype,
           const std::shared_ptr<Context>& context, Communicator& communicator);
  /// Aborts a running collective that uses the unit's buffers.
  ~FlatUnit();
  FlatUnit(const FlatUnit&) = delete;
  FlatUnit& operator=(const FlatUnit&) = delete;

  const std::string& name() const { return layout_.unit(); }
  const ShardLayout& layout() const { return layout_; }
  const std::vector<Parameter*>& parameters() const { return parameters_; }
  State state() const { return state_; }
  /// First flat element and number of elements of this rank's segment.
  std::int64_t segment_begin() const;
  std::int64_t segment_size() const;
  const Tensor& master() const { return master_; }
  /// Gradient of master(), complete after finish_reduce() of the step's last micro-batch.
  const Tensor& gradient() const { return gradient_; }

  void start_gather();
  void finish_gather();
  /// Frees the gathered copy, if any; parameters are unreadable until the next gather.
  void release();

  /// Prepares the gradient buffer for a backward pass. `first`: first micro-batch of the step.
  void prepare_gradients(bool first);
  /// Zeros gradients of unused parameters and starts the sum over ranks. `last`: last micro-batch
  /// of the step.
  void start_reduce(bool last);
  void finish_reduce();

  /// Gathered copy that an optimizer step can write together with the master, rounded to the
  /// compute dtype; undefined if the copy is incomplete or is the master itself.
  Tensor copy_of_master() const;
  /// Marks the gathered copy as stale, unless the update was `copied` into copy_of_master().
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
  bool fresh_ = false;  // the gathered copy holds the master's values; mode None

  std::shared_ptr<Storage> full_gradient_;  // [padded] f32
  Tensor full_gradient_view_;
  Tensor gradient_;        // [segment] f32; a window of full_gradient_ if nothing is scattered
  Tensor scattered_;       // [segment] f32: reduced gradient of a later micro-batch
  bool scatters_ = false;  // mode Full on more than one rank
  bool first_ = true;      // first micro-batch of this step

  State state_ = State::Sharded;
  WorkPtr gathering_, reducing_;
};

}  // namespace tessera::comm
