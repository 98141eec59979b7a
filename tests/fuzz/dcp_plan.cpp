// Export plan of a PyTorch Distributed Checkpoint with arbitrary `.metadata`.
#include <filesystem>
#include <fstream>

#include "io/consolidate/consolidate.h"
#include "io/dcp/metadata.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;
namespace fs = std::filesystem;

TESSERA_FUZZ_TARGET(dcp_plan, "dcp_metadata") {
  static const fs::path dir =
      fs::path("/dev/shm") / ("tessera-fuzz-dcp-plan-" + std::to_string(::getpid()));
  fs::create_directories(dir);
  fuzz::try_parse([&] {
    const std::string text(fuzz::text_of(data, size));
    const io::DcpMetadata metadata = io::parse_dcp_metadata(text, ".metadata");
    if (metadata.files.size() > 8) return;
    // Sparse files of maximum size, so that the sizes in the metadata pass.
    for (const std::string& name : metadata.files) {
      std::ofstream(dir / name).put('x');
      std::error_code error;
      fs::resize_file(dir / name, std::uintmax_t{1} << 62, error);
    }
    std::ofstream(dir / ".metadata", std::ios::binary) << text;
    io::ConsolidateOptions options;
    options.format = io::ExportFormat::Safetensors;
    options.what = data[size - 1] % 2 == 0 ? io::ExportWhat::Model : io::ExportWhat::All;
    options.dtype = DType::F32;
    if (data[size - 1] % 4 >= 2) {  // of the seed fsdp-gpt2: its names are searched
      std::ofstream(dir / "config.json")
          << R"({"model_type": "gpt2", "vocab_size": 17, "n_positions": 6, "n_embd": 4, "n_layer": 1,
                 "n_head": 2})";
    }
    const io::ConsolidatePlan plan = io::plan_consolidation(dir, options);
    for (const auto& tensor : plan.tensors) {
      fuzz::expect(tensor.bytes ==
                   numel(tensor.shape) * static_cast<std::int64_t>(dtype_size(tensor.written)));
    }
  });
  fs::remove_all(dir);
  return 0;
}
