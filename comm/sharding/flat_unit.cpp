#include "comm/sharding/flat_unit.h"

#include "kernels/elementwise.h"

namespace tessera::comm {

ShardMode parse_shard_mode(const std::string& name) {
  if (name == "full") return ShardMode::Full;
  if (name == "none") return ShardMode::None;
  throw InvalidArgument("shard.mode must be full or none, got '{}'", name);
}

FlatUnit::FlatUnit(const Unit& unit, ShardMode mode, DType compute_dtype, DType master_dtype,
                   const std::shared_ptr<Context>& context, Communicator& communicator,
                   std::function<void(FlatUnit&)> demand)
    : parameters_(unit.parameters),
      compute_dtype_(compute_dtype),
      context_(context),
      communicator_(communicator),
      demand_(std::move(demand)),
      layout_(layout_of(unit, communicator.world_size())),
      scatters_(mode == ShardMode::Full && communicator.world_size() > 1) {
  const std::int64_t padded = layout_.padded_size();
  const std::int64_t segment = segment_size();
  master_ =
      Tensor::full(context_, {segment}, master_dtype, 0.0, MemoryCategory::Parameters, name());

  gather_is_master_ = compute_dtype_ == master_dtype && !scatters_;
  gathered_ = gather_is_master_
                  ? master_.storage()
                  : Storage::reserve(context_,
                                     static_cast<std::size_t>(padded) * dtype_size(compute_dtype_),
                                     MemoryCategory::Gathered, name());
  if (!gather_is_master_) gathered_->set_supplier(this);
  gathered_view_ = Tensor::window(gathered_, 0, {padded}, compute_dtype_);

  full_gradient_ = Storage::reserve(context_, static_cast<std::size_t>(padded) * sizeof(float),
                                    MemoryCategory::Gradients, name());
  full_gradient_->set_supplier(this);
  full_gradient_view_ = Tensor::window(full_gradient_, 0, {padded}, DType::F32);
  if (scatters_) {
    gradient_ = Tensor::full(context_, {segment}, DType::F32, 0.0, MemoryCategory::Gradients,
                             name() + " segment");
  } else {
    gradient_ = full_gradient_view_;
  }

  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterSlot& slot = layout_.slots()[i];
    Tensor& tensor = parameters_[i]->tensor;
    tensor.bind(gathered_, slot.offset, compute_dtype_);
    tensor.set_grad_buffer(Tensor::window(full_gradient_, slot.offset, slot.shape, DType::F32));
  }
}

FlatUnit::~FlatUnit() {
  for (const auto& storage : {gathered_, full_gradient_}) storage->set_supplier(nullptr);
  for (const WorkPtr& work : {gathering_, reducing_}) {
    if (!work || work->is_done()) continue;
    communicator_.abort(fmt::format("unit {} was destroyed during a collective", name()));
    try {
      work->wait();
    } catch (const Error&) {  // the expected outcome of abort()
    }
  }
}

std::int64_t FlatUnit::segment_begin() const {
  return scatters_ ? layout_.segment_size() * communicator_.rank() : 0;
}

std::int64_t FlatUnit::segment_size() const {
  return scatters_ ? layout_.segment_size() : layout_.padded_size();
}

CollectiveOptions FlatUnit::options(const char* operation) const {
  return {fmt::format("{} {}", operation, name()), {}};
}

void FlatUnit::supply(Storage& storage) {
  if (&storage == gathered_.get()) {
    demand_(*this);
    return;
  }
  require<InternalError>(!reducing_, "unit {}: a gradient arrived while they are being reduced",
                         name());
  full_gradient_->materialize();
}

void FlatUnit::start_gather() {
  if (state_ != State::Sharded) return;
  if (!gather_is_master_) {
    gathered_->materialize();
    gathered_->set_available(true);
    const Tensor own = Tensor::window(gathered_, segment_begin(), {segment_size()}, compute_dtype_);
    kernels::cast(*context_, master_.view(), {own.view(), false, true});
    if (scatters_)
      gathering_ = communicator_.start_all_gather(gathered_view_.view(), options("all_gather"));
    gathered_->set_available(false);
  }
  state_ = State::Gathering;
}

void FlatUnit::finish_gather() {
  if (state_ == State::Gathered) return;
  require<InternalError>(state_ == State::Gathering, "unit {} is sharded, expected gathering",
                         name());
  if (gathering_) {
    gathering_->wait();
    gathering_.reset();
  }
  gathered_->set_available(true);
  state_ = State::Gathered;
}

void FlatUnit::release() {
  if (!scatters_) return;
  if (state_ == State::Gathering) finish_gather();
  gathered_->release();
  state_ = State::Sharded;
}

void FlatUnit::keep() {
  if (!scatters_ || state_ != State::Gathered) return;
  gathered_->set_available(false);
  state_ = State::Gathering;
}

void FlatUnit::begin_micro_batch(bool first) {
  require<InternalError>(!reducing_, "unit {}: gradients are still being reduced", name());
  users = outstanding = 0;
  reduced_ = false;
  if (first) has_sum_ = false;
  // Micro-batches accumulate in the segment if scattered, else in the full buffer.
  if (!first && !scatters_) return;
  for (Parameter* parameter : parameters_) parameter->tensor.zero_grad();
}

void FlatUnit::zero_gaps() {
  const auto zero = [this](std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    kernels::fill(*context_, full_gradient_view_.alias({end - begin}, {1}, begin).view(), 0.0);
  };
  std::int64_t covered = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterSlot& slot = layout_.slots()[i];
    zero(covered, slot.offset);
    if (!parameters_[i]->tensor.grad().defined()) zero(slot.offset, slot.offset + slot.numel);
    covered = slot.offset + slot.numel;
  }
  zero(covered, layout_.padded_size());
}

void FlatUnit::start_reduce(bool last) {
  reduced_ = true;
  if (!scatters_ && !last) return;
  zero_gaps();
  if (scatters_) {
    if (has_sum_ && !scattered_.defined()) {
      scattered_ = Tensor::empty(context_, {segment_size()}, DType::F32, MemoryCategory::Gradients,
                                 name() + " scattered");
    }
    reducing_ = communicator_.start_reduce_scatter(full_gradient_view_.view(),
                                                   (has_sum_ ? scattered_ : gradient_).view(),
                                                   options("reduce_scatter"));
  } else if (communicator_.world_size() > 1) {
    reducing_ = communicator_.start_all_reduce(full_gradient_view_.view(), ReduceOp::Sum,
                                               options("all_reduce"));
  }
  full_gradient_->set_available(!reducing_);
}

void FlatUnit::finish_reduce() {
  if (!reducing_) return;
  reducing_->wait();
  reducing_.reset();
  full_gradient_->set_available(true);
  if (!scatters_) return;
  full_gradient_->release();
  if (has_sum_) {
    kernels::cast(*context_, scattered_.view(), {gradient_.view(), true, true});
    scattered_ = {};
  }
  has_sum_ = true;
}

Tensor FlatUnit::copy_of_master() const {
  const bool has_copy = !scatters_ && !gather_is_master_ && state_ == State::Gathered;
  return has_copy ? gathered_view_ : Tensor();
}

void FlatUnit::master_changed(bool copied) {
  gathered_->bump_version();
  if (copied || gather_is_master_ || scatters_) return;
  gathered_->set_available(false);
  state_ = State::Sharded;
}

}  // namespace tessera::comm
