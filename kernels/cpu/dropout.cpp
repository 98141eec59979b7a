#include "kernels/dropout.h"

#include "kernels/cpu/loops.h"
#include "kernels/cpu/random.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

template <typename T, bool kAccumulate>
void run(Context& context, const Dropout& args) {
  using A = Accumulator<T>;
  const auto* x = static_cast<const T*>(args.x.data);
  auto* y = static_cast<T*>(args.y.view.data);
  const float p = args.p;
  const A scale = A(1) / (A(1) - static_cast<A>(p));
  const RngStep at = *args.rng;
  const RngKey key = RngKey::make(at.seed, RngPurpose::Dropout, at.step, args.place);
  const std::uint64_t first_element = at.first_sample * args.sample_elements;
  for_elements(context, args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
    for_random_words(key, first_element, begin, end,
                     [=](std::int64_t first, std::int64_t count, const std::uint32_t* words) {
#pragma omp simd
                       for (std::int64_t j = 0; j < count; ++j) {
                         // As uniform_from_bits(), but from int32, which every CPU level can convert.
                         const float uniform =
                             static_cast<float>(static_cast<std::int32_t>(words[j] >> 8)) *
                             0x1.0p-24F;
                         const A scaled = load(x + first + j) * scale;
                         A value = uniform >= p ? scaled : A(0);
                         if constexpr (kAccumulate) value += load(y + first + j);
                         store(y + first + j, value);
                       }
                     });
  });
}

}  // namespace

void dropout(Context& context, const Dropout& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) {
    visit_flag(args.y.accumulate, [&](auto accumulate) { run<T, accumulate()>(context, args); });
  });
}

TESSERA_CPU_END
