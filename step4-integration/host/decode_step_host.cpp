// decode_step: checks, allocation, dispatch.
#include "host/decode_step_host.h"

#include <ATen/ops/empty.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/decode_step_cpu.h"
#include "host/integration_host.h"
#include "kernels/decode_step/packed.h"
#include "kernels/decode_step/shared_buffer.h"

namespace kf::step4 {
namespace {

using kf::decode_step::CacheStrides;
using kf::decode_step::kMostRows;
using kf::decode_step::kOfLayer;
using kf::decode_step::Layer;
using kf::decode_step::State;
using kf::decode_step::Wanted;

constexpr int64_t kStateBytes = sizeof(State);

Op<kf::decode_step::Args> decode_step_op() {
  return {"decode_step",
          cpu::decode_step,
          emulated::decode_step::rungs(),
          gpu::decode_step::rungs(),
          kf::decode_step::automatic,
          "what lies between products"};
}

// Read, or written, where it lies at every token: it is not copied.
void check_whole(const char* op, const std::string& name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.is_contiguous(), op, ": `", name, "` must be contiguous");
}

void check_cache(const char* name, const at::Tensor& cache) {
  TORCH_CHECK_VALUE(cache.stride(4) == 1 || cache.size(4) == 1, "decode_step: `", name,
                    "` must have stride 1 along its last dimension, got ", cache.stride(4));
  for (int64_t dim = 0; dim < 4; ++dim) {
    TORCH_CHECK_VALUE(cache.stride(dim) != 0 || cache.size(dim) <= 1, "decode_step: `", name,
                      "` must not be an expanded tensor: dimension ", dim, " has stride 0");
  }
}

void check_row(const char* name, const at::Tensor& t, at::ScalarType type, const at::Tensor& token_weight,
               int64_t batch) {
  check_type("decode_step", name, t, type);
  check_device("decode_step", name, t, "token_weight", token_weight);
  check_shape("decode_step", name, t, {batch});
  check_whole("decode_step", name, t);
}

// CPU tensors only: a GPU gives NaN.
void check_places(const at::Tensor& ids, const at::Tensor& end, const at::Tensor& begin, int64_t vocab,
                  int64_t positions, int64_t capacity) {
  for (int64_t b = 0; b < ids.numel(); ++b) {
    const int64_t id = ids.const_data_ptr<int64_t>()[b];
    const int64_t last = end.const_data_ptr<int32_t>()[b], first = begin.const_data_ptr<int32_t>()[b];
    TORCH_CHECK_VALUE(id >= 0 && id < vocab, "decode_step: `ids` must be from 0 to ", vocab - 1,
                      ", the rows of `token_weight`, got ", id, " at ", b);
    TORCH_CHECK_VALUE(first >= 0 && first <= last, "decode_step: `begin` must be from 0 to `end` (", last, "), got ",
                      first, " at ", b);
    TORCH_CHECK_VALUE(last < capacity, "decode_step: `end` (", last, " at ", b, ") has reached the caches' capacity, ",
                      capacity);
    TORCH_CHECK_VALUE(last - first < positions, "decode_step: `end` − `begin` (", last - first, " at ", b,
                      ") has reached the ", positions, " rows of `position_weight`");
  }
}

// Each of `weights` by the name that GPT-2 gives it, and its shape. `own`: the width of the heads together.
void check_weights(const char* op, at::TensorList weights, const at::Tensor& token_weight, int64_t layers,
                   int64_t width, int64_t own, int64_t inner) {
  const std::vector<int64_t> of_width{width};
  const std::array<std::vector<int64_t>, kOfLayer> shapes{{of_width,
                                                           of_width,
                                                           {width, 3 * own},
                                                           {3 * own},
                                                           {own, width},
                                                           of_width,
                                                           of_width,
                                                           of_width,
                                                           {width, inner},
                                                           {inner},
                                                           {inner, width},
                                                           of_width}};
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string name = "weights[" + std::to_string(i) + "]";
    const bool of_layer = static_cast<int64_t>(i) < layers * kOfLayer;
    check_like(op, name.c_str(), weights[i], "token_weight", token_weight, of_layer ? shapes[i % kOfLayer] : of_width);
    check_whole(op, name, weights[i]);
  }
}

