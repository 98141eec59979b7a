#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/tensor_view.h"

namespace tessera::comm {

struct Collective;
class FlightRecorder;

enum class ReduceOp : std::uint8_t { Sum, Max };

/// label: name in messages ("all_gather h.3"). deadline: counted from the start of execution; zero:
/// the communicator's default.
struct CollectiveOptions {
  std::string label;
  std::chrono::milliseconds deadline{0};
};

/// An asynchronous collective.
class Work {
 public:
  virtual ~Work() = default;
  virtual bool is_done() const = 0;
  /// Host buffers: blocks until the collective is done or its deadline passes. Device buffers: the
  /// context's later device work waits for the collective. NCCL does not block the host; a failure
  /// after wait() surfaces in the next call or in Communicator::check().
  /// @throws CommError with the label, the sequence number and the culprits
  virtual void wait() = 0;
};
using WorkPtr = std::shared_ptr<Work>;

/// Bytes that a rank sent in collectives, by kind: of a buffer of n bytes, (W - 1) / W of it in a
/// gather or scatter over W ranks, and twice that in an all_reduce.
struct Traffic {
  std::int64_t all_gather = 0, reduce_scatter = 0, all_reduce = 0;
  std::int64_t total() const { return all_gather + reduce_scatter + all_reduce; }
};

/// Collectives over a fixed group of ranks.
///
/// All ranks of the group call the same collectives in the same order, numbered from 0. The start_
/// functions queue a collective on the communicator's own thread (or stream); collectives run one
/// after another and own their buffers until wait() returns. The plain functions start and wait.
/// Buffers are contiguous, on the host or on the device of the communicator's context. A collective
/// sees the results of work queued before start_; work queued after wait() sees its result.
///
/// After an error the communicator is dead. The first call or wait() that meets it throws the error
/// itself; works that did not run and later calls then throw CommError(Aborted) at once. The
/// destructor aborts running collectives in bounded time. One thread at a time may call.
///
/// split() makes subgroups, for device meshes. A failure of a communicator or of its subgroups fails
/// all of them on every rank. Errors name ranks of the world, the outermost communicator.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// "shm", "tcp", "threads", "single", "nccl", "host-staged shm"
  virtual std::string_view backend() const = 0;

  // The next five functions throw InvalidArgument for invalid arguments, before anything starts.

  /// In place: `buffer` has world_size equal parts. Fill part rank(); the others are received.
  WorkPtr start_all_gather(const TensorView& buffer, CollectiveOptions options);
  /// `in` has world_size equal parts; `out` receives the sum of part rank() over all ranks, added in
  /// rank order in float32 unless the backend says otherwise (nccl.h). in: f32 or bf16; out:
  /// scattered_dtype() of it, no overlap with in.
  WorkPtr start_reduce_scatter(const TensorView& in, const TensorView& out,
                               CollectiveOptions options);
  /// In place; f64, f32 or i64. Adds in rank order, so that every rank gets the same bits.
  WorkPtr start_all_reduce(const TensorView& buffer, ReduceOp op, CollectiveOptions options);
  /// In place: every rank receives root's contents.
  WorkPtr start_broadcast(const TensorView& buffer, int root, CollectiveOptions options);
  WorkPtr start_barrier(CollectiveOptions options);
  /// Starts a collective whose arguments one of the functions above has checked.
  virtual WorkPtr start(Collective collective) = 0;

  /// Collectives started before end_group() may run together: NCCL launches them as one, with one
  /// sequence number and the sum of their deadlines; other backends ignore groups. Wait for their
  /// works after end_group(). Groups do not nest. See CollectiveGroup.
  virtual void begin_group() {}
  /// @throws CommError
  virtual void end_group() {}
  /// Discards the group after an error between the starts; waiting on its works throws
  /// InternalError. The same group may be started again.
  virtual void drop_group() noexcept {}

  /// Dtype of reduce_scatter's result: f32. NCCL adds bf16 in bf16, and returns bf16.
  virtual DType scattered_dtype(DType /*in*/) const { return DType::F32; }

