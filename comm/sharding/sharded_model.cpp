#include "comm/sharding/sharded_model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>

#include "comm/communicator.h"
#include "core/base/thread_pool.h"
#include "core/base/trace.h"
#include "kernels/elementwise.h"
#include "kernels/optimizer.h"

namespace tessera::comm {

namespace {

std::string name_of(std::span<nn::Module* const> modules) {
  std::string text;
  for (const nn::Module* module : modules)
    text += (text.empty() ? "" : ", ") + (module->path().empty() ? "root" : module->path());
  return text;
}

std::shared_ptr<Context> make_state_context(const ShardSpec& spec,
                                            const std::shared_ptr<Context>& context) {
  if (!spec.offload || context->target().type != DeviceType::CUDA) return context;
  const bool is_planned = context->device().type == DeviceType::Meta;
  return Context::create({.device = {is_planned ? DeviceType::Meta : DeviceType::CPU, 0},
                          .threads = context->threads().size(),
                          .cpu_level = context->cpu_level()});
}

// `tensor`, or a copy in page-locked memory that belongs to `state`. Waits for the device.
Tensor fetched(const Tensor& tensor, const std::shared_ptr<Context>& state) {
  if (tensor.context() == state) return tensor;
  const auto memory = Storage::allocate_on_host(tensor.context(), tensor.bytes(),
                                                MemoryCategory::Staging, "offload");
  if (memory->data() != nullptr) tensor.copy_to_host(memory->data());
  auto wrapped = Storage::wrap(state, memory->data(), memory->bytes(), memory);
  return Tensor::window(std::move(wrapped), 0, tensor.shape(), tensor.dtype());
}

void add_unique(std::vector<FlatUnit*>& units, FlatUnit* unit) {
  if (std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
}

}  // namespace

struct ShardedModel::Tables {
  std::unordered_map<const void*, std::function<void()>> before_update;  // by owner
  std::unordered_map<const Parameter*, FlatUnit*> unit_of;
  std::unordered_map<const nn::Module*, Units> units_of_module;  // cache, filled on first run
};

// One forward pass of nn::unit, and its backward pass.
class ShardedModel::Run final : public autograd::Scope {
 public:
  Run(ShardedModel& model, Units units, std::string name)
      : model_(model), units_(std::move(units)), counted_(units_), name_(std::move(name)) {}
  /// Units of runs inside this one that are recorded only when it is computed again.
  void add(const Units& inner) { counted_.insert(counted_.end(), inner.begin(), inner.end()); }
  const Units& counted() const { return counted_; }

  void before_backward() override {
    require(!left_,
            "backward ran through unit '{}' twice for one forward pass: add up the losses and call "
            "backward once",
            name_);
    range_ = std::make_unique<Range>(*model_.context_, "backward " + name_);
    model_.enter(units_);
  }
  void after_backward() override {
    range_.reset();
    left_ = true;
    model_.leave(units_, false);
    model_.after_backward(counted_);
  }