std::vector<Layer> layers_of(at::TensorList weights) {
  std::vector<Layer> layers;
  for (size_t i = 0; i + kOfLayer < weights.size(); i += kOfLayer) {
    const at::Tensor* w = &weights[i];
    layers.push_back({w[0].data_ptr(), w[1].data_ptr(), w[2].data_ptr(), w[3].data_ptr(), w[4].data_ptr(),
                      w[5].data_ptr(), w[6].data_ptr(), w[7].data_ptr(), w[8].data_ptr(), w[9].data_ptr(),
                      w[10].data_ptr(), w[11].data_ptr()});
  }
  return layers;
}

// The model's part of the arguments, with `layers` by `layers_of`, which they point to.
kf::decode_step::Args args_of(const at::Tensor& token_weight, at::TensorList weights,
                              const std::vector<Layer>& layers) {
  kf::decode_step::Args args{};
  args.token_weight = token_weight.data_ptr();
  args.weights = layers.data();
  args.ln_weight = weights[weights.size() - 2].data_ptr();
  args.ln_bias = weights[weights.size() - 1].data_ptr();
  args.layers = static_cast<int64_t>(layers.size());
  args.width = token_weight.size(1);
  args.inner = weights[9].numel();
  args.vocab = token_weight.size(0);
  args.dtype = dtype_of(token_weight);
  return args;
}

void check_packed(const char* op, const at::Tensor& packed, const at::Tensor& token_weight) {
  check_type(op, "packed", packed, at::kByte);
  check_device(op, "packed", packed, "token_weight", token_weight);
  check_dim(op, "packed", packed, 1);
  check_whole(op, "packed", packed);
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 16 == 0, op,
                    ": `packed` must begin at a multiple of 16 bytes");
  TORCH_CHECK_VALUE(packed.numel() >= kStateBytes, op, ": `packed` must be what `decode_pack` gives, got ",
                    packed.numel(), " bytes");
}

// Of workers that share a model; that of one that has the whole has no `peers`.
kf::decode_step::Workers workers_of(const at::Tensor& token_weight, const std::optional<at::Tensor>& buffer,
                                    at::IntArrayRef peers, int64_t rank, at::IntArrayRef words, double patience) {
  kf::decode_step::Workers workers;
  const auto count = static_cast<int64_t>(peers.size());
  if (count == 0) {
    TORCH_CHECK_VALUE(!buffer.has_value(), "decode_step: `peers` must be given where `buffer` is");
    return workers;
  }
  TORCH_CHECK_VALUE(count <= kf::decode_step::kMostWorkers, "decode_step: `peers` must be at most ",
                    kf::decode_step::kMostWorkers, " addresses, got ", count);
  TORCH_CHECK_VALUE(buffer.has_value(), "decode_step: `buffer` must be given where `peers` are");
  const int64_t width = token_weight.size(1);
  check_peers("decode_step", *buffer, peers, rank, "token_weight", token_weight, width, decode_step_bytes(width, count),
              patience);
  const bool fit = static_cast<int64_t>(words.size()) == count + 1 && words[0] == 0 &&
                   words[rank + 1] - words[rank] == token_weight.size(0);
  TORCH_CHECK_VALUE(fit,
                    "decode_step: `words` must be where each worker's tokens begin, and where the last one's end; ",
                    "those of `rank` must be the ", token_weight.size(0), " rows of `token_weight`, got ", words);
  addresses_of(peers, workers.peers);
  workers.count = static_cast<int>(count);
  workers.rank = static_cast<int>(rank);
  workers.first_token = words[rank];
  workers.tokens = words.back();
  workers.patience_ns = static_cast<int64_t>(patience * 1e9);
  return workers;
}

// Of a launch of blocks that wait for each other and have given up.
void throw_failure(const State& state) {
  const std::string said = kf::decode_step::failure(state);
  TORCH_CHECK_VALUE(state.wanted < static_cast<uint32_t>(Wanted::kLabel), "decode_step: ", said);
  TORCH_CHECK(said.empty(), "decode_step: ", said);
}

