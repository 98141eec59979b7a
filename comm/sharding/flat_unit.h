#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/base/shard_layout.h"
#include "core/nn/units.h"
#include "core/optim/adamw.h"

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
/// Both whole buffers get their memory when they are first read or written: the gathered parameters
/// by `demand`, the gradients without further ado.
///
/// State: Sharded -> start_gather -> Gathering -> finish_gather -> Gathered -> release -> Sharded;
/// gradients, once per micro-batch: begin_micro_batch -> (backward) -> start_reduce ->
/// finish_reduce. start_gather and release are idempotent. finish_gather without a start, and
/// gradients during a reduction, throw InternalError naming the unit.
class FlatUnit final : private StorageSupplier {
 public:
  enum class State : std::uint8_t { Sharded, Gathering, Gathered };

  /// Binds the unit's parameters. `communicator` and `context` must outlive this.
  /// @param master_dtype  f32, or bf16 if that is the compute dtype
  /// @param demand        called when a parameter is read that is not gathered; gathers the unit
  FlatUnit(const Unit& unit, ShardMode mode, DType compute_dtype, DType master_dtype,
           const std::shared_ptr<Context>& context, Communicator& communicator,
           std::function<void(FlatUnit&)> demand);
  /// Aborts a running collective that uses the unit's buffers.
  ~FlatUnit() override;
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
  /// Frees the gathered copy, if any; the next read of a parameter demands it again.
  void release();
  /// Keeps the gathered copy for a use that is expected soon, which demands it nevertheless.
  void keep();

  /// Starts new gradients. `first`: first micro-batch of the step.
  void begin_micro_batch(bool first);
  /// Zeros gradients of unused parameters and starts the sum over ranks. `last`: last micro-batch
  /// of the step.
  void start_reduce(bool last);
  void finish_reduce();
  /// Whether start_reduce() was called in this micro-batch.
  bool is_reduced() const { return reduced_; }

  int users = 0;        ///< forward and backward passes that are running and use the parameters
  int outstanding = 0;  ///< forward passes whose backward has not ended

  /// Gathered copy that an optimizer step can write together with the master, rounded to the
  /// compute dtype; undefined if the copy is incomplete or is the master itself.
  Tensor copy_of_master() const;
  /// Marks the gathered copy as stale, unless the update was `copied` into copy_of_master().
  void master_changed(bool copied = false);

 private:
  void supply(Storage& storage) override;
  void zero_gaps();
  CollectiveOptions options(const char* operation) const;

  std::vector<Parameter*> parameters_;
  DType compute_dtype_;
  std::shared_ptr<Context> context_;
  Communicator& communicator_;
  std::function<void(FlatUnit&)> demand_;
  ShardLayout layout_;

  Tensor master_;                      // [segment] master dtype
  std::shared_ptr<Storage> gathered_;  // [padded] compute dtype; the master's storage if aliased
  bool gather_is_master_ = false;
  Tensor gathered_view_;

  std::shared_ptr<Storage> full_gradient_;  // [padded] f32
  Tensor full_gradient_view_;
  Tensor gradient_;        // [segment] f32; a window of full_gradient_ if nothing is scattered
  Tensor scattered_;       // [segment] f32: reduced gradient of a later micro-batch
  bool scatters_ = false;  // mode Full on more than one rank
  bool has_sum_ = false;   // gradient_ has the sum of the step's micro-batches so far
  bool reduced_ = false;

  State state_ = State::Sharded;
  WorkPtr gathering_, reducing_;
};

}  // namespace tessera::comm
