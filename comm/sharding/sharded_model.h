#pragma once

#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "comm/sharding/flat_unit.h"
#include "core/nn/unit.h"
#include "core/optim/optimizer.h"

namespace tessera {
class Range;
}

namespace tessera::comm {

/// One rank's share of a model: gathers units when their parameters are read within nn::unit,
/// releases them afterwards, reduces gradients during backward, and updates its segments. Learns
/// the order in which a micro-batch needs the units, to gather them ahead.
///
/// Per step: for each micro-batch begin_micro_batch, the model's loss, backward, end_micro_batch;
/// then sum_totals and step. All ranks make the same calls, run the same units in the same order,
/// and read the same parameters in them. Gradients are sums over ranks and micro-batches, so scale
/// the loss. No graph may outlive the ShardedModel.
class ShardedModel final : public nn::UnitRuntime {
 public:
  /// Binds the model's parameters and becomes its unit runtime. Masters are zero until load().
  /// Parameters that require no gradient by now are frozen. `model` and `mesh` must outlive this.
  ShardedModel(nn::Module& model, const Mesh& mesh, const ShardSpec& spec,
               const std::shared_ptr<Context>& context);
  ShardedModel(nn::Module& model, Mesh&& mesh, const ShardSpec& spec,
               const std::shared_ptr<Context>& context) = delete;  // the mesh would not live
  ~ShardedModel() override;
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  nn::Module& module() const { return model_; }
  const Mesh& mesh() const { return mesh_; }
  const std::shared_ptr<Context>& context() const { return context_; }
  const ShardSpec& spec() const { return spec_; }
  /// Context of masters and optimizer state: the model's, or one of the host for ShardSpec::offload.
  const std::shared_ptr<Context>& state_context() const { return state_context_; }
  const std::vector<std::unique_ptr<FlatUnit>>& units() const { return units_; }

  /// Sets this rank's master values from `source`, and the states that start as the weights.
  void load(const ParameterSource& source);
  /// Sets the masters to the parameters' initial values, which depend on seed and names only.
  void initialize(std::uint64_t seed);
  /// Creates the optimizer's state tensors, with zeros or the weights as they are now (see
  /// optim::StateKind); step() calls it on first use.
  /// @throws InvalidArgument if there are tensors of other names
  void create_optimizer_state(const optim::Optimizer& optimizer);
  /// Names of the optimizer's state tensors; empty before create_optimizer_state().
  const std::vector<std::string>& state_names() const { return state_names_; }

  /// A contiguous range of a parameter on this rank.
  struct Piece {
    const Parameter* parameter = nullptr;
    std::int64_t begin = 0, end = 0;  ///< elements of the parameter
    Tensor master{};                  ///< [end - begin], master dtype
    struct State {
      Tensor values{};  ///< [end - begin]; undefined if the parameter lacks this state
      Shape shape{};    ///< of the whole tensor, see Optimizer::state_shape()
      std::int64_t begin = 0, end = 0;  ///< values of the whole tensor
      bool starts_as_param = false;     ///< see optim::StateKind
    };
    std::vector<State> state{};  ///< in the order of state_names(); empty for frozen parameters
    /// Sets state i to the master's values, if it starts with those.
    void start_state(std::size_t i) const;
  };
  /// Pieces that this rank writes into a checkpoint. Every element of the model belongs to exactly
  /// one piece of one rank, whatever is replicated.
  std::vector<Piece> owned_pieces();
  /// Pieces of this rank's masters, which may be replicated on other ranks.
  std::vector<Piece> held_pieces();
  /// Discards gathered copies. Call it after writing into pieces.
  void values_changed();

  /// Sets a callback that gets each unit's local gradients before they are reduced, to
  /// read them; empty: none. Its exceptions end backward.
  void observe_gradients(std::function<void(const FlatUnit&)> observer);
  /// Sets an owner's callback, which step() calls before values change; empty: none.
  void before_update(const void* owner, std::function<void()> callback);

  /// @throws InvalidArgument if it is not the first one, and the step has none yet
  void begin_micro_batch(bool first, bool last);
  /// @throws InvalidArgument naming a unit that ran forward but was not reached by backward
  void end_micro_batch();
  /// All-reduces a step's totals. With NCCL the host does not wait.
  /// @param totals  [n] f64: element 0 becomes the sum of squares of all gradients, the others (the
  ///   trainer's loss and flags) become sums over ranks
  void sum_totals(const Tensor& totals);
  /// One optimizer step on this rank's segments.
  /// @param another_follows  starts to gather the first units of the next step as soon as they are
  ///   updated. Call release() if it does not follow after all
  void step(const optim::Optimizer& optimizer, const optim::UpdateOptions& options,
            bool another_follows = false);
  /// Releases gathered copies, after waiting for those on their way.
  void release();

  /// Call it before each forward pass without backward, and end_evaluation() after the last one.
  void begin_evaluation();
  /// Gathers all units, until end_evaluation(), for work on the whole model such as sampling text.
  void gather_all();
  void end_evaluation();

  nn::UnitPrecision precision() const override;
  bool gathers_alone(const nn::Module& module) override;
  std::shared_ptr<autograd::Scope> before_forward(std::span<nn::Module* const> modules) override;
  void after_forward(std::span<nn::Module* const> modules,
                     const std::shared_ptr<autograd::Scope>& scope) override;

 private:
  class Run;
  enum class Phase : std::uint8_t { None, Training, Evaluation };
  using Units = std::vector<FlatUnit*>;
  // Units in the order in which a pass demanded them.
  struct Order {
    Units units;
    std::size_t next = 0;
  };

  std::vector<Piece> pieces(bool owned_only);
  void start_states();
  const Units& units_of_module(const nn::Module& module);
  Units units_of_modules(std::span<nn::Module* const> modules);
  void demand(FlatUnit& unit);
  Order* order();
  static Units first_of(const Order& order, std::size_t count, const FlatUnit* except = nullptr);
  Units expected(std::size_t count, const FlatUnit* except = nullptr);
  void enter(const Units& units);
  void leave(const Units& units, bool after_forward);
  void after_backward(const Units& units);
  void begin_phase(Phase phase);
  void start_reduce(FlatUnit& unit);
  void drain_reductions(int most);
  void finish_reductions();

  nn::Module& model_;
  const Mesh& mesh_;
  ShardSpec spec_;
  std::shared_ptr<Context> context_, state_context_;
  std::vector<std::unique_ptr<FlatUnit>> units_;
  std::vector<std::string> state_names_;
  struct State {
    Tensor values;
    optim::StatePlaces places;
    optim::StateKind kind;
  };
  std::vector<std::vector<State>> state_;       // by unit
  Units reducing_, replicating_;                // in flight, oldest first
  std::vector<std::unique_ptr<Range>> ranges_;  // open trace ranges, innermost last
  std::function<void(const FlatUnit&)> observer_;
  struct Tables;
  std::shared_ptr<Tables> tables_;  // not shared, as in Context
  std::vector<Run*> running_;       // recorded forward passes, innermost last
  Order training_order_, evaluation_order_;
  Phase phase_ = Phase::None;
  bool whole_ = false;       // between gather_all() and end_evaluation()
  bool last_ = true;         // last micro-batch of the step
  bool unfinished_ = false;  // the step awaits further micro-batches
};

}  // namespace tessera::comm
