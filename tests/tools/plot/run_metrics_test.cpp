#include "tools/tessera/plot/run_metrics.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"
#include "tests/support/text.h"
#include "tools/tessera/plot/csv.h"

using namespace tessera;
using namespace tessera::tools;
using test::holds;

TEST_CASE("lines of one step join, null is NaN, and time and tokens add up over resumes") {
  const test::TempDir dir;
  const std::string file = dir.write("metrics.jsonl",
                                     R"({"step":0,"loss":4.0,"tokens":10,"elapsed_s":2.0}
{"step":1,"val_loss":3.5,"elapsed_s":3.0}
{"step":1,"loss":null,"tokens":10,"skipped":true,"elapsed_s":4.0}
{"step":2,"loss":3.0,"tokens":20,"elapsed_s":1.5}
)");
  const RunFile read = read_run(dir.path());
  CHECK(read.warnings.empty());
  const RunMetrics& run = read.run;
  REQUIRE(run.rows.size() == 3);
  CHECK(run.rows[2].step == 2);
  CHECK(run.rows[2].tokens == 20);
  CHECK(run.rows[2].seconds == 5.5);
  const auto& loss = run.values.at("loss");
  REQUIRE(loss.size() == 3);
  CHECK(std::isnan(loss[1].value));
  CHECK(run.values.at("val_loss").at(0).row == 1);
  CHECK(run.keys == std::vector<std::string>{"loss", "tokens", "elapsed_s", "val_loss", "skipped"});

  RunMetrics named = read_run(file).run;
  named.name = "a, \"b\"";
  CHECK(to_csv({&named, 1}, {"val_loss", "loss"}) ==
        "run,step,val_loss,loss\n"
        "\"a, \"\"b\"\"\",0,,4\n"
        "\"a, \"\"b\"\"\",1,3.5,\n"
        "\"a, \"\"b\"\"\",2,,3\n");
  CHECK(to_csv({&named, 1}, {}).starts_with("run,step,loss,tokens,elapsed_s,val_loss,skipped\n"));
}

TEST_CASE("steps that come again replace the earlier ones") {
  const test::TempDir dir;
  dir.write("metrics.jsonl",
            "{\"step\":5,\"loss\":4,\"tokens\":10}\n{\"step\":6,\"loss\":3,\"tokens\":10}\n"
            "{\"step\":7,\"loss\":9,\"tokens\":10}\n{\"step\":6,\"loss\":2.5,\"tokens\":10}\n");
  const RunMetrics run = read_run(dir.path()).run;
  REQUIRE(run.rows.size() == 2);
  CHECK(run.rows[0].tokens == 50);  // as if the steps before were alike
  CHECK(run.rows[1].tokens == 60);
  REQUIRE(run.values.at("loss").size() == 2);
  CHECK(run.values.at("loss")[1].value == 2.5);
}

TEST_CASE("unreadable lines are named and left out; a file without any is an error") {
  const test::TempDir dir;
  const auto file = dir.path() / "metrics.jsonl";
  dir.write("metrics.jsonl", "{\"step\":0,\"loss\":4}\n[1]\n{\"step\":\"x\"}\n{\"step\":1,\"lo");
  const RunFile read = read_run(file);
  CHECK(read.run.rows.size() == 1);
  REQUIRE(read.warnings.size() == 2);
  CHECK(holds(read.warnings[0], "the last line is incomplete"));
  CHECK(holds(read.warnings[1], "line 2, and 1 more, is no JSON object with a step"));

  dir.write("metrics.jsonl", "{\"step\":0");
  CHECK_THROWS_HOLDING(IoError, "holds no step yet", read_run(file));
  CHECK_THROWS_HOLDING(IoError, "does not exist; name a", read_run(dir.path() / "absent"));
}

TEST_CASE("names have as many parts as tell the paths apart") {
  CHECK(short_names({"runs/a", "runs/b/", "runs/c/metrics.jsonl"}) ==
        std::vector<std::string>{"a", "b", "c"});
  CHECK(short_names({"x/run", "y/run", "y/other"}) ==
        std::vector<std::string>{"x/run", "y/run", "other"});
  CHECK(short_names({"a/b/run", "run"}) == std::vector<std::string>{"b/run", "run"});
}
