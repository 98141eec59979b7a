#include "kernels/sampling.h"

#include <cmath>

#include "kernels/cpu/loops.h"
#include "kernels/sampling_weight.h"
#include "kernels/workspace.h"

TESSERA_CPU_BEGIN
namespace {

/// All tokens of a row, or those that top-k keeps, by ascending id; `i` indexes them.
struct Row {
  const float* logits;
  std::int32_t columns;
  const std::int32_t* ids = nullptr;  ///< null: all tokens

  struct Threshold {
    std::uint32_t key;
    std::uint64_t needed;
  };
  /// Key at which the sum of amount(logit, key, i) from the largest key down reaches `needed`, and
  /// how much of `needed` is left for tokens with that key. Radix selection from the top digit.
  template <typename Amount>
  Threshold select(std::uint64_t needed, const Amount& amount) const {
    std::uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      std::uint64_t amounts[256] = {};
      for (std::int32_t i = 0; i < columns; ++i) {
        const std::uint32_t key = logit_key(logits[i]);
        if (((key ^ found) & mask) == 0) amounts[key >> shift & 255U] += amount(logits[i], key, i);
      }
      std::uint32_t digit = 255;
      while (digit > 0 && amounts[digit] < needed) needed -= amounts[digit--];
      found |= digit << shift;
      mask |= 255U << shift;
    }
    return {found, needed};
  }

  /// The first i at which the running sum of the amounts exceeds `target`.
  template <typename Amount>
  std::int32_t find(std::uint64_t target, const Amount& amount) const {
    for (std::int32_t i = 0; i + 1 < columns; ++i) {
      const std::uint64_t own = amount(logits[i], logit_key(logits[i]), i);
      if (own > target) return i;
      target -= own;
    }
    return columns - 1;
  }

  template <typename Amount>
  std::uint64_t sum(const Amount& amount) const {
    std::uint64_t total = 0;
    for (std::int32_t i = 0; i < columns; ++i) total += amount(logits[i], logit_key(logits[i]), i);
    return total;
  }

  /// Keeps the tokens with keys above `threshold`, and the first `count` with that key.
  KeptTokens keep(std::uint32_t threshold, std::uint64_t count) const {
    return {threshold, find(count - 1, [&](float, std::uint32_t key, std::int32_t) {
              return std::uint64_t{key == threshold};
            })};
  }
};

bool keeps_few(const Sampling& args) {
  return args.temperature > 0.0 && args.top_k > 0 && args.top_k < args.logits.shape[1];
}

/// Memory for the tokens that top-k keeps of a row.
struct Scratch {
  float* logits = nullptr;
  std::int32_t* ids = nullptr;
};

std::int32_t sample_row(Row row, const Sampling& args, std::uint64_t draw, const Scratch& scratch) {
  std::int32_t best = 0;
  for (std::int32_t i = 0; i < row.columns; ++i) {
    if (std::isnan(row.logits[i])) return -1;
    if (row.logits[i] > row.logits[best]) best = i;
  }
  const float largest = row.logits[best];
  if (!std::isfinite(largest)) return -1;
  if (args.temperature == 0.0) return best;

  if (keeps_few(args)) {
    const auto [threshold, count] =
        row.select(static_cast<std::uint64_t>(args.top_k),
                   [](float, std::uint32_t, std::int32_t) { return std::uint64_t{1}; });
    const KeptTokens few = row.keep(threshold, count);
    std::int32_t kept = 0;
    for (std::int32_t i = 0; i < row.columns; ++i) {
      if (!few.contains(logit_key(row.logits[i]), i)) continue;
      scratch.logits[kept] = row.logits[i];
      scratch.ids[kept++] = i;
    }
    row = {scratch.logits, kept, scratch.ids};
  }
  KeptTokens kept;
  const double scale = octaves_per_logit(args.temperature);
  std::uint64_t least = 0;
  const auto kept_weight = [&](float logit, std::uint32_t key, std::int32_t i) {
    const std::uint64_t weight = kept.contains(key, i) ? sampling_weight(logit, largest, scale) : 0;
    return weight >= least ? weight : 0;
  };
  std::uint64_t total = row.sum(kept_weight);
  if (args.top_p < 1.0) {
    const std::uint64_t needed = fraction_of_weights(total, args.top_p);
    const auto [threshold, rest] = row.select(needed, kept_weight);
    // Tokens with equal keys have equal weights.
    const std::uint64_t each = sampling_weight(logit_of_key(threshold), largest, scale);
    const std::uint64_t count = (rest + each - 1) / each;
    kept = row.keep(threshold, count);
    total = needed - rest + count * each;
  }
  if (args.min_p > 0.0) {
    least = least_weight(args.min_p);
    total = row.sum(kept_weight);
  }
  const std::int32_t drawn = row.find(draw_below(total, args.key.word(draw)), kept_weight);
  return row.ids == nullptr ? drawn : row.ids[drawn];
}

}  // namespace

void sample(Context& context, const Sampling& args) {
  const auto* logits = static_cast<const float*>(args.logits.data);
  auto* tokens = static_cast<std::int32_t*>(args.tokens.data);
  const std::int64_t stride = args.logits.strides[0], columns = args.logits.shape[1];
  const std::int64_t rows = args.logits.shape[0], few = keeps_few(args) ? args.top_k : 0;
  const Workspace scratch(
      context, static_cast<std::size_t>(rows * few) * (sizeof(float) + sizeof(std::int32_t)),
      "sample");
  if (scratch.is_planned()) return;
  auto* few_logits = static_cast<float*>(scratch.data());
  auto* few_ids = reinterpret_cast<std::int32_t*>(few_logits + rows * few);
  for_rows(context, rows, columns, [&](std::int64_t row, std::int64_t end) {
    for (; row < end; ++row)
      tokens[row] = sample_row({logits + row * stride, static_cast<std::int32_t>(columns)}, args,
                               args.first_draw + static_cast<std::uint64_t>(row),
                               {few_logits + row * few, few_ids + row * few});
  });
}

TESSERA_CPU_END
