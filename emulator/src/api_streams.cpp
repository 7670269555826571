// Streams and events. What is launched is done when the call returns, so there is little to wait for.
#include <time.h>

#include <set>

#include "api.h"

namespace kf::simt {

struct CUstream_st {
  unsigned flags;
};
struct CUevent_st {
  bool recorded = false;
  timespec time{};
};

namespace {

// All that the program has made and not destroyed: still known, and so no leak to a sanitizer, when it ends.
template <class T>
struct Handles {
  static T* make(T value) {
    T* const fresh = new T(value);
    Handles& all = lasting<Handles>();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.made.insert(fresh);
    return fresh;
  }
  static cudaError_t destroy(T* handle) {
    Handles& all = lasting<Handles>();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.made.erase(handle) == 0) return report(cudaErrorInvalidResourceHandle);
    delete handle;
    return report(cudaSuccess);
  }

  std::mutex mutex;
  std::set<T*> made;
};

// The streams that no program makes: the default one, cudaStreamLegacy and cudaStreamPerThread.
bool is_named(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

}  // namespace

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = Handles<CUstream_st>::make({flags});
  return report(cudaSuccess);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = is_named(stream) ? cudaStreamDefault : stream->flags;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  if (const cudaError_t error = cudaDeviceSynchronize()) return error;  // the stream has come to it
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  callback(stream, cudaDeviceSynchronize(), data);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return Handles<CUstream_st>::destroy(stream); }

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return report(cudaSuccess); }

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = Handles<CUevent_st>::make({});
  return report(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return Handles<CUevent_st>::destroy(event); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  event->recorded = true;
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (start == nullptr || end == nullptr || !start->recorded || !end->recorded) {
    return report(cudaErrorInvalidResourceHandle);
  }
  const double seconds = static_cast<double>(end->time.tv_sec - start->time.tv_sec) +
                         1e-9 * static_cast<double>(end->time.tv_nsec - start->time.tv_nsec);
  *milliseconds = static_cast<float>(1e3 * seconds);
  return cudaSuccess;
}

}  // namespace kf::simt
