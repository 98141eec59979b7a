// The journal of an unfinished export, next to its output directory.
#include <filesystem>
#include <fstream>

#include "io/consolidate/attempt.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;
namespace fs = std::filesystem;

TESSERA_FUZZ_TARGET(journal, "journal") {
  static const fs::path dir =
      fs::path("/dev/shm") / ("tessera-fuzz-journal-" + std::to_string(::getpid()));
  const fs::path made = dir / "out.tmp", file = made / "data";
  fs::create_directories(made);
  std::ofstream(file) << 'x';
  std::ofstream(dir / "out.tmp.journal", std::ios::binary) << fuzz::text_of(data, size);
  bool taken = false;
  fuzz::try_parse([&] {
    io::Attempt attempt(dir / "out", 0x0123456789abcdef);
    taken = true;
    const std::size_t n = attempt.found().size();
    for (const io::FileRecord& done : attempt.found()) attempt.record(done);
    // Resuming keeps the output directory.
    fuzz::expect(fs::is_directory(made) && (n == 0 || fs::exists(file)));
  });
  fuzz::expect(taken || fs::exists(file));  // foreign files stay
  fs::remove_all(dir);
  return 0;
}
