// Every rung of this step in float32, against a plain loop; without torch, so that a sanitizer or a debugger sees
// nothing but the kernels. Presets in the root's CMakeLists.txt: simt, simt-asan, cuda.
#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "device_array.h"  // step 1's
#include "kernels/cross_entropy/rungs.h"
#include "kernels/decode_step/packed.h"
#include "kernels/decode_step/rungs.h"
#include "kernels/embedding/rungs.h"
#include "kernels/embedding_backward/rungs.h"
#include "kernels/kv_append/rungs.h"
#include "kernels/sample/rungs.h"

namespace kf::KF_BACKEND {
namespace {

std::vector<float> numbers(int64_t n, float first) {
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = first + 0.37f * static_cast<float>(i * 7919 % 97);
  return values;
}

// Two rows of ids, one id of them outside the vocabulary. The second row may begin elsewhere: its first position may
// lie before the table, which is row 0, its last past the end.
template <class Id>
void every_embedding_adds_two_rows(Id bad, int32_t moved) {
  constexpr int64_t kBatch = 2, kLength = 5, kVocab = 11, kPosition = 2, kRows = kPosition + kLength;
  for (const auto& rung : embedding::rungs()) {
    for (const int64_t width : {1, 3, 4, 31, 64, 130, 760}) {
      const std::vector<float> token = numbers(kVocab * width, -4), place = numbers(kRows * width, 9);
      std::vector<Id> ids = {0, 10, 3, 3, 7, 1, 2, 0, 9, 10};
      ids[6] = bad;
      const DeviceArray<Id> device_ids(ids);
      const DeviceArray<float> device_token(token), device_place(place);
      const DeviceArray<int32_t> positions({0, moved});
      const DeviceArray<float> y(std::vector<float>(kBatch * kLength * width, 0));
      rung.launch({device_ids.data(), device_token.data(), device_place.data(), y.data(), kBatch, kLength, width,
                   kVocab, kRows, kPosition, moved == 0 ? nullptr : static_cast<const int32_t*>(positions.data()),
                   sizeof(Id) == 8, DType::kFloat32},
                  nullptr);
      const std::vector<float> got = y.values();
      for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
        const int64_t row = i / width, column = i % width;
        const int64_t at = std::max<int64_t>(0, kPosition + row % kLength + (row < kLength ? 0 : moved));
        const std::string what = rung.name + (" width " + std::to_string(width)) + ", element " + std::to_string(i);
        if (row == 6 || at >= kRows) {
          ASSERT_TRUE(std::isnan(got[i])) << what;
        } else {
          ASSERT_EQ(got[i], token[ids[row] * width + column] + place[at * width + column]) << what;
        }
      }
    }
  }
}

TEST(Embedding, EveryRungAddsTwoRowsAndMarksABadId) {
  for (const int64_t bad : {int64_t{11}, int64_t{-1}, int64_t{1} << 40}) every_embedding_adds_two_rows<int64_t>(bad, 0);
  for (const int32_t bad : {11, -1}) every_embedding_adds_two_rows<int32_t>(bad, 0);
}

// Rows that lie apart, with a good target, an ignored one and one outside; the gradient goes over the logits.
void every_cross_entropy_writes_over_its_logits(int64_t width, int64_t bad) {
  constexpr int64_t kRows = 3;
  const int64_t stride = width + 3;
  const std::vector<float> before = numbers(kRows * stride, -9);
  const std::vector<int64_t> targets = {width - 1, -100, bad};
  for (const auto& rung : cross_entropy::rungs()) {
    const DeviceArray<float> logits(before), loss(std::vector<float>(kRows, 7));
    const DeviceArray<int64_t> device_targets(targets);
    rung.launch({logits.data(), static_cast<const int64_t*>(device_targets.data()), loss.data(), nullptr, logits.data(),
                 kRows, width, stride, stride, -100, DType::kFloat32},
                nullptr);
    const std::vector<float> got = logits.values(), losses = loss.values();
    const std::string what = rung.name + (" width " + std::to_string(width));
    double sum = 0;
    for (int64_t c = 0; c < width; ++c) sum += std::exp(static_cast<double>(before[c]));
    EXPECT_NEAR(losses[0], std::log(sum) - before[width - 1], 1e-4) << what;
    EXPECT_EQ(losses[1], 0) << what;
    EXPECT_TRUE(std::isnan(losses[2])) << what;
    for (int64_t c = 0; c < stride; ++c) {
      const std::string where = what + ", column " + std::to_string(c);
      if (c < width) {
        const double p = std::exp(static_cast<double>(before[c])) / sum;
        ASSERT_NEAR(got[c], c == width - 1 ? p - 1 : p, 1e-6) << where;
        ASSERT_EQ(got[stride + c], 0) << where;
        ASSERT_TRUE(std::isnan(got[2 * stride + c])) << where;
      } else {
        for (int64_t row = 0; row < kRows; ++row) ASSERT_EQ(got[row * stride + c], before[row * stride + c]) << where;
      }
    }
  }
}

TEST(CrossEntropy, EveryRungWritesOverItsLogitsAndMarksABadTarget) {
  for (const int64_t width : {1, 5, 33, 130, 4100}) {
    for (const int64_t bad : {width, int64_t{-1}, int64_t{1} << 40}) {
      every_cross_entropy_writes_over_its_logits(width, bad);
    }
  }
}

TEST(Embedding, EveryRungMovesASequenceAndMarksWhatIsPastTheTable) {
  for (const int32_t moved : {-2, -4, 3, INT32_MIN, INT32_MAX}) every_embedding_adds_two_rows<int64_t>(-1, moved);
}

// Tokens by their ids in ascending order, some of them outside the table, and where each id's begin, as the host finds
// them.
TEST(EmbeddingBackward, EveryRungAddsUpEachRowsTokensAndNoOthers) {
  constexpr int64_t kTokens = 300, kVocab = 5;
  std::vector<int32_t> sorted;
  for (const auto& [id, count] : {std::pair(-1, 20), {0, 1}, {1, 190}, {3, 2}, {4, 7}, {5, 80}}) {
    sorted.insert(sorted.end(), count, id);
  }
  ASSERT_EQ(sorted.size(), kTokens);
  std::vector<int64_t> order(kTokens), first(kVocab + 1);
  for (int64_t i = 0; i < kTokens; ++i) order[i] = i * 7 % kTokens;
  for (int64_t v = 0; v <= kVocab; ++v) first[v] = std::lower_bound(sorted.begin(), sorted.end(), v) - sorted.begin();
  const DeviceArray<int32_t> device_sorted(sorted);
  const DeviceArray<int64_t> device_order(order), device_first(first);
  for (const auto& rung : embedding_backward::rungs()) {
    for (const int64_t width : {1, 3, 4, 31, 64, 1040}) {
      const std::vector<float> grad = numbers(kTokens * width, -4);
      const DeviceArray<float> device_grad(grad), y(kVocab * width);
      kf::embedding_backward::Args args{device_grad.data(),
                                        device_sorted.elements(),
                                        device_order.elements(),
                                        device_first.elements(),
                                        y.data(),
                                        nullptr,
                                        kTokens,
                                        width,
                                        kVocab,
                                        DType::kFloat32};
      const DeviceArray<char> scratch(std::vector<char>(rung.scratch_bytes ? rung.scratch_bytes(args) : 1, -1));
      args.scratch = scratch.data();
      rung.launch(args, nullptr);
      const std::vector<float> got = y.values();
      for (int64_t i = 0; i < kVocab * width; ++i) {
        const int64_t v = i / width;
        double sum = 0;
        for (int64_t t = first[v]; t < first[v + 1]; ++t) sum += grad[order[t] * width + i % width];
        ASSERT_NEAR(got[i], sum, 1e-5 * 190 * 40) << rung.name << " width " << width << ", element " << i;
      }
    }
  }
}

// The second sequence may be moved, so that its first or last tokens stand outside the caches.
void every_kv_append_writes_its_rows(int32_t moved) {
  constexpr int64_t kBatch = 2, kHeads = 3, kLength = 4, kCapacity = 7, kPosition = 2;
  for (const auto& rung : kv_append::rungs()) {
    for (const int64_t dim : {1, 4, 25, 31, 64}) {
      // q, k and v packed in one row, as GPT-2's c_attn gives them.
      const int64_t row = 3 * kHeads * dim;
      const std::vector<float> packed = numbers(kBatch * kLength * row, 1);
      const DeviceArray<float> device_packed(packed);
      const int64_t size = kBatch * kHeads * kCapacity * dim;
      const DeviceArray<float> k_cache(size), v_cache(size);
      const DeviceArray<int32_t> positions({0, moved});
      const kf::kv_append::Strides packed_strides{kLength * row, dim, row};
      const kf::kv_append::Strides cache_strides{kHeads * kCapacity * dim, kCapacity * dim, dim};
      const float* q = static_cast<const float*>(device_packed.data());
      rung.launch({q + kHeads * dim, q + 2 * kHeads * dim, k_cache.data(), v_cache.data(), packed_strides,
                   packed_strides, cache_strides, cache_strides, kBatch, kHeads, kLength, dim, kCapacity, kPosition,
                   moved == 0 ? nullptr : static_cast<const int32_t*>(positions.data()), DType::kFloat32},
                  nullptr);
      for (const int64_t which : {1, 2}) {
        const std::vector<float> got = (which == 1 ? k_cache : v_cache).values();
        for (int64_t i = 0; i < size; ++i) {
          const int64_t d = i % dim, place = i / dim % kCapacity, head = i / dim / kCapacity % kHeads;
          const int64_t batch = i / dim / kCapacity / kHeads, token = place - kPosition - (batch == 1 ? moved : 0);
          const std::string what = rung.name + (" head_dim " + std::to_string(dim)) + ", element " + std::to_string(i);
          if (token < 0 || token >= kLength) {
            ASSERT_TRUE(std::isnan(got[i])) << what;
          } else {
            ASSERT_EQ(got[i], packed[(batch * kLength + token) * row + (which * kHeads + head) * dim + d]) << what;
          }
        }
      }
    }
  }
}

TEST(KvAppend, EveryRungWritesItsRowsAndNothingElse) { every_kv_append_writes_its_rows(0); }

TEST(KvAppend, EveryRungMovesASequenceAndWritesNothingOutsideTheCaches) {
  for (const int32_t moved : {1, -2, -4, 3, 9, -9, INT32_MIN, INT32_MAX}) every_kv_append_writes_its_rows(moved);
}

struct Drawn {
  std::vector<int64_t> token, rng_state;
  std::vector<float> log_prob;
  std::vector<uint8_t> seen;
};

// Two rows, the second without a distribution.
Drawn drawn_by(const Rung<kf::sample::Args>& rung, int64_t width, double temperature, int64_t top_k, double top_p) {
  std::vector<float> logits = numbers(2 * width, -30);
  logits[2 * width - 1] = NAN;
  std::vector<uint8_t> seen(2 * width);
  for (int64_t i = 0; i < 2 * width; i += 3) seen[i] = 1;
  const DeviceArray<float> device_logits(logits), log_prob(2);
  const DeviceArray<uint8_t> device_seen(seen);
  const DeviceArray<int64_t> rng_state(std::vector<int64_t>{5, 1, 6, 2}), token(std::vector<int64_t>(2, -7));
  rung.launch({device_logits.data(), rng_state.elements(), device_seen.elements(), token.elements(),
               log_prob.elements(), 2, width, width, width, temperature, top_k, top_p, 0.01, 1.25, DType::kFloat32},
              nullptr);
  return {token.values(), rng_state.values(), log_prob.values(), device_seen.values()};
}

TEST(Sample, EveryRungTakesTheSameToken) {
  for (const int64_t width : {1, 33, 700, 5000}) {
    for (const double temperature : {0.0, 0.7}) {
      for (const int64_t top_k : {0, 20}) {
        for (const double top_p : {1.0, 0.8}) {
          const Drawn first = drawn_by(*sample::rungs().begin(), width, temperature, top_k, top_p);
          for (const auto& rung : sample::rungs()) {
            const std::string what = rung.name + (" width " + std::to_string(width));
            const Drawn got = drawn_by(rung, width, temperature, top_k, top_p);
            ASSERT_GE(got.token[0], 0) << what;
            ASSERT_LT(got.token[0], width) << what;
            ASSERT_EQ(got.token, (std::vector<int64_t>{first.token[0], -1})) << what;
            ASSERT_EQ(got.seen, first.seen) << what;
            ASSERT_EQ(got.seen[got.token[0]], 1) << what;
            ASSERT_NEAR(got.log_prob[0], first.log_prob[0], 1e-6) << what;
            ASSERT_TRUE(std::isnan(got.log_prob[1])) << what;
            const int64_t draws = temperature > 0;
            ASSERT_EQ(got.rng_state, (std::vector<int64_t>{5, 1 + draws, 6, 2 + draws})) << what;
          }
        }
      }
    }
  }
}

// Numbers from −1 to 1 as bfloat16.
class Halves : public DeviceArray<__nv_bfloat16> {
 public:
  explicit Halves(int64_t n, float scale = 1, float mean = 0) : DeviceArray(made(n, scale, mean)) {}

