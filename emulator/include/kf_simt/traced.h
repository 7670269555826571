// For views.py, which includes it before the source: it tells device functions from host functions in what the
// preprocessor writes.
#undef __global__
#undef __device__
#undef __host__
#define __global__ __kf_global__
#define __device__ __kf_device__
#define __host__ __kf_host__
