// Memory and traffic of every sharding mode against the formulas of ZeRO: Rajbhandari et al. 2020,
// arXiv:1910.02054, sections 3, 5 and 7. docs/sharding.md has the table that this test prints.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "comm/threads.h"
#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/ops/linear.h"
#include "core/optim/adamw.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using comm::Hold;

namespace {

constexpr int kUnits = 4, kRows = 2;
constexpr std::int64_t kWidth = 64, kUnit = kWidth * kWidth;  // parameters of a unit
constexpr std::int64_t kAll = kUnits * kUnit;                 // Psi

struct Square : nn::Module {
  Parameter weight;
  Square(nn::Module& parent, std::string_view name)
      : Module(parent, name), weight(*this, "weight", {kWidth, kWidth}, {}) {}
  Tensor operator()(const Tensor& x) const { return ops::linear(x, weight, {}); }
};

// Units of one size, without padding.
struct Squares : nn::Module {
  nn::List<Square> h{*this, "h", kUnits};
  Tensor operator()(Tensor x) {
    for (Square& layer : h) x = nn::unit(layer, x);
    return x;
  }
};

struct Setting {
  std::string mode;
  int world = 1;
  DType compute = DType::F32, gradient = DType::F32;
  int micro_batches = 1, gather_ahead = 0;

  int group() const { return comm::shard_group_size(mode, world, 2); }
  comm::ShardSpec spec() const {
    comm::ShardSpec spec = test::spec_of(mode, compute);
    spec.gradient = spec.reduction = gradient;
    spec.gather_ahead = gather_ahead;
    return spec;
  }
};

// Bytes of a rank: held before the update by category, at the peak, and sent in a step.
struct Bytes {
  std::int64_t parameters = 0, gathered = 0, gradients = 0, moments = 0;
  std::int64_t gathered_peak = 0, gradients_peak = 0;
  std::int64_t all_gather = 0, reduce_scatter = 0, all_reduce = 0;

  std::int64_t held() const { return parameters + gathered + gradients + moments; }
  friend bool operator==(const Bytes&, const Bytes&) = default;
};

std::string text_of(const Bytes& b) {
  return fmt::format(
      "parameters {}, gathered {}, gradients {}, moments {}; peaks {}, {}; sent {}, {}, {}",
      b.parameters, b.gathered, b.gradients, b.moments, b.gathered_peak, b.gradients_peak,
      b.all_gather, b.reduce_scatter, b.all_reduce);
}

// The paper's formulas, with the differences that docs/sharding.md lists.
Bytes formula(const Setting& s) {
  const comm::ShardSpec spec = s.spec();
  const std::int64_t n = s.group(), replicas = s.world / n;
  const bool is_mixed = s.compute != DType::F32, is_narrow = s.gradient != DType::F32;
  const bool splits = n > 1, splits_weights = splits && spec.parameters == Hold::Split,
             splits_gradients = splits && spec.gradients == Hold::Split;
  const auto copy = static_cast<std::int64_t>(dtype_size(s.compute));
  const auto gradient = static_cast<std::int64_t>(dtype_size(s.gradient));
  const std::int64_t micro_batches = s.micro_batches;

  Bytes b;
  b.moments = 8 * kAll / n;
  b.parameters = is_mixed || splits_weights ? 4 * kAll / n : 4 * kAll;
  // A split unit's bf16 weights exist while it is gathered.
  b.gathered = is_mixed && !splits_weights ? copy * kAll : 0;
  b.gathered_peak = splits_weights ? copy * kUnit * (1 + s.gather_ahead) : b.gathered;

  // The reduced gradients are float32. Whole ones are freed as they are reduced.
  b.gradients = 4 * kAll / n;
  const std::int64_t segment = 4 * kUnit / n, whole = gradient * kUnit;
  const std::int64_t of_input = 4 * kRows * kWidth;
  if (!splits) {
    b.gradients_peak = b.gradients + (is_narrow ? whole : 0) + of_input;
  } else if (splits_gradients || micro_batches == 1) {
    // One unit is in backward while another is being reduced. In the first micro-batch its segment is
    // allocated when it is reduced itself; later ones are added from a segment of their own.
    const std::int64_t in_flight =
        micro_batches == 1 ? std::max(2 * whole - segment, whole) : 2 * whole + segment;
    b.gradients_peak = b.gradients + in_flight + of_input;
  } else {
    // The first unit of the last micro-batch is reduced, or the last one is.
    b.gradients_peak = std::max(gradient * kAll + segment, b.gradients + whole + of_input);
  }

  const auto sent = [](std::int64_t bytes, std::int64_t ranks) {
    return bytes * (ranks - 1) / ranks;
  };
  b.all_gather = sent(copy * kAll * (splits_weights ? 2 * micro_batches : 1), n);
  b.reduce_scatter = sent(gradient * kAll * (splits_gradients ? micro_batches : 1), n);
  b.all_reduce = 2 * sent(4 * kAll / n, replicas);
  // Backward begins with the unit that forward ended with, which is still gathered.
  if (splits_weights) b.all_gather -= sent(copy * kUnit * micro_batches, n);
  return b;
}

Bytes measure_rank(const Setting& s, comm::Communicator& world) {
  const auto context = Context::create({.threads = 1});
  const comm::Mesh mesh = test::mesh_of(s.mode, world);
  Squares model;
  comm::ShardedModel sharded(model, mesh, s.spec(), context);
  sharded.load([](const Parameter&, std::int64_t begin, std::int64_t end, float* out) {
    std::fill(out, out + (end - begin), 0.01F);
  });
  std::int64_t gradients = 0;
  const auto step = [&](int number) {
    for (int m = 0; m < s.micro_batches; ++m) {
      sharded.begin_micro_batch(m == 0, m + 1 == s.micro_batches);
      Tensor x = Tensor::full(context, {kRows, kWidth}, s.compute, 1.0);
      x.set_requires_grad(true);  // so that backward reads the weights of the first unit too
      const Tensor y = model(x);
      autograd::backward(y, Tensor::full(context, y.shape(), y.dtype(), 1.0));
      sharded.end_micro_batch();
    }
    gradients = context->ledger().usage(MemoryCategory::Gradients).current;
    sharded.step(optim::AdamW(), {1e-3, number, Tensor::full(context, {1}, DType::F32, 1.0)});
  };
  step(1);  // learns the order of units
  const comm::Traffic shard = mesh.shard().traffic(), replicate = mesh.replicate().traffic();
  step(2);
  const MemoryLedger& ledger = context->ledger();
  const auto now = [&](MemoryCategory c) { return ledger.usage(c).current; };
  return {.parameters = now(MemoryCategory::Parameters),
          .gathered = now(MemoryCategory::Gathered),
          .gradients = gradients,
          .moments = now(MemoryCategory::OptimizerState),
          .gathered_peak = ledger.usage(MemoryCategory::Gathered).peak,
          .gradients_peak = ledger.usage(MemoryCategory::Gradients).peak,
          .all_gather = mesh.shard().traffic().all_gather - shard.all_gather,
          .reduce_scatter = mesh.shard().traffic().reduce_scatter - shard.reduce_scatter,
          .all_reduce = mesh.replicate().traffic().all_reduce - replicate.all_reduce};
}

std::vector<Bytes> measure(const Setting& s) {
  std::vector<Bytes> by_rank(static_cast<std::size_t>(s.world));
  const auto group = std::make_shared<comm::ThreadGroup>(s.world);
  test::on_threads(s.world, [&](int rank) {
    by_rank[static_cast<std::size_t>(rank)] =
        measure_rank(s, *comm::make_threads_communicator(group, rank));
  });
  return by_rank;
}

constexpr const char* kModes[] = {"none", "optimizer", "gradients", "full", "hybrid"};

// "1.5": bytes per parameter.
std::string each(std::int64_t bytes) {
  return fmt::format("{}", static_cast<double>(bytes) / static_cast<double>(kAll));
}

}  // namespace

