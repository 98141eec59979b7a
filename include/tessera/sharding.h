#pragma once

/// A model with parameters, gradients and optimizer state sharded over ranks.
///
///     const comm::Mesh mesh(*communicator);
///     comm::ShardedModel model(net, mesh, comm::shard_spec("full"), context);

#include "comm/sharding/mesh.h"
#include "comm/sharding/shard_spec.h"
#include "comm/sharding/sharded_model.h"
