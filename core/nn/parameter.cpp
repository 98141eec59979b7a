#include "core/nn/parameter.h"

#include <algorithm>
#include <numbers>

#include "core/base/rng.h"
#include "core/nn/units.h"

namespace tessera {
namespace {

constexpr std::int64_t kChunk = 1 << 20;  // elements of float32 staging

// Draw i of a uniform stream with mean 0 and variance 1.
float centered_uniform_at(const RngKey& key, std::uint64_t i) {
  return std::numbers::sqrt3_v<float> * (2.0F * uniform_from_bits(key.word(i)) - 1.0F);
}

}  // namespace

Parameter::Parameter(nn::Module& owner, std::string_view own_name, const Shape& shape,
                     Initialization initialization, bool decays)
    : name(owner.path_of(own_name)),
      tensor(Tensor::unbound(shape, DType::F32)),
      init(initialization),
      decay(decays) {
  tensor.set_requires_grad(true);
  owner.add(*this);
}

void initialize_range(const Parameter& parameter, std::uint64_t seed, std::int64_t begin,
                      std::int64_t end, float* out) {
  switch (parameter.init.kind) {
    case Initialization::Kind::Zeros:
      std::fill(out, out + (end - begin), 0.0F);
      break;
    case Initialization::Kind::Ones:
      std::fill(out, out + (end - begin), 1.0F);
      break;
    case Initialization::Kind::Normal:
    case Initialization::Kind::Uniform: {
      const RngKey key = RngKey::make(seed, RngPurpose::Init, hash_text(parameter.name));
      const bool is_normal = parameter.init.kind == Initialization::Kind::Normal;
      for (std::int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<std::uint64_t>(i);
        const float draw = is_normal ? normal_at(key, at) : centered_uniform_at(key, at);
        out[i - begin] = parameter.init.std * draw;
      }
      break;
    }
  }
}

void fill_from_host(
    const Tensor& tensor,
    const std::function<void(std::int64_t begin, std::int64_t end, float* out)>& source) {
  if (tensor.device().type == DeviceType::Meta) return;
  if (tensor.device().type == DeviceType::CPU && tensor.dtype() == DType::F32) {
    source(0, tensor.numel(), tensor.data<float>());
    return;
  }
  std::vector<float> staging;
  for (std::int64_t begin = 0; begin < tensor.numel(); begin += kChunk) {
    const std::int64_t count = std::min(kChunk, tensor.numel() - begin);
    staging.resize(static_cast<std::size_t>(count));
    source(begin, begin + count, staging.data());
    const Tensor part = tensor.alias({count}, {1}, begin);
    visit_floating(tensor.dtype(), "a parameter", [&]<typename T>(std::type_identity<T>) {
      if constexpr (std::is_same_v<T, float>)
        part.copy_from_host(staging.data());
      else
        part.copy_from_host(std::vector<T>(staging.begin(), staging.end()).data());
    });
  }
}

void materialize(const nn::Module& model, const std::shared_ptr<Context>& context, DType dtype,
                 const ParameterSource& source) {
  for (const Unit& unit : units_of(model)) {
    const ShardLayout layout = layout_of(unit, 1);
    auto storage = Storage::allocate(
        context, static_cast<std::size_t>(layout.padded_size()) * dtype_size(dtype),
        MemoryCategory::Parameters, unit.name);
    for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
      Parameter& parameter = *unit.parameters[i];
      parameter.tensor.bind(storage, layout.slots()[i].offset, dtype);
      fill_from_host(parameter.tensor, [&](std::int64_t begin, std::int64_t end, float* out) {
        source(parameter, begin, end, out);
      });
    }
  }
}

}  // namespace tessera
