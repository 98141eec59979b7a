#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/context.h"
#include "core/base/thread_pool.h"
#include "kernels/cpu/attention_scores.h"
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/few_rows.h"
#include "kernels/cpu/visit.h"
#include "kernels/workspace.h"

// One thread computes a whole head (backward: all heads that share keys and values), so the result
// does not depend on the number of threads. Keys and values of a head are copied once into dense
// tiles (attention_tiles.h), padded with zeros; tiles of kQueries x kKeys scores stay in the L1
// cache. Scratch memory per thread grows with Tk * D. With few queries, as when tokens are
// generated, keys and values are read where they are, once for all of them (few_rows.h).
TESSERA_CPU_BEGIN
namespace {

constexpr Index kFewQueries = 4;  // from 6 on, tiles are faster

template <typename T, typename E>
void write_rows(Head<E> head, Index first, Index count, Index dim, const T* tile, Index tile_stride,
                bool accumulate) {
  for (Index i = 0; i < count; ++i) {
    E* to = head.row(first + i);
    const T* from = tile + i * tile_stride;
    if (accumulate) {
#pragma omp simd
      for (Index d = 0; d < dim; ++d) store(to + d, static_cast<T>(load(to + d)) + from[d]);
    } else {
#pragma omp simd
      for (Index d = 0; d < dim; ++d) store(to + d, from[d]);
    }
  }
}

/// Runs body(first, last, scratch) on equal ranges of n items, one per thread.
template <typename Layout, typename T = typename Layout::Element, typename Body>
void for_each_slot(Context& context, Index n, const Sizes& sizes, const char* owner, Body&& body) {
  const Index slots = std::min<Index>(context.threads().size(), n);
  const Index per_slot = Layout(nullptr, sizes).used();
  const Workspace workspace(context, static_cast<std::size_t>(slots * per_slot) * sizeof(T), owner);
  if (workspace.is_planned()) return;
  T* scratch = static_cast<T*>(workspace.data());
  context.threads().parallel_for(slots, 1, [&](Index begin, Index end) {
    for (Index slot = begin; slot < end; ++slot)
      body(slot * n / slots, (slot + 1) * n / slots, Layout(scratch + slot * per_slot, sizes));
  });
}

template <typename Tiles, typename T = typename Tiles::Element>
struct ForwardScratch : Scratch<T> {
  using Element = T;
  ForwardScratch(T* begin, const Sizes& s)
      : Scratch<T>(begin),
        keys(*this, s),
        values(*this, s.padded_keys, s),
        scores(this->take(kQueries * kKeys)),
        out(this->take(kQueries * s.padded_dim)),
        max(this->take(kQueries)),
        new_max(this->take(kQueries)),
        factor(this->take(kQueries)),
        sum(this->take(kQueries * kLanes<T>)) {}
  typename Tiles::Dots keys;
  typename Tiles::Rows values;
  T *scores, *out;
  T *max, *new_max, *factor;  // of each row; factor: for sums of earlier tiles
  T* sum;                     // of each row, in lanes
};

/// e^x for x up to 80, or 0 below -80, where later products would be denormal and thus slow.
template <typename T>
inline Vector<T> exp_or_zero(Vector<T> x) {
  return x < T(-80) ? Vector<T>{} : exp_in_range(x);
}

/// Calls f(j, vector of scores j, mask) for the vectors that hold the first `visible` scores. Whole
/// vectors come without a mask; in the last one a mask hides the rest, because a scalar loop over it
/// would take longer than the vector loop.
template <typename T, typename F>
inline void for_each_vector(const T* scores, std::int32_t visible, F&& f) {
  std::int32_t j = 0;
  for (; j + kLanes<T> <= visible; j += kLanes<T>)
    f(j, load_vector<T>(scores + j), std::false_type{});
  if (j < visible) f(j, load_vector<T>(scores + j), std::true_type{});
}

/// The largest of `least` and the first `visible` scores.
template <typename T>
inline T largest_score(const T* scores, std::int32_t visible, T least) {
  Vector<T> largest = Vector<T>{} + least;
  for_each_vector(scores, visible, [&](std::int32_t j, Vector<T> score, auto masked) {
    const Vector<T> raised = larger<T>(score, largest);
    largest = masked() ? (kLaneNumbers<T> < visible - j ? raised : largest) : raised;
  });
  return horizontal_max<T>(largest);
}

/// Replaces the first `visible` scores by exp(score - max), and the others by 0.
/// @return their sum, in lanes
template <typename T>
inline Vector<T> exp_row(T* scores, std::int32_t visible, std::int32_t width, T max) {
  Vector<T> sums{};
  for_each_vector(scores, visible, [&](std::int32_t j, Vector<T> score, auto masked) {
    Vector<T> e = exp_or_zero<T>(score - max);
    if (masked()) e = kLaneNumbers<T> < visible - j ? e : Vector<T>{};
    store_vector(scores + j, e);
    sums += e;
  });
  for (Index j = round_up(visible, kLanes<T>); j < width; j += kLanes<T>)
    store_vector(scores + j, Vector<T>{});
  return sums;
}

/// row *= factor; `width` is a multiple of kLanes<T>, as is the width of every tile.
template <typename T>
inline void scale_row(T* row, Index width, T factor) {
  for (Index d = 0; d < width; d += kLanes<T>)
    store_vector(row + d, load_vector<T>(row + d) * factor);
}

/// Raises the maxima of rows to those of a tile of scores, and sets the factors of earlier sums.
/// @param visible  of each row, the length of the prefix that holds the visible scores
template <typename Tiles, typename T = typename Tiles::Element>
void raise_maxima(const ForwardScratch<Tiles>& s, const std::int32_t* visible, Index rows) {
  for (Index i = 0; i < rows; ++i)
    s.new_max[i] = largest_score(s.scores + i * kKeys, visible[i], s.max[i]);
  for (Index i = 0; i < rows; i += kLanes<T>) {
    const Vector<T> before = load_vector<T>(s.max + i), now = load_vector<T>(s.new_max + i);
    store_vector(s.factor + i, before == now ? Vector<T>{} + T(1) : exp_or_zero<T>(before - now));
    store_vector(s.max + i, now);
  }
}

/// The columns of a tile of scores that its rows see, for kTileRows of them at a time: most scores beyond are
/// not computed.
template <typename T>
class SeenColumns {
 public:
  /// @param count  queries from `first` on
  template <typename Scores>
  SeenColumns(const Scores& variant, Index first, Index count, Index key)
      : rows_(round_up(count, kTileRows)) {
    for (Index i = 0; i < rows_; i += kTileRows) {
      const Index end = variant.end_key(first + i, std::min<Index>(kTileRows, count - i));
      ends_[i / kTileRows] = round_up(std::clamp<Index>(end - key, 0, kKeys), kKeyStep<T>);
    }
  }
  std::int32_t of_row(Index i) const { return static_cast<std::int32_t>(ends_[i / kTileRows]); }
  Index most() const { return of_row(rows_ - 1); }

