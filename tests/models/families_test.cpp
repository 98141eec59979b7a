// Models of every family against transformers: tests/golden/families, made by make_families.py.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "comm/communicator.h"
#include "comm/sharding/sharded_model.h"
#include "comm/threads.h"
#include "core/autograd/autograd.h"
#include "io/base/file.h"
#include "io/hf/family.h"
#include "io/hf/model_source.h"
#include "models/decoder.h"
#include "tests/models/golden_models.h"
#include "tests/support/on_threads.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using io::Json;
using test::Case;

namespace {

struct Loaded {
  std::unique_ptr<models::LanguageModel> model;
  ParameterSource source;
};

Loaded load(const std::shared_ptr<const io::ModelSource>& source) {
  models::Arch arch = models::parse_arch(source->config().dump(), "config.json");
  arch.seq_len = std::max<std::int64_t>(arch.seq_len, 96);  // beyond what dynamic scaling begins at
  Loaded loaded;
  loaded.model = models::make_model(arch);
  loaded.source = [source](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
    source->read(p.name, begin, end, out, DType::F32);
  };
  return loaded;
}

void check_close(const std::vector<double>& got, const Json& want, double tolerance) {
  std::size_t i = 0;
  double most = 0;
  for (const auto& row : want)
    for (const double value : row) most = std::max(most, std::abs(got[i++] - value));
  CHECK(most < tolerance);
}

template <typename T>
std::vector<double> values_of(const Tensor& tensor) {
  const std::vector<T> values = tensor.to_vector<T>();
  return {values.begin(), values.end()};
}

// Norm, and products with two fixed vectors, of each Hugging Face tensor's gradient.
void check_gradients(const Case& c, const models::LanguageModel& model) {
  std::map<std::string, const Parameter*> by_name;
  for (const Parameter* p : model.parameters()) by_name[p->name] = p;
  const double total = test::norm_of(c.json.at("gradients"));
  for (const io::HfTensor& tensor : c.tensors) {
    const std::vector<double> gradient =
        by_name.at(tensor.info.name)->tensor.grad().to_vector<double>();
    std::size_t at = 0;
    for (const io::HfTensor::Part& part : tensor.parts) {
      CAPTURE(part.name);
      const Json& expected = c.json.at("gradients").at(part.name);
      const std::int64_t count = numel(tensor.shape_of(part));
      test::check_gradient(part.name,
                           std::span(gradient).subspan(at, static_cast<std::size_t>(count)),
                           expected, total);
      at += static_cast<std::size_t>(count);
    }
  }
}

void check_greedy(const Case& c, models::LanguageModel& model,
                  const std::shared_ptr<Context>& context) {
  const std::vector<std::int32_t> want = c.json.at("greedy");
  std::vector<std::int32_t> text(want.begin(), want.begin() + 3);
  nn::KvCache cache(model.arch().seq_len);
  std::size_t fed = 0;
  while (text.size() < want.size()) {
    const auto part = std::span(text).subspan(fed);
    const Tensor tokens = Tensor::from<std::int32_t>(context, {1, std::ssize(part)},
                                                     std::span<const std::int32_t>(part));
    fed = text.size();
    const std::vector<float> logits = model.decode(tokens, cache).to_vector<float>();
    text.push_back(
        static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  CHECK(text == want);
}

// Loss of one row of two, as a micro-batch of its own: an auxiliary loss is a mean over these.
Tensor loss_of_row(const Case& c, models::LanguageModel& model,
                   const std::shared_ptr<Context>& context, int row) {
  const auto part = [&](const char* key) {
    const Tensor all = c.ids(context, key);
    return all.alias({1, all.dim(1)}, {all.dim(1), 1}, row * all.dim(1));
  };
  const Tensor tokens = part("tokens");
  return model.loss(tokens, part("targets"), 0.5 / static_cast<double>(tokens.dim(1)));
}

// Two ranks with a row each: the sum of their losses, and the norm of the whole gradient, are those
// of a model in float64 that is not sharded.
void check_sharded(const Case& c, const std::shared_ptr<const io::ModelSource>& source) {
  const Loaded whole = load(source);
  const auto alone = Context::create();
  materialize(*whole.model, alone, DType::F64, whole.source);
  double total = 0, norm = 0;
  for (const int row : {0, 1}) {
    const Tensor loss = loss_of_row(c, *whole.model, alone, row);
    total += loss.item();
    autograd::backward(loss);
  }
  for (const Parameter* p : whole.model->parameters())
    for (const double g : p->tensor.grad().to_vector<double>()) norm += g * g;
  auto group = std::make_shared<comm::ThreadGroup>(2);
  test::on_threads(2, [&](int rank) {
    const auto context = Context::create();
    const auto communicator = comm::make_threads_communicator(group, rank, {});
    const comm::Mesh mesh(*communicator);
    const Loaded loaded = load(source);
    comm::ShardedModel sharded(*loaded.model, mesh, comm::shard_spec("full"), context);
    sharded.load(loaded.source);
    sharded.begin_micro_batch(true, true);
    const Tensor loss = loss_of_row(c, *loaded.model, context, rank);
    autograd::backward(loss);
    sharded.end_micro_batch();
    const Tensor totals = Tensor::from(context, {0.0, loss.item()}, DType::F64);
    sharded.sum_totals(totals);
    const std::vector<double> sums = totals.to_vector<double>();
    CHECK(std::abs(sums[0] - norm) < 1e-4 * norm);
    CHECK(std::abs(sums[1] - total) < 1e-4);
  });
}

void check(const Case& c) {
  const test::TempDir dir;
  test::write_model(c, dir);
  const std::shared_ptr<const io::ModelSource> source = io::open_model(dir.path());
  const Loaded loaded = load(source);
  models::LanguageModel& model = *loaded.model;

  std::string ours, theirs;
  for (const Parameter* p : model.parameters())
    ours += fmt::format("{} {}\n", p->name, p->tensor.shape());
  for (const io::HfTensor& tensor : c.tensors)
    theirs += fmt::format("{} {}\n", tensor.info.name, tensor.info.shape);
  CHECK(ours == theirs);

  {
    const auto context = Context::create();
    materialize(model, context, DType::F64, loaded.source);
    const Tensor tokens = c.ids(context, "tokens"), targets = c.ids(context, "targets");
    check_close(values_of<double>(model.logits(tokens)), c.json.at("logits"), 1e-5);
    const Tensor loss = model.loss(tokens, targets, 1.0 / static_cast<double>(tokens.numel()));
    CHECK(std::abs(loss.item() - c.json.at("loss").get<double>()) < 1e-6);
    autograd::backward(loss);
    check_gradients(c, model);
  }
  const Loaded again = load(source);
  const auto context = Context::create();
  const NoGradGuard no_grad(*context);
  materialize(*again.model, context, DType::F32, again.source);
  check_close(values_of<float>(again.model->logits(c.ids(context, "tokens"))), c.json.at("logits"),
              1e-4);
  check_greedy(c, *again.model, context);
  check_sharded(c, source);

  // Through config.json and back.
  const io::HfFamily& family = *io::hf_family_of(c.json.at("config"));
  const Json exported = family.config_to_hf(c.config, DType::F32);
  CHECK(family.config_from_hf(exported, "exported") == c.config);
  const models::Arch arch = models::parse_arch(c.config.dump(), "section");
  CHECK(models::to_json(models::parse_arch(models::to_json(arch), "again")) ==
        models::to_json(arch));
}

}  // namespace

TEST_CASE("every family computes what transformers does, trains, decodes and shards") {
  int families = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(test::source_path("tests/golden/families"))) {
    ++families;
    const Json file = Json::parse(io::read_file(entry.path(), std::int64_t{1} << 24));
    for (const Json& json : file.at("cases")) {
      const std::string label =
          entry.path().stem().string() + ": " + json.at("label").get<std::string>();
      CAPTURE(label);
      check(Case(json));
    }
  }
  CHECK(families + 1 == std::ssize(models::families()));  // GPT-2 has its own golden values
}
