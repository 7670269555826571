// Every rung of this step in float32, against a plain loop; without torch, so that a sanitizer or a debugger sees
// nothing but the kernels. Presets in the root's CMakeLists.txt: simt, simt-asan, cuda.
#include <gtest/gtest.h>
#include <kf/launch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/embedding/rungs.h"
#include "kernels/kv_append/rungs.h"

namespace kf::KF_BACKEND {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// `values` in the GPU's memory, with not a byte more, so that a sanitizer finds what lies one past the end.
template <class T>
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<T>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceVector(const DeviceVector&) = delete;
  ~DeviceVector() { cudaFree(data_); }
  void* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> copy(size_);
    check(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

std::vector<float> numbers(int64_t n, float first) {
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = first + 0.37f * static_cast<float>(i * 7919 % 97);
  return values;
}

// Two rows of ids, one of them outside the vocabulary.
template <class Id>
void every_embedding_adds_two_rows(Id bad) {
  constexpr int64_t kBatch = 2, kLength = 5, kVocab = 11, kPosition = 2;
  for (const auto& rung : embedding::rungs()) {
    for (const int64_t width : {1, 3, 4, 31, 64, 130, 760}) {
      const std::vector<float> token = numbers(kVocab * width, -4), place = numbers((kPosition + kLength) * width, 9);
      std::vector<Id> ids = {0, 10, 3, 3, 7, 1, 2, 0, 9, 10};
      ids[6] = bad;
      const DeviceVector<Id> device_ids(ids);
      const DeviceVector<float> device_token(token), device_place(place);
      const DeviceVector<float> y(std::vector<float>(kBatch * kLength * width, 0));
      rung.launch({device_ids.data(), device_token.data(), device_place.data(), y.data(), kBatch, kLength, width,
                   kVocab, kPosition, sizeof(Id) == 8, DType::kFloat32},
                  nullptr);
      const std::vector<float> got = y.values();
      for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
        const int64_t row = i / width, column = i % width;
        const std::string what = rung.name + (" width " + std::to_string(width)) + ", element " + std::to_string(i);
        if (row == 6) {
          ASSERT_TRUE(std::isnan(got[i])) << what;
        } else {
          ASSERT_EQ(got[i], token[ids[row] * width + column] + place[(kPosition + row % kLength) * width + column])
              << what;
        }
      }
    }
  }
}

TEST(Embedding, EveryRungAddsTwoRowsAndMarksABadId) {
  for (const int64_t bad : {int64_t{11}, int64_t{-1}, int64_t{1} << 40}) every_embedding_adds_two_rows<int64_t>(bad);
  for (const int32_t bad : {11, -1}) every_embedding_adds_two_rows<int32_t>(bad);
}

TEST(KvAppend, EveryRungWritesItsRowsAndNothingElse) {
  constexpr int64_t kBatch = 2, kHeads = 3, kLength = 4, kCapacity = 7, kPosition = 2;
  for (const auto& rung : kv_append::rungs()) {
    for (const int64_t dim : {1, 4, 25, 31, 64}) {
      // q, k and v packed in one row, as GPT-2's c_attn gives them.
      const int64_t row = 3 * kHeads * dim;
      const std::vector<float> packed = numbers(kBatch * kLength * row, 1);
      const DeviceVector<float> device_packed(packed);
      const int64_t size = kBatch * kHeads * kCapacity * dim;
      const DeviceVector<float> k_cache(std::vector<float>(size, kNaN)), v_cache(std::vector<float>(size, kNaN));
      const kf::kv_append::Strides packed_strides{kLength * row, dim, row};
      const kf::kv_append::Strides cache_strides{kHeads * kCapacity * dim, kCapacity * dim, dim};
      const float* q = static_cast<const float*>(device_packed.data());
      rung.launch(
          {q + kHeads * dim, q + 2 * kHeads * dim, k_cache.data(), v_cache.data(), packed_strides, packed_strides,
           cache_strides, cache_strides, kBatch, kHeads, kLength, dim, kPosition, DType::kFloat32},
          nullptr);
      for (const int64_t which : {1, 2}) {
        const std::vector<float> got = (which == 1 ? k_cache : v_cache).values();
        for (int64_t i = 0; i < size; ++i) {
          const int64_t d = i % dim, place = i / dim % kCapacity, head = i / dim / kCapacity % kHeads;
          const int64_t batch = i / dim / kCapacity / kHeads, token = place - kPosition;
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

}  // namespace
}  // namespace kf::KF_BACKEND
