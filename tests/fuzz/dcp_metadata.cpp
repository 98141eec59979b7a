// `.metadata` of a PyTorch Distributed Checkpoint: a pickle.
#include "io/dcp/metadata.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(dcp_metadata, "dcp_metadata") {
  fuzz::try_parse([&] {
    const auto metadata =
        io::parse_dcp_metadata(std::string(fuzz::text_of(data, size)), ".metadata");
    for (const auto& [name, tensor] : metadata.tensors) {
      std::int64_t elements = 0;
      for (const auto& chunk : tensor.chunks) {
        fuzz::expect(chunk.file < metadata.files.size());
        elements += numel(chunk.box.shape);
      }
      fuzz::expect(elements == numel(tensor.shape));
    }
    for (const auto& [name, place] : metadata.hyperparameters)
      fuzz::expect(place.file < metadata.files.size() && place.offset >= 0 && place.length > 0);
  });
  return 0;
}
