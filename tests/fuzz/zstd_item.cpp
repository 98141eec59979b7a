// A zstd stream with a torch.save archive, as PyTorch's extension ZStandard writes items.
#include <algorithm>
#include <memory>
#include <string>

#include "io/base/zstd.h"
#include "io/torch/torch_archive.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(zstd_item, "zstd_item") {
  static const fuzz::InputFile input;
  const auto file = std::make_shared<const io::File>(io::File::open(input.write(data, size)));
  const io::ZstdRange range{0, static_cast<std::int64_t>(size)};
  constexpr std::int64_t kMost = 1 << 20;
  fuzz::try_parse([&] {
    io::ZstdDecoder decoder(file, range);
    const io::ZstdEnds ends = io::read_zstd_ends(decoder, kMost);
    fuzz::expect(decoder.memory() < (std::int64_t{9} << 20));
    // Small reads find the same bytes, also backwards.
    io::ZstdDecoder again(file, range);
    std::string part(std::min<std::size_t>(ends.head.size(), 100), '\0');
    for (const std::size_t at : {part.size() / 2, std::size_t{0}}) {
      again.read_at(static_cast<std::int64_t>(at), part.data(), part.size() - at);
      fuzz::expect(ends.head.compare(at, part.size() - at, part, 0, part.size() - at) == 0);
    }
    fuzz::try_parse([&] {
      const io::TorchTensor tensor =
          io::read_torch_tensor(io::ByteRange(ends.head, ends.tail, ends.size, "item"));
      fuzz::expect(tensor.begin >= 0 && tensor.storage_end <= ends.size);
    });
  });
  return 0;
}
