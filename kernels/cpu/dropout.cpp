#include "kernels/dropout.h"

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

constexpr int kGroups = 64;  // counters per draw(); each yields four words

// Draws words 4 first to 4 (first + kGroups) - 1 of the stream: Philox4x32-10 of core/base/rng.h
// with one counter per lane, so that the rounds vectorize.
void draw(const RngKey& key, std::uint64_t first, std::uint32_t* words) {
  std::uint32_t c0[kGroups], c1[kGroups], c2[kGroups], c3[kGroups];
  for (int i = 0; i < kGroups; ++i) {
    const std::uint64_t counter = first + static_cast<std::uint64_t>(i);
    c0[i] = static_cast<std::uint32_t>(counter);
    c1[i] = static_cast<std::uint32_t>(counter >> 32);
    c2[i] = static_cast<std::uint32_t>(key.stream);
    c3[i] = static_cast<std::uint32_t>(key.stream >> 32);
  }
  auto key0 = static_cast<std::uint32_t>(key.key);
  auto key1 = static_cast<std::uint32_t>(key.key >> 32);
  for (int round = 0; round < 10; ++round) {
#pragma omp simd
    for (int i = 0; i < kGroups; ++i) {
      const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * c0[i];
      const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * c2[i];
      c0[i] = static_cast<std::uint32_t>(product1 >> 32) ^ c1[i] ^ key0;
      c1[i] = static_cast<std::uint32_t>(product1);
      c2[i] = static_cast<std::uint32_t>(product0 >> 32) ^ c3[i] ^ key1;
      c3[i] = static_cast<std::uint32_t>(product0);
    }
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  for (int i = 0; i < kGroups; ++i) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

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
    std::uint32_t words[4 * kGroups];
    for (std::int64_t i = begin; i < end;) {
      const std::uint64_t number = first_element + static_cast<std::uint64_t>(i);
      draw(key, number / 4, words);
      const auto skip = static_cast<std::int64_t>(number % 4);
      const std::int64_t count = std::min(end - i, 4 * kGroups - skip);
#pragma omp simd
      for (std::int64_t j = 0; j < count; ++j) {
        // As uniform_from_bits(), but from int32, which every CPU level can convert.
        const float uniform =
            static_cast<float>(static_cast<std::int32_t>(words[skip + j] >> 8)) * 0x1.0p-24F;
        const A scaled = load(x + i + j) * scale;
        A value = uniform >= p ? scaled : A(0);
        if constexpr (kAccumulate) value += load(y + i + j);
        store(y + i + j, value);
      }
      i += count;
    }
  });
}

}  // namespace

void dropout(Context& context, const Dropout& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) {
    visit_flag(args.y.accumulate, [&](auto accumulate) { run<T, accumulate()>(context, args); });
  });
}

TESSERA_CPU_END
