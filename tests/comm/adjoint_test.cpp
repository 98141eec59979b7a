// Collectives as linear maps between the ranks' vectors: a map A and its adjoint B satisfy
// <A x, y> = <x, B y>, where <,> sums over all ranks. Backward passes depend on these pairs.

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/base/rng.h"
#include "tests/comm/meshes.h"

using namespace tessera;
using namespace tessera::test;
using comm::Communicator;
using comm::ReduceOp;

namespace {

// Integers so small that all sums and products below are exact in every dtype.
template <typename T>
std::vector<T> random_vector(std::uint64_t seed, int rank, std::int64_t count) {
  const auto key = RngKey::make(seed, RngPurpose::Test, static_cast<std::uint64_t>(rank));
  std::vector<T> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto word = static_cast<int>(key.word(static_cast<std::uint64_t>(i)) % 63);
    values.push_back(T(static_cast<float>(word - 31)));
  }
  return values;
}

template <typename A, typename B>
double inner(const std::vector<A>& x, const std::vector<B>& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    sum += static_cast<double>(static_cast<float>(x[i])) *
           static_cast<double>(static_cast<float>(y[i]));
  return sum;
}

template <typename T>
std::vector<T> gathered(Communicator& c, const std::vector<T>& x) {
  const auto size = static_cast<std::ptrdiff_t>(x.size());
  std::vector<T> all(x.size() * static_cast<std::size_t>(c.world_size()));
  std::copy(x.begin(), x.end(), all.begin() + c.rank() * size);
  Mirror<T> mirror(all);
  c.all_gather(mirror.view(), {.label = "gather"});
  mirror.fetch();
  return all;
}

template <typename T>
std::vector<T> summed(Communicator& c, std::vector<T> x) {
  Mirror<T> mirror(x);
  c.all_reduce(mirror.view(), ReduceOp::Sum, {.label = "sum"});
  mirror.fetch();
  return x;
}

template <typename T, typename Sum>
std::vector<Sum> scattered(Communicator& c, std::vector<T> x) {
  std::vector<Sum> part(x.size() / static_cast<std::size_t>(c.world_size()));
  Mirror<T> in(x);
  Mirror<Sum> out(part);
  c.reduce_scatter(in.view(), out.view(), {.label = "scatter"});
  out.fetch();
  return part;
}

template <typename T>
std::vector<T> broadcast(Communicator& c, std::vector<T> x, int root) {
  Mirror<T> mirror(x);
  c.broadcast(mirror.view(), root, {.label = "cast"});
  mirror.fetch();
  return x;
}

template <typename T>
std::vector<T> own_part(const Communicator& c, const std::vector<T>& x) {
  const auto size = static_cast<std::ptrdiff_t>(x.size()) / c.world_size();
  return {x.begin() + c.rank() * size, x.begin() + (c.rank() + 1) * size};
}

// A rank's terms of <A x, y> and <x, B y>, by the name of the pair.
using Terms = std::map<std::string, std::pair<double, double>>;

template <typename T>
void add_pairs(Communicator& c, int rank, std::int64_t part, Terms& terms) {
  const std::int64_t whole = part * c.world_size();
  const auto x = random_vector<T>(1, rank, part), y = random_vector<T>(2, rank, whole),
             z = random_vector<T>(3, rank, whole);
  const std::string of = fmt::format(" {}[{}]", dtype_name(dtype_of<T>()), part);
  const auto add = [&](const std::string& pair, double left, double right) {
    terms[pair + of] = {left, right};
  };
  if constexpr (!std::is_same_v<T, double>) {
    const bool is_narrow = c.scattered_dtype(dtype_of<T>()) == DType::BF16;
    add("all_gather, reduce_scatter", inner(gathered(c, x), y),
        is_narrow ? inner(x, scattered<T, BFloat16>(c, y)) : inner(x, scattered<T, float>(c, y)));
  }
  if constexpr (!std::is_same_v<T, BFloat16>) {
    add("all_gather, part of all_reduce", inner(gathered(c, x), y),
        inner(x, own_part(c, summed(c, y))));
    add("all_reduce, itself", inner(summed(c, y), z), inner(y, summed(c, z)));
    // The adjoint of a broadcast is the sum at its root, and zero elsewhere.
    for (int root = 0; root < c.world_size(); ++root) {
      auto at_root = summed(c, z);
      if (c.rank() != root) at_root.assign(at_root.size(), T(0));
      add(fmt::format("broadcast from {}, sum at {}", root, root), inner(broadcast(c, y, root), z),
          inner(y, at_root));
    }
  }
}

}  // namespace

TEST_CASE("all_gather and reduce_scatter, all_reduce, and broadcast and its sum are adjoint") {
  constexpr Mesh kMeshes[] = {{1, 2}, {1, 3}, {1, 4}, {2, 2}, {3, 2}};
  for (const std::string backend : {"threads", "shm", "tcp", "nccl"}) {
    for (const Mesh& mesh : kMeshes) {
      CAPTURE(backend);
      CAPTURE(mesh.rows);
      CAPTURE(mesh.columns);
      AnyRanks ranks(backend, mesh.size());
      std::map<std::string, Terms> sums;  // by group
      std::mutex mutex;
      const auto results = run_ranks(mesh.size(), [&](int rank) {
        const MeshRank m(ranks.join(rank), mesh);
        const std::string names[] = {"world", fmt::format("row {}", rank / mesh.columns),
                                     fmt::format("column {}", rank % mesh.columns)};
        for (std::size_t g = 0; g < m.all().size(); ++g) {
          Communicator& c = *m.all()[g];
          if (g > 0 && (c.world_size() == 1 || c.world_size() == mesh.size())) continue;
          Terms terms;
          for (const std::int64_t part : {1, 97, 1500}) {
            add_pairs<float>(c, rank, part, terms);
            add_pairs<double>(c, rank, part, terms);
            add_pairs<BFloat16>(c, rank, part, terms);
          }
          const std::lock_guard lock(mutex);
          for (const auto& [pair, term] : terms) {
            sums[names[g]][pair].first += term.first;
            sums[names[g]][pair].second += term.second;
          }
        }
      });
      for (const RankResult& result : results) CHECK(result.error == "");
      CHECK(sums.size() ==
            (mesh.rows == 1 ? 1U : 1U + static_cast<std::size_t>(mesh.rows + mesh.columns)));
      for (const auto& group : sums) {
        CAPTURE(group.first);
        for (const auto& pair : group.second) {
          CAPTURE(pair.first);
          CHECK(pair.second.first == pair.second.second);
        }
      }
    }
  }
}