// The state of packed weights, with which the next launch begins anew.
State take_state(const at::Tensor& packed) {
  const at::Tensor bytes = packed.slice(0, 0, kStateBytes), here = bytes.to(at::kCPU);
  State state;
  std::memcpy(&state, here.const_data_ptr(), sizeof state);
  if (state.wanted != 0) bytes.slice(0, sizeof state.epoch).zero_();
  return state;
}

CacheStrides strides_of(const at::Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}; }

// What decode_pack is asked for, on the device of `token_weight`, which it makes the current one.
class Packing {
  std::string_view rung_;
  std::vector<Layer> layers_;
  void* stream_ = nullptr;
  bool on_gpu_;
#ifdef KF_WITH_CUDA
  c10::OptionalDeviceGuard guard_;
#endif

 public:
  kf::decode_step::Args args{};
  int64_t bytes = 0;
  std::string why_not;  // it cannot be done

  Packing(const at::Tensor& token_weight, at::TensorList weights, std::string_view rung, int64_t rows = 1)
      : rung_(rung), on_gpu_(token_weight.is_cuda()) {
    TORCH_CHECK_VALUE(rung == "v3_persistent" || rung == "v4_clusters",
                      "decode_pack: `rung` must be 'v3_persistent' or 'v4_clusters', got '", rung, "'");
    check_dim("decode_pack", "token_weight", token_weight, 2);
    TORCH_CHECK_VALUE(weights.size() > 2 && weights.size() % kOfLayer == 2,
                      "decode_pack: `weights` must be 12 for each layer, and 2, got ", weights.size());
    TORCH_CHECK_VALUE(token_weight.numel() > 0, "decode_pack: `token_weight` must not be empty, got shape ",
                      shape_text(token_weight));
    TORCH_CHECK_VALUE(weights[9].numel() > 0, "decode_pack: `weights[9]` must not be empty");
    const int64_t layers = static_cast<int64_t>(weights.size()) / kOfLayer, width = token_weight.size(1);
    check_weights("decode_pack", weights, token_weight, layers, width, width, weights[9].numel());
    check_whole("decode_pack", "token_weight", token_weight);
    layers_ = layers_of(weights);
    args = args_of(token_weight, weights, layers_);
    args.batch = rows;
#ifdef KF_WITH_CUDA
    if (on_gpu_) {
      guard_.reset_device(token_weight.device());
      stream_ = c10::cuda::getCurrentCUDAStream(token_weight.device().index()).stream();
      bytes = gpu::decode_step::packed_bytes(rung, args, why_not);
      return;
    }
#endif
    bytes = emulated::decode_step::packed_bytes(rung, args, why_not);
  }

  void into(const at::Tensor& packed) {
    args.packed = packed.data_ptr();
#ifdef KF_WITH_CUDA
    if (on_gpu_) return gpu::decode_step::pack_weights(rung_, args, stream_);
#endif
    emulated::decode_step::pack_weights(rung_, args, stream_);
  }
};

at::Tensor packed_by(const at::Tensor& token_weight, at::TensorList weights, std::string_view rung, at::Tensor* out) {
  Packing packing(token_weight, weights, rung);
  TORCH_CHECK_VALUE(packing.why_not.empty(), "decode_pack: rung '", rung, "' ", packing.why_not);
  if (out != nullptr) {
    check_packed("decode_pack", *out, token_weight);
    check_shape("decode_pack", "packed", *out, {packing.bytes});
  }
  const at::Tensor packed = out != nullptr ? *out : at::empty({packing.bytes}, token_weight.options().dtype(at::kByte));
  packing.into(packed);
  return packed;
}

}  // namespace

int64_t decode_step_bytes(int64_t width, int64_t workers) { return kf::decode_step::buffer_bytes(width, workers); }
int64_t decode_step_header() { return sizeof(kf::decode_step::Mail); }

