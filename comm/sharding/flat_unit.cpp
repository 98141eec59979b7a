#include "comm/sharding/flat_unit.h"

#include <algorithm>

#include "comm/communicator.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"

namespace tessera::comm {
namespace {

// A tensor of `count` elements of `dtype` in the memory of `storage`, at element `begin`, which can
// be read while the storage is not available.
Tensor part_of(const std::shared_ptr<Storage>& storage, std::int64_t begin, std::int64_t count,
               DType dtype) {
  const std::size_t size = dtype_size(dtype);
  auto* const data = static_cast<std::byte*>(storage->data());
  auto memory = Storage::wrap(
      storage->context(), data == nullptr ? nullptr : data + static_cast<std::size_t>(begin) * size,
      static_cast<std::size_t>(count) * size, storage);
  return Tensor::window(std::move(memory), 0, {count}, dtype);
}

}  // namespace

FlatUnit::FlatUnit(const Unit& unit, const ShardSpec& spec, const Mesh& mesh,
                   const std::shared_ptr<Context>& context, const std::shared_ptr<Context>& host,
                   std::function<void(FlatUnit&)> demand, std::function<void()> make_room)
    : parameters_(unit.parameters),
      spec_(spec),
      context_(context),
      shard_(mesh.shard()),
      replicate_(mesh.replicate()),
      demand_(std::move(demand)),
      make_room_(std::move(make_room)),
      layout_(layout_of(unit, shard_.world_size())),
      trainable_(unit.parameters.front()->tensor.requires_grad()) {
  splits_parameters_ = splits() && spec.parameters == Hold::Split;
  splits_gradients_ = splits() && spec.gradients == Hold::Split;
  const std::int64_t padded = layout_.padded_size();
  const std::int64_t segment = segment_size();

  if (!trainable_) spec_.master = spec.frozen;
  const bool is_offloaded = host != nullptr && (trainable_ || spec_.master != spec.compute);
  in_place_ = !splits_parameters_ && (is_offloaded || spec.compute == spec_.master);
  always_whole_ = in_place_ && !splits();
  const auto make = [&](const std::shared_ptr<Context>& place, DType dtype) {
    return Tensor::full(place, {segment}, dtype, 0.0, MemoryCategory::Parameters, name());
  };
  whole_ = Storage::reserve(
      context_, static_cast<std::size_t>(padded) * dtype_size(spec.compute),
      in_place_ && !is_offloaded ? MemoryCategory::Parameters : MemoryCategory::Gathered, name());
  whole_view_ = Tensor::window(whole_, 0, {padded}, spec.compute);
  if (in_place_) {
    whole_->materialize();
    own_ = part_of(whole_, segment_begin(), segment, spec.compute);
    kernels::fill(*context_, whole_view_.view(), 0.0);
    whole_->set_available(always_whole_);
  } else {
    own_ = make(context_, is_offloaded ? spec.compute : spec_.master);
    // Later, it would lie between activations, and part the memory that they leave.
    if (!splits_parameters_) whole_->materialize();
    whole_->set_available(false);
  }
  master_ = is_offloaded ? make(host, spec_.master) : own_;
  if (trainable_) make_gradients();

  // Nothing below throws, so no parameter refers to a unit whose memory could not be had.
  whole_->set_supplier(this);
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i]->tensor.bind(whole_, layout_.slots()[i].offset, spec.compute);
  if (!trainable_) return;
  whole_gradient_->set_supplier(this);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterSlot& slot = layout_.slots()[i];
    parameters_[i]->tensor.set_grad_buffer(
        Tensor::window(whole_gradient_, slot.offset, slot.shape, spec.gradient));
  }
  if (takes_rows()) parameters_.front()->tensor.set_row_receiver(this);
}

