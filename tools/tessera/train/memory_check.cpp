#include "tools/tessera/train/memory_check.h"

#include <fmt/format.h>

#include "core/base/error.h"

namespace tessera::tools {

std::string check_memory(const MemoryNeed& need, bool refuse) {
  const SystemMemory& memory = need.memory;
  const std::int64_t bytes = total(need.plan) * need.ranks;
  if (memory.total <= 0 || bytes <= memory.available) return {};
  std::string text = fmt::format(
      "{} up to {} of memory, and {} {}{}; a rank's share: {}",
      need.ranks == 1 ? "this run needs" : fmt::format("the {} ranks here need", need.ranks),
      format_bytes(bytes), need.there, format_bytes(memory.total),
      memory.available < memory.total
          ? fmt::format(" ({} of it free now)", format_bytes(memory.available))
          : std::string(),
      describe(need.plan));
  require<OutOfMemory>(!refuse || bytes <= memory.total,
                       "{}. Nothing was started; to start anyway, use --train.memory_check warn",
                       text);
  return text;
}

}  // namespace tessera::tools