at::Tensor& decode_step_out(const at::Tensor& ids, at::Tensor& end, const at::Tensor& begin,
                            const at::Tensor& token_weight, const at::Tensor& position_weight, at::TensorList weights,
                            at::Tensor& k_cache, at::Tensor& v_cache, const std::optional<at::Tensor>& packed,
                            const std::optional<at::Tensor>& buffer, at::IntArrayRef peers, int64_t rank,
                            at::IntArrayRef words, std::optional<double> scale, bool scale_by_layer, double eps,
                            std::string_view approximate, double patience, std::string_view rung, at::Tensor& logits) {
  check_floating("decode_step", "token_weight", token_weight);
  check_dim("decode_step", "token_weight", token_weight, 2);
  const int64_t vocab = token_weight.size(0), width = token_weight.size(1);
  TORCH_CHECK_VALUE(vocab > 0 && width > 0, "decode_step: `token_weight` must not be empty, got shape ",
                    shape_text(token_weight));
  check_whole("decode_step", "token_weight", token_weight);
  check_like("decode_step", "position_weight", position_weight, "token_weight", token_weight);
  check_dim("decode_step", "position_weight", position_weight, 2);
  check_shape("decode_step", "position_weight", position_weight, {position_weight.size(0), width});
  check_whole("decode_step", "position_weight", position_weight);
  check_like("decode_step", "k_cache", k_cache, "token_weight", token_weight);
  check_dim("decode_step", "k_cache", k_cache, 5);
  check_like("decode_step", "v_cache", v_cache, "token_weight", token_weight, k_cache.sizes());
  const int64_t layers = k_cache.size(0), batch = k_cache.size(1), heads = k_cache.size(2), capacity = k_cache.size(3),
                head_dim = k_cache.size(4);
  TORCH_CHECK_VALUE(layers > 0, "decode_step: `k_cache` must have at least one layer, got shape ", shape_text(k_cache));
  const kf::decode_step::Workers workers = workers_of(token_weight, buffer, peers, rank, words, patience);
  const int64_t own = heads * head_dim;
  TORCH_CHECK_VALUE(own > 0 && (own == width || (workers.count > 0 && own < width)),
                    "decode_step: `k_cache` must have heads of ", width,
                    " columns together, the width of `token_weight`, got shape ", shape_text(k_cache));
  TORCH_CHECK_VALUE(batch <= kMostRows, "decode_step: `k_cache` must have at most ", kMostRows, " rows, got ", batch);
  check_cache("k_cache", k_cache);
  check_cache("v_cache", v_cache);
  check_row("ids", ids, at::kLong, token_weight, batch);
  check_row("end", end, at::kInt, token_weight, batch);
  check_row("begin", begin, at::kInt, token_weight, batch);
  TORCH_CHECK_VALUE(static_cast<int64_t>(weights.size()) == layers * kOfLayer + 2,
                    "decode_step: `weights` must be 12 for each of the caches' ", layers,
                    " layers, and 2: ", layers * kOfLayer + 2, ", got ", weights.size());
  const int64_t inner = weights[9].numel();
  TORCH_CHECK_VALUE(inner > 0, "decode_step: `weights[9]` must not be empty");
  check_weights("decode_step", weights, token_weight, layers, width, own, inner);
  TORCH_CHECK_VALUE(!scale || std::isfinite(*scale), "decode_step: `scale` must be finite, got ", *scale);
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), "decode_step: `eps` must be finite and not negative, got ", eps);
  TORCH_CHECK_VALUE(approximate == "tanh" || approximate == "none",
                    "decode_step: `approximate` must be 'tanh' or 'none', got '", approximate, "'");
  check_out("decode_step", "logits", logits, {batch, vocab}, "token_weight", token_weight);
  const auto apart = [&](const char* name, const at::Tensor& written) {
    check_apart("decode_step", {{name, written}},
                {{"ids", ids}, {"begin", begin}, {"token_weight", token_weight}, {"position_weight", position_weight}});
    for (size_t i = 0; i < weights.size(); ++i) {
      check_apart("decode_step", {{name, written}}, {{("weights[" + std::to_string(i) + "]").c_str(), weights[i]}});
    }
  };
  apart("end", end);
  apart("k_cache", k_cache);
  apart("v_cache", v_cache);
  apart("logits", logits);
  const auto apart_from_all = [&](const char* name, const at::Tensor& written) {
    apart(name, written);
    check_apart("decode_step", {{name, written}},
                {{"k_cache", k_cache}, {"v_cache", v_cache}, {"end", end}, {"logits", logits}});
  };
  if (packed) {
    check_packed("decode_step", *packed, token_weight);
    apart_from_all("packed", *packed);
  }
  check_apart("decode_step", {{"logits", logits}, {"v_cache", v_cache}, {"k_cache", k_cache}, {"end", end}}, {});
  if (buffer) {
    apart_from_all("buffer", *buffer);
    TORCH_CHECK_VALUE(token_weight.is_cuda() || (rung != "auto" && rung != "cpu"),
                      "decode_step: `rung` must be the name of one for tensors on the CPU where `peers` are given");
  }
  check_rung(decode_step_op(), rung, token_weight);
  if (batch == 0) return logits;
  if (token_weight.is_cpu()) {
    const int64_t tokens = workers.count > 0 ? workers.tokens : vocab;
    check_places(ids, end, begin, tokens, position_weight.size(0), capacity);
  }
  const std::vector<Layer> layer_weights = layers_of(weights);
  kf::decode_step::Args args = args_of(token_weight, weights, layer_weights);
  args.ids = ids.const_data_ptr<int64_t>();
  args.end = end.data_ptr<int32_t>();
  args.begin = begin.const_data_ptr<int32_t>();
  args.position_weight = position_weight.data_ptr();
  args.k_cache = k_cache.data_ptr();
  args.v_cache = v_cache.data_ptr();
  args.k_stride = strides_of(k_cache);
  args.v_stride = strides_of(v_cache);
  args.logits = logits.data_ptr();
  args.batch = batch;
  args.heads = heads;
  args.head_dim = head_dim;
  args.capacity = capacity;
  args.positions = position_weight.size(0);
  args.scale = scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
  args.scale_by_layer = scale_by_layer;
  args.eps = eps;
  args.tanh = approximate == "tanh";
  if (packed) {
    args.packed = packed->data_ptr();
    args.packed_bytes = packed->numel();
  }
  args.workers = workers;
  run(decode_step_op(), rung, token_weight, args);
  if (packed && packed->is_cpu()) throw_failure(take_state(*packed));
  return logits;
}