TEST_CASE("every mode holds and sends exactly what the formulas say") {
  struct Precision {
    DType compute, gradient;
  };
  for (const Precision& p :
       {Precision{DType::F32, DType::F32}, {DType::BF16, DType::F32}, {DType::BF16, DType::BF16}}) {
    for (const int world : {2, 4}) {
      for (const std::string mode : kModes) {
        for (const int micro_batches : {1, 3}) {
          for (const int ahead : {0, 1}) {
            const Setting setting{mode, world, p.compute, p.gradient, micro_batches, ahead};
            CAPTURE(mode);
            CAPTURE(world);
            CAPTURE(dtype_name(p.compute));
            CAPTURE(dtype_name(p.gradient));
            CAPTURE(micro_batches);
            CAPTURE(ahead);
            const Bytes expected = formula(setting);
            CAPTURE(text_of(expected));
            for (const Bytes& rank : measure(setting)) {
              CAPTURE(text_of(rank));
              CHECK(rank == expected);
            }
          }
        }
      }
    }
  }
}

// The totals as the paper has them: bytes held 2 + 2 + K, elements sent 2 Psi or 3 Psi.
TEST_CASE("totals are those of ZeRO, and a table shows them") {
  constexpr std::int64_t n = 4;
  std::string table = fmt::format("bytes per parameter, {} ranks, one micro-batch\n", n);
  for (const DType compute : {DType::F32, DType::BF16}) {
    // Weights, gradients (float32), and the rest: moments and, in bf16, master weights.
    const std::int64_t w = compute == DType::F32 ? 4 : 2, g = 4, k = compute == DType::F32 ? 8 : 12;
    for (const std::string mode : kModes) {
      CAPTURE(mode);
      const Bytes b = measure({mode, n, compute}).front();
      table += fmt::format("| {} | `{}` | {} | {} | {} | {} | {} | {} | {} | {} |\n",
                           dtype_name(compute), mode, each(b.parameters), each(b.gathered),
                           each(b.gradients), each(b.moments), each(b.held()), each(b.all_gather),
                           each(b.reduce_scatter), each(b.all_reduce));
      if (mode == "hybrid") continue;  // not in the paper
      // ZeRO-3 without its bf16 shard, which is cast from the master instead.
      const std::int64_t w3 = compute == DType::F32 ? w : 0;
      const std::int64_t held = mode == "none"   ? (w + g + k) * kAll
                                : mode != "full" ? w * kAll + (g + k) * kAll / n
                                                 : (w3 + g + k) * kAll / n;
      CHECK(b.held() == held);
      const std::int64_t elements = b.all_gather / w + b.reduce_scatter / g + b.all_reduce / 4;
      // The unit that forward ends with is gathered once.
      CHECK(elements == (mode == "full" ? 3 * kAll - kUnit : 2 * kAll) * (n - 1) / n);
    }
  }
  MESSAGE(table);
}
