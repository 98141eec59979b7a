#include "kernels/sampling.h"

#include <cmath>

#include "kernels/cpu/loops.h"
#include "kernels/sampling_weight.h"

TESSERA_CPU_BEGIN
namespace {

struct Row {
  const float* logits;
  std::int32_t columns;

  struct Threshold {
    std::uint32_t key;
    std::uint64_t needed;
  };
  /// The key at which amount(logit, key, id), summed from the largest key down, reaches `needed`,
  /// and what is needed of the tokens with that key. Digit by digit from the most significant: the
  /// amounts for each digit of the keys that agree with those found.
  template <typename Amount>
  Threshold select(std::uint64_t needed, const Amount& amount) const {
    std::uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      std::uint64_t amounts[256] = {};
      for (std::int32_t id = 0; id < columns; ++id) {
        const std::uint32_t key = logit_key(logits[id]);
        if (((key ^ found) & mask) == 0)
          amounts[key >> shift & 255U] += amount(logits[id], key, id);
      }
      std::uint32_t digit = 255;
      while (digit > 0 && amounts[digit] < needed) needed -= amounts[digit--];
      found |= digit << shift;
      mask |= 255U << shift;
    }
    return {found, needed};
  }

  /// The first id at which the sum of the amounts exceeds `target`.
  template <typename Amount>
  std::int32_t find(std::uint64_t target, const Amount& amount) const {
    for (std::int32_t id = 0; id + 1 < columns; ++id) {
      const std::uint64_t own = amount(logits[id], logit_key(logits[id]), id);
      if (own > target) return id;
      target -= own;
    }
    return columns - 1;
  }

  template <typename Amount>
  std::uint64_t sum(const Amount& amount) const {
    std::uint64_t total = 0;
    for (std::int32_t id = 0; id < columns; ++id)
      total += amount(logits[id], logit_key(logits[id]), id);
    return total;
  }

  /// Of the tokens with this key keeps the first `count`, and all with larger keys.
  KeptTokens keep(std::uint32_t threshold, std::uint64_t count) const {
    return {threshold, find(count - 1, [&](float, std::uint32_t key, std::int32_t) {
              return std::uint64_t{key == threshold};
            })};
  }
};

std::int32_t sample_row(const Row& row, const Sampling& args, std::uint64_t draw) {
  std::int32_t best = 0;
  for (std::int32_t id = 0; id < row.columns; ++id) {
    if (std::isnan(row.logits[id])) return -1;
    if (row.logits[id] > row.logits[best]) best = id;
  }
  const float largest = row.logits[best];
  if (!std::isfinite(largest)) return -1;
  if (args.temperature == 0.0) return best;

  KeptTokens kept;
  const double scale = octaves_per_logit(args.temperature);
  const auto kept_weight = [&](float logit, std::uint32_t key, std::int32_t id) {
    return kept.contains(key, id) ? sampling_weight(logit, largest, scale) : 0;
  };
  if (args.top_k > 0 && args.top_k < row.columns) {
    const auto [threshold, count] =
        row.select(static_cast<std::uint64_t>(args.top_k),
                   [](float, std::uint32_t, std::int32_t) { return std::uint64_t{1}; });
    kept = row.keep(threshold, count);
  }
  std::uint64_t total = row.sum(kept_weight);
  if (args.top_p < 1.0) {
    const std::uint64_t needed = fraction_of_weights(total, args.top_p);
    const auto [threshold, rest] = row.select(needed, kept_weight);
    // Tokens of one key have one weight.
    const std::uint64_t each = sampling_weight(logit_of_key(threshold), largest, scale);
    const std::uint64_t count = (rest + each - 1) / each;
    kept = row.keep(threshold, count);
    total = needed - rest + count * each;
  }
  return row.find(draw_below(total, args.key.word(draw)), kept_weight);
}

}  // namespace

void sample(Context& context, const Sampling& args) {
  const auto* logits = static_cast<const float*>(args.logits.data);
  auto* tokens = static_cast<std::int32_t*>(args.tokens.data);
  const std::int64_t stride = args.logits.strides[0], columns = args.logits.shape[1];
  for_rows(context, args.logits.shape[0], columns, [&](std::int64_t row, std::int64_t end) {
    for (; row < end; ++row)
      tokens[row] = sample_row({logits + row * stride, static_cast<std::int32_t>(columns)}, args,
                               args.first_draw + static_cast<std::uint64_t>(row));
  });
}

TESSERA_CPU_END
