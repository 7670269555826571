// safetensors: eight bytes with the length of a header, the header in JSON, then the numbers.
// https://github.com/huggingface/safetensors
#include <kf/cpu.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <set>
#include <utility>

#include "files.h"

namespace gpt2 {
namespace {

using kf::DType;
namespace cpu = kf::cpu;

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kWeights = "model.safetensors";

struct Stored {
  DType dtype;
  std::vector<int64_t> shape;
  const std::byte* data;
  fs::path path;  // of its file
};

std::string text_of(const std::vector<int64_t>& shape) { return Json(shape).dump(); }

int64_t numel(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

// Reads a file into memory; `begin` is where its numbers do.
class File {
  Memory memory_;

 public:
  const fs::path& path;
  size_t size;
  Json header;
  const std::byte* numbers;

  explicit File(const fs::path& path) : memory_(size_of(path)), path(path), size(size_of(path)) {
    std::ifstream file(path, std::ios::binary);
    uint64_t length = 0;
    if (size < sizeof length) fail("it has " + std::to_string(size) + " bytes");
    // The numbers shall lie at a multiple of 64 bytes, as kernels read them: the header is read apart.
    file.read(reinterpret_cast<char*>(&length), sizeof length);
    if (length > size - sizeof length) fail("its header would have " + std::to_string(length) + " bytes");
    std::string text(length, ' ');
    file.read(text.data(), static_cast<std::streamsize>(length));
    header = Json::parse(text, nullptr, false);
    if (!header.is_object()) fail("its header is no JSON");
    size -= sizeof length + length;
    file.read(reinterpret_cast<char*>(memory_.data()), static_cast<std::streamsize>(size));
    if (!file) fail("it cannot be read to its end");
    numbers = memory_.data();
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(path.string() + ": no whole safetensors file: " + why);
  }

  static size_t size_of(const fs::path& path) {
    std::error_code error;
    const auto size = fs::file_size(path, error);
    if (error) throw Error(path.string() + (fs::exists(path) ? " cannot be read" : " is missing"));
    return size;
  }

  Stored tensor(const std::string& name, const Json& entry) const {
    static const std::map<std::string, DType> kTypes{
        {"F32", DType::kFloat32}, {"F16", DType::kFloat16}, {"BF16", DType::kBFloat16}, {"F64", DType::kFloat64}};
    try {
      const auto type = kTypes.find(entry.at("dtype").get<std::string>());
      if (type == kTypes.end()) {
        throw Error(path.string() + ": `" + name + "` must be of a floating type, got " + entry.at("dtype").dump());
      }
      const auto shape = entry.at("shape").get<std::vector<int64_t>>();
      const auto offsets = entry.at("data_offsets").get<std::pair<uint64_t, uint64_t>>();
      if (offsets.second > size || offsets.first > offsets.second) {
        fail("`" + name + "` would end at byte " + std::to_string(offsets.second) + " of " + std::to_string(size));
      }
      const auto bytes = static_cast<int64_t>(offsets.second - offsets.first);
      double wanted = static_cast<double>(kf::size_of(type->second));  // whatever the file says, this does not overflow
      for (const int64_t n : shape) wanted *= n < 0 ? -1.0 : static_cast<double>(n);
      if (wanted != static_cast<double>(bytes)) {
        fail("`" + name + "` of shape " + text_of(shape) + " has " + std::to_string(bytes) + " bytes");
      }
      return {type->second, shape, numbers + offsets.first, path};
    } catch (const Json::exception&) {
      fail("its header does not describe `" + name + "`");
    }
  }

  Memory release() { return std::move(memory_); }
};

// The numbers of a tensor as `to` wants them: another dtype, or another place for them.
Memory converted(const Stored& from, DType to) {
  const int64_t n = numel(from.shape);
  Memory memory(static_cast<size_t>(n * kf::size_of(to)));
  cpu::with_type(from.dtype, [&](auto from_type) {
    cpu::with_type(to, [&](auto to_type) {
      using From = typename decltype(from_type)::element;
      using To = typename decltype(to_type)::element;
      using C = std::conditional_t<std::is_same_v<To, double>, double, float>;
      for (int64_t i = 0; i < n; ++i) {  // by memcpy: in a file, a number may lie at any byte
        From value;
        std::memcpy(&value, from.data + i * static_cast<int64_t>(sizeof value), sizeof value);
        const To result = static_cast<To>(static_cast<C>(value));
        std::memcpy(memory.data() + i * static_cast<int64_t>(sizeof result), &result, sizeof result);
      }
    });
  });
  return memory;
}

// The safetensors files of a folder: one, or those that an index names.
std::set<fs::path> weight_files(const fs::path& folder) {
  if (fs::exists(folder / kWeights) || !fs::exists(folder / kIndex)) return {folder / kWeights};
  const Json index = read_json(folder / kIndex);
  std::set<fs::path> paths;
  const Json files = index.value("weight_map", Json());
  for (const Json& name : files) {
    if (name.is_string()) paths.insert(folder / name.get<std::string>());
  }
  if (paths.empty()) {
    throw Error((folder / kIndex).string() + ": `weight_map` must give each tensor the name of its file");
  }
  return paths;
}

bool is_buffer(const std::string& name) {  // old files store the causal mask too
  const auto ends = [&](const std::string& end) {
    return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
  };
  return ends(".attn.bias") || ends(".attn.masked_bias");
}

}  // namespace

Memory::Memory(size_t size) {
  constexpr size_t kPage = size_t{1} << 21;
  const size_t unit = size >= kPage ? kPage : 64;
  const size_t whole = (size + unit - 1) / unit * unit;
  bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(unit, std::max(whole, unit))));
  if (bytes_ == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (unit == kPage) madvise(bytes_.get(), whole, MADV_HUGEPAGE);
#endif
}

void Memory::Free::operator()(void* p) const { std::free(p); }

std::map<std::string, std::vector<int64_t>> shapes(const Config& config) {
  const int64_t width = config.n_embd, inner = config.n_inner;
  std::map<std::string, std::vector<int64_t>> all{{"wte.weight", {config.vocab_size, width}},
                                                  {"wpe.weight", {config.n_positions, width}},
                                                  {"ln_f.weight", {width}},
                                                  {"ln_f.bias", {width}}};
  for (int64_t layer = 0; layer < config.n_layer; ++layer) {
    const std::string of = "h." + std::to_string(layer) + ".";
    for (const char* norm : {"ln_1", "ln_2"}) all[of + norm + ".weight"] = all[of + norm + ".bias"] = {width};
    const auto add = [&](const std::string& name, int64_t in, int64_t out) {
      all[of + name + ".weight"] = {in, out};
      all[of + name + ".bias"] = {out};
    };
    add("attn.c_attn", width, 3 * width);
    add("attn.c_proj", width, width);
    add("mlp.c_fc", width, inner);
    add("mlp.c_proj", inner, width);
  }
  return all;
}

Weights::Weights(const fs::path& folder, const Config& config) {
  std::map<std::string, Stored> stored;
  const auto expected = shapes(config);
  for (const fs::path& path : weight_files(folder)) {
    File file(path);
    for (const auto& [name, entry] : file.header.items()) {
      if (name == "__metadata__") continue;
      const std::string prefix = "transformer.";
      const std::string key = name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
      if (is_buffer(key)) continue;
      if (key != "lm_head.weight" && expected.count(key) == 0) {
        throw Error(path.string() + ": the model has no place for the tensor `" + key + "`");
      }
      if (!stored.emplace(key, file.tensor(name, entry)).second) {
        throw Error(path.string() + ": the tensor `" + key + "` is there twice");
      }
    }
    memory_.push_back(file.release());
  }
  for (const auto& [name, shape] : expected) {
    const auto found = stored.find(name);
    if (found == stored.end()) throw Error(folder.string() + ": the tensor `" + name + "` is missing");
    if (found->second.shape != shape) {
      throw Error(found->second.path.string() + ": `" + name + "` must have shape " + text_of(shape) + ", got " +
                  text_of(found->second.shape));
    }
  }
  const Stored& table = stored.at("wte.weight");
  const auto head = stored.find("lm_head.weight");
  if (head != stored.end() && (head->second.dtype != table.dtype || head->second.shape != table.shape ||
                               std::memcmp(head->second.data, table.data,
                                           static_cast<size_t>(numel(table.shape) * kf::size_of(table.dtype))) != 0)) {
    throw Error(head->second.path.string() + ": `lm_head.weight` must equal `wte.weight`, the head is tied to it");
  }
  dtype = table.dtype;
  for (const auto& [name, shape] : expected) {
    const Stored& one = stored.at(name);
    const bool as_it_lies = one.dtype == dtype && reinterpret_cast<uintptr_t>(one.data) % 16 == 0;
    if (!as_it_lies) memory_.push_back(converted(one, dtype));
    tensors_[name] = as_it_lies ? one.data : memory_.back().data();
    sizes[name] = static_cast<size_t>(numel(shape) * kf::size_of(dtype));
  }
}

}  // namespace gpt2
