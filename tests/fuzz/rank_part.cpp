// Index parts of a save's ranks, each ended by a NUL, and the index merged from them.
#include <algorithm>
#include <string>

#include "io/checkpoint/merge_index.h"
#include "io/checkpoint/shard.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(rank_part, "rank_part") {
  std::string_view text = fuzz::text_of(data, size);
  const auto ranks = static_cast<int>(std::ranges::count(text, '\0'));
  if (ranks < 1 || ranks > 8) return -1;
  io::CheckpointIndex frame;
  frame.step = 3;
  frame.world_size = ranks;
  frame.run_id = "run";
  frame.created = "2026-01-31T12:00:00Z";
  frame.tessera_version = "0.1.0";
  fuzz::try_parse([&] {
    io::IndexMerger merger;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::size_t end = text.find('\0');
      merger.add(io::shard_name(rank, ranks), text.substr(0, end), "part");
      text.remove_prefix(end + 1);
    }
    const std::string index = io::format_index(merger.finish(frame, "index.json"));
    fuzz::expect(io::format_index(io::parse_index(index, "again")) == index);
  });
  return 0;
}
