#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/comm/ranks.h"

namespace tessera::test {

struct Mismatch {
  const char* name;
  /// @param buffer  f32[32]
  std::function<void(comm::Communicator&, const TensorView& buffer, bool odd)> call;
  /// Expected error; ODD stands for the odd rank, MOST for the number of all others.
  const char* text;
  /// The ranks move data in an earlier call.
  bool is_later = false;
};

inline std::vector<Mismatch> mismatches() {
  using comm::ReduceOp;
  const auto view = [](const TensorView& buffer, std::int64_t n) {
    TensorView part = dense_view(buffer.data, DType::F32, {n});
    part.device = buffer.device;
    return part;
  };
  return {
      {"operation",
       [=](auto& c, const TensorView& data, bool odd) {
         if (odd) {
           c.barrier({.label = "x"});
         } else {
           c.all_reduce(view(data, 12), ReduceOp::Sum, {.label = "x"});
         }
       },
       "rank ODD called barrier#0 (x), where MOST ranks called all_reduce#0 (x) f32[12] sum"},
      {"count",
       [=](auto& c, const TensorView& data, bool odd) {
         c.all_gather(view(data, odd ? 24 : 12), {.label = "h.1"});
       },
       "rank ODD called all_gather#0 (h.1) f32[24], where MOST ranks called all_gather#0 (h.1) "
       "f32[12]"},
      {"dtype",
       [=](auto& c, const TensorView& data, bool odd) {
         TensorView values = view(data, 12);
         if (odd) values.dtype = DType::I32;
         c.all_gather(values, {});
       },
       "rank ODD called all_gather#0 i32[12]"},
      {"reduction",
       [=](auto& c, const TensorView& data, bool odd) {
         TensorView values = view(data, 12);
         values.dtype = DType::I64;  // max of floating point is refused over NCCL
         c.all_reduce(values, odd ? ReduceOp::Max : ReduceOp::Sum, {});
       },
       "rank ODD called all_reduce#0 i64[12] max"},
      {"root",
       [=](auto& c, const TensorView& data, bool odd) {
         c.broadcast(view(data, 12), odd ? 1 : 0, {});
       },
       "rank ODD called broadcast#0 f32[12] from rank 1, where"},
      {"label",
       [=](auto& c, const TensorView& data, bool odd) {
         c.all_gather(view(data, 12), {.label = odd ? "h.2" : "h.1"});
       },
       "rank ODD called all_gather#0 (h.2)"},
      {"order",
       [=](auto& c, const TensorView& data, bool odd) {
         c.all_gather(view(data, 12), {.label = "h.0"});
         c.all_reduce(view(data, 12), ReduceOp::Sum, {.label = odd ? "norm" : "loss"});
         c.all_reduce(view(data, 12), ReduceOp::Sum, {.label = odd ? "loss" : "norm"});
       },
       "rank ODD called all_reduce#1 (norm) f32[12] sum, where MOST ranks called all_reduce#1 "
       "(loss)",
       true},
      {"a call left out",
       [=](auto& c, const TensorView& data, bool odd) {
         if (!odd) c.all_gather(view(data, 12), {.label = "h.0"});
         c.all_gather(view(data, 12), {.label = "h.1"});
       },
       "rank ODD called all_gather#0 (h.1) f32[12], where MOST ranks called all_gather#0 (h.0)"},
  };
}

/// `text` of a Mismatch, for a world size and odd rank.
inline std::string text_of(const Mismatch& mismatch, int world, int odd) {
  std::string text = all_but_one(mismatch.text, world);
  const auto at = text.find("ODD");
  return text.replace(at, 3, std::to_string(odd));
}

/// The lowest rank that can be the odd one: of two ranks, the lower one is the reference.
inline int first_odd(int world) { return world == 2 ? 1 : 0; }

}  // namespace tessera::test
