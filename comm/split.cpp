#include "comm/split.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace tessera::comm {
namespace {

constexpr std::size_t kLongestKind = 24;  // labels are compared by their first 40 bytes
constexpr std::size_t kBits = 8;
// Time of ranks that find out late that a peer did not connect.
constexpr std::chrono::milliseconds kSkew{5000};

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

void check_arguments(const Communicator& parent, const std::vector<int>& members,
                     const std::string& kind) {
  require(!kind.empty() && kind.size() <= kLongestKind,
          "split: expected a kind of 1 to {} bytes, such as \"shard\", got '{}'", kLongestKind,
          kind);
  const bool ascends = std::ranges::adjacent_find(members, std::greater_equal()) == members.end();
  require(ascends && !members.empty() && members.front() >= 0 &&
              members.back() < parent.world_size() &&
              std::ranges::count(members, parent.rank()) == 1,
          "split: expected ascending ranks of a group of {}, with rank {}, got {}",
          parent.world_size(), parent.rank(), members);
}

// Members of each rank's group, by rank. Exchanges them as bitmaps.
std::vector<std::vector<int>> exchange_members(Communicator& parent,
                                               const std::vector<int>& members,
                                               const std::string& kind) {
  const int world = parent.world_size();
  const std::size_t part = (index(world) + kBits - 1) / kBits;
  std::vector<std::uint8_t> bits(part * index(world));
  const auto byte_of = [&](int rank, int member) -> std::uint8_t& {
    return bits[part * index(rank) + index(member) / kBits];
  };
  const auto mask = [](int member) { return 1U << (index(member) % kBits); };
  for (const int m : members) {
    byte_of(parent.rank(), m) = static_cast<std::uint8_t>(byte_of(parent.rank(), m) | mask(m));
  }
  parent.all_gather(dense_view(bits.data(), DType::U8, {static_cast<std::int64_t>(bits.size())}),
                    {.label = "split " + kind, .deadline = {}});
  std::vector<std::vector<int>> claimed(index(world));
  for (int r = 0; r < world; ++r) {
    for (int m = 0; m < world; ++m) {
      if ((byte_of(r, m) & mask(m)) != 0) claimed[index(r)].push_back(m);
    }
  }
  return claimed;
}

}  // namespace

std::optional<CommError> find_split_mismatch(const std::vector<std::vector<int>>& claimed,
                                             const std::string& kind, const Subgroup* group) {
  const auto agrees = [&](int r) {
    return std::ranges::all_of(claimed[index(r)],
                               [&](int m) { return claimed[index(m)] == claimed[index(r)]; });
  };
  std::vector<int> odd, intruders;
  for (int r = 0; r < static_cast<int>(claimed.size()); ++r) {
    if (agrees(r)) continue;
    odd.push_back(r);
    if (std::ranges::any_of(claimed[index(r)], agrees)) intruders.push_back(r);
  }
  if (odd.empty()) return std::nullopt;
  if (intruders.empty()) intruders = odd;
  const auto claim = [&](int r) {
    return fmt::format("rank {} joins the {} group of {}", world_rank(group, r), kind,
                       short_rank_list(world_ranks(group, claimed[index(r)])));
  };
  const int first = intruders.front();
  const int other = *std::ranges::find_if(
      claimed[index(first)], [&](int m) { return claimed[index(m)] != claimed[index(first)]; });
  return CommError(CommFailure::Mismatch, world_ranks(group, intruders),
                   "split: ranks disagree on their groups: {}, but {}; every rank must pass the "
                   "members of its own group",
                   claim(first), claim(other));
}

std::unique_ptr<Communicator> split_communicator(
    Communicator& parent, const SplitOptions& options, const std::vector<int>& members,
    const std::string& kind,
    const std::function<std::unique_ptr<Communicator>(SubgroupPtr, int rank)>& connect) {
  check_arguments(parent, members, kind);
  const Subgroup* const group = options.group.get();
  const auto claimed = exchange_members(parent, members, kind);
  if (const auto mismatch = find_split_mismatch(claimed, kind, group)) {
    parent.fail(*mismatch);
    throw CommError(*mismatch);
  }
  auto subgroup = std::make_shared<Subgroup>();
  subgroup->kind = kind;
  subgroup->ranks = world_ranks(group, members);
  // The groups of a split are disjoint, so their first ranks differ.
  subgroup->key = fmt::format("{}/{} {}", options.key, options.number, subgroup->describe());
  const int rank = static_cast<int>(std::ranges::find(members, parent.rank()) - members.begin());
  const auto fail = [&](const CommError& error) {
    parent.fail(error);
    return error;
  };
  std::unique_ptr<Communicator> made;
  try {
    made = connect(subgroup, rank);
  } catch (const CommError& error) {
    throw fail(error);
  } catch (const std::exception& error) {
    const int self = world_rank(group, parent.rank());
    throw fail(CommError(CommFailure::Aborted, std::vector<int>{self},
                         "rank {} can't connect the {}: {}", self, subgroup->describe(),
                         error.what()));
  }
  parent.barrier({.label = "connect " + kind, .deadline = options.connect_time + kSkew});
  return made;
}

}  // namespace tessera::comm