 private:
  ShardedModel& model_;
  Units units_, counted_;
  bool left_ = false;  // backward has been here
  std::string name_;
  std::unique_ptr<Range> range_;
};

ShardedModel::ShardedModel(nn::Module& model, const Mesh& mesh, const ShardSpec& spec,
                           const std::shared_ptr<Context>& context)
    : model_(model),
      mesh_(mesh),
      spec_(spec),
      context_(context),
      tables_(std::make_unique<Tables>()) {
  spec.validate();
  state_context_ = make_state_context(spec, context);
  require(!model.parameters().empty(), "the model has no parameters");
  require(model.unit_runtime() == nullptr, "the model is sharded already");
  const auto add = [&](const Unit& unit) {
    if (unit.parameters.empty()) return;
    units_.push_back(std::make_unique<FlatUnit>(
        unit, spec, mesh, context, state_context_ == context ? nullptr : state_context_,
        [this](FlatUnit& flat) { demand(flat); },
        [this] { drain_reductions(spec_.reduce_behind); }));
    FlatUnit& flat = *units_.back();
    for (const Parameter* parameter : unit.parameters) tables_->unit_of[parameter] = &flat;
  };
  for (const Unit& unit : tessera::units_of(model, spec.units)) {
    Unit trainable{unit.name, {}}, frozen{unit.name, {}};
    for (Parameter* p : unit.parameters)
      (p->tensor.requires_grad() ? trainable : frozen).parameters.push_back(p);
    if (!trainable.parameters.empty()) frozen.name += " (frozen)";
    add(trainable);
    add(frozen);
  }
  model.set_unit_runtime(this);
}

ShardedModel::~ShardedModel() { model_.set_unit_runtime(nullptr); }

void ShardedModel::load(const ParameterSource& source) {
  for (const Piece& piece : held_pieces()) {
    fill_from_host(piece.master, [&](std::int64_t begin, std::int64_t end, float* out) {
      source(*piece.parameter, piece.begin + begin, piece.begin + end, out);
    });
  }
  start_states();
  values_changed();
}

void ShardedModel::Piece::start_state(std::size_t i) const {
  const State& values = state[i];
  if (values.starts_as_param && values.values.defined())
    kernels::cast(*master.context(), master.view(), {values.values.view(), false, true});
}

void ShardedModel::start_states() {
  for (const Piece& piece : held_pieces())
    for (std::size_t i = 0; i < piece.state.size(); ++i) piece.start_state(i);
}

void ShardedModel::initialize(std::uint64_t seed) {
  load([seed](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
    initialize_range(p, seed, begin, end, out);
  });
}

void ShardedModel::create_optimizer_state(const optim::Optimizer& optimizer) {
  std::vector<std::string> names = optimizer.state_names();
  for (const std::string& name : names) {
    const bool is_word = std::ranges::all_of(name, [](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    });
    require(is_word && !name.empty() && name.size() <= 100 && std::ranges::count(names, name) == 1,
            "optimizer state '{}': expected different names of 1 to 100 letters, digits or '_'",
            name);
  }
  if (!state_.empty()) {
    require(names == state_names_,
            "the optimizer's state is [{}], and the model has state tensors [{}] of another one; "
            "use one optimizer with a ShardedModel",
            fmt::join(names, ", "), fmt::join(state_names_, ", "));
    return;
  }
  for (const auto& unit : units_) {
    std::vector<State>& state = state_.emplace_back();
    if (!unit->is_trainable()) continue;
    for (std::size_t i = 0; i < names.size(); ++i) {
      optim::StatePlaces places(optimizer, i, unit->layout(), unit->segment_begin(),
                                unit->segment_size());
      const optim::StateKind kind = optimizer.state_kind(i);
      const auto [dtype, block, starts_as_param] = kind;
      require(
          !starts_as_param || (dtype == DType::F32 && block == 1),
          "optimizer state '{}' starts as the parameter, so it must be f32 with a value for each "
          "element",
          names[i]);
      // Zeros in any dtype: segments and thus states are of whole 64 elements.
      const auto bytes = static_cast<std::int64_t>(dtype_size(dtype)) * places.size / block;
      const Tensor zeros = Tensor::full(state_context_, {bytes / 4}, DType::F32, 0.0,
                                        MemoryCategory::OptimizerState, unit->name());
      state.push_back({Tensor::window(zeros.storage(), 0, {places.size / block}, dtype),
                       std::move(places), kind});
    }
  }
  state_names_ = std::move(names);
  start_states();
}

void ShardedModel::observe_gradients(std::function<void(const FlatUnit&)> observer) {
  observer_ = std::move(observer);
}

void ShardedModel::before_update(const void* owner, std::function<void()> callback) {
  if (callback)
    tables_->before_update[owner] = std::move(callback);
  else
    tables_->before_update.erase(owner);
}

std::vector<ShardedModel::Piece> ShardedModel::pieces(bool owned_only) {
  std::vector<Piece> result;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    FlatUnit& unit = *units_[u];
    const ShardLayout& layout = unit.layout();
    const std::int64_t held = unit.segment_begin();
    const std::vector<SlotRange> held_ranges = layout.ranges(held, held + unit.segment_size());
    std::size_t at_range = 0;
    const auto [begin, end] =
        owned_only ? unit.owned() : std::pair(held, held + unit.segment_size());
    for (const SlotRange& range : layout.ranges(begin, end)) {
      const std::int64_t at = range.offset + begin - held;
      Piece& piece = result.emplace_back(
          Piece{unit.parameters()[static_cast<std::size_t>(range.slot)], range.begin, range.end,
                unit.master().alias({range.end - range.begin}, {1}, at)});
      if (state_.empty()) continue;
      while (held_ranges[at_range].slot != range.slot) ++at_range;
      for (const State& state : state_[u]) {
        const std::int64_t place = state.places.first[at_range];
        const std::int64_t skipped = range.begin - held_ranges[at_range].begin;
        Piece::State& part = piece.state.emplace_back();
        if (place < 0) continue;
        const std::int64_t block = state.kind.block;
        part.starts_as_param = state.kind.starts_as_param;
        part.begin = range.begin / block;
        part.end = (range.end + block - 1) / block;
        part.shape = block == 1 ? piece.parameter->tensor.shape()
                                : Shape{(piece.parameter->tensor.numel() + block - 1) / block};
        part.values = state.values.alias({part.end - part.begin}, {1}, (place + skipped) / block);
      }
    }
  }
  return result;
}

std::vector<ShardedModel::Piece> ShardedModel::owned_pieces() { return pieces(true); }
std::vector<ShardedModel::Piece> ShardedModel::held_pieces() { return pieces(false); }

void ShardedModel::values_changed() {
  for (const auto& unit : units_) {
    unit->release();
    unit->master_changed();
  }
}

const ShardedModel::Units& ShardedModel::units_of_module(const nn::Module& module) {
  const auto [at, is_new] = tables_->units_of_module.try_emplace(&module);
  if (!is_new) return at->second;
  for (const Parameter* parameter : module.parameters()) {
    const auto found = tables_->unit_of.find(parameter);
    if (found == tables_->unit_of.end()) tables_->units_of_module.erase(at);
    require(found != tables_->unit_of.end(),
            "nn::unit runs '{}', which is not a part of the sharded model", module.path());
    add_unique(at->second, found->second);
  }
  return at->second;
}

ShardedModel::Units ShardedModel::units_of_modules(std::span<nn::Module* const> modules) {
  Units units;
  for (const nn::Module* module : modules)
    for (FlatUnit* unit : units_of_module(*module)) add_unique(units, unit);
  return units;
}

ShardedModel::Order* ShardedModel::order() {
  if (whole_ || phase_ == Phase::None) return nullptr;
  return phase_ == Phase::Training ? &training_order_ : &evaluation_order_;
}

// Next `count` distinct units of a learned order, without `except`.
ShardedModel::Units ShardedModel::first_of(const Order& order, std::size_t count,
                                           const FlatUnit* except) {
  Units units;
  for (std::size_t i = order.next; i < order.units.size() && units.size() < count; ++i)
    if (order.units[i] != except) add_unique(units, order.units[i]);
  return units;
}

ShardedModel::Units ShardedModel::expected(std::size_t count, const FlatUnit* except) {
  const Order* const learned = order();
  return learned == nullptr ? Units{} : first_of(*learned, count, except);
}

// Gathers a unit whose parameters are being read, and starts to gather those that came next in the
// pass before. Where this pass differs from it, the order is learned anew.
void ShardedModel::demand(FlatUnit& unit) {
  require(unit.users > 0 || whole_ || !unit.splits_parameters(),
          "a parameter of unit '{}' was read outside of nn::unit, where it is sharded: call the "
          "module that has it by nn::unit(module, inputs...)",
          unit.name());
  unit.gathered_by = std::max(1, unit.users);
  Order* const learned = order();
  if (learned == nullptr) {
    unit.start_gather();
    unit.finish_gather();
    return;
  }
  Units& units = learned->units;
  if (learned->next >= units.size() || units[learned->next] != &unit) {
    units.resize(learned->next);
    units.push_back(&unit);
  }
  ++learned->next;
  unit.start_gather();
  for (FlatUnit* next : expected(static_cast<std::size_t>(spec_.gather_ahead), &unit))
    next->start_gather();
  unit.finish_gather();
}

void ShardedModel::enter(const Units& units) {
  for (FlatUnit* unit : units) ++unit->users;
}

void ShardedModel::leave(const Units& units, bool after_forward) {
  for (FlatUnit* unit : units) {
    // A run within another one releases what it gathered itself.
    if (--unit->users >= unit->gathered_by || whole_) continue;
    if (after_forward && !spec_.reshard_after_forward && unit->outstanding > 0) continue;
    const Units soon = expected(static_cast<std::size_t>(std::max(spec_.gather_ahead, 1)));
    if (std::find(soon.begin(), soon.end(), unit) != soon.end())
      unit->keep();
    else
      unit->release();
  }
}

nn::UnitPrecision ShardedModel::precision() const {
  if (!spec_.output) return {};
  return {.input = spec_.compute, .output = spec_.output};
}

bool ShardedModel::gathers_alone(const nn::Module& module) {
  std::size_t gathered = 0;
  for (const FlatUnit* unit : units_of_module(module)) gathered += unit->parameters().size();
  return gathered == module.parameters().size();
}

std::shared_ptr<autograd::Scope> ShardedModel::before_forward(
    std::span<nn::Module* const> modules) {
  Units units = units_of_modules(modules);
  std::string name = name_of(modules);
  std::shared_ptr<Run> run;
  if (context_->grad_enabled()) {
    require(phase_ == Phase::Training,
            "unit '{}' ran outside of a micro-batch while operations are recorded: call "
            "begin_micro_batch() first, or evaluate under NoGradGuard",
            name);
    for (const FlatUnit* unit : units)
      require(!unit->is_reduced(),
              "unit '{}' runs forward after its gradients of this micro-batch were reduced: make "
              "all forward passes before backward, or another micro-batch",
              unit->name());
    run = std::make_shared<Run>(*this, units, name);
  } else if (!running_.empty()) {
    running_.back()->add(units);
  }
  if (run) running_.push_back(run.get());
  enter(units);
  ranges_.push_back(std::make_unique<Range>(*context_, "forward " + name));
  return run;
}

void ShardedModel::after_forward(std::span<nn::Module* const> modules,
                                 const std::shared_ptr<autograd::Scope>& scope) {
  if (!ranges_.empty()) ranges_.pop_back();
  const Units units = units_of_modules(modules);
  if (scope) {
    if (scope->operations() > 0)
      for (FlatUnit* unit : running_.back()->counted()) ++unit->outstanding;
    running_.pop_back();
  }
  leave(units, true);
}

void ShardedModel::after_backward(const Units& units) {
  for (FlatUnit* unit : units) {
    if (--unit->outstanding > 0) continue;
    if (unit->is_trainable()) drain_reductions(std::max(spec_.reduce_behind - 1, 0));
    start_reduce(*unit);
  }
}

void ShardedModel::begin_phase(Phase phase) {
  // Left by a pass that threw:
  ranges_.clear();
  running_.clear();
  whole_ = false;
  for (const auto& unit : units_) {
    unit->users = 0;
    unit->gathered_by = 1;
  }

  phase_ = phase;
  training_order_.next = evaluation_order_.next = 0;
}

void ShardedModel::begin_micro_batch(bool first, bool last) {
  require(first || unfinished_,
          "begin_micro_batch(first = false), but the step has no earlier micro-batch: begin the "
          "first one of each step with first = true");
  unfinished_ = false;
  finish_reductions();  // left by a pass that threw
  begin_phase(Phase::Training);
  last_ = last;
  for (const auto& unit : units_) unit->begin_micro_batch(first);
}

void ShardedModel::start_reduce(FlatUnit& unit) {
  if (observer_ && unit.is_trainable()) {
    drain_reductions(0);  // exposed gradients need memory
    unit.expose_gradients();
    observer_(unit);
  }
  if (unit.start_reduce(last_)) reducing_.push_back(&unit);
}

// Waits until at most `most` units are being reduced. The sums over replicas may take until the end
// of the micro-batch.
void ShardedModel::drain_reductions(int most) {
  while (std::ssize(reducing_) > most) {
    FlatUnit* const unit = reducing_.front();
    reducing_.erase(reducing_.begin());
    unit->finish_reduce();
    replicating_.push_back(unit);
  }
}

void ShardedModel::finish_reductions() {
  drain_reductions(0);
  for (FlatUnit* unit : std::exchange(replicating_, {})) unit->finish_replicate();
}

void ShardedModel::end_micro_batch() {
  require(phase_ == Phase::Training, "end_micro_batch() without begin_micro_batch()");
  for (const auto& unit : units_)
    require(unit->outstanding == 0,
            "unit '{}' ran forward, but backward did not reach it: its result is not a part of the "
            "loss. Add it to the loss, or run the unit under NoGradGuard",
            unit->name());
  // Units that did not run take part with zeros.
  for (const auto& unit : units_) {
    if (unit->is_reduced()) continue;
    drain_reductions(0);
    start_reduce(*unit);
  }
  finish_reductions();
  for (const auto& unit : units_) unit->release();
  phase_ = Phase::None;
  unfinished_ = !last_;
}

void ShardedModel::sum_totals(const Tensor& totals) {
  require(totals.dtype() == DType::F64 && totals.shape().size() == 1 && totals.numel() >= 1,
          "totals must be [n] f64, got {} {}", totals.shape(), totals.dtype());
  const auto count = static_cast<std::int64_t>(units_.size());
  const Tensor squares = Tensor::full(context_, {count, 1}, DType::F64, 0.0,
                                      MemoryCategory::Workspace, "gradient norm");
  const auto element = [](const Tensor& t, std::int64_t i) { return t.alias({1}, {1}, i).view(); };
  for (std::int64_t u = 0; u < count; ++u) {
    const FlatUnit& unit = *units_[static_cast<std::size_t>(u)];
    if (unit.is_trainable())
      kernels::sum_of_squares(*context_, {unit.gradient().view(), element(squares, u)});
  }
  // Every replica holds the same gradients, so count those of the first.
  if (mesh_.replicate().rank() == 0)
    kernels::sum_rows(*context_, squares.view(), {element(totals, 0), false, true});
  else
    kernels::fill(*context_, element(totals, 0), 0.0);
  if (mesh_.world().world_size() == 1) return;
  mesh_.world().all_reduce(totals.view(), ReduceOp::Sum, {"all_reduce grad_norm", {}});
}

void ShardedModel::step(const optim::Optimizer& optimizer, const optim::UpdateOptions& options,
                        bool another_follows) {
  require(!whole_, "an optimizer step between gather_all() and end_evaluation()");
  require(!unfinished_,
          "an optimizer step before the step's last micro-batch: begin that one with last = true");
  create_optimizer_state(optimizer);
  for (const auto& unit : units_)
    unit->release();  // those that the step before gathered, if no micro-batch ran
  for (const auto& [owner, callback] : tables_->before_update) callback();
  const Range range(*context_, "optimizer");
  optim::UpdateOptions own_options = options;
  own_options.factor = fetched(options.factor, state_context_);
  training_order_.next = 0;
  Units ahead;
  if (another_follows)
    ahead = first_of(training_order_, static_cast<std::size_t>(spec_.gather_ahead) + 1);
  const auto gather_early = [&](FlatUnit& unit) {
    if (std::ranges::count(ahead, &unit) > 0) unit.start_gather();
  };
  for (std::size_t u = 0; u < units_.size(); ++u) {
    FlatUnit& unit = *units_[u];
    if (!unit.is_trainable()) {
      gather_early(unit);
      continue;
    }
    const Tensor copy = unit.copy_of_master();
    optim::Segment segment{.layout = unit.layout(),
                           .first = unit.segment_begin(),
                           .param = unit.master(),
                           .grad = fetched(unit.gradient(), state_context_),
                           .copy = copy,
                           .compute = spec_.compute};
    for (const State& state : state_[u]) segment.state.push_back(state.values);
    if (unit.segment_size() < unit.layout().padded_size())
      segment.gather = [&](const Tensor& whole) {
        require<Unsupported>(state_context_ == context_,
                             "an optimizer that gathers can't be used with ShardSpec::offload");
        mesh_.shard().all_gather(whole.view(), {"all_gather optimizer " + unit.name(), {}});
      };
    optimizer.update(segment, own_options);
    unit.release_gradient();
    unit.master_changed(copy.defined());
    gather_early(unit);
  }
}

void ShardedModel::release() {
  begin_phase(Phase::None);
  for (const auto& unit : units_) unit->release();
}

void ShardedModel::begin_evaluation() { begin_phase(Phase::Evaluation); }

void ShardedModel::gather_all() {
  begin_phase(Phase::None);
  whole_ = true;
  CollectiveGroup group(mesh_.shard());
  for (const auto& unit : units_) unit->start_gather();
  group.end();
  for (const auto& unit : units_) unit->finish_gather();
}

void ShardedModel::end_evaluation() { release(); }

}  // namespace tessera::comm
