#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/consolidate/consolidate.h"
#include "io/gguf/header.h"
#include "io/gguf/writer.h"
#include "io/hf/model_source.h"
#include "io/pump/chunk_sums.h"
#include "io/pump/layout.h"
#include "io/pump/write_files.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const fs::path kFixtures = source_path("tests/io/gguf/fixtures");

/// Elements of a tensor of a GGUF file.
std::vector<float> values_of(const fs::path& path, const std::string& name) {
  const File file = File::open(path);
  const GgufHeader header = read_gguf_header(file);
  const auto entry = std::ranges::find(header.tensors, name, &GgufEntry::name);
  REQUIRE(entry != header.tensors.end());
  std::vector<char> bytes(static_cast<std::size_t>(entry->end - entry->begin));
  file.read(entry->begin, bytes.data(), bytes.size());
  std::vector<float> values(static_cast<std::size_t>(numel(entry->shape)));
  if (entry->elements->encoding == Encoding::Q8_0)
    decode_q8_0(bytes.data(), numel(entry->shape), values.data());
  else
    convert_elements(*entry->elements->dtype, bytes.data(), DType::F32, values.data(),
                     numel(entry->shape));
  return values;
}

std::string type_in(const fs::path& path, const std::string& name) {
  const GgufHeader header = read_gguf_header(File::open(path));
  const auto entry = std::ranges::find(header.tensors, name, &GgufEntry::name);
  REQUIRE(entry != header.tensors.end());
  return std::string(entry->elements->name);
}

ConsolidateOptions gguf_options(std::optional<DType> dtype = {},
                                Encoding encoding = Encoding::Plain) {
  ConsolidateOptions options;
  options.format = ExportFormat::GGUF;
  options.dtype = dtype;
  options.encoding = encoding;
  return options;
}

/// The fixture llama.gguf with further keys. Data stays a multiple of 32 bytes.
std::string llama_with(GgufKeys keys) {
  keys.add("pad", std::string(31 - (keys.bytes().size() + 22) % 32, ' '));
  std::string text = read_text(kFixtures / "llama.gguf");
  std::uint64_t count = 0;
  std::memcpy(&count, text.data() + 16, sizeof(count));
  count += keys.count();
  std::memcpy(text.data() + 16, &count, sizeof(count));
  return text.insert(24, keys.bytes());
}

struct Gpt2 {
  TempDir dir;
  SampleModel model = make_sample_model();
  fs::path run = dir.path() / "run", out = dir.path() / "out";
  explicit Gpt2(int world_size) {
    save(model, run / "checkpoints",
         {.world_size = world_size, .trainer_json = R"({"step": 7})", .chunk_bytes = 64});
  }
};

TEST_CASE("a checkpoint of several ranks becomes GGUF, and a Hugging Face model again") {
  const Gpt2 f(3);
  ConsolidateOptions options = gguf_options();
  std::vector<std::string> warnings;
  options.warn = [&](const std::string& text) { warnings.push_back(text); };
  consolidate(f.run, f.out, options);
  const fs::path file = f.out / "model.gguf";
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("no tokenizer.json") != std::string::npos);
  const auto& embedding = f.model.at("wte.weight");
  CHECK(values_of(file, "token_embd.weight") == embedding.weight);
  const auto& qkv = f.model.at("h.0.attn.c_attn.weight");
  const std::vector<float> stored = values_of(file, "blk.0.attn_qkv.weight");
  const auto in = static_cast<std::size_t>(qkv.shape[0]);
  const auto out = static_cast<std::size_t>(qkv.shape[1]);
  for (std::size_t i = 0; i < in; ++i)
    for (std::size_t j = 0; j < out; ++j) REQUIRE(stored[j * in + i] == qkv.weight[i * out + j]);
  const GgufHeader header = read_gguf_header(File::open(file));
  CHECK(header.keys.at("general.architecture") == "gpt2");
  CHECK(header.keys.at("gpt2.embedding_length") == embedding.shape[1]);
  CHECK(header.keys.at("general.name") == "run");

  CHECK_THROWS_HOLDING(Unsupported, "give it with --config",
                       consolidate(file, f.dir.path() / "back"));
  consolidate(f.run, f.dir.path() / "hf");
  ConsolidateOptions back;
  back.config_file = f.dir.path() / "hf/config.json";
  consolidate(file, f.dir.path() / "back", back);
  CHECK(read_text(f.dir.path() / "back/model.safetensors") ==
        read_text(f.dir.path() / "hf/model.safetensors"));
}

