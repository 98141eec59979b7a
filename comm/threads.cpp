#include "comm/threads.h"

#include <cstring>

#include "comm/reduce.h"

namespace tessera::comm {
namespace {

class ThreadsBackend final : public CollectiveBackend {
 public:
  ThreadsBackend(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return group_->world_size(); }
  std::string_view name() const override { return "threads"; }
  void run(const Collective& collective) override { group_->run(rank_, collective); }
  void interrupt(const CommError& reason) noexcept override { group_->fail(reason); }
  std::string key() const override {
    return group_->group() ? group_->group()->key : std::string(name());
  }
  std::chrono::milliseconds connect_timeout() const override { return {}; }
  std::unique_ptr<CollectiveBackend> connect_subgroup(const Membership& subgroup,
                                                      int rank) override {
    return std::make_unique<ThreadsBackend>(group_->subgroup(subgroup.group), rank);
  }
  void close(const CommError* reason) noexcept override {
    if (reason != nullptr) group_->fail(*reason);
    group_->leave(rank_);
  }

 private:
  std::shared_ptr<ThreadGroup> group_;
  const int rank_;
};

}  // namespace

ThreadGroup::ThreadGroup(int world_size) : world_size_(world_size) {
  require(world_size >= 1, "a group needs at least one rank, got world size {}", world_size);
  calls_.resize(static_cast<std::size_t>(world_size));
  departed_.resize(calls_.size());
}

ThreadGroup::ThreadGroup(std::shared_ptr<Family> family, SubgroupPtr group)
    : family_(std::move(family)),
      group_(std::move(group)),
      world_size_(static_cast<int>(group_->ranks.size())),
      calls_(group_->ranks.size()),
      departed_(group_->ranks.size()) {}

std::shared_ptr<ThreadGroup> ThreadGroup::subgroup(const SubgroupPtr& group) {
  const std::lock_guard lock(family_->mutex);
  auto& known = family_->groups[group->key];
  auto made = known.lock();
  if (!made) {
    made.reset(new ThreadGroup(family_, group));  // not make_shared: a private constructor
    known = made;
  }
  return made;
}

std::vector<int> ThreadGroup::missing_locked() const {
  std::vector<int> missing;
  for (int r = 0; r < world_size_; ++r) {
    if (calls_[static_cast<std::size_t>(r)] == nullptr) missing.push_back(r);
  }
  return missing;
}

void ThreadGroup::check_departed_locked(const Collective& collective) {
  std::vector<int> gone = missing_locked();
  std::erase_if(gone, [&](int r) { return !departed_[static_cast<std::size_t>(r)]; });
  if (gone.empty() || family_->failure) return;
  gone = world_ranks(group_.get(), gone);
  family_->failure =
      CommError(CommFailure::PeerLost, gone, "{}: {} left the group of {} and will not arrive",
                collective.describe(), rank_list(gone), world_size_);
}

void ThreadGroup::run(int rank, const Collective& collective) {
  const auto deadline = std::chrono::steady_clock::now() + collective.deadline;
  std::unique_lock lock(family_->mutex);
  if (family_->failure) throw CommError(*family_->failure);
  calls_[static_cast<std::size_t>(rank)] = &collective;
  if (missing_locked().empty()) {
    std::vector<Signature> signatures;
    for (const Collective* call : calls_) signatures.emplace_back(*call);
    family_->failure = find_mismatch(signatures, group_.get());
    if (!family_->failure) {
      move_data_locked();
      calls_.assign(calls_.size(), nullptr);
      ++round_;
    }
    family_->changed.notify_all();
    if (family_->failure) throw CommError(*family_->failure);
    return;
  }
  const std::uint64_t round = round_;
  while (round_ == round) {
    check_departed_locked(collective);
    if (family_->failure) {
      family_->changed.notify_all();
      throw CommError(*family_->failure);
    }
    if (family_->changed.wait_until(lock, deadline) == std::cv_status::timeout && round_ == round &&
        !family_->failure) {
      const std::vector<int> missing = world_ranks(group_.get(), missing_locked());
      family_->failure = CommError(
          CommFailure::Timeout, missing, "{}: {} of {} ranks arrived within {}, missing: {}",
          collective.describe(), world_size_ - static_cast<int>(missing.size()), world_size_,
          format_seconds(collective.deadline), rank_list(missing));
    }
  }
}

void ThreadGroup::move_data_locked() const {
  const Collective& call = *calls_[0];
  const auto world = static_cast<std::size_t>(world_size_);
  const std::size_t part = call.bytes() / world;
  std::vector<const void*> parts;
  switch (call.kind) {
    case CollectiveKind::AllGather:
      for (int r = 0; r < world_size_; ++r) {
        copy_to_others_locked(r, part * static_cast<std::size_t>(r), part);
      }
      break;
    case CollectiveKind::ReduceScatter:
      for (std::size_t r = 0; r < world; ++r) {
        parts.clear();
        for (const Collective* from : calls_) {
          parts.push_back(static_cast<const std::byte*>(from->in) + part * r);
        }
        sum_parts_f32(parts, call.dtype, static_cast<float*>(calls_[r]->out),
                      call.count / world_size_);
      }
      break;
    case CollectiveKind::AllReduce:
      for (const Collective* from : calls_) parts.push_back(from->out);
      reduce_parts(parts, call.dtype, call.op, call.out, call.count);
      copy_to_others_locked(0, 0, call.bytes());
      break;
    case CollectiveKind::Broadcast:
      copy_to_others_locked(call.root, 0, call.bytes());
      break;
    case CollectiveKind::Barrier:
      break;
  }
}

// Copies [offset, offset + bytes) of a rank's buffer to the same range of all other buffers.
void ThreadGroup::copy_to_others_locked(int rank, std::size_t offset, std::size_t bytes) const {
  const Collective* from = calls_[static_cast<std::size_t>(rank)];
  for (const Collective* to : calls_) {
    if (to == from || bytes == 0) continue;
    std::memcpy(static_cast<std::byte*>(to->out) + offset,
                static_cast<const std::byte*>(from->out) + offset, bytes);
  }
}

void ThreadGroup::fail(const CommError& error) {
  const std::lock_guard lock(family_->mutex);
  if (!family_->failure) family_->failure = error;
  family_->changed.notify_all();
}

void ThreadGroup::leave(int rank) {
  const std::lock_guard lock(family_->mutex);
  departed_[static_cast<std::size_t>(rank)] = true;
  family_->changed.notify_all();
}

std::unique_ptr<Communicator> make_threads_communicator(std::shared_ptr<ThreadGroup> group,
                                                        int rank,
                                                        const CommunicatorOptions& options) {
  require(group != nullptr && rank >= 0 && rank < group->world_size(),
          "rank {} is not a rank of a group of {}", rank, group ? group->world_size() : 0);
  return std::make_unique<QueuedCommunicator>(
      std::make_unique<ThreadsBackend>(std::move(group), rank), options.timeout);
}

}  // namespace tessera::comm
