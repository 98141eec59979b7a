#include "comm/communicator.h"

#include "comm/collective.h"

namespace tessera::comm {
namespace {

void check_buffer(const TensorView& view, std::string_view what, Device device) {
  require(view.device == device, "{}: expected a buffer on {}, got one on {}", what, device.str(),
          view.device.str());
  require(view.is_contiguous(), "{}: expected a contiguous buffer, got shape {} with strides {}",
          what, view.shape, view.strides);
  require(view.data != nullptr || view.numel() == 0 || view.device.type == DeviceType::Meta,
          "{}: the buffer of shape {} has no memory", what, view.shape);
}

// Checks the first buffer of a collective. @return the device that all its buffers must be on
Device check_first_buffer(const TensorView& view, std::string_view what, Device other_than_host) {
  const Device device = view.device.type == DeviceType::CPU ? Device{} : other_than_host;
  check_buffer(view, what, device);
  return device;
}

void check_parts(const TensorView& view, int world_size, std::string_view what) {
  require(view.numel() % world_size == 0,
          "{}: {} elements do not split into {} equal parts, one for each rank; pad the buffer",
          what, view.numel(), world_size);
}

}  // namespace

std::int64_t Communicator::sent_parts(std::size_t bytes) const {
  const auto world = static_cast<std::size_t>(world_size());
  return static_cast<std::int64_t>(bytes * (world - 1) / world);
}

WorkPtr Communicator::start_all_gather(const TensorView& buffer, CollectiveOptions options) {
  const Device where = check_first_buffer(buffer, "all_gather", device());
  check_parts(buffer, world_size(), "all_gather");
  traffic_.all_gather += sent_parts(buffer.bytes());
  return start({.kind = CollectiveKind::AllGather,
                .dtype = buffer.dtype,
                .count = buffer.numel(),
                .out = buffer.data,
                .label = std::move(options.label),
                .deadline = options.deadline,
                .device = where});
}

WorkPtr Communicator::start_reduce_scatter(const TensorView& in, const TensorView& out,
                                           CollectiveOptions options) {
  const Device where = check_first_buffer(in, "reduce_scatter", device());
  check_buffer(out, "reduce_scatter", where);
  check_parts(in, world_size(), "reduce_scatter");
  require(in.dtype == DType::F32 || in.dtype == DType::BF16,
          "reduce_scatter: expected input of dtype f32 or bf16, got {}", in.dtype);
  const DType sum = scattered_dtype(in.dtype);
  require(out.dtype == sum, "reduce_scatter: expected output of dtype {}, got {}", sum, out.dtype);
  require(out.numel() == in.numel() / world_size(),
          "reduce_scatter: the input has {} elements for {} ranks, so the output needs {}, got {}",
          in.numel(), world_size(), in.numel() / world_size(), out.numel());
  const auto* in_begin = static_cast<const std::byte*>(in.data);
  const auto* out_begin = static_cast<const std::byte*>(out.data);
  require(in.numel() == 0 || in.device.type == DeviceType::Meta ||
              in_begin + in.bytes() <= out_begin || out_begin + out.bytes() <= in_begin,
          "reduce_scatter: input and output overlap; use separate memory");
  traffic_.reduce_scatter += sent_parts(in.bytes());
  return start({.kind = CollectiveKind::ReduceScatter,
                .dtype = in.dtype,
                .count = in.numel(),
                .in = in.data,
                .out = out.data,
                .label = std::move(options.label),
                .deadline = options.deadline,
                .device = where});
}

WorkPtr Communicator::start_all_reduce(const TensorView& buffer, ReduceOp op,
                                       CollectiveOptions options) {
  const Device where = check_first_buffer(buffer, "all_reduce", device());
  require(buffer.dtype == DType::F64 || buffer.dtype == DType::F32 || buffer.dtype == DType::I64,
          "all_reduce: expected dtype f64, f32 or i64, got {}", buffer.dtype);
  traffic_.all_reduce += 2 * sent_parts(buffer.bytes());
  return start({.kind = CollectiveKind::AllReduce,
                .dtype = buffer.dtype,
                .op = op,
                .count = buffer.numel(),
                .out = buffer.data,
                .label = std::move(options.label),
                .deadline = options.deadline,
                .device = where});
}

WorkPtr Communicator::start_broadcast(const TensorView& buffer, int root,
                                      CollectiveOptions options) {
  const Device where = check_first_buffer(buffer, "broadcast", device());
  require(root >= 0 && root < world_size(), "broadcast: root {} is not a rank of a group of {}",
          root, world_size());
  return start({.kind = CollectiveKind::Broadcast,
                .dtype = buffer.dtype,
                .root = root,
                .count = buffer.numel(),
                .out = buffer.data,
                .label = std::move(options.label),
                .deadline = options.deadline,
                .device = where});
}

WorkPtr Communicator::start_barrier(CollectiveOptions options) {
  return start({.label = std::move(options.label), .deadline = options.deadline});
}

}  // namespace tessera::comm
