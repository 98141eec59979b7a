// A DeepSpeed checkpoint of one rank: a file of model states, and one of optimizer states behind it.
#include "io/deepspeed/states.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(deepspeed_states, "deepspeed_states") {
  const std::string_view input = fuzz::text_of(data, size);
  // Both are zip archives, and an archive ends with 22 bytes that begin so.
  constexpr std::size_t kEnd = 22;
  const std::size_t end = input.find(std::string_view("PK\5\6", 4));
  const std::size_t cut =
      end == std::string_view::npos || size - end < kEnd ? size / 2 : end + kEnd;
  const std::string_view parts[] = {input.substr(0, cut), input.substr(cut)};
  fuzz::try_parse([&] {
    io::DeepSpeedStates states;
    states.add("model", io::read_deepspeed_model(io::ByteRange(parts[0], "model")));
    states.add("optimizer", io::read_deepspeed_optimizer(io::ByteRange(parts[1], "optimizer")));
    for (const io::DeepSpeedTensor& tensor : states.cut()) {
      std::int64_t covered = 0;
      for (const io::StoredBlock& block : tensor.blocks) {
        fuzz::expect(block.file < 2);
        const io::TorchTensor& stored = *block.known;
        const auto width = static_cast<std::int64_t>(dtype_size(stored.carrier));
        covered += numel(block.box.shape);
        if (!block.flat) continue;
        fuzz::expect(block.box.offsets[0] + block.box.shape[0] == covered);
        fuzz::expect(stored.begin + block.offset >= stored.storage_begin &&
                     stored.begin + block.offset + block.box.shape[0] * width <=
                         stored.storage_end &&
                     stored.storage_end <= static_cast<std::int64_t>(parts[block.file].size()));
      }
      fuzz::expect(covered == numel(tensor.shape));
    }
  });
  return 0;
}
