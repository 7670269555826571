// all_reduce without torch: workers are threads of the host, each with a GPU of its own where there are so many, else
// with a stream. To be run under a debugger, or the race detector.
//
//   kernel-fusion simt --race -I . -I ../common/include -I ../step1-simple/include -I ../step2-attention/include -I
//   ../step3-fused/include tests/all_reduce_workers.cu v2_peer 3 nvcc -std=c++20 -arch=native -I . -I ../common/include
//   -I ../step1-simple/include -I ../step2-attention/include -I ../step3-fused/include tests/all_reduce_workers.cu -o
//   ../out/workers
#define KF_BACKEND gpu
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/all_reduce/v2_peer.cu"
#include "kernels/all_reduce/v3_fused.cu"
#include "kernels/all_reduce/v4_push.cu"

namespace {

using namespace kf::gpu;
constexpr int kRows = 3, kWidth = 40, kCalls = 4;

float number(int worker, int call, int i) { return static_cast<float>((worker * 31 + call * 7 + i * 13) % 17) - 8; }

float* on_device(const std::vector<float>& values) {
  void* to = nullptr;
  check(cudaMalloc(&to, values.size() * sizeof(float)), "cudaMalloc");
  check(cudaMemcpy(to, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  return static_cast<float*>(to);
}

// Calls the rung some times, and returns how many numbers of its sums are wrong.
int work(const kf::Rung<all_reduce::Args>& rung, all_reduce::Args a, int device) {
  check(cudaSetDevice(device), "cudaSetDevice");
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  float* const ones = on_device(std::vector<float>(kRows * kWidth, 1));
  float *const y = on_device(std::vector<float>(kRows * kWidth)), *const sum =
                                                                      on_device(std::vector<float>(kRows * kWidth));
  int wrong = 0;
  for (int call = 0; call < kCalls; ++call) {
    std::vector<float> x(kRows * kWidth), got(x.size());
    for (int i = 0; i < kRows * kWidth; ++i) x[i] = number(a.rank, call, i);
    a.x = on_device(x);
    a.x_bias = a.residual = a.weight = a.bias = ones;
    a.y = y;
    a.sum = sum;
    rung.launch(a, stream);
    check(cudaStreamSynchronize(stream), rung.name);
    check(cudaMemcpy(got.data(), sum, got.size() * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (int i = 0; i < kRows * kWidth; ++i) {
      float wanted = 2;
      for (int worker = 0; worker < a.workers; ++worker) wanted += number(worker, call, i);
      wrong += got[i] != wanted;
    }
  }
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "v4_push";
  const int workers = argc > 2 ? std::atoi(argv[2]) : 2;
  const kf::Rung<all_reduce::Args>* rung = nullptr;
  for (const auto& each : all_reduce::rungs()) rung = name == each.name ? &each : rung;
  if (rung == nullptr || workers < 1 || workers > kf::all_reduce::kMostWorkers) {
    std::fprintf(stderr, "all_reduce_workers: v2_peer, v3_fused or v4_push, and from 1 to 8 workers\n");
    return 2;
  }
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  const auto device_of = [&](int worker) { return devices < workers ? 0 : worker; };
  all_reduce::Args args{};
  args.rows = kRows, args.width = kWidth, args.eps = 1e-5, args.workers = workers, args.patience_ns = 20'000'000'000;
  const int64_t bytes = kf::all_reduce::buffer_bytes(kWidth, workers);
  args.slot_bytes = kf::all_reduce::slot_bytes(bytes, workers);
  for (int worker = 0; worker < workers; ++worker) {
    check(cudaSetDevice(device_of(worker)), "cudaSetDevice");
    for (int other = 0; device_of(workers - 1) != 0 && other < workers; ++other) {
      if (other != worker) check(cudaDeviceEnablePeerAccess(other, 0), "cudaDeviceEnablePeerAccess");
    }
    check(cudaMalloc(&args.peers[worker], bytes), "cudaMalloc");
    check(cudaMemset(args.peers[worker], 255, bytes), "cudaMemset");
    check(cudaMemset(args.peers[worker], 0, sizeof(kf::all_reduce::Header)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  std::vector<int> wrong(workers);
  std::vector<std::thread> threads;
  for (int worker = 0; worker < workers; ++worker) {
    args.rank = worker;
    threads.emplace_back([&, args, worker] { wrong[worker] = work(*rung, args, device_of(worker)); });
  }
  for (std::thread& thread : threads) thread.join();
  int all = 0;
  for (const int each : wrong) all += each;
  std::printf("%s, %d workers: %d numbers are wrong\n", rung->name, workers, all);
  return all == 0 ? 0 : 1;
}
