#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/sharding/mesh.h"
#include "comm/sharding/shard_spec.h"
#include "core/autograd/autograd.h"
#include "core/base/shard_layout.h"
#include "core/nn/units.h"

namespace tessera::comm {

class Work;
struct CollectiveOptions;

/// One unit's parameters as a flat buffer, distributed over a mesh.
///
/// Holds this rank's segment of master values and of their float32 gradient (all of
/// them in a shard group of one), and the parameters in the compute dtype, which the
/// model's tensors view. If these stay whole and have the master's dtype, the master is a part of
/// them; in a shard group of one, a float32 gradient is the whole buffer. Units of frozen
/// parameters have no gradients. An offloaded master is in host memory; the device has a copy of it
/// in the compute dtype.
///
/// Gradient buffers are allocated on first write, so that they take the memory that activations leave
/// during backward, and are freed by release_gradient(); whole parameters by `demand` on first read.
///
/// A unit of one parameter can receive its gradient as rows (ShardSpec::tokens). If that is the only
/// gradient of a micro-batch, the ranks gather their rows, and each adds up those of its segment, in
/// rank order; else the rows are written into the whole gradient.
///
/// State: Sharded -> start_gather -> Gathering -> finish_gather -> Gathered -> release -> Sharded;
/// gradients, once per micro-batch: begin_micro_batch -> (backward) -> start_reduce ->
/// finish_reduce -> finish_replicate. start_gather and release are idempotent. finish_gather without
/// a start throws InternalError, and a gradient after start_reduce InvalidArgument, naming the unit.
class FlatUnit final : private StorageSupplier, private autograd::RowReceiver {
 public:
  enum class State : std::uint8_t { Sharded, Gathering, Gathered };

  /// Binds the unit's parameters, which are all trainable or all frozen. `mesh` must outlive this.
  /// @param host    context of offloaded masters; null: not offloaded
  /// @param demand  called when a parameter is read that is not gathered; gathers the unit
  /// @param make_room  called before the whole gradient buffer or that of rows is allocated
  FlatUnit(const Unit& unit, const ShardSpec& spec, const Mesh& mesh,
           const std::shared_ptr<Context>& context, const std::shared_ptr<Context>& host,
           std::function<void(FlatUnit&)> demand, std::function<void()> make_room);
  /// Aborts a running collective that uses the unit's buffers.
  ~FlatUnit() override;
  FlatUnit(const FlatUnit&) = delete;
  FlatUnit& operator=(const FlatUnit&) = delete;

  const std::string& name() const { return layout_.unit(); }
  /// Layout over the shard group.
  const ShardLayout& layout() const { return layout_; }
  bool is_trainable() const { return trainable_; }
  /// Whether parameters are released between their uses.
  bool splits_parameters() const { return splits_parameters_; }
  const std::vector<Parameter*>& parameters() const { return parameters_; }
  State state() const { return state_; }
  /// First flat element and number of elements of this rank's segment.
  std::int64_t segment_begin() const;
  std::int64_t segment_size() const;
  /// The part of the segment that this rank saves, in flat elements: every element of the unit
  /// belongs to one rank's part.
  std::pair<std::int64_t, std::int64_t> owned() const;
  const Tensor& master() const { return master_; }
  /// Gradient of master(), complete after finish_reduce() of the step's last micro-batch; its memory
  /// is there until release_gradient() or the next step. @throws InvalidArgument if there is none
  const Tensor& gradient() const;
  /// Frees the gradient of the step.
  void release_gradient();

  void start_gather();
  void finish_gather();
  /// Frees the gathered copy, if any; the next read of a parameter demands it again.
  void release();
  /// Like release(), but keeps the gathered copy in memory for a use that is expected soon.
  void keep();

  /// Starts new gradients. `first`: first micro-batch of the step.
  void begin_micro_batch(bool first);
  /// Writes a gradient that arrived as rows into the parameter's grad(), until start_reduce().
  void expose_gradients();
  /// Zeros gradients of unused parameters and starts the sum over the shard group. `last`: last
  /// micro-batch of the step. @return whether finish_reduce() has something to wait for
  bool start_reduce(bool last);
  /// Waits for it; after the last micro-batch starts the sum over replicas.
  void finish_reduce();
  void finish_replicate();
  /// Whether start_reduce() was called in this micro-batch.
  bool is_reduced() const { return reduced_; }

  int users = 0;        ///< forward and backward passes that are running and use the parameters
  int gathered_by = 1;  ///< users at the first read: the last of them releases
  int outstanding = 0;  ///< forward passes whose backward has not ended

  /// Gathered copy that an optimizer step can write together with the master, rounded to the
  /// compute dtype; undefined if the copy is incomplete or is the master itself.
  Tensor copy_of_master() const;
  /// Marks the gathered copy as stale, unless the update was `copied` into copy_of_master().
  void master_changed(bool copied = false);

 private:
  void make_gradients();
  bool splits() const;
  void supply(Storage& storage) override;
  bool takes_rows() const;
  autograd::RowGradient receive(std::int64_t count) override;
  void spread_rows();
  void sum_rows();
  void upload_master() const;
  void zero_gaps();
  CollectiveOptions options(const char* operation) const;

  std::vector<Parameter*> parameters_;
  ShardSpec spec_;
  std::shared_ptr<Context> context_;
  Communicator& shard_;
  Communicator& replicate_;
  std::function<void(FlatUnit&)> demand_;
  std::function<void()> make_room_;
  ShardLayout layout_;
  bool trainable_, splits_parameters_, splits_gradients_;

  std::shared_ptr<Storage> whole_;  // [padded] compute dtype: the parameters
  Tensor whole_view_;
  Tensor master_;          // [segment] master dtype
  Tensor own_;             // [segment] this rank's part of a gather: master_, or its device copy
  bool in_place_ = false;  // own_ is a part of whole_
  bool always_whole_ = false;  // and is all of it

  std::shared_ptr<Storage> whole_gradient_;  // [padded] gradient dtype
  Tensor whole_gradient_view_;
  std::shared_ptr<Storage> segment_gradient_;  // null: the gradient is the whole
  Tensor gradient_;                            // [segment] f32; undefined: none
  Tensor arriving_;  // [segment] a sum to be added to or moved into gradient_
  Tensor narrow_;    // [padded] reduction dtype, if it is not the gradient dtype
  Tensor rows_;      // [ranks, tokens, width] f32: the gradient as rows; undefined: it is dense
  Tensor row_ids_;   // [ranks, tokens] i32
  bool has_sum_ = false;  // gradient_ has the sum of the step's micro-batches so far
  bool reduced_ = false;
  bool last_ = true;

  State state_ = State::Sharded;
  std::shared_ptr<Work> gathering_, replicating_;
  std::vector<std::shared_ptr<Work>> reducing_;
};

}  // namespace tessera::comm
