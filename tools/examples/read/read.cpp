// A program that reads checkpoints and links nothing else of tessera: prints each weight's shape and norm.
#include <tessera/checkpoint.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace ts = tessera;
namespace io = tessera::io;

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CHECKPOINT\n", argv[0]);
    return 2;
  }
  try {
    const auto checkpoint = io::open_checkpoint(argv[1]);  // a run: its newest checkpoint
    std::printf("step %lld, saved by %d ranks\n", static_cast<long long>(checkpoint.index().step),
                checkpoint.index().world_size);
    const io::TensorSource& weights = checkpoint.source(io::kModelSection);
    for (const io::TensorInfo& info : weights.tensors()) {
      const std::int64_t count = ts::numel(info.shape);
      std::vector<float> values(static_cast<std::size_t>(count));
      weights.read(info.name, 0, count, values.data(), ts::DType::F32);  // verified, any dtype
      double squares = 0;
      for (const float value : values) squares += static_cast<double>(value) * value;
      std::printf("%s %s %g\n", info.name.c_str(), info.shape.str().c_str(), std::sqrt(squares));
    }
  } catch (const ts::Error& error) {
    std::fprintf(stderr, "read: %s\n", error.what());
    return 1;
  }
}
