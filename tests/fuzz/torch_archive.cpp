// A torch.save archive: a zip directory and a pickle.
#include "io/torch/torch_archive.h"

#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(torch_archive, "torch_archive") {
  fuzz::try_parse([&] {
    const io::ByteRange archive(fuzz::text_of(data, size), "archive");
    const io::TorchTensor tensor = io::read_torch_tensor(archive);
    const auto bytes = numel(tensor.shape) * static_cast<std::int64_t>(dtype_size(tensor.carrier));
    fuzz::expect(tensor.storage_begin >= 0 &&
                 tensor.storage_end <= static_cast<std::int64_t>(size));
    fuzz::expect(tensor.begin >= tensor.storage_begin &&
                 tensor.begin + bytes <= tensor.storage_end);
  });
  return 0;
}
