// tessera serve, driven by Python's http.client.

#include <doctest/doctest.h>

#include "tests/e2e/inference_support.h"
#include "tests/io/python.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;

TEST_CASE("the server answers, refuses, streams and stops") {
  const SmallModel& model = SmallModel::get();
  const CliResult probe = run_cli({"serve", model.run, "--host", "0.0.0.0"});
  REQUIRE(probe.code == 2);
  if (probe.err.find("no HTTP server") != std::string::npos) {
    MESSAGE("skipped: ", probe.err);
    return;
  }
  CHECK(probe.err.find("set TESSERA_API_KEY") != std::string::npos);
  for (const char* const host : {"127.example.org", "127.0.0.1.example.org", "::"})
    CHECK(run_cli({"serve", model.run, "--host", host}).err.find("set TESSERA_API_KEY") !=
          std::string::npos);
  const Python python("import http.client");
  REQUIRE_MESSAGE(python, python.missing());
  CHECK(python.run_file(source_path("tests/e2e/serve_client.py"),
                        {tessera_program(), model.run, model.chat_template}) == "exit code 0\n");
}