TEST_CASE("an export to GGUF replaces an export only") {
  const Gpt2 f(1);
  ConsolidateOptions options = gguf_options(DType::BF16);
  consolidate(f.run, f.out, options);
  CHECK(type_in(f.out / "model.gguf", "token_embd.weight") == "BF16");
  CHECK(type_in(f.out / "model.gguf", "position_embd.weight") == "F32");
  CHECK(type_in(f.out / "model.gguf", "blk.0.attn_qkv.bias") == "F32");
  CHECK_THROWS_HOLDING(InvalidArgument, "exists already", consolidate(f.run, f.out, options));
  options.overwrite = true;
  consolidate(f.run, f.out, options);
  fs::copy_file(kFixtures / "llama.gguf", f.out / "model.gguf",
                fs::copy_options::overwrite_existing);
  CHECK_THROWS_HOLDING(InvalidArgument, "does not name tessera as its writer",
                       consolidate(f.run, f.out, options));
}

TEST_CASE("a Llama's rows of queries and keys are those of the gguf package") {
  const TempDir dir;
  const SafetensorsReader expected(kFixtures / "dequantized.safetensors.golden");
  for (const Encoding encoding : {Encoding::Plain, Encoding::Q8_0}) {
    const fs::path out = dir.path() / (encoding == Encoding::Plain ? "plain" : "q8");
    consolidate(kFixtures / "llama", out, gguf_options({}, encoding));
    const fs::path ours = out / "model.gguf";
    int equal = 0;
    for (const GgufEntry& entry : read_gguf_header(File::open(kFixtures / "llama.gguf")).tensors) {
      if (type_in(ours, entry.name) != entry.elements->name) continue;
      ++equal;
      CHECK_MESSAGE(values_of(ours, entry.name) == values_of(kFixtures / "llama.gguf", entry.name),
                    entry.name);
    }
    CHECK(equal == (encoding == Encoding::Plain ? 3 : 6));  // norms, and matrices in q8_0
    const Json keys = read_gguf_header(File::open(ours)).keys;
    CHECK(keys["llama.rope.dimension_count"] == 8);
    CHECK(keys["llama.attention.head_count_kv"] == 2);
    CHECK(keys["general.file_type"] == (encoding == Encoding::Plain ? 0 : 7));
  }
}

TEST_CASE("a GGUF file of q8_0, f16, bf16 and f32 becomes a Hugging Face model") {
  const TempDir dir;
  ConsolidateOptions options;
  options.dtype = DType::F32;
  consolidate(kFixtures / "llama.gguf", dir.path() / "hf", options);
  const SafetensorsReader ours(dir.path() / "hf/model.safetensors");
  const SafetensorsReader expected(kFixtures / "dequantized.safetensors.golden");
  CHECK(ours.header().tensors.size() == expected.header().tensors.size());
  for (const SafetensorsEntry& entry : expected.header().tensors) {
    const auto n = static_cast<std::size_t>(numel(entry.shape));
    std::vector<float> a(n), b(n);
    expected.read(entry.name, 0, numel(entry.shape), a.data(), DType::F32);
    ours.read(entry.name, 0, numel(entry.shape), b.data(), DType::F32);
    CHECK_MESSAGE(a == b, entry.name);
  }
  const Json config = Json::parse(read_text(dir.path() / "hf/config.json"));
  const Json original = Json::parse(read_text(kFixtures / "llama/config.json"));
  for (const char* key : {"vocab_size", "hidden_size", "head_dim", "rms_norm_eps",
                          "num_key_value_heads", "tie_word_embeddings", "bos_token_id",
                          "eos_token_id", "attention_bias", "mlp_bias", "hidden_act"})
    CHECK_MESSAGE(config.at(key) == original.at(key), key);
  CHECK(config["rope_parameters"] == original["rope_parameters"]);
  const Json tokenizer = Json::parse(read_text(dir.path() / "hf/tokenizer.json"));
  CHECK(tokenizer["model"]["merges"] == Json::parse("[[\"a\",\"b\"],[\"\xe2\x96\x81\",\"a\"]]"));
  CHECK(tokenizer["model"]["vocab"]["ab"] == 7);
  CHECK(tokenizer["added_tokens"].size() == 3);
  CHECK(read_text(dir.path() / "hf/chat_template.jinja") == "{{ messages[0]['content'] }}");
}

