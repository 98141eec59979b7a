#include "comm/sharding/sharded_model.h"

#include <algorithm>

#include "core/base/trace.h"
#include "kernels/elementwise.h"
#include "kernels/optimizer.h"

namespace tessera::comm {

ShardedModel::ShardedModel(const std::vector<Unit>& units, ShardMode mode, DType compute_dtype,
                           const std::shared_ptr<Context>& context, Communicator& communicator,
                           int gather_ahead, DType master_dtype)
    : mode_(mode), gather_ahead_(gather_ahead), context_(context), communicator_(communicator) {
  require(gather_ahead >= 0, "gather_ahead must not be negative, got {}", gather_ahead);
  require(!units.empty(), "a model needs at least one unit");
  require(compute_dtype == DType::F32 || compute_dtype == DType::BF16,
          "parameters are gathered in f32 or bf16, got {}", compute_dtype);
  require(master_dtype == DType::F32 || master_dtype == compute_dtype,
          "master weights are f32 or of the compute dtype {}, got {}", compute_dtype, master_dtype);
  for (const Unit& unit : units) {
    require(!unit.parameters.empty(), "unit '{}' has no parameters", unit.name);
    units_.push_back(std::make_unique<FlatUnit>(unit, mode, compute_dtype, master_dtype, context,
                                                communicator_));
    const FlatUnit& flat = *units_.back();
    decay_.push_back(optim::decay_ranges(flat.layout(), flat.segment_begin(), flat.segment_size()));
  }
}

ShardedModel::~ShardedModel() = default;

void ShardedModel::load(const ParameterSource& source) {
  for (const Piece& piece : held_pieces()) {
    fill_from_host(piece.master, [&](std::int64_t begin, std::int64_t end, float* out) {
      source(*piece.parameter, piece.begin + begin, piece.begin + end, out);
    });
  }
  values_changed();
}

void ShardedModel::create_optimizer_state() {
  if (has_optimizer_state()) return;
  for (const auto& unit : units_) {
    for (auto* list : {&exp_avg_, &exp_avg_sq_}) {
      list->push_back(Tensor::full(context_, {unit->segment_size()}, DType::F32, 0.0,
                                   MemoryCategory::OptimizerState, unit->name()));
    }
  }
}

std::vector<ShardedModel::Piece> ShardedModel::pieces(bool owned_only) {
  std::vector<Piece> result;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    FlatUnit& unit = *units_[u];
    const ShardLayout& layout = unit.layout();
    const std::int64_t held = unit.segment_begin();
    std::int64_t begin = held;
    std::int64_t end = held + unit.segment_size();
    if (owned_only) {
      begin = layout.segment_size() * communicator_.rank();
      end = begin + layout.segment_size();
    }
    for (const SlotRange& range : layout.ranges(begin, end)) {
      const std::int64_t at = begin + range.offset - held;
      const auto part = [&](const Tensor& t) {
        return t.alias({range.end - range.begin}, {1}, at);
      };
      const bool moments = has_optimizer_state();
      result.push_back({unit.parameters()[static_cast<std::size_t>(range.slot)], range.begin,
                        range.end, part(unit.master()), moments ? part(exp_avg_[u]) : Tensor(),
                        moments ? part(exp_avg_sq_[u]) : Tensor()});
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

// Waits for a unit's parameters and starts gathering the next units.
void ShardedModel::ensure_gathered(int unit, int direction) {
  const int count = static_cast<int>(units_.size());
  const int last_ahead = std::min(gather_ahead_, direction > 0 ? count - 1 - unit : unit - 1);
  const auto start = [&](int ahead) {
    const int next = unit + direction * ahead;
    units_[static_cast<std::size_t>(next)]->start_gather();
  };
  {
    // Group only the first two units, because units further ahead must not delay the first.
    CollectiveGroup group(communicator_);
    start(0);
    if (last_ahead >= 1) start(1);
    group.end();
  }
  for (int ahead = 2; ahead <= last_ahead; ++ahead) start(ahead);
  units_[static_cast<std::size_t>(unit)]->finish_gather();
}

void ShardedModel::begin_micro_batch(bool first, bool last) {
  ranges_.clear();  // left by a pass that threw
  training_ = true;
  first_ = first;
  last_ = last;
  // Prepare the root now, because the loss computes the head's gradient during forward.
  units_.front()->prepare_gradients(first);
}

void ShardedModel::begin_range(const char* phase, int unit) {
  ranges_.push_back(std::make_unique<Range>(
      *context_, fmt::format("{} {}", phase, units_[static_cast<std::size_t>(unit)]->name())));
}

void ShardedModel::before_forward(int unit) {
  ensure_gathered(unit, 1);
  begin_range("forward", unit);
}

void ShardedModel::after_forward(int unit) {
  if (!ranges_.empty()) ranges_.pop_back();
  // Backward starts with the last unit and needs the root.
  const bool needed_soon = unit == 0 || unit + 1 == static_cast<int>(units_.size());
  if (training_ && needed_soon) return;
  units_[static_cast<std::size_t>(unit)]->release();
}

void ShardedModel::before_backward(int unit) {
  ensure_gathered(unit, -1);
  units_[static_cast<std::size_t>(unit)]->prepare_gradients(first_);
  begin_range("backward", unit);
}

void ShardedModel::after_backward(int unit) {
  if (!ranges_.empty()) ranges_.pop_back();
  FlatUnit& flat = *units_[static_cast<std::size_t>(unit)];
  flat.release();
  drain_reductions();
  start_reduce(flat);
}

void ShardedModel::start_reduce(FlatUnit& unit) {
  if (observer_) observer_(unit);
  unit.start_reduce(last_);
  reducing_.push_back(&unit);
}

void ShardedModel::drain_reductions() {
  for (FlatUnit* unit : std::exchange(reducing_, {})) unit->finish_reduce();
}

void ShardedModel::end_micro_batch() {
  FlatUnit& root = *units_.front();
  root.release();
  start_reduce(root);
  drain_reductions();
  training_ = false;
}

void ShardedModel::sum_totals(const Tensor& totals) {
  require(totals.dtype() == DType::F64 && totals.shape().size() == 1 && totals.numel() >= 1,
          "totals must be [n] f64, got {} {}", totals.shape(), totals.dtype());
  const auto count = static_cast<std::int64_t>(units_.size());
  const Tensor squares =
      Tensor::empty(context_, {count, 1}, DType::F64, MemoryCategory::Workspace, "gradient norm");
  const auto element = [](const Tensor& t, std::int64_t i) { return t.alias({1}, {1}, i).view(); };
  for (std::int64_t u = 0; u < count; ++u) {
    kernels::sum_of_squares(
        *context_, {units_[static_cast<std::size_t>(u)]->gradient().view(), element(squares, u)});
  }
  // In mode None every rank holds the whole sum, so count rank 0 only.
  const bool counts = mode_ == ShardMode::Full || communicator_.rank() == 0;
  if (counts)
    kernels::sum_rows(*context_, squares.view(), {element(totals, 0), false, true});
  else
    kernels::fill(*context_, element(totals, 0), 0.0);
  if (communicator_.world_size() == 1) return;
  communicator_.all_reduce(totals.view(), ReduceOp::Sum, {"all_reduce grad_norm", {}});
}

void ShardedModel::step(const optim::AdamWOptions& options, double lr, std::int64_t step,
                        const Tensor& factor) {
  create_optimizer_state();
  const Range range(*context_, "optimizer");
  for (std::size_t u = 0; u < units_.size(); ++u) {
    FlatUnit& unit = *units_[u];
    const Tensor copy = unit.copy_of_master();
    optim::adamw_step(options, decay_[u], unit.master(), unit.gradient(), exp_avg_[u],
                      exp_avg_sq_[u], lr, step, factor, copy, u, unit.segment_begin());
    unit.master_changed(copy.defined());
  }
}

void ShardedModel::gather_all() {
  CollectiveGroup group(communicator_);
  for (const auto& unit : units_) unit->start_gather();
  group.end();
  for (const auto& unit : units_) unit->finish_gather();
}

void ShardedModel::end_evaluation() {
  for (const auto& unit : units_) unit->release();
}

}  // namespace tessera::comm