 private:
  static std::vector<__nv_bfloat16> made(int64_t n, float scale, float mean) {
    static uint32_t state = 1;
    std::vector<__nv_bfloat16> values(n);
    for (auto& value : values) {
      state = state * 1664525 + 1013904223;
      value = __float2bfloat16(mean + scale * (static_cast<float>(state >> 8) / (1 << 23) - 1));
    }
    return values;
  }
};

// A model of random weights, and what `decode_step` is told of it. Caches, places and logits are the test's.
struct Gpt2 {
  int64_t layers, width, inner, vocab, slots;
  static constexpr int64_t kPositions = 20;
  Halves token{vocab * width}, position{kPositions * width}, norm{width, 0.2f, 1},
      bias{std::max(inner, 3 * width), 0.2f};
  Halves attention{3 * width * width, 0.1f}, projection{width * width, 0.1f}, fc{width * inner, 0.1f};
  std::vector<kf::decode_step::Layer> of_layers{
      static_cast<size_t>(layers),
      {norm.data(), bias.data(), attention.data(), bias.data(), projection.data(), bias.data(), norm.data(),
       bias.data(), fc.data(), bias.data(), fc.data(), bias.data()}};

  kf::decode_step::Args args(int64_t batch, int64_t heads, double scale) const {
    kf::decode_step::Args args{};
    args.token_weight = token.data();
    args.position_weight = position.data();
    args.weights = of_layers.data();
    args.ln_weight = norm.data();
    args.ln_bias = bias.data();
    args.k_stride = args.v_stride = {batch * slots * width, slots * width, slots * width / heads, width / heads};
    args.layers = layers;
    args.batch = batch;
    args.heads = heads;
    args.head_dim = width / heads;
    args.capacity = slots;
    args.width = width;
    args.inner = inner;
    args.vocab = vocab;
    args.positions = kPositions;
    args.scale = scale;
    args.eps = 1e-5;
    args.tanh = true;
    args.dtype = DType::kBFloat16;
    return args;
  }
};

// Of four rows the second has no slot left, the third more tokens than there are positions, the last an id that is
// none.
TEST(DecodeStep, EveryRungMarksARowWithoutAPlaceAndWritesNothingOfIt) {
  constexpr int64_t kLayers = 2, kBatch = 4, kWidth = 72, kHeads = 3, kInner = 200, kVocab = 67, kSlots = 40;
  constexpr int64_t kRow = kSlots * kWidth, kCache = kLayers * kBatch * kRow;
  const Gpt2 model{kLayers, kWidth, kInner, kVocab, kSlots};
  const Halves keys(kCache), values(kCache);
  for (const auto& rung : decode_step::rungs()) {
    const DeviceArray<int64_t> ids({3, 5, 66, 67});
    const DeviceArray<int32_t> end({6, 40, 39, 4}), begin({1, 30, 5, 0});
    const DeviceArray<__nv_bfloat16> k_cache(keys.values()), v_cache(values.values());
    const DeviceArray<__nv_bfloat16> logits(std::vector<__nv_bfloat16>(kBatch * kVocab, __float2bfloat16(7)));
    kf::decode_step::Args args = model.args(kBatch, kHeads, 0.2);
    args.ids = ids.elements();
    args.end = end.elements();
    args.begin = begin.elements();
    args.k_cache = k_cache.data();
    args.v_cache = v_cache.data();
    args.logits = logits.data();
    const std::string why_not = rung.can_implement(args);
    if (!why_not.empty()) continue;
    const DeviceArray<char> scratch(std::vector<char>(rung.scratch_bytes(args)));
    args.scratch = scratch.data();
    rung.launch(args, nullptr);
    const std::vector<__nv_bfloat16> got = logits.values(), after = k_cache.values(), before = keys.values();
    EXPECT_EQ(end.values(), (std::vector<int32_t>{7, 40, 39, 5})) << rung.name;
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t v = 0; v < kVocab; ++v) {
        ASSERT_EQ(std::isnan(__bfloat162float(got[b * kVocab + v])), b > 0) << rung.name << ", row " << b;
      }
      int64_t changed = 0;
      for (int64_t l = 0; l < kLayers; ++l) {
        for (int64_t i = (l * kBatch + b) * kRow; i < (l * kBatch + b + 1) * kRow; ++i) {
          changed += __bfloat162float(after[i]) != __bfloat162float(before[i]);  // NaN is another, too
        }
      }
      if (b == 1 || b == 2) {
        ASSERT_EQ(changed, 0) << rung.name << ", row " << b;
      } else {
        ASSERT_GT(changed, 0) << rung.name << ", row " << b;
        ASSERT_LE(changed, kLayers * kWidth) << rung.name << ", row " << b;
      }
    }
  }
}