TEST_CASE("positions scaled by a factor alone, or by the older key, are linear") {
  const TempDir dir;
  int runs = 0;
  const auto rope_of = [&](const GgufKeys& keys) {
    const fs::path file = dir.path() / "x.gguf", out = dir.path() / std::to_string(runs++);
    std::ofstream(file, std::ios::binary) << llama_with(keys);
    consolidate(file, out);
    const Json config = Json::parse(read_text(out / "config.json"));
    const Json& scaling = config["rope_scaling"];
    if (scaling.is_null()) return 0.0;
    CHECK(scaling["rope_type"] == "linear");
    return scaling["factor"].get<double>();
  };
  GgufKeys factor, older, both, zero, none, negative;
  factor.add("llama.rope.scaling.factor", 4.0F);
  CHECK(rope_of(factor) == 4);
  older.add("llama.rope.scale_linear", 2.5F);
  CHECK(rope_of(older) == 2.5);
  both.append(factor);
  both.append(older);
  CHECK(rope_of(both) == 4);
  zero.add("llama.rope.scale_linear", 0.0F);
  CHECK(rope_of(zero) == 0);
  none.append(factor);
  none.add("llama.rope.scaling.type", "none");
  CHECK(rope_of(none) == 0);
  negative.add("llama.rope.scaling.factor", -1.0F);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "llama.rope.scaling.factor is -1", rope_of(negative));
}

TEST_CASE("GGUF refuses what it has no place for, by name") {
  const TempDir dir;
  const fs::path source = dir.path() / "source", out = dir.path() / "out";
  fs::copy(kFixtures / "llama", source);
  const Json original = Json::parse(read_text(source / "config.json"));
  const auto set = [&](const Json& changes) {
    Json config = original;
    for (const auto& change : changes.items()) config[change.key()] = change.value();
    std::ofstream(source / "config.json") << config;
  };
  set({{"model_type", "smollm3"}, {"no_rope_layers", {1}}});
  CHECK_THROWS_HOLDING(Unsupported, "model_type smollm3", consolidate(source, out, gguf_options()));
  set({{"model_type", "other"}});
  CHECK_THROWS_HOLDING(Unsupported, "\"other\"", consolidate(source, out, gguf_options()));
  set({{"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}}},
       {"rope_parameters", {{"rope_type", "dynamic"}, {"factor", 2.0}, {"rope_theta", 1e4}}}});
  CHECK_THROWS_HOLDING(Unsupported, "rotary scaling dynamic",
                       consolidate(source, out, gguf_options()));
  set({});
  ConsolidateOptions options = gguf_options(DType::F32, Encoding::Q8_0);
  CHECK_THROWS_HOLDING(InvalidArgument, "q8_0", consolidate(source, out, options));
  options = gguf_options();
  options.what = ExportWhat::All;
  CHECK_THROWS_HOLDING(InvalidArgument, "--format safetensors", consolidate(source, out, options));

  // Another quantization: the type of the first tensor in Q8_0 becomes Q4_0 of half as many bytes.
  std::string text = read_text(kFixtures / "llama.gguf");
  const std::size_t at = text.find("token_embd.weight") + 17 + 4 + 16;
  text[at] = 2;
  std::ofstream(dir.path() / "q4.gguf", std::ios::binary) << text;
  CHECK_THROWS_HOLDING(Unsupported, "token_embd.weight is quantized as Q4_0",
                       consolidate(dir.path() / "q4.gguf", out));
  CHECK_FALSE(fs::exists(out));
}

TEST_CASE("a value beyond f16 is an error with the tensor's name") {
  Gpt2 f(1);
  f.model.tensors[0].weight[5] = 70'000;
  fs::remove_all(f.run);
  save(f.model, f.run / "checkpoints", {.trainer_json = R"({"step": 7})"});
  ConsolidateOptions options;
  options.dtype = DType::F16;
  CHECK_THROWS_HOLDING(InvalidArgument, f.model.tensors[0].name + " has values beyond 65504",
                       consolidate(f.run, f.out, options));
  CHECK_FALSE(fs::exists(f.out));
  options.dtype = DType::BF16;
  consolidate(f.run, f.out, options);
}

/// One f32 tensor in a file, in chunks with checksums.
class FileSource final : public TensorSource {
 public:
  FileSource(fs::path dir, Shape shape) : dir_(std::move(dir)) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    values.resize(static_cast<std::size_t>(numel(shape)));
    for (float& value : values) value = normal(random);
    std::ofstream(dir_ / "t.bin", std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(4 * values.size()));
    record_ = std::make_shared<TensorRecord>(TensorRecord{DType::F32, shape, {}});
    for (std::int64_t begin = 0; begin < numel(shape); begin += kChunk) {
      Chunk& chunk = record_->chunks.emplace_back();
      chunk.file = "t.bin";
      chunk.begin = begin;
      chunk.end = std::min(begin + kChunk, numel(shape));
      chunk.byte_begin = 4 * begin;
      chunk.byte_end = 4 * chunk.end;
      chunk.crc64 = checksum_of(Checksum::Crc64, values.data() + begin,
                                static_cast<std::size_t>(4 * (chunk.end - begin)));
    }
  }
  const fs::path& path() const override { return dir_; }
  const std::vector<TensorInfo>& tensors() const override { return none_; }
  std::shared_ptr<const TensorRecord> record(const std::string&) const override { return record_; }
  std::vector<float> values;

 private:
  static constexpr std::int64_t kChunk = 10'007;
  fs::path dir_;
  std::vector<TensorInfo> none_;
  std::shared_ptr<TensorRecord> record_;
};

