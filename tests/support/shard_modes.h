#pragma once

#include <string>

#include "comm/communicator.h"
#include "comm/sharding/mesh.h"
#include "comm/sharding/shard_spec.h"

namespace tessera::test {

/// The mesh of a mode, with groups of two ranks for "hybrid".
inline comm::Mesh mesh_of(const std::string& mode, comm::Communicator& world) {
  return {world, comm::shard_group_size(mode, world.world_size(), 2)};
}

inline comm::ShardSpec spec_of(const std::string& mode, DType compute = DType::F32,
                               DType master = DType::F32) {
  comm::ShardSpec spec = comm::shard_spec(mode);
  spec.compute = compute;
  spec.master = master;
  return spec;
}

}  // namespace tessera::test