// The same of rungs that read packed weights, row by row.
void a_token_in_one_launch_without_a_place_writes_nothing(const kf::Rung<kf::decode_step::Args>& rung, int64_t width,
                                                          int64_t inner, int count = 5) {
  constexpr int64_t kVocab = 67;
  const int64_t cache = 2 * 40 * width;
  const Gpt2 model{2, width, inner, kVocab, 40};
  const Halves keys(cache);
  const DeviceArray<int64_t> ids(std::vector<int64_t>{3});
  const DeviceArray<__nv_bfloat16> logits(std::vector<__nv_bfloat16>(kVocab, __float2bfloat16(7)));
  kf::decode_step::Args args = model.args(1, width / 64, 0.125);
  args.ids = ids.elements();
  args.logits = logits.data();
  std::string why_not;
  args.packed_bytes = decode_step::packed_bytes(rung.name, args, why_not);
  if (!why_not.empty()) GTEST_SKIP() << why_not;
  const DeviceArray<char> packed(std::vector<char>(args.packed_bytes, 1));
  args.packed = packed.data();
  decode_step::pack_weights(rung.name, args, nullptr);
  struct Row {
    int32_t begin, end;
    bool exists;
  };
  const Row rows[] = {Row{1, 6, true}, Row{30, 40, false}, Row{5, 39, false}, Row{7, 3, false}, Row{0, 19, true}};
  for (int i = 0; i < count; ++i) {
    const Row row = rows[i];
    const DeviceArray<int32_t> end(std::vector<int32_t>{row.end}), begin(std::vector<int32_t>{row.begin});
    const DeviceArray<__nv_bfloat16> k_cache(keys.values()), v_cache(keys.values());
    args.end = end.elements();
    args.begin = begin.elements();
    args.k_cache = k_cache.data();
    args.v_cache = v_cache.data();
    ASSERT_EQ(rung.can_implement(args), "");
    rung.launch(args, nullptr);
    const std::vector<__nv_bfloat16> got = logits.values(), after = k_cache.values(), before = keys.values();
    EXPECT_EQ(end.values()[0], row.end + (row.exists ? 1 : 0));
    for (const __nv_bfloat16 each : got) ASSERT_EQ(std::isnan(__bfloat162float(each)), !row.exists) << row.end;
    int64_t changed = 0;
    for (int64_t i = 0; i < cache; ++i) changed += __bfloat162float(after[i]) != __bfloat162float(before[i]);
    EXPECT_EQ(changed > 0, row.exists) << row.end;
  }
}

