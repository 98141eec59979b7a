#include "tools/tessera/model/scoring.h"

#include <algorithm>
#include <numeric>

#include "core/ops/embedding.h"
#include "kernels/cross_entropy.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kLogitsAtOnce = std::int64_t{1} << 24;  // elements
constexpr std::int32_t kNext = kernels::kIgnoreTarget;         // token after the last of a text

Tensor ids_of(const std::shared_ptr<Context>& context, const Shape& shape, const Tokens& ids) {
  return Tensor::from<std::int32_t>(context, shape, std::span<const std::int32_t>(ids));
}

// The `count` most likely tokens; ties go to the lower id.
std::vector<std::int32_t> most_likely(std::span<const float> logits, std::int64_t count) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  count = std::min(count, std::ssize(ids));
  const auto before = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), before);
  ids.resize(static_cast<std::size_t>(count));
  return ids;
}

}  // namespace

std::vector<TokenScore> score_rows(const Tensor& logits, const Tokens& tokens, std::int64_t top) {
  const std::shared_ptr<Context>& context = logits.context();
  const std::int64_t rows = std::ssize(tokens);
  const Tensor losses = Tensor::empty(context, {rows}, DType::F32);
  const Tensor targets = ids_of(context, {rows}, tokens);
  kernels::cross_entropy(
      *context, {.logits = logits.view(), .targets = targets.view(), .losses = losses.view()});
  const auto loss = losses.to_vector<float>();
  const auto values = top > 0 ? logits.to_vector<float>() : std::vector<float>();
  const auto columns = static_cast<std::size_t>(logits.dim(1));
  std::vector<TokenScore> scores(tokens.size());
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    TokenScore& score = scores[row];
    score.log_prob = -static_cast<double>(loss[row]);
    if (top == 0 || tokens[row] == kernels::kIgnoreTarget) continue;
    const std::span<const float> own(values.data() + row * columns, columns);
    const double log_sum =
        static_cast<double>(own[static_cast<std::size_t>(tokens[row])]) - score.log_prob;
    for (const std::int32_t id : most_likely(own, top))
      score.top.emplace_back(
          id, id == tokens[row] ? score.log_prob
                                : static_cast<double>(own[static_cast<std::size_t>(id)]) - log_sum);
  }
  return scores;
}

std::vector<std::vector<TokenScore>> score(models::LanguageModel& model,
                                           const std::shared_ptr<Context>& context,
                                           const std::vector<ScoredText>& texts,
                                           const ScoreOptions& options) {
  const models::Arch& arch = model.arch();
  const std::size_t unread = options.on_next ? 0 : 1;  // tokens at the end that predict nothing
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const Tokens& tokens = texts[i].tokens;
    require(std::ssize(tokens) <= arch.seq_len + static_cast<std::int64_t>(unread),
            "a text of {} tokens is longer than the model's {} positions", tokens.size(),
            arch.seq_len);
    require(texts[i].first >= 1, "the first token of a text has no score");
    for (const std::int32_t token : tokens)
      require(token >= 0 && token < arch.vocab_size, "{} is not one of the model's ids, 0 to {}",
              token, arch.vocab_size - 1);
    if (tokens.size() + 1 - unread > texts[i].first) order.push_back(i);
  }
  const auto inputs_of = [&](std::size_t i) {
    return static_cast<std::int64_t>(texts[order[i]].tokens.size() - unread);
  };
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [&](std::size_t i) { return texts[i].tokens.size(); });
  std::vector<std::vector<TokenScore>> scores(texts.size());
  for (std::size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    if (options.keep_going && !options.keep_going()) return {};
    const std::int64_t length = inputs_of(begin);
    // Shorter rows are padded at their end, unless positions depend on a row's length.
    while (end < order.size() && end < begin + static_cast<std::size_t>(options.batch) &&
           !model.outgrows(inputs_of(end), length - inputs_of(end)))
      ++end;
    Tokens inputs, positions, targets;
    std::vector<std::size_t> owners;  // texts of the positions
    for (std::size_t i = begin; i < end; ++i) {
      const ScoredText& text = texts[order[i]];
      const auto row = static_cast<std::int32_t>(static_cast<std::int64_t>(i - begin) * length);
      inputs.insert(inputs.end(), text.tokens.begin(), text.tokens.begin() + inputs_of(i));
      inputs.resize(static_cast<std::size_t>(row + length));
      for (std::size_t t = text.first; t < text.tokens.size() + 1 - unread; ++t) {
        positions.push_back(row + static_cast<std::int32_t>(t) - 1);
        targets.push_back(t < text.tokens.size() ? text.tokens[t] : kNext);
        owners.push_back(order[i]);
      }
    }
    const std::int64_t rows = static_cast<std::int64_t>(end - begin) * length, width = arch.n_embd;
    const Tensor features =
        model.features(ids_of(context, {static_cast<std::int64_t>(end - begin), length}, inputs))
            .alias({rows, width}, {width, 1}, 0);
    const std::int64_t chunk = std::max<std::int64_t>(1, kLogitsAtOnce / arch.vocab_size);
    for (std::int64_t first = 0; first < std::ssize(positions); first += chunk) {
      const std::int64_t count = std::min(chunk, std::ssize(positions) - first);
      const auto part = [&](const Tokens& all) {
        return Tokens(all.begin() + first, all.begin() + first + count);
      };
      const Tensor chosen =
          ops::embedding(ids_of(context, {1, count}, part(positions)), features, Tensor());
      const Tensor logits = model.logits_of(chosen.alias({count, width}, {width, 1}, 0));
      std::vector<TokenScore> found = score_rows(logits, part(targets), options.top);
      for (std::int64_t row = 0; row < count; ++row) {
        const auto at = static_cast<std::size_t>(first + row);
        if (targets[at] == kNext)
          options.on_next(owners[at], logits.alias({1, arch.vocab_size}, {arch.vocab_size, 1},
                                                   row * arch.vocab_size));
        else
          scores[owners[at]].push_back(std::move(found[static_cast<std::size_t>(row)]));
      }
    }
  }
  return scores;
}

double log_likelihood(const std::vector<TokenScore>& scores) {
  double sum = 0;
  for (const TokenScore& score : scores) sum += score.log_prob;
  return sum;
}

}  // namespace tessera::tools
