#include "train/save_state.h"

#include "comm/control/agreement.h"
#include "core/base/device_backend.h"

namespace tessera::train {

std::vector<std::string> StoreCoordinator::exchange(const std::string& phase,
                                                    std::string_view mine) {
  // The call count keeps keys unique when a step is saved again. It is equal on all ranks, because
  // they make the same calls.
  return comm::exchange(*store_, fmt::format("{}/{}/{}", name_, calls_++, phase), rank_,
                        world_size_, mine, deadline_);
}

io::SaveRequest make_save_request(comm::ShardedModel& sharded, bool with_optimizer,
                                  bool trainable_only) {
  io::SaveRequest request;
  for (const auto& piece : sharded.owned_pieces()) {
    if (trainable_only && !piece.parameter->tensor.requires_grad()) continue;
    const auto add = [&](const io::Section& section, const Shape& shape, const Tensor& values,
                         std::int64_t begin, std::int64_t end) {
      request.parts[section].push_back(
          {piece.parameter->name, shape, values.dtype(), begin, end, values.view().data});
    };
    add(io::kModelSection, piece.parameter->tensor.shape(), piece.master, piece.begin, piece.end);
    for (std::size_t i = 0; with_optimizer && i < piece.state.size(); ++i) {
      const comm::ShardedModel::Piece::State& state = piece.state[i];
      if (state.values.defined())
        add({sharded.state_names()[i]}, state.shape, state.values, state.begin, state.end);
    }
  }
  return request;
}

namespace {

std::size_t bytes_of(const io::TensorPart& part) {
  return static_cast<std::size_t>(part.end - part.begin) * dtype_size(part.dtype);
}

}  // namespace

std::size_t save_copy_bytes(const io::SaveRequest& request) {
  std::size_t bytes = 0;
  for (const auto& [section, parts] : request.parts)
    for (const io::TensorPart& part : parts) bytes += bytes_of(part);
  return bytes;
}

SaveState make_save_state(comm::ShardedModel& sharded, bool with_optimizer, bool trainable_only) {
  SaveState state{make_save_request(sharded, with_optimizer, trainable_only)};
  const auto pieces = sharded.owned_pieces();
  if (pieces.empty() || pieces[0].master.device().type != DeviceType::CUDA) return state;
  const std::shared_ptr<Context> context = pieces[0].master.context();
  state.copies = Storage::allocate_on_host(context, save_copy_bytes(state.request),
                                           MemoryCategory::Staging, "checkpoint");
  auto* copy = static_cast<std::byte*>(state.copies->data());
  for (auto& [section, parts] : state.request.parts) {
    for (io::TensorPart& part : parts) {
      if (bytes_of(part) > 0) context->backend().copy_to_host(copy, part.data, bytes_of(part));
      part.data = copy;
      copy += bytes_of(part);
    }
  }
  return state;
}

namespace {

// NaN and infinity have an exponent of all ones. Bit operations vectorize, float sums don't.
template <typename Bits, Bits kExponent>
bool all_finite(const void* data, std::int64_t count) {
  const auto* values = static_cast<const Bits*>(data);
  Bits bad = 0;
  for (std::int64_t i = 0; i < count; ++i)
    bad = static_cast<Bits>(bad | static_cast<Bits>((values[i] & kExponent) == kExponent));
  return bad == 0;
}

}  // namespace

bool is_finite(const io::SaveRequest& request) {
  for (const auto& [section, parts] : request.parts) {
    for (const io::TensorPart& part : parts) {
      const std::int64_t count = part.end - part.begin;
      if (!is_floating(part.dtype)) continue;
      if (!(part.dtype == DType::BF16 ? all_finite<std::uint16_t, 0x7f80>(part.data, count)
                                      : all_finite<std::uint32_t, 0x7f800000U>(part.data, count)))
        return false;
    }
  }
  return true;
}

}  // namespace tessera::train
