#include "comm/sharding/replica_check.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "comm/communicator.h"
#include "kernels/bit_hash.h"

namespace tessera::comm {
namespace {

// A replicated parameter. The list has the same order on all ranks.
struct Replicated {
  std::string name;
  int groups = 1;                    // ranks r with equal r % groups are replicas
  std::vector<Tensor> tensors = {};  // the parts of this rank; may be empty
};

std::vector<Replicated> replicated(ShardedModel& model) {
  const Mesh& mesh = model.mesh();
  std::vector<Replicated> list;
  if (mesh.replicate().world_size() > 1) {
    std::unordered_map<const Parameter*, std::size_t> index_of;
    for (const auto& unit : model.units()) {
      for (const Parameter* p : unit->parameters()) {
        index_of[p] = list.size();
        list.push_back({p->name, mesh.shard().world_size()});
      }
    }
    for (const ShardedModel::Piece& piece : model.held_pieces()) {
      std::vector<Tensor>& parts = list[index_of.at(piece.parameter)].tensors;
      parts.push_back(piece.master);
      for (const ShardedModel::Piece::State& state : piece.state)
        if (state.values.defined()) parts.push_back(state.values);
    }
  }
  if (mesh.shard().world_size() == 1) return list;
  for (const auto& unit : model.units()) {
    const bool stays = !unit->is_trainable() && !unit->splits_parameters() &&
                       unit->state() == FlatUnit::State::Gathered;
    if (!stays) continue;
    for (const Parameter* p : unit->parameters()) list.push_back({p->name, 1, {p->tensor}});
  }
  return list;
}

// Hashes parameters in the memory of the context of `hashes`, [list.size()]; leaves the others.
void hash_into(const Tensor& hashes, const std::vector<Replicated>& list) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Tensor hash = hashes.alias({1}, {1}, static_cast<std::int64_t>(i));
    std::uint64_t position = 0;
    for (const Tensor& part : list[i].tensors) {
      if (part.context() != hashes.context()) continue;
      kernels::bit_hash(*part.context(), {part.view(), hash.view(), position, position > 0});
      position += (part.bytes() + 7) / 8;
    }
  }
}

// Ranks that differ from the most frequent hash of their group, in the first such group.
struct Odd {
  std::vector<int> ranks;
  int reference = 0;        // a rank that they differ from
  bool is_majority = true;  // more than half of a group agrees with it
};

// @param hash_of  of a rank
template <typename F>
std::optional<Odd> find_odd(int world_size, int groups, const F& hash_of) {
  Odd odd;
  for (int group = 0; group < groups && odd.ranks.empty(); ++group) {
    std::map<std::uint64_t, int> counts;
    for (int rank = group; rank < world_size; rank += groups) ++counts[hash_of(rank)];
    if (counts.size() == 1) continue;
    int reference = group;
    for (int rank = group; rank < world_size; rank += groups)
      if (counts[hash_of(rank)] > counts[hash_of(reference)]) reference = rank;
    odd.reference = reference;
    odd.is_majority = counts[hash_of(reference)] * 2 > world_size / groups;
    for (int rank = group; rank < world_size; rank += groups)
      if (hash_of(rank) != hash_of(reference)) odd.ranks.push_back(rank);
  }
  if (odd.ranks.empty()) return std::nullopt;
  std::sort(odd.ranks.begin(), odd.ranks.end());
  return odd;
}

}  // namespace

void check_replicas(ShardedModel& model) {
  const std::vector<Replicated> list = replicated(model);
  if (list.empty()) return;
  Communicator& world = model.mesh().world();
  const auto& context = model.context();
  const auto count = static_cast<std::int64_t>(list.size());
  const Tensor hashes = Tensor::empty(context, {count * world.world_size()}, DType::I64,
                                      MemoryCategory::Workspace, "replica hashes");
  const Tensor own = hashes.alias({count}, {1}, count * world.rank());
  std::vector<std::int64_t> values(list.size());
  if (model.state_context() != context) {
    const Tensor offloaded = Tensor::empty(model.state_context(), {count}, DType::I64,
                                           MemoryCategory::Workspace, "replica hashes");
    offloaded.copy_from_host(values.data());
    hash_into(offloaded, list);
    if (context->device().type != DeviceType::Meta) offloaded.copy_to_host(values.data());
  }
  own.copy_from_host(values.data());
  hash_into(own, list);
  world.all_gather(hashes.view(), {"all_gather replica hashes", {}});
  if (context->device().type == DeviceType::Meta) return;
  const std::vector<std::int64_t> all = hashes.to_vector<std::int64_t>();
  world.check();

  std::optional<Odd> first;
  std::string name;
  std::int64_t differing = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const Replicated& item = list[static_cast<std::size_t>(i)];
    const auto odd = find_odd(world.world_size(), item.groups, [&](int rank) {
      return static_cast<std::uint64_t>(all[static_cast<std::size_t>(rank * count + i)]);
    });
    if (odd && ++differing == 1) first = odd, name = item.name;
  }
  if (!first) return;
  throw ReplicaMismatch(fmt::format(
      "weights or optimizer state of '{}' on rank{} {} differ from those of rank {}, which should "
      "be the same bits{}; {} of {} parameters differ, probably by a fault of memory or device: "
      "check the host, and resume from the newest checkpoint",
      name, first->ranks.size() == 1 ? "" : "s", fmt::join(first->ranks, ", "), first->reference,
      first->is_majority ? "" : " (no majority says which are right)", differing, list.size()));
}

}  // namespace tessera::comm