  /// Calls f(row, rows, columns) for rows that see as many columns.
  template <typename F>
  void for_rows(const F& f) const {
    for (Index row = 0, end = 0; row < rows_; row = end) {
      while (end < rows_ && of_row(end) == of_row(row)) end += kTileRows;
      f(row, end - row, of_row(row));
    }
  }
  /// Calls f(column, columns, row): no row before `row` sees any of these columns.
  template <typename F>
  void for_columns(const F& f) const {
    const Index step = of_row(0) == most() ? most() : kKeyStep<T>;
    for (Index j = 0, row = 0; j < most(); j += step) {
      while (of_row(row) <= j) row += kTileRows;
      f(j, step, row);
    }
  }

 private:
  Index rows_;
  Index ends_[kQueries / kTileRows];  // ascending
};

/// Computes s.out, s.max and s.sum of a tile of queries over all keys that they see.
template <typename Tiles, typename Scores, typename T = typename Tiles::Element>
void forward_tile(const ForwardScratch<Tiles>& s, const Sizes& sizes, const Scores& variant,
                  Index first, T scale) {
  const Index count = std::min(kQueries, sizes.queries - first);
  const Index rows = round_up(count, kTileRows), width = sizes.padded_dim;
  std::fill_n(s.out, rows * width, T(0));
  for (T* const maxima : {s.max, s.new_max})
    std::fill_n(maxima, kQueries, -std::numeric_limits<T>::infinity());
  std::fill_n(s.sum, kQueries * kLanes<T>, T(0));
  const Index seen = variant.end_key(first, count);
  for (Index key = variant.first_key(first) / kKeys * kKeys; key < seen; key += kKeys) {
    const SeenColumns<T> columns(variant, first, count, key);
    if (variant.skips(first, count, key, columns.most())) continue;
    columns.for_rows([&](Index row, Index n, Index seen_keys) {
      s.keys.multiply(row, n, seen_keys, key, sizes, s.scores + row * kKeys, scale);
    });
    std::int32_t visible[kQueries];
    for (Index i = 0; i < rows; ++i)
      visible[i] = static_cast<std::int32_t>(variant.prepare(
          s.scores + i * kKeys, first + std::min(i, count - 1), key, columns.of_row(i)));
    raise_maxima(s, visible, rows);
    for (Index i = 0; i < rows; ++i) {
      const Vector<T> sum = exp_row(s.scores + i * kKeys, visible[i], columns.of_row(i), s.max[i]);
      const T factor = s.factor[i];
      T* const lanes = s.sum + i * kLanes<T>;
      store_vector(lanes, load_vector<T>(lanes) * factor + sum);
      if (factor != T(1)) scale_row(s.out + i * width, width, factor);
    }
    columns.for_rows([&](Index row, Index n, Index depth) {
      s.values.template add<false>(n, depth, key, s.scores + row * kKeys, sizes,
                                   s.out + row * width);
    });
  }
  for (Index i = 0; i < rows; ++i) {
    T* const lanes = s.sum + i * kLanes<T>;
    lanes[0] = horizontal_sum<T>(load_vector<T>(lanes));
    scale_row(s.out + i * width, width, 1 / lanes[0]);
  }
}

/// One row for each query of a thread's heads, head by head.
struct FewScratch : Scratch<float> {
  using Element = float;
  FewScratch(float* begin, const Sizes& s)
      : Scratch<float>(begin),
        q(take(s.slot_rows * s.dim)),
        scores(take(s.slot_rows * s.padded_keys)),
        out(take(s.slot_rows * s.padded_dim)) {}
  float *q, *scores, *out;
};

/// Computes heads [head, head + heads) of a sequence: whole groups, or a part of one.
template <typename E, typename Scores>
void forward_heads(const AttentionForward& args, const FewScratch& s, const Sizes& sizes,
                   Index batch, Index head, Index heads) {
  const Index queries = sizes.queries, rows = heads * queries, width = sizes.padded_dim;
  const Scores variant(args.variant, batch, queries, sizes.keys);
  Index first = variant.first_key(0);
  while (variant.skips(0, queries, first, kKeys)) first += kKeys;
  const Index keys = variant.end_key(0, queries) - first;
  const Index padded = round_up(keys, kKeyStep<float>);

  const auto rows_of = [&](float* sums, Index sums_stride, const float* a, Index a_stride,
                           const TensorView& b, Index n, Index k) {
    const auto at = head_of<const E>(b, batch, head / sizes.group());
    const Index groups = std::max<Index>(1, heads / sizes.group());
    return FewRows<E>{sums,        sums_stride,   a, a_stride, at.data + first * at.stride,
                      at.stride,   rows / groups, n, k,        groups,
                      b.strides[2]};
  };
  for (Index row = 0; row < rows; ++row) {
    const auto q = head_of<const E>(args.q, batch, head + row / queries);
    const E* const from = q.data + row % queries * q.stride;
    float* const to = s.q + row * sizes.dim;
#pragma omp simd
    for (Index d = 0; d < sizes.dim; ++d) to[d] = args.scale * load(from + d);
  }
  few_dots(rows_of(s.scores, padded, s.q, sizes.dim, args.k, keys, sizes.dim));
  for (Index row = 0; row < rows; ++row) {
    float* const scores = s.scores + row * padded;
    const auto visible =
        static_cast<std::int32_t>(variant.prepare(scores, row % queries, first, keys));
    const float max = largest_score(scores, visible, -std::numeric_limits<float>::infinity());
    const float sum =
        horizontal_sum<float>(exp_row(scores, visible, static_cast<std::int32_t>(padded), max));
    scale_row(scores, padded, 1 / sum);
    if (args.log_sum_exp.data != nullptr)
      static_cast<float*>(args.log_sum_exp.data)[(batch * sizes.heads + head) * queries + row] =
          max + std::log(sum);
  }
  std::fill_n(s.out, rows * width, 0.0F);
  add_few_rows(rows_of(s.out, width, s.scores, padded, args.v, sizes.dim, keys));
  for (Index i = 0; i < heads; ++i)
    write_rows<float, E>(head_of<E>(args.out, batch, head + i), 0, queries, sizes.dim,
                         s.out + i * queries * width, width, false);
}

template <typename E, typename Scores>
void forward_few(Context& context, const AttentionForward& args, Sizes sizes) {
  const Index n = sizes.batch * sizes.heads, group = sizes.group();
  const Index slots = std::min<Index>(context.threads().size(), n);
  sizes.slot_rows = std::min(sizes.heads, (n + slots - 1) / slots) * sizes.queries;
  for_each_slot<FewScratch>(
      context, n, sizes, "attention_forward", [&](Index begin, Index end, const FewScratch& s) {
        while (begin < end) {
          const Index head = begin % sizes.heads;
          const Index left = std::min(end - begin, sizes.heads - head);
          Index heads = std::min(left, group - head % group);
          if (heads == group) heads = left / group * group;
          forward_heads<E, Scores>(args, s, sizes, begin / sizes.heads, head, heads);
          begin += heads;
        }
      });
}

template <typename E, typename Scores, typename Tiles>
void forward_many(Context& context, const AttentionForward& args, const Sizes& sizes) {
  using T = Accumulator<E>;
  auto* log_sum_exp = static_cast<T*>(args.log_sum_exp.data);
  const auto scale = static_cast<T>(args.scale);
  for_each_slot<ForwardScratch<Tiles>>(
      context, sizes.batch * sizes.heads, sizes, "attention_forward",
      [&](Index begin, Index end, const ForwardScratch<Tiles>& s) {
        for (Index item = begin; item < end; ++item) {
          const Index batch = item / sizes.heads;
          const Index head = item % sizes.heads;
          const Scores variant(args.variant, batch, sizes.queries, sizes.keys);
          if (item == begin || head % sizes.group() == 0) {
            const Index kv = head / sizes.group();
            s.keys.load_keys(head_of<const E>(args.k, batch, kv), sizes);
            s.values.load_rows(head_of<const E>(args.v, batch, kv), 0, sizes.keys,
                               sizes.padded_keys, sizes);
          }
          for (Index first = 0; first < sizes.queries; first += kQueries) {
            const Index count = std::min(kQueries, sizes.queries - first);
            const auto q = head_of<const E>(args.q, batch, head);
            s.keys.load_queries(q, first, count, sizes, scale);
            forward_tile(s, sizes, variant, first, scale);
            write_rows<T, E>(head_of<E>(args.out, batch, head), first, count, sizes.dim, s.out,
                             sizes.padded_dim, false);
            if (log_sum_exp != nullptr)
              for (Index i = 0; i < count; ++i)
                log_sum_exp[item * sizes.queries + first + i] =
                    s.max[i] + std::log(s.sum[i * kLanes<T>]);
          }
        }
      });
}

/// Calls run(std::type_identity<Tiles>{}) with the fastest tiles for heads of E.
template <typename E, typename F>
void visit_tiles(const F& run) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<E, BFloat16>)
    if (multiplies_pairs()) return run(std::type_identity<PairTiles>{});
