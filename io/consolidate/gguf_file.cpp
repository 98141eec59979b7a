#include "io/consolidate/gguf_file.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/gguf/family.h"
#include "io/gguf/header.h"
#include "io/gguf/offset_source.h"
#include "io/gguf/vocabulary.h"
#include "io/gguf/writer.h"

namespace tessera::io {
namespace {

constexpr const char* kGgufWriter = "tessera.version";

// general.file_type of a file whose matrices are mostly of this type (llama.cpp, llama_ftype).
std::uint32_t file_type(const GgufElements& elements) {
  const std::map<std::string_view, std::uint32_t> types{
      {"F32", 0}, {"F16", 1}, {"Q8_0", 7}, {"BF16", 32}};
  return types.at(elements.name);
}

// Dtype and encoding of a weight in the file.
void choose_elements(ExportTensor& tensor, const GgufTensor& form,
                     const ConsolidateOptions& options) {
  require<Unsupported>(is_floating(tensor.stored),
                       "{}: tensor {} is {}, which GGUF has no place for",
                       tensor.source->path().string(), tensor.source_name, tensor.stored);
  tensor.encoding = Encoding::Plain;
  if (form.is_f32 || tensor.written == DType::F64) {
    tensor.written = DType::F32;
  } else if (options.encoding == Encoding::Q8_0) {
    const bool fits = form.shape[form.shape.size() - 1] % kQ8Elements == 0;
    tensor.encoding = fits ? Encoding::Q8_0 : Encoding::Plain;
    tensor.written = fits ? DType::F32 : DType::F16;
  }
}

// Name of the model: of its directory, or of the run of a checkpoint.
std::string model_name(const ConsolidateSource& source) {
  const fs::path path = fs::weakly_canonical(source.path);
  return (source.checkpoint ? path.parent_path().parent_path() : path).filename().string();
}

}  // namespace

ExportFile plan_gguf_file(ConsolidateSource& source, const std::vector<SideFile>& files,
                          const ConsolidateOptions& options) {
  std::map<std::string, std::string> contents;
  for (const SideFile& file : files) contents[file.name] = file.content;
  const Json config = parse_json(contents.at(kConfigFile), kConfigFile);
  const GgufFamily& family = gguf_family(config.at("model_type").get<std::string>());

  GgufKeys settings;
  const std::vector<GgufFactors> factors =
      add_gguf_settings(settings, family, config, source.warnings);
  std::vector<GgufSpec> specs;
  std::string first_data;  // of the factors, which are no tensors of the source
  for (const GgufFactors& one : factors) {
    specs.push_back({one.name,
                     {static_cast<std::int64_t>(one.values.size())},
                     &gguf_elements_of(DType::F32, Encoding::Plain)});
    first_data.append(reinterpret_cast<const char*>(one.values.data()), 4 * one.values.size());
    first_data.resize((first_data.size() + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment);
  }

  std::vector<const ExportTensor*> written;
  std::map<const GgufElements*, std::int64_t> elements;  // of matrices by type
  auto offsets = std::make_unique<OffsetSource>(
      source.weights.empty() ? nullptr : source.weights.front().source);
  for (ExportTensor& tensor : source.weights) {
    const GgufTensor form = gguf_tensor(family, config, tensor.name, tensor.shape);
    choose_elements(tensor, form, options);
    if (form.offset != 0) {
      offsets->add(tensor.source_name, form.offset);
      tensor.source = offsets.get();
    }
    tensor.name = form.name;
    tensor.shape = form.shape;
    tensor.swap = form.swap;
    const GgufElements& type = gguf_elements_of(tensor.written, tensor.encoding);
    if (!form.is_f32) elements[&type] += numel(tensor.shape);
    specs.push_back({tensor.name, tensor.shape, &type});
    written.push_back(&tensor);
  }
  source.sources.push_back(std::move(offsets));
  require<Unsupported>(
      config.value("tie_word_embeddings", true) ||
          std::ranges::find(specs, std::string("output.weight"), &GgufSpec::name) != specs.end(),
      "{} has no head, for which programs that read GGUF would take the embedding",
      source.path.string());

  const GgufElements* most = &gguf_elements_of(DType::F32, Encoding::Plain);
  for (const auto& [type, count] : elements)
    if (count > elements[most]) most = type;
  GgufKeys keys;
  keys.add("general.architecture", family.arch);
  keys.add("general.type", "model");
  keys.add("general.name", model_name(source));
  keys.add("general.file_type", file_type(*most));
  keys.add("general.quantization_version", std::uint32_t{2});
  keys.add(kGgufWriter, TESSERA_VERSION);
  keys.append(settings);
  add_gguf_vocabulary(keys, contents, config, source.warnings);

  GgufPlan plan = plan_gguf(keys, specs);
  ExportFile file;
  file.name = kGgufFile;
  file.preamble = std::move(plan.preamble) + first_data;
  file.size = plan.file_size;
  for (std::size_t i = 0; i < written.size(); ++i)
    file.add(*written[i], plan.begins[factors.size() + i]);
  return file;
}

bool is_gguf_of_export(const fs::path& file) {
  try {
    return read_gguf_header(File::open(file)).keys.contains(kGgufWriter);
  } catch (const Error&) {
    return false;
  }
}

}  // namespace tessera::io
