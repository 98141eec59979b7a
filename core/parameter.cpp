#include "core/parameter.h"

#include <algorithm>

#include "core/base/rng.h"
#include "core/base/shard_layout.h"
#include "kernels/elementwise.h"

namespace tessera {
namespace {

constexpr std::int64_t kChunk = 1 << 20;  // elements of float32 staging

// FNV-1a: names the random stream of a parameter.
std::uint64_t hash_name(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace

void initialize_range(const Parameter& parameter, std::uint64_t seed, std::int64_t begin,
                      std::int64_t end, float* out) {
  switch (parameter.init.kind) {
    case Initialization::Kind::Zeros:
      std::fill(out, out + (end - begin), 0.0F);
      break;
    case Initialization::Kind::Ones:
      std::fill(out, out + (end - begin), 1.0F);
      break;
    case Initialization::Kind::Normal: {
      const RngKey key = RngKey::make(seed, RngPurpose::Init, hash_name(parameter.name));
      for (std::int64_t i = begin; i < end; ++i) {
        out[i - begin] = parameter.init.std * normal_at(key, static_cast<std::uint64_t>(i));
      }
      break;
    }
  }
}

void fill_from_host(
    const Tensor& tensor,
    const std::function<void(std::int64_t begin, std::int64_t end, float* out)>& source) {
  if (tensor.device().type == DeviceType::Meta) return;
  const bool rounds = tensor.dtype() == DType::BF16;
  if (tensor.device().type == DeviceType::CPU && !rounds) {
    source(0, tensor.numel(), tensor.data<float>());
    return;
  }
  std::vector<float> staging;
  std::vector<BFloat16> rounded;
  for (std::int64_t begin = 0; begin < tensor.numel(); begin += kChunk) {
    const std::int64_t count = std::min(kChunk, tensor.numel() - begin);
    staging.resize(static_cast<std::size_t>(count));
    source(begin, begin + count, staging.data());
    if (rounds) {
      rounded.clear();
      for (const float value : staging) rounded.emplace_back(value);
    }
    tensor.alias({count}, {1}, begin)
        .copy_from_host(rounds ? static_cast<const void*>(rounded.data()) : staging.data());
  }
}

void materialize(const std::vector<Unit>& units, const std::shared_ptr<Context>& context,
                 DType dtype, const ParameterSource& source) {
  std::vector<float> staging;
  for (const Unit& unit : units) {
    std::vector<ShardLayout::Parameter> parts;
    for (const Parameter* p : unit.parameters)
      parts.push_back({p->name, p->tensor.shape(), p->decay});
    const ShardLayout layout(unit.name, parts, 1);
    auto storage = Storage::allocate(
        context, static_cast<std::size_t>(layout.padded_size()) * dtype_size(dtype),
        MemoryCategory::Parameters, unit.name);
    for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
      Parameter& parameter = *unit.parameters[i];
      const ParameterSlot& slot = layout.slots()[i];
      parameter.tensor.bind(storage, slot.offset, dtype);
      if (context->device().type == DeviceType::Meta) continue;
      for (std::int64_t begin = 0; begin < slot.numel; begin += kChunk) {
        const std::int64_t count = std::min(kChunk, slot.numel - begin);
        staging.resize(static_cast<std::size_t>(count));
        source(parameter, begin, begin + count, staging.data());
        const Tensor part = Tensor::window(storage, slot.offset + begin, {count}, dtype);
        const Tensor values =
            Tensor::from<float>(context, {count}, std::span<const float>(staging));
        kernels::cast(*context, values.view(), {part.view(), false, true});
      }
    }
  }
}

}  // namespace tessera