#endif
  run(std::type_identity<PlainTiles<Accumulator<E>>>{});
}

template <typename E, typename Scores>
void forward(Context& context, const AttentionForward& args) {
  using T = Accumulator<E>;
  const Sizes sizes = sizes_of<T>(args.q, args.k);
  if constexpr (std::is_same_v<T, float>)
    if (sizes.queries <= kFewQueries) return forward_few<E, Scores>(context, args, sizes);
  visit_tiles<E>([&]<typename Tiles>(std::type_identity<Tiles>) {
    forward_many<E, Scores, Tiles>(context, args, sizes);
  });
}

template <typename Tiles, typename T = typename Tiles::Element>
struct BackwardScratch : Scratch<T> {
  using Element = T;
  BackwardScratch(T* begin, const Sizes& s)
      : Scratch<T>(begin),
        keys(*this, s),
        values(*this, s),
        k(*this, s.padded_keys, s),
        q(*this, kQueries, s),
        grad_out(*this, kQueries, s),
        grad_k(this->take(s.padded_keys * s.padded_dim)),
        grad_v(this->take(s.padded_keys * s.padded_dim)),
        grad_q(this->take(kQueries * s.padded_dim)),
        probabilities(this->take(kQueries * kKeys)),
        grad_scores(this->take(kQueries * kKeys)),
        delta(this->take(kQueries)) {}
  typename Tiles::Dots keys, values;
  typename Tiles::Rows k, q, grad_out;
  T *grad_k, *grad_v, *grad_q;
  T *probabilities, *grad_scores, *delta;
};

