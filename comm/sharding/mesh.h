#pragma once

#include <memory>

namespace tessera::comm {

class Communicator;

/// Ranks as a grid: `replicas` groups of `shard_size` ranks that shard one copy of the model.
/// Rank r belongs to replica r / shard_size, at position r % shard_size.
class Mesh {
 public:
  /// One replica over all ranks. `world` must outlive the mesh.
  explicit Mesh(Communicator& world);
  /// @param shard_size  divides the number of ranks; 1: every rank has a copy
  /// @throws InvalidArgument otherwise; CommError
  Mesh(Communicator& world, int shard_size);
  ~Mesh();
  Communicator& world() const { return *world_; }
  /// The ranks over which this rank's copy of the model is sharded.
  Communicator& shard() const { return *shard_; }
  /// The ranks that hold the same shard as this one.
  Communicator& replicate() const { return *replicate_; }

 private:
  Communicator* world_;
  Communicator* shard_;
  Communicator* replicate_;
  std::unique_ptr<Communicator> own_shard_, own_replicate_;
};

}  // namespace tessera::comm