at::Tensor decode_step(const at::Tensor& ids, at::Tensor& end, const at::Tensor& begin, const at::Tensor& token_weight,
                       const at::Tensor& position_weight, at::TensorList weights, at::Tensor& k_cache,
                       at::Tensor& v_cache, const std::optional<at::Tensor>& packed,
                       const std::optional<at::Tensor>& buffer, at::IntArrayRef peers, int64_t rank,
                       at::IntArrayRef words, std::optional<double> scale, bool scale_by_layer, double eps,
                       std::string_view approximate, double patience, std::string_view rung) {
  check_dim("decode_step", "token_weight", token_weight, 2);
  check_dim("decode_step", "k_cache", k_cache, 5);
  at::Tensor logits = at::empty({k_cache.size(1), token_weight.size(0)}, token_weight.options());
  return decode_step_out(ids, end, begin, token_weight, position_weight, weights, k_cache, v_cache, packed, buffer,
                         peers, rank, words, scale, scale_by_layer, eps, approximate, patience, rung, logits);
}

at::Tensor& decode_pack_out(const at::Tensor& token_weight, at::TensorList weights, std::string_view rung,
                            at::Tensor& packed) {
  (void)packed_by(token_weight, weights, rung, &packed);
  return packed;
}

at::Tensor decode_pack(const at::Tensor& token_weight, at::TensorList weights, std::string_view rung) {
  return packed_by(token_weight, weights, rung, nullptr);
}

std::string decode_pack_refusal(const at::Tensor& token_weight, at::TensorList weights, std::string_view rung,
                                int64_t rows) {
  TORCH_CHECK_VALUE(rows > 0, "decode_pack_refusal: `rows` must be at least 1, got ", rows);
  return Packing(token_weight, weights, rung, rows).why_not;
}

void decode_check(at::Tensor& packed) {
  check_type("decode_check", "packed", packed, at::kByte);
  throw_failure(take_state(packed));
}

OpInfo decode_step_info() { return describe(decode_step_op()); }

}  // namespace kf::step4