/// Computes grad_q of a tile of queries, and adds its terms to grad_k and grad_v.
template <typename Tiles, typename Scores, typename T = typename Tiles::Element>
void backward_tile(const BackwardScratch<Tiles>& s, const Sizes& sizes, const Scores& variant,
                   Index first, const T* log_sum_exp, T scale) {
  const Index width = sizes.padded_dim;
  const Index count = std::min(kQueries, sizes.queries - first);
  const Index rows = round_up(count, kTileRows);
  std::fill_n(s.grad_q, rows * width, T(0));
  const Index seen = variant.end_key(first, count);
  for (Index key = variant.first_key(first) / kKeys * kKeys; key < seen; key += kKeys) {
    const SeenColumns<T> columns(variant, first, count, key);
    if (variant.skips(first, count, key, columns.most())) continue;
    columns.for_rows([&](Index row, Index n, Index seen_keys) {
      s.keys.multiply(row, n, seen_keys, key, sizes, s.probabilities + row * kKeys, scale);
      s.values.multiply(row, n, seen_keys, key, sizes, s.grad_scores + row * kKeys, T(1));
    });
    for (Index i = 0; i < rows; ++i) {
      T* p = s.probabilities + i * kKeys;
      T* g = s.grad_scores + i * kKeys;
      const auto visible = static_cast<std::int32_t>(
          i < count ? variant.prepare(p, first + i, key, columns.of_row(i)) : 0);
      const T shift = log_sum_exp[first + std::min(i, count - 1)];
      const T delta = s.delta[i];
      for (std::int32_t j = 0; j < columns.of_row(i); j += kLanes<T>) {
        const Vector<T> score = load_vector<T>(p + j);
        Vector<T> e = exp_or_zero<T>(score - shift);
        if (j + kLanes < T >> visible) e = kLaneNumbers<T> < visible - j ? e : Vector<T>{};
        Vector<T> gradient = e * (load_vector<T>(g + j) - delta) * scale;
        if constexpr (Scores::kCaps) gradient = variant.template before_cap<T>(gradient, score, e);
        store_vector(p + j, e);
        store_vector(g + j, gradient);
      }
    }
    columns.for_columns([&](Index column, Index n, Index row) {
      const Index weights = row * kKeys + column, sums = (key + column) * width;
      s.grad_out.template add<true>(n, rows - row, row, s.probabilities + weights, sizes,
                                    s.grad_v + sums);
      s.q.template add<true>(n, rows - row, row, s.grad_scores + weights, sizes, s.grad_k + sums);
    });
    columns.for_rows([&](Index row, Index n, Index depth) {
      s.k.template add<false>(n, depth, key, s.grad_scores + row * kKeys, sizes,
                              s.grad_q + row * width);
    });
  }
}