TEST(DecodeStep, ATokenInOneLaunchWithoutAPlaceWritesNothing) {
  for (const auto& rung : decode_step::rungs()) {
    if (std::string(rung.name) == "v3_persistent") a_token_in_one_launch_without_a_place_writes_nothing(rung, 64, 80);
    if (std::string(rung.name) != "v4_clusters") continue;
    a_token_in_one_launch_without_a_place_writes_nothing(rung, 64, 64);     // a cluster, of 2048 threads
    a_token_in_one_launch_without_a_place_writes_nothing(rung, 64, 80, 1);  // one more, without a head
  }
}

// The kernels of v4_clusters for wider models, of which the emulation has not clusters enough: a narrow one, padded.
TEST(DecodeStep, ClustersForAnyWidthGiveTheSameToken) {
  constexpr int64_t kVocab = 1100, kSlots = 40;
  struct Case {
    int64_t width, batch;
  };
  for (const auto& [width, batch] :
       {Case{64, 1}, Case{64, 3}, Case{256, 1}, Case{256, 2}}) {  // 256: two heads a cluster
    const Gpt2 model{2, width, 2 * width + 80, kVocab, kSlots};
    std::string why_not;
    if (decode_step::v4_clusters_bytes(model.args(1, width / 64, 0.125), why_not); !why_not.empty()) {
      GTEST_SKIP() << why_not;
    }
    const Halves keys(2 * batch * kSlots * width), values(2 * batch * kSlots * width);
    const DeviceArray<int64_t> ids(std::vector<int64_t>{3, 9, 27});
    const DeviceArray<int32_t> begin(std::vector<int32_t>{1, 0, 30});
    const std::vector<int32_t> before{19, 0, 38};
    const auto step = [&](auto launch) {
      const DeviceArray<int32_t> end(before);
      const DeviceArray<__nv_bfloat16> k_cache(keys.values()), v_cache(values.values());
      const DeviceArray<__nv_bfloat16> logits(std::vector<__nv_bfloat16>(batch * kVocab, __float2bfloat16(7)));
      kf::decode_step::Args args = model.args(batch, width / 64, 0.125);
      args.ids = ids.elements();
      args.begin = begin.elements();
      args.end = end.elements();
      args.k_cache = k_cache.data();
      args.v_cache = v_cache.data();
      args.logits = logits.data();
      launch(args);
      for (int64_t b = 0; b < batch; ++b) EXPECT_EQ(end.values()[b], before[b] + 1);
      std::vector<float> all;
      for (const auto& from : {logits.values(), k_cache.values(), v_cache.values()}) {
        for (const __nv_bfloat16 each : from) all.push_back(__bfloat162float(each));
      }
      return all;
    };
    const std::vector<float> expected = step([](const kf::decode_step::Args& args) {
      const DeviceArray<char> scratch(std::vector<char>(decode_step::rungs().first->scratch_bytes(args)));
      kf::decode_step::Args with = args;
      with.scratch = scratch.data();
      decode_step::rungs().first->launch(with, nullptr);
    });
    // On a GPU, too, clusters are few.
    for (const int steps : width == 64 ? std::array{16, 20} : std::array{12, 25}) {
      const kf::decode_step::ClusterForm form{steps, 2};
      const std::vector<float> got = step([&](kf::decode_step::Args args) {
        std::string why_not;
        args.packed_bytes = decode_step::v4_clusters_bytes(args, why_not, form);
        ASSERT_EQ(why_not, "");
        const DeviceArray<char> packed(std::vector<char>(args.packed_bytes, 1));
        args.packed = packed.data();
        decode_step::v4_clusters_pack(args, nullptr, form);
        decode_step::v4_clusters_of(args, form, nullptr);
        args.batch = 5;  // these forms take four
        EXPECT_THROW(decode_step::v4_clusters_of(args, form, nullptr), std::invalid_argument);
      });
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], expected[i], 0.03f + 0.02f * std::abs(expected[i]))
            << width << ", " << batch << ", " << steps << ", " << i;
      }
    }
  }
}

}  // namespace
}  // namespace kf::KF_BACKEND
