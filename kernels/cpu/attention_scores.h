#pragma once

#include <algorithm>
#include <limits>

#include "kernels/attention.h"
#include "kernels/cpu/vector.h"

// Masks and caps of attention's scores, one class for plain causal attention and one for all other
// variants. Query i of a sequence stands at the position of key i + past.
TESSERA_CPU_BEGIN

/// Plain causal attention: query i sees keys [0, i + past].
class CausalScores {
 public:
  static constexpr bool kCaps = false;
  CausalScores(const AttentionVariant&, std::int64_t /*batch*/, std::int64_t queries,
               std::int64_t keys)
      : past_(keys - queries) {}

  /// Keys outside of [first_key, end_key) are seen by no query in [first, first + count).
  static constexpr std::int64_t first_key(std::int64_t /*first*/) { return 0; }
  std::int64_t end_key(std::int64_t first, std::int64_t count) const {
    return first + count + past_;
  }
  /// True if no query in [first, first + count) sees a key in [key, key + width).
  static constexpr bool skips(std::int64_t /*first*/, std::int64_t /*count*/, std::int64_t /*key*/,
                              std::int64_t /*width*/) {
    return false;
  }
  /// Caps and masks the scores of a query and keys [key, key + width). Returns the length of the
  /// prefix that holds every visible key, 0 if there is none; hidden keys in it get -infinity.
  template <typename T>
  std::int64_t prepare(T* /*scores*/, std::int64_t query, std::int64_t key,
                       std::int64_t width) const {
    return std::clamp<std::int64_t>(query + past_ + 1 - key, 0, width);
  }

 private:
  std::int64_t past_;
};

/// Any variant, with the same functions.
class VariantScores {
 public:
  static constexpr bool kCaps = true;
  VariantScores(const AttentionVariant& variant, std::int64_t batch, std::int64_t queries,
                std::int64_t keys)
      : past_(keys - queries),
        keys_(keys),
        window_(variant.window),
        documents_(variant.documents.defined()
                       ? static_cast<const std::int32_t*>(variant.documents.data) +
                             batch * variant.documents.strides[0]
                       : nullptr),
        softcap_(variant.softcap),
        causal_(variant.causal) {}

  std::int64_t first_key(std::int64_t first) const {
    return window_ > 0 ? std::max<std::int64_t>(0, first + past_ - window_ + 1) : 0;
  }
  std::int64_t end_key(std::int64_t first, std::int64_t count) const {
    return causal_ ? first + count + past_ : keys_;
  }
  /// Compares ranges of ids, which is exact for the ascending ids of packed documents.
  bool skips(std::int64_t first, std::int64_t count, std::int64_t key, std::int64_t width) const {
    if (documents_ == nullptr) return false;
    const std::int32_t* const queries = documents_ + first + past_;
    const std::int32_t* const keys = documents_ + key;
    const Range own = range_of(queries, count),
                others = range_of(keys, std::min(width, keys_ - key));
    return others.most < own.least || others.least > own.most;
  }

  template <typename T>
  std::int64_t prepare(T* scores, std::int64_t query, std::int64_t key, std::int64_t width) const {
    const std::int64_t position = query + past_;
    const std::int64_t end =
        std::clamp<std::int64_t>((causal_ ? position + 1 : keys_) - key, 0, width);
    const std::int64_t begin =
        window_ > 0 ? std::max<std::int64_t>(0, position - window_ + 1 - key) : 0;
    if (begin >= end) return 0;
    if (softcap_ > 0) cap(scores, end);
    std::fill_n(scores, begin, -std::numeric_limits<T>::infinity());
    if (documents_ == nullptr) return end;
    const std::int32_t own = documents_[position];
    std::int64_t visible = 0;
    for (std::int64_t j = begin; j < end; ++j) {
      if (documents_[key + j] == own)
        visible = j + 1;
      else
        scores[j] = -std::numeric_limits<T>::infinity();
    }
    return visible;
  }

  /// Gradient of the scores before the cap. @param weights  exp() of the shifted scores; 0 for
  /// hidden keys, which stay without a gradient
  template <typename T>
  Vector<T> before_cap(Vector<T> gradient, Vector<T> capped, Vector<T> weights) const {
    if (!(softcap_ > 0)) return gradient;
    const Vector<T> ratio = capped / T(softcap_);
    return weights == T(0) ? Vector<T>{} : gradient * (T(1) - ratio * ratio);
  }

 private:
  struct Range {
    std::int32_t least, most;
  };
  static Range range_of(const std::int32_t* ids, std::int64_t count) {
    Range range{ids[0], ids[0]};
    for (std::int64_t i = 1; i < count; ++i)
      range = {std::min(range.least, ids[i]), std::max(range.most, ids[i])};
    return range;
  }

  /// Rounds `count` up to whole vectors.
  template <typename T>
  void cap(T* scores, std::int64_t count) const {
    for (std::int64_t j = 0; j < count; j += kLanes<T>)
      store_vector(scores + j, T(softcap_) * tanh(load_vector<T>(scores + j) / T(softcap_)));
  }

  std::int64_t past_, keys_, window_;
  const std::int32_t* documents_;  // [keys]
  float softcap_;
  bool causal_;
};

TESSERA_CPU_END