template <typename E, typename Scores, typename Tiles>
void backward_head(const AttentionBackward& args, const BackwardScratch<Tiles>& s,
                   const Sizes& sizes, Index batch, Index head) {
  using T = Accumulator<E>;
  const Scores variant(args.variant, batch, sizes.queries, sizes.keys);
  const auto q = head_of<const E>(args.q, batch, head);
  const auto out = head_of<const E>(args.out, batch, head);
  const auto grad_out = head_of<const E>(args.grad_out, batch, head);
  const T* log_sum_exp =
      static_cast<const T*>(args.log_sum_exp.data) + (batch * sizes.heads + head) * sizes.queries;
  const auto scale = static_cast<T>(args.scale);
  const Index width = sizes.padded_dim;
  for (Index first = 0; first < sizes.queries; first += kQueries) {
    const Index count = std::min(kQueries, sizes.queries - first);
    s.keys.load_queries(q, first, count, sizes, scale);
    s.values.load_queries(grad_out, first, count, sizes, T(1));
    s.q.load_rows(q, first, count, kQueries, sizes);
    s.grad_out.load_rows(grad_out, first, count, kQueries, sizes);
    for (Index i = 0; i < count; ++i)
      s.delta[i] = vector_sum<T>(
          sizes.dim,
          [a = grad_out.row(first + i), b = out.row(first + i)]<typename V>(
              std::type_identity<V>, Index d) { return load_as<V>(a + d) * load_as<V>(b + d); });
    std::fill_n(s.delta + count, kQueries - count, T(0));
    backward_tile(s, sizes, variant, first, log_sum_exp, scale);
    if (args.grad_q)
      write_rows<T, E>(head_of<E>(args.grad_q.view, batch, head), first, count, sizes.dim, s.grad_q,
                       width, args.grad_q.accumulate);
  }
}