  /// Sum over the collectives that were started. The bytes are those of the algorithms that move
  /// least, whatever a backend does.
  const Traffic& traffic() const { return traffic_; }

  void all_gather(const TensorView& buffer, CollectiveOptions options) {
    start_all_gather(buffer, std::move(options))->wait();
  }
  void reduce_scatter(const TensorView& in, const TensorView& out, CollectiveOptions options) {
    start_reduce_scatter(in, out, std::move(options))->wait();
  }
  void all_reduce(const TensorView& buffer, ReduceOp op, CollectiveOptions options) {
    start_all_reduce(buffer, op, std::move(options))->wait();
  }
  void broadcast(const TensorView& buffer, int root, CollectiveOptions options) {
    start_broadcast(buffer, root, std::move(options))->wait();
  }
  void barrier(CollectiveOptions options) { start_barrier(std::move(options))->wait(); }

  /// Makes a communicator over some ranks of this one. All ranks call it in the same order, each
  /// with the group that it joins, as for collectives; the groups are disjoint. Members of groups of
  /// the same kind, such as the rows of a mesh, call it together: on a 2 x 2 mesh, ranks 0 and 1 with
  /// {0, 1}, ranks 2 and 3 with {2, 3}. All ranks succeed or fail together.
  ///
  /// The subgroup numbers its collectives from 0 and runs them on its own thread (or stream),
  /// concurrently with other communicators; its deadlines default to this communicator's. Messages
  /// contain its kind: "all_gather#3 (h.1, shard group of ranks 2, 3)". A group of one rank makes no
  /// connection. Destroy subgroups before this communicator, which passes failures to them.
  ///
  /// Blocks for at most the deadline of a collective, then the time to connect the communicator.
  /// @param members  ranks of this communicator, ascending, with rank(); a member's rank in the
  ///   subgroup is its position
  /// @param kind     "shard", "replicate"; 1 to 24 bytes
  /// @throws InvalidArgument for invalid arguments, before anything starts; CommError if ranks
  ///   disagree on kind or members, or a rank does not arrive or connect in time
  virtual std::unique_ptr<Communicator> split(const std::vector<int>& members,
                                              const std::string& kind) = 0;

  // The next four functions of the outermost communicator cover its subgroups.

  /// Throws if a collective on device memory has failed since its wait(). Call it after
  /// synchronizing with the device, before using results on the host. @throws CommError
  virtual void check() {}
  /// Name of the running collective, else of the next or the failed one; empty: none. Any thread.
  virtual std::string under_way() const { return {}; }
  /// Total nanoseconds that Work::wait() blocked the host. Any thread.
  virtual std::int64_t waited_ns() const { return 0; }
  /// Records collectives queued from now on; null: stops recording. Groups of one ignore it.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): overriders keep it
  virtual void set_recorder(std::shared_ptr<FlightRecorder> /*recorder*/) {}

  /// Fails running and queued collectives and all later calls. Any thread; idempotent.
  virtual void abort(std::string_view reason) noexcept = 0;
  /// Like abort(); later calls report `reason`.
  virtual void fail(const CommError& reason) noexcept { abort(reason.what()); }

 protected:
  /// Device whose buffers are accepted besides those of the host.
  virtual Device device() const { return {}; }

 private:
  std::int64_t sent_parts(std::size_t bytes) const;
  Traffic traffic_;
};

/// Groups the collectives started in its lifetime; see Communicator::begin_group().
class CollectiveGroup {
 public:
  explicit CollectiveGroup(Communicator& communicator) : communicator_(&communicator) {
    communicator.begin_group();
  }
  ~CollectiveGroup() {
    if (communicator_ != nullptr) communicator_->drop_group();
  }
  CollectiveGroup(const CollectiveGroup&) = delete;
  CollectiveGroup& operator=(const CollectiveGroup&) = delete;

  /// Call once, after the last start. @throws CommError
  void end() { std::exchange(communicator_, nullptr)->end_group(); }

 private:
  Communicator* communicator_;
};

}  // namespace tessera::comm