TEST_CASE("swaps and q8_0 do not depend on the size of blocks, and verify checksums") {
  const TempDir dir;
  const Shape shape{6 * 8, 2048};  // heads of 8 rows
  FileSource source(dir.path(), shape);
  struct Case {
    std::optional<Swap> swap;
    Encoding encoding;
  };
  for (const Case& c :
       {Case{Swap{2, 4, 2048}, Encoding::Plain}, Case{Swap{48, 2048, 1}, Encoding::Plain},
        Case{{}, Encoding::Q8_0}, Case{Swap{2, 4, 2048}, Encoding::Q8_0}}) {
    std::vector<float> order = source.values;
    if (c.swap) {
      const auto [rows, columns, inner] = *c.swap;
      const std::int64_t matrix = rows * columns * inner;
      for (std::int64_t i = 0; i < numel(shape); ++i) {
        const std::int64_t k = i % inner, column = i / inner % columns;
        const std::int64_t row = i / inner / columns % rows;
        order[static_cast<std::size_t>(i / matrix * matrix + (column * rows + row) * inner + k)] =
            source.values[static_cast<std::size_t>(i)];
      }
    }
    const bool encodes = c.encoding == Encoding::Q8_0;
    std::string expected(32, '#');
    expected.resize(64, '\0');  // the gap before the part
    const std::size_t bytes = encodes ? order.size() / kQ8Elements * kQ8Bytes : 4 * order.size();
    expected.resize(64 + bytes);
    if (encodes)
      REQUIRE(encode_q8_0(order.data(), numel(shape), expected.data() + 64));
    else
      std::memcpy(expected.data() + 64, order.data(), bytes);
    for (const std::int64_t memory :
         {std::int64_t{1}, std::int64_t{1} << 20, std::int64_t{1} << 26}) {
      OutputFile file{
          "out.bin", std::string(32, '#'), static_cast<std::int64_t>(expected.size()), {}};
      OutputPart& part =
          file.parts.emplace_back(OutputPart{&source, "t", 0, numel(shape), DType::F32, 64});
      part.swap = c.swap;
      part.encoding = c.encoding;
      std::vector<OutputFile> files{file};
      CHECK(write_files(dir.path(), files, {0}, {.memory = memory, .jobs = 3}));
      CHECK(read_text(dir.path() / "out.bin") == expected);
    }
  }
  const_cast<TensorRecord&>(*source.record("t")).chunks[3].crc64 ^= 1;
  OutputFile file{"out.bin", "", 4 * numel(shape), {}};
  file.parts.emplace_back(OutputPart{&source, "t", 0, numel(shape), DType::F32, 0}).swap =
      Swap{48, 2048, 1};
  std::vector<OutputFile> files{file};
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "checksum is wrong",
                       write_files(dir.path(), files, {0}, {.memory = 1, .jobs = 2}));
}

TEST_CASE("q8_0 rounds halves away from zero and refuses what has no scale") {
  std::vector<float> values(32, 0);
  values[0] = 127;
  values[1] = 2.5F;
  values[2] = -2.5F;
  values[3] = 0.49999997F;
  std::vector<char> block(kQ8Bytes);
  REQUIRE(encode_q8_0(values.data(), 32, block.data()));
  std::vector<float> back(32);
  decode_q8_0(block.data(), 32, back.data());
  CHECK(back[0] == 127);
  CHECK(back[1] == 3);
  CHECK(back[2] == -3);
  CHECK(back[3] == 0);
  for (const float bad : {1e9F, INFINITY, std::nanf("")}) {
    values[4] = bad;
    CHECK_FALSE(encode_q8_0(values.data(), 32, block.data()));
  }
}

}  // namespace
}  // namespace tessera::io