template <typename E, typename Scores, typename Tiles>
void backward(Context& context, const AttentionBackward& args) {
  using T = Accumulator<E>;
  const Sizes sizes = sizes_of<T>(args.q, args.k);
  for_each_slot<BackwardScratch<Tiles>>(
      context, sizes.batch * sizes.kv_heads, sizes, "attention_backward",
      [&](Index begin, Index end, const BackwardScratch<Tiles>& s) {
        for (Index item = begin; item < end; ++item) {
          const Index batch = item / sizes.kv_heads;
          const Index kv = item % sizes.kv_heads;
          const auto k = head_of<const E>(args.k, batch, kv);
          const auto v = head_of<const E>(args.v, batch, kv);
          s.keys.load_keys(k, sizes);
          s.values.load_keys(v, sizes);
          s.k.load_rows(k, 0, sizes.keys, sizes.padded_keys, sizes);
          std::fill_n(s.grad_k, sizes.padded_keys * sizes.padded_dim, T(0));
          std::fill_n(s.grad_v, sizes.padded_keys * sizes.padded_dim, T(0));
          for (Index head = kv * sizes.group(); head < (kv + 1) * sizes.group(); ++head)
            backward_head<E, Scores>(args, s, sizes, batch, head);
          if (args.grad_k)
            write_rows<T, E>(head_of<E>(args.grad_k.view, batch, kv), 0, sizes.keys, sizes.dim,
                             s.grad_k, sizes.padded_dim, args.grad_k.accumulate);
          if (args.grad_v)
            write_rows<T, E>(head_of<E>(args.grad_v.view, batch, kv), 0, sizes.keys, sizes.dim,
                             s.grad_v, sizes.padded_dim, args.grad_v.accumulate);
        }
      });
}

}  // namespace

void attention_forward(Context& context, const AttentionForward& args) {
  visit_dtype(args.q.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    if (args.variant.is_causal_only())
      forward<E, CausalScores>(context, args);
    else
      forward<E, VariantScores>(context, args);
  });
}

void attention_backward(Context& context, const AttentionBackward& args) {
  visit_dtype(args.q.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    visit_tiles<E>([&]<typename Tiles>(std::type_identity<Tiles>) {
      if (args.variant.is_causal_only())
        backward<E, CausalScores, Tiles>(context, args);
      else
        backward<E, VariantScores, Tiles>(context, args);
    });
  });
}

TESSERA_CPU_END