void FlatUnit::make_gradients() {
  const std::int64_t padded = layout_.padded_size();
  whole_gradient_ =
      Storage::reserve(context_, static_cast<std::size_t>(padded) * dtype_size(spec_.gradient),
                       MemoryCategory::Gradients, name());
  whole_gradient_view_ = Tensor::window(whole_gradient_, 0, {padded}, spec_.gradient);
  if (splits() || spec_.gradient != DType::F32) {
    segment_gradient_ =
        Storage::reserve(context_, static_cast<std::size_t>(segment_size()) * sizeof(float),
                         MemoryCategory::Gradients, name() + " segment");
  }
}

FlatUnit::~FlatUnit() {
  whole_->set_supplier(nullptr);
  if (trainable_) whole_gradient_->set_supplier(nullptr);
  if (takes_rows()) parameters_.front()->tensor.set_row_receiver(nullptr);
  const auto abandon = [this](Communicator& communicator, const WorkPtr& work) {
    if (!work || work->is_done()) return;
    communicator.abort(fmt::format("unit {} was destroyed during a collective", name()));
    try {
      work->wait();
    } catch (const Error&) {  // the expected outcome of abort()
    }
  };
  abandon(shard_, gathering_);
  for (const WorkPtr& work : reducing_) abandon(shard_, work);
  abandon(replicate_, replicating_);
}

bool FlatUnit::splits() const { return shard_.world_size() > 1; }

std::int64_t FlatUnit::segment_begin() const {
  return splits() ? layout_.segment_size() * shard_.rank() : 0;
}

std::int64_t FlatUnit::segment_size() const {
  return splits() ? layout_.segment_size() : layout_.padded_size();
}

std::pair<std::int64_t, std::int64_t> FlatUnit::owned() const {
  const std::int64_t segment = layout_.segment_size();
  const std::int64_t replicas = replicate_.world_size();
  const std::int64_t blocks = segment / ShardLayout::kAlignment;
  const std::int64_t share = (blocks + replicas - 1) / replicas * ShardLayout::kAlignment;
  const std::int64_t first = segment * shard_.rank();
  const auto at = [&](std::int64_t replica) { return first + std::min(replica * share, segment); };
  return {at(replicate_.rank()), at(replicate_.rank() + 1)};
}

CollectiveOptions FlatUnit::options(const char* operation) const {
  return {fmt::format("{} {}", operation, name()), {}};
}

void FlatUnit::supply(Storage& storage) {
  if (&storage == whole_.get()) {
    demand_(*this);
    return;
  }
  require(
      !reduced_,
      "gradients of unit '{}' were used after they had been reduced: a parameter of it was used "
      "outside of nn::unit",
      name());
  make_room_();
  whole_gradient_->materialize();
  if (!rows_.defined()) return;
  spread_rows();
  rows_ = row_ids_ = {};
}

// Whether the rows of all ranks, with their numbers, and the sum of those of this segment take less
// memory than the whole gradient.
bool FlatUnit::takes_rows() const {
  const Shape& shape = parameters_.front()->tensor.shape();
  const bool is_wide = spec_.gradient == DType::F32 && spec_.reduction == DType::F32;
  if (!trainable_ || !splits_gradients_ || !is_wide || spec_.tokens == 0) return false;
  return parameters_.size() == 1 && shape.size() == 2 &&
         spec_.tokens <
             (layout_.padded_size() - segment_size()) / (shard_.world_size() * (shape[1] + 1));
}

autograd::RowGradient FlatUnit::receive(std::int64_t count) {
  const Tensor& parameter = parameters_.front()->tensor;
  // The error of a late gradient is that of supply().
  if (reduced_ || rows_.defined() || parameter.grad().defined()) return {};
  require(count <= spec_.tokens,
          "unit '{}' got the gradient of {} tokens in a micro-batch, but ShardSpec::tokens is {}",
          name(), count, spec_.tokens);
  whole_gradient_->release();  // so that a dense gradient to be added calls supply()
  make_room_();
  const std::int64_t ranks = shard_.world_size(), n = spec_.tokens, width = parameter.dim(1);
  const auto make = [&](const Shape& shape, DType dtype) {
    return Tensor::empty(context_, shape, dtype, MemoryCategory::Gradients, name() + " rows");
  };
  rows_ = make({ranks, n, width}, DType::F32);
  row_ids_ = make({ranks, n}, DType::I32);
  return {rows_.alias({n, width}, {width, 1}, shard_.rank() * n * width).view(),
          row_ids_.alias({n}, {1}, shard_.rank() * n).view()};
}

