#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/control/store.h"
#include "comm/sharding/sharded_model.h"
#include "core/base/storage.h"
#include "io/checkpoint/save.h"

namespace tessera::train {

/// Exchanges text between ranks over the run's store. Use one per thread, with the same name on the
/// corresponding threads of all ranks. All ranks must make the same calls in the same order.
class StoreCoordinator final : public io::SaveCoordinator {
 public:
  StoreCoordinator(std::shared_ptr<comm::Store> store, std::string name, int rank, int world_size,
                   std::chrono::milliseconds deadline)
      : store_(std::move(store)),
        name_(std::move(name)),
        rank_(rank),
        world_size_(world_size),
        deadline_(deadline) {}
  std::vector<std::string> exchange(const std::string& phase, std::string_view mine) override;

 private:
  std::shared_ptr<comm::Store> store_;
  std::string name_;
  int rank_, world_size_;
  std::chrono::milliseconds deadline_;
  std::int64_t calls_ = 0;
};

/// A save request and the host copies of GPU values that it refers to.
struct SaveState {
  io::SaveRequest request;
  std::shared_ptr<Storage> copies{};
};
/// Bytes of the host copies of a request's values.
std::size_t save_copy_bytes(const io::SaveRequest& request);
/// This rank's part of a save.
/// @param trainable_only  leave out frozen weights: LoRA's are those of another model
/// @throws OutOfMemory
SaveState make_save_state(comm::ShardedModel& sharded, bool with_optimizer,
                          bool trainable_only = false);
/// The same without host copies; the request refers to device memory.
io::SaveRequest make_save_request(comm::ShardedModel& sharded, bool with_optimizer,
                                  bool trainable_only = false);

/// Whether all values are finite. Needed although gradients are checked: the square of a finite
/// gradient can overflow the second moment.
/// @param request  its values must be in host memory
bool is_finite(const io::SaveRequest& request);

}  // namespace tessera::train
