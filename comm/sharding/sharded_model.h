#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/sharding/flat_unit.h"
#include "comm/sharding/replayed_communicator.h"
#include "core/base/trace.h"

namespace tessera::comm {

/// One rank's share of a model: gathers units ahead of their use, releases them after, sums
/// gradients over ranks while backward goes on, and updates its segments.
///
/// Per step: for each micro-batch begin_micro_batch, the model's loss with *this as its hooks,
/// backward, end_micro_batch; then sum_totals, step. All ranks make the same calls in
/// the same order. The gradients are sums over ranks and micro-batches: scale the loss.
class ShardedModel final : public UnitHooks {
 public:
  /// Binds the parameters of `units`; unit 0 is the root. Masters start as zeros: see load().
  /// `communicator` must outlive this.
  /// @param compute_dtype  f32 or bf16
  /// @param gather_ahead   units that are gathered before they are needed, beside the one in use:
  ///   more hide more of a slow network, and take the memory of a unit each
  /// @param master_dtype   of the weights that are updated and saved: f32, or bf16 if that is the
  ///   compute dtype; updates are then rounded stochastically
  ShardedModel(const std::vector<Unit>& units, ShardMode mode, DType compute_dtype,
               const std::shared_ptr<Context>& context, Communicator& communicator,
               int gather_ahead = 1, DType master_dtype = DType::F32);

  ShardMode mode() const { return mode_; }
  const std::vector<std::unique_ptr<FlatUnit>>& units() const { return units_; }

  /// Fills this rank's master values, part by part.
  void load(const ParameterSource& source);
  /// Makes the moments, zeros. Called by step() if need be.
  void create_optimizer_state();
  bool has_optimizer_state() const { return !exp_avg_.empty(); }

  /// One contiguous piece of a parameter that this rank writes into a checkpoint: each element of
  /// the model is in exactly one piece of one rank, in mode None too.
  struct Piece {
    const Parameter* parameter = nullptr;
    std::int64_t begin = 0, end = 0;  ///< elements of the parameter
    Tensor master{};                  ///< [end - begin], master dtype
    Tensor exp_avg{}, exp_avg_sq{};   ///< [end - begin] f32; undefined without optimizer state
  };
  std::vector<Piece> owned_pieces();
  /// All pieces that this rank holds: owned_pieces() in mode Full, the whole model in mode None.
  std::vector<Piece> held_pieces();
  /// After writing into pieces: gathered copies are stale.
  void values_changed();

  /// From now on, `observer` sees each unit's gradients of each micro-batch when this rank has
  /// computed them, before they are reduced; empty: nobody does. What it throws ends backward.
  void observe_gradients(std::function<void(const FlatUnit&)> observer) {
    observer_ = std::move(observer);
  }

  /// All from here to the end may be captured, once it has run and write_copies() was called: a
  /// Replay of it starts every collective anew, with its own number and deadline.
  void begin_micro_batch(bool first, bool last);
  void end_micro_batch();
  /// Casts masters that have changed into the copies that stay gathered, if there are such. No
  /// collective.
  void write_copies();
  /// After a capture that failed: what it began has never run.
  void forget_pass();
  /// One all-reduce of what a step is judged by; on a device nothing waits for it.
  /// @param totals  [n] f64: element 0 becomes the sum of the squares of all the model's gradients,
  ///   the others (loss and flags of the trainer) their sums over ranks; the same on every rank
  void sum_totals(const Tensor& totals);
  /// AdamW on this rank's segments.
  /// @param step    from 1
  /// @param factor  see optim::adamw_step
  /// @param seed    of the rounding of bf16 masters: the same at any world size
  void step(const optim::AdamWOptions& options, double lr, std::int64_t step, const Tensor& factor,
            std::uint64_t seed = 0);

  /// The same in two parts, the second of which can be captured once and replayed: what changes
  /// from step to step is written to the device's memory first.
  void write_step(const optim::AdamWOptions& options, double lr, std::int64_t step,
                  std::uint64_t seed);
  void written_step(const optim::AdamWOptions& options, const Tensor& factor);
  /// To be called after each replay of written_step().
  void step_replayed();

  /// For whole-model work such as sampling text: gathers every unit; end_evaluation() gives them
  /// back.
  void gather_all();
  /// Releases what a forward pass without backward, or gather_all(), left gathered.
  void end_evaluation();

  void before_forward(int unit) override;
  void after_forward(int unit) override;
  void before_backward(int unit) override;
  void after_backward(int unit) override;

 private:
  std::vector<Piece> pieces(bool owned_only);
  void begin_range(const char* phase, int unit);
  void ensure_gathered(int unit, int direction);
  void start_reduce(FlatUnit& unit);
  void drain_reductions(std::size_t keep);
  struct StepOf {  // a unit
    double lr = 0;
    std::int64_t step = 1;
    RngKey rounding{};
    optim::StepTensors tensors{};
  };
  void update(const optim::AdamWOptions& options, const Tensor& factor,
              const std::function<StepOf(std::size_t)>& step_of);
  RngKey rounding_key(std::uint64_t seed, std::int64_t step, std::size_t unit) const;

  ShardMode mode_;
  int gather_ahead_;
  std::shared_ptr<Context> context_;
  ReplayedCommunicator communicator_;
  std::vector<std::unique_ptr<FlatUnit>> units_;
  std::vector<std::vector<optim::DecayRange>> decay_;
  std::vector<Tensor> exp_avg_, exp_avg_sq_;
  Tensor rates_, streams_;                      // of write_step(): [3] f32, [units, 2] i64
  std::vector<FlatUnit*> reducing_;             // in flight, oldest first
  std::vector<std::unique_ptr<Range>> ranges_;  // open ones, the innermost last
  std::function<void(const FlatUnit&)> observer_;
  bool training_ = false;
  bool first_ = true, last_ = true;
};

}  // namespace tessera::comm