// Adds this rank's rows to the parameter's gradient.
void FlatUnit::spread_rows() {
  const auto own = [&](const Tensor& t) { return t.view().narrow(0, shard_.rank(), 1); };
  kernels::embedding_backward(
      *context_, {own(row_ids_), own(rows_), autograd::leaf_target(parameters_.front()->tensor)});
}

// Adds up the rows of all ranks, in rank order, for the rows of the parameter that the segment has a
// part of.
void FlatUnit::sum_rows() {
  const std::int64_t width = rows_.dim(2), begin = segment_begin(), first = begin / width;
  const std::int64_t count = (begin + segment_size() + width - 1) / width - first;
  const Tensor sums = Tensor::empty(context_, {count, width}, DType::F32, MemoryCategory::Gradients,
                                    name() + " arriving");
  kernels::embedding_backward(*context_, {.tokens = row_ids_.view(),
                                          .grad_y = rows_.view(),
                                          .grad_token_weight = {sums.view(), false, true},
                                          .first_token = first});
  arriving_ = sums.alias({segment_size()}, {1}, begin - first * width);
  rows_ = row_ids_ = {};
}

void FlatUnit::start_gather() {
  if (state_ != State::Sharded) return;
  if (!always_whole_) {
    whole_->materialize();
    whole_->set_available(true);
    if (!in_place_) {
      const Tensor slot = Tensor::window(whole_, segment_begin(), {segment_size()}, spec_.compute);
      kernels::cast(*context_, own_.view(), {slot.view(), false, true});
    }
    const TensorView whole = whole_view_.view();
    whole_->set_available(false);
    if (splits()) gathering_ = shard_.start_all_gather(whole, options("all_gather"));
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
  whole_->set_available(true);
  state_ = State::Gathered;
}

void FlatUnit::release() {
  if (state_ == State::Gathering) finish_gather();
  if (!splits_parameters_) return;
  whole_->release();
  state_ = State::Sharded;
}

void FlatUnit::keep() {
  if (!splits_parameters_ || state_ != State::Gathered) return;
  whole_->set_available(false);
  state_ = State::Gathering;
}

void FlatUnit::begin_micro_batch(bool first) {
  require<InternalError>(reducing_.empty() && !replicating_,
                         "unit {}: gradients are still being reduced", name());
  users = outstanding = 0;
  reduced_ = false;
  rows_ = row_ids_ = {};
  if (!trainable_) return;
  whole_gradient_->set_available(true);  // if it is there
  if (first) {
    has_sum_ = false;
    release_gradient();  // of a step without an update
  }
  // Micro-batches accumulate in the segment if gradients are split, else in the whole buffer.
  if (!first && !splits_gradients_) return;
  for (Parameter* parameter : parameters_) parameter->tensor.zero_grad();
}

void FlatUnit::expose_gradients() {
  if (!rows_.defined()) return;
  whole_gradient_->materialize();
  spread_rows();
}

void FlatUnit::zero_gaps() {
  const auto zero = [this](std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    kernels::fill(*context_, whole_gradient_view_.alias({end - begin}, {1}, begin).view(), 0.0);
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

bool FlatUnit::start_reduce(bool last) {
  last_ = last;
  const bool reduces = trainable_ && (splits_gradients_ || last);
  if (reduces && !rows_.defined()) zero_gaps();
  reduced_ = true;  // from now on, gradients of this micro-batch would be lost
  if (!reduces) return false;
  if (segment_gradient_) {
    segment_gradient_->materialize();
    gradient_ = Tensor::window(segment_gradient_, 0, {segment_size()}, DType::F32);
  } else {
    gradient_ = part_of(whole_gradient_, 0, segment_size(), DType::F32);
  }
  if (rows_.defined()) {
    whole_gradient_->release();  // exposed
    CollectiveGroup group(shard_);
    for (const Tensor& part : {row_ids_, rows_})
      reducing_.push_back(shard_.start_all_gather(part.view(), options("all_gather rows of")));
    group.end();
    return true;
  }
  if (splits()) {
    Tensor in = whole_gradient_view_;
    if (spec_.reduction != spec_.gradient) {
      narrow_ = Tensor::empty(context_, in.shape(), spec_.reduction, MemoryCategory::Gradients,
                              name() + " reduction");
      kernels::cast(*context_, in.view(), {narrow_.view(), false, true});
      in = narrow_;
    }
    const DType sum = shard_.scattered_dtype(in.dtype());
    if (has_sum_ || sum != DType::F32)
      arriving_ = Tensor::empty(context_, {segment_size()}, sum, MemoryCategory::Gradients,
                                name() + " arriving");
    const Tensor& out = arriving_.defined() ? arriving_ : gradient_;
    reducing_ = {shard_.start_reduce_scatter(in.view(), out.view(), options("reduce_scatter"))};
  } else if (segment_gradient_) {
    kernels::cast(*context_, whole_gradient_view_.view(), {gradient_.view(), false, true});
    whole_gradient_->release();
  }
  whole_gradient_->set_available(false);  // until the next micro-batch
  return true;
}

void FlatUnit::finish_reduce() {
  if (!reduced_ || !trainable_ || (!splits_gradients_ && !last_)) return;
  if (!reducing_.empty()) {
    for (const WorkPtr& work : reducing_) work->wait();
    reducing_.clear();
    narrow_ = {};
    if (rows_.defined()) sum_rows();
    whole_gradient_->release();
    if (arriving_.defined())
      kernels::cast(*context_, arriving_.view(), {gradient_.view(), has_sum_, true});
    arriving_ = {};
    has_sum_ = true;
  }
  if (last_ && replicate_.world_size() > 1)
    replicating_ =
        replicate_.start_all_reduce(gradient_.view(), ReduceOp::Sum, options("all_reduce"));
}

const Tensor& FlatUnit::gradient() const {
  require(gradient_.defined(),
          "unit '{}' has no gradient: sum_totals() and step() come after micro-batches, once",
          name());
  return gradient_;
}

void FlatUnit::release_gradient() {
  if (gradient_.defined() && !segment_gradient_) gradient_.storage()->set_available(false);
  gradient_ = {};
  if (segment_gradient_) segment_gradient_->release();
  whole_gradient_->release();
}

void FlatUnit::finish_replicate() {
  if (!replicating_) return;
  replicating_->wait();
  replicating_.reset();
}

Tensor FlatUnit::copy_of_master() const {
  const bool has_copy = !splits() && !in_place_ && state_ == State::Gathered;
  return has_copy ? whole_view_ : Tensor();
}

void FlatUnit::upload_master() const {
  Tensor from = master_;
  if (spec_.compute != spec_.master) {
    from = Tensor::empty(master_.context(), master_.shape(), spec_.compute, MemoryCategory::Staging,
                         "offload");
    kernels::cast(*master_.context(), master_.view(), {from.view(), false, true});
  }
  own_.copy_from_host(from.view().data);
}

void FlatUnit::master_changed(bool copied) {
  whole_->bump_version();
  if (master_.context() != context_) upload_master();
  if (copied || always_whole_ || splits_parameters_) return;
  whole_->set_available(false);
  state_ = State::Sharded;
}

}  // namespace tessera::comm
