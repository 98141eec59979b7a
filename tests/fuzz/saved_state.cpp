// The pickle of a state with DTensors and ShardedTensors, in an archive with storages of 16 bytes.
#include "io/torch/saved_state.h"

#include "io/pump/box.h"
#include "tests/fuzz/fuzz.h"
#include "tests/io/dcp/bytes.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(saved_state, "saved_state") {
  test::ZipFile file;
  file.parts.push_back({"a/data.pkl", std::string(fuzz::text_of(data, size))});
  for (int i = 0; i < 8; ++i)
    file.parts.push_back({"a/data/" + std::to_string(i), std::string(16, 'x')});
  const std::string bytes = file.bytes();
  fuzz::try_parse([&] {
    const io::SavedState state = io::read_saved_state(io::ByteRange(bytes, "archive"));
    for (const io::ParamGroup& group : state.hyperparameters.groups)
      fuzz::expect(group.settings != nullptr && !group.weights.empty());
    for (const io::SavedTensor& tensor : state.tensors) {
      fuzz::expect(!tensor.name.empty() && !tensor.dtype.empty());
      for (const io::SavedTensor::Stored& stored : tensor.stored) {
        fuzz::expect(io::is_inside(stored.box, tensor.shape));
        fuzz::expect(stored.box.shape == stored.tensor.shape);
        fuzz::expect(stored.tensor.begin >= stored.tensor.storage_begin &&
                     stored.tensor.storage_end <= static_cast<std::int64_t>(bytes.size()));
      }
    }
  });
  return 0;
}
