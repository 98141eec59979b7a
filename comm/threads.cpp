#include "comm/threads.h"

#include <algorithm>
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

  void run(const Collective& collective) override {
    group_->arrive(rank_, collective);
    switch (collective.kind) {
      case CollectiveKind::AllGather:
        return all_gather(collective);
      case CollectiveKind::ReduceScatter:
        return reduce_scatter(collective);
      case CollectiveKind::AllReduce:
        return all_reduce(collective);
      case CollectiveKind::Broadcast:
        return broadcast(collective);
      case CollectiveKind::Barrier:
        return;
    }
  }

  void interrupt(const CommError& reason) noexcept override { group_->fail(reason); }
  void close(const CommError* reason) noexcept override {
    if (reason != nullptr) group_->fail(*reason);
    group_->leave(rank_);
  }

 private:
  void all_gather(const Collective& mine) {
    const std::size_t part = mine.bytes() / static_cast<std::size_t>(world_size());
    for (int r = 0; r < world_size(); ++r) {
      const std::size_t offset = part * static_cast<std::size_t>(r);
      if (r != rank_) copy(mine.out, group_->collective(r).out, offset, part);
    }
    group_->meet();
  }

  void reduce_scatter(const Collective& mine) {
    const std::int64_t count = mine.count / world_size();
    const auto offset = static_cast<std::size_t>(count * rank_) * dtype_size(mine.dtype);
    std::vector<const void*> parts;
    for (int r = 0; r < world_size(); ++r) {
      parts.push_back(static_cast<const std::byte*>(group_->collective(r).in) + offset);
    }
    sum_parts_f32(parts, mine.dtype, static_cast<float*>(mine.out), count);
    group_->meet();
  }

  // Each rank reduces its slice in its own buffer, where no other rank reads that slice; then all
  // ranks copy the other slices.
  void all_reduce(const Collective& mine) {
    const std::size_t size = dtype_size(mine.dtype);
    const auto begin = [&](int r) { return mine.count * r / world_size(); };
    const auto offset = [&](int r) { return static_cast<std::size_t>(begin(r)) * size; };
    std::vector<const void*> parts;
    for (int r = 0; r < world_size(); ++r) {
      parts.push_back(static_cast<const std::byte*>(group_->collective(r).out) + offset(rank_));
    }
    reduce_parts(parts, mine.dtype, mine.op, static_cast<std::byte*>(mine.out) + offset(rank_),
                 begin(rank_ + 1) - begin(rank_));
    group_->meet();
    for (int r = 0; r < world_size(); ++r) {
      if (r == rank_) continue;
      copy(mine.out, group_->collective(r).out, offset(r), offset(r + 1) - offset(r));
    }
    group_->meet();
  }

  void broadcast(const Collective& mine) {
    if (rank_ != mine.root) copy(mine.out, group_->collective(mine.root).out, 0, mine.bytes());
    group_->meet();
  }

  static void copy(void* to, const void* from, std::size_t offset, std::size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(static_cast<std::byte*>(to) + offset, static_cast<const std::byte*>(from) + offset,
                bytes);
  }

  std::shared_ptr<ThreadGroup> group_;
  const int rank_;
};

}  // namespace

ThreadGroup::ThreadGroup(int world_size) : world_size_(world_size) {
  require(world_size >= 1, "a group needs at least one rank, got world size {}", world_size);
  collectives_.resize(static_cast<std::size_t>(world_size));
  arrived_.resize(collectives_.size());
  departed_.resize(collectives_.size());
}

std::vector<int> ThreadGroup::missing_locked() const {
  std::vector<int> missing;
  for (int r = 0; r < world_size_; ++r) {
    if (!arrived_[static_cast<std::size_t>(r)]) missing.push_back(r);
  }
  return missing;
}

void ThreadGroup::check_departed_locked(const Collective& collective) {
  std::vector<int> gone = missing_locked();
  std::erase_if(gone, [&](int r) { return !departed_[static_cast<std::size_t>(r)]; });
  if (gone.empty() || failure_) return;
  failure_ =
      CommError(CommFailure::PeerLost, gone, "{}: {} left the group of {} and will not arrive",
                collective.describe(), rank_list(gone), world_size_);
}

void ThreadGroup::arrive(int rank, const Collective& collective) {
  const auto deadline = std::chrono::steady_clock::now() + collective.deadline;
  std::unique_lock lock(mutex_);
  if (failure_) throw CommError(*failure_);
  collectives_[static_cast<std::size_t>(rank)] = &collective;
  arrived_[static_cast<std::size_t>(rank)] = true;
  if (++arrivals_ == world_size_) {
    std::vector<Signature> signatures;
    for (const Collective* c : collectives_) signatures.emplace_back(*c);
    failure_ = find_mismatch(signatures);
    if (!failure_) {
      std::fill(arrived_.begin(), arrived_.end(), false);
      arrivals_ = 0;
      ++round_;
    }
    changed_.notify_all();
    if (failure_) throw CommError(*failure_);
    return;
  }
  const std::uint64_t round = round_;
  while (round_ == round) {
    check_departed_locked(collective);
    if (failure_) {
      changed_.notify_all();
      throw CommError(*failure_);
    }
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && round_ == round &&
        !failure_) {
      const std::vector<int> missing = missing_locked();
      failure_ = CommError(CommFailure::Timeout, missing,
                           "{}: {} of {} ranks arrived within {}, missing: {}",
                           collective.describe(), world_size_ - static_cast<int>(missing.size()),
                           world_size_, format_seconds(collective.deadline), rank_list(missing));
    }
  }
}

void ThreadGroup::meet() {
  std::unique_lock lock(mutex_);
  if (++met_ == world_size_) {
    met_ = 0;
    ++meeting_;
    changed_.notify_all();
    return;
  }
  const std::uint64_t meeting = meeting_;
  changed_.wait(lock, [&] { return meeting_ != meeting; });
}

void ThreadGroup::fail(const CommError& error) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
  changed_.notify_all();
}

void ThreadGroup::leave(int rank) {
  const std::lock_guard lock(mutex_);
  departed_[static_cast<std::size_t>(rank)] = true;
  changed_.notify_all();
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
