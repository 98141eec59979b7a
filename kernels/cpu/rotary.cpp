#include "kernels/rotary.h"

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

constexpr int kTile = 128;  // pairs

/// Cosines and sines of one position for a tile of pairs. Angles are quarter turns in f64: whole
/// quarter turns swap and negate sine and cosine; the rest is at most an eighth of a turn from 0.
template <typename A>
struct Angles {
  double quarters[kTile];  ///< quarter turns per position
  A rest[kTile];           ///< radians
  std::int32_t whole[kTile];
  A cosine[kTile], sine[kTile];

  // There is no table of all positions, because it would be read as often as angles are computed
  // now: once for all heads of a token.
  Angles(const Rotary& args, std::int64_t first, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i)
      quarters[i] = args.angles.step[static_cast<std::size_t>(first + i)] * 0.63661977236758134308;
  }

  void move_to(double position, A factor, A sign, std::int64_t count) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      const double angle = position * quarters[i];
      const double shifted = angle + kRound;
      whole[i] = static_cast<std::int32_t>(std::bit_cast<std::int64_t>(shifted));
      rest[i] = static_cast<A>((angle - (shifted - kRound)) * 1.57079632679489661923);
    }
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      const A c = cosine_near_zero(rest[i]), s = sine_near_zero(rest[i]);
      const bool swap = (whole[i] & 1) != 0;
      const A cos = swap ? s : c, sin = swap ? c : s;
      cosine[i] = factor * (((whole[i] + 1) & 2) != 0 ? -cos : cos);
      sine[i] = factor * sign * ((whole[i] & 2) != 0 ? -sin : sin);
    }
  }

  // For |x| <= pi / 4, error below 1e-7 (Cephes' cosf and sinf coefficients).
  static inline float cosine_near_zero(float x) {
    const float z = x * x;
    const float p = (2.443315711809948e-5F * z - 1.388731625493765e-3F) * z + 4.166664568298827e-2F;
    return p * z * z - 0.5F * z + 1.0F;
  }
  static inline float sine_near_zero(float x) {
    const float z = x * x;
    const float p = (-1.9515295891e-4F * z + 8.3321608736e-3F) * z - 1.6666654611e-1F;
    return p * z * x + x;
  }
  static inline double cosine_near_zero(double x) { return std::cos(x); }
  static inline double sine_near_zero(double x) { return std::sin(x); }
};

template <bool kAccumulate, typename T, typename A>
void rotate(const T* x, T* y, std::int64_t half, const A* cosine, const A* sine,
            std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const A low = load(x + i), high = load(x + half + i);
    A to_low = low * cosine[i] - high * sine[i];
    A to_high = high * cosine[i] + low * sine[i];
    if constexpr (kAccumulate) {
      to_low += load(y + i);
      to_high += load(y + half + i);
    }
    store(y + i, to_low);
    store(y + half + i, to_high);
  }
}

template <bool kAccumulate, typename T>
void copy(const T* x, T* y, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (kAccumulate)
      store(y + i, load(x + i) + load(y + i));
    else
      y[i] = x[i];
  }
}

template <bool kAccumulate, typename T>
void run(Context& context, const Rotary& args) {
  using A = Accumulator<T>;
  const TensorView &in = args.x, &out = args.y.view;
  const auto* x = static_cast<const T*>(in.data);
  auto* y = static_cast<T*>(out.data);
  const std::int64_t times = in.shape[1], heads = in.shape[2], dim = in.shape[3];
  const std::int64_t half = args.angles.pairs;
  const std::int64_t rotated = heads - args.copied_heads;
  const auto offset = [times](const TensorView& view, std::int64_t token) {
    return token / times * view.strides[0] + token % times * view.strides[1];
  };
  for_rows(context, in.shape[0] * times, heads * dim, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t first = 0; first < half; first += kTile) {
      const std::int64_t count = std::min<std::int64_t>(kTile, half - first);
      Angles<A> angles(args, first, count);
      for (std::int64_t token = begin; token < end; ++token) {
        const std::int64_t position = args.first_position + token % times;
        angles.move_to(static_cast<double>(position), static_cast<A>(args.angles.factor),
                       args.inverse ? A(-1) : A(1), count);
        const T* from = x + offset(in, token) + first;
        T* to = y + offset(out, token) + first;
        for (std::int64_t head = 0; head < rotated; ++head)
          rotate<kAccumulate>(from + head * in.strides[2], to + head * out.strides[2], half,
                              angles.cosine, angles.sine, count);
      }
    }
    for (std::int64_t token = begin; token < end; ++token) {
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t first = head < rotated ? 2 * half : 0;
        copy<kAccumulate>(x + offset(in, token) + head * in.strides[2] + first,
                          y + offset(out, token) + head * out.strides[2] + first, dim - first);
      }
    }
  });
}

}  // namespace

void rotary(Context& context, const Rotary& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) {
    visit_flag(args.y.accumulate, [&](auto accumulate) { run<accumulate(), T>(context, args); });
  });
}

TESSERA_CPU_END
