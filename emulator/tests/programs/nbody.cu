// Gravity between all pairs of bodies, by tiles of positions in shared memory, for a few steps.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define BLOCK_SIZE 64
#define SOFTENING 1e-2f

#define SAFE_CALL(call)                                                                                           \
  do {                                                                                                            \
    cudaError err = call;                                                                                         \
    if (cudaSuccess != err) {                                                                                     \
      fprintf(stderr, "Cuda error in file '%s' in line %i : %s.\n", __FILE__, __LINE__, cudaGetErrorString(err)); \
      exit(EXIT_FAILURE);                                                                                         \
    }                                                                                                             \
  } while (0)

inline __host__ __device__ float3 operator+(float3 a, float3 b) { return make_float3(a.x + b.x, a.y + b.y, a.z + b.z); }
inline __host__ __device__ float3 operator*(float s, float3 a) { return make_float3(s * a.x, s * a.y, s * a.z); }

class Bodies {  // on the device; position.w is the mass
 public:
  __device__ float4 position(int i) const { return i < count_ ? positions_[i] : make_float4(0, 0, 0, 0); }
  __device__ static float3 attraction(float4 to, float4 from) {
    const float dx = from.x - to.x, dy = from.y - to.y, dz = from.z - to.z;
    const float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + SOFTENING);
    return from.w * inverse * inverse * inverse * make_float3(dx, dy, dz);
  }
  __host__ __device__ int count() const { return count_; }
  float4* positions_;
  float3* velocities_;
  int count_;
};

__global__ void accelerate(Bodies bodies, float dt) {
  __shared__ float4 tile[BLOCK_SIZE];
  const int i = blockDim.x * blockIdx.x + threadIdx.x;
  const float4 mine = bodies.position(i);
  float3 sum = make_float3(0.0f, 0.0f, 0.0f);
  for (int first = 0; first < bodies.count(); first += BLOCK_SIZE) {
    tile[threadIdx.x] = bodies.position(first + threadIdx.x);
    __syncthreads();
#pragma unroll 4
    for (int j = 0; j < BLOCK_SIZE; ++j) sum = sum + Bodies::attraction(mine, tile[j]);
    __syncthreads();
  }
  if (i < bodies.count()) bodies.velocities_[i] = bodies.velocities_[i] + dt * sum;
}

__global__ void move(Bodies bodies, float dt) {
  const int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i >= bodies.count()) return;
  const float3 v = bodies.velocities_[i];
  float4& p = bodies.positions_[i];
  p.x += dt * v.x;
  p.y += dt * v.y;
  p.z += dt * v.z;
}

struct Body {
  double x, y, z, m, vx, vy, vz;
};

int main() {
  const int n = 200, steps = 4;
  const float dt = 0.01f;
  std::vector<float4> positions(n);
  std::vector<Body> host(n);
  for (int i = 0; i < n; ++i) {
    positions[i] = {float(i * 37 % 101) / 50 - 1, float(i * 53 % 103) / 51 - 1, float(i * 71 % 107) / 53 - 1, 0.01f};
    host[i] = {positions[i].x, positions[i].y, positions[i].z, positions[i].w, 0, 0, 0};
  }
  Bodies bodies;
  bodies.count_ = n;
  SAFE_CALL(cudaMalloc(&bodies.positions_, n * sizeof(float4)));
  SAFE_CALL(cudaMalloc(&bodies.velocities_, n * sizeof(float3)));
  SAFE_CALL(cudaMemcpy(bodies.positions_, positions.data(), n * sizeof(float4), cudaMemcpyHostToDevice));
  SAFE_CALL(cudaMemset(bodies.velocities_, 0, n * sizeof(float3)));
  const int blocks = (n + BLOCK_SIZE - 1) / BLOCK_SIZE;
  for (int step = 0; step < steps; ++step) {
    accelerate<<<blocks, BLOCK_SIZE>>>(bodies, dt);
    move<<<blocks, BLOCK_SIZE>>>(bodies, dt);
  }
  SAFE_CALL(cudaGetLastError());
  SAFE_CALL(cudaMemcpy(positions.data(), bodies.positions_, n * sizeof(float4), cudaMemcpyDeviceToHost));
  SAFE_CALL(cudaFree(bodies.positions_));
  SAFE_CALL(cudaFree(bodies.velocities_));

  for (int step = 0; step < steps; ++step) {
    for (Body& a : host) {
      for (const Body& b : host) {
        const double dx = b.x - a.x, dy = b.y - a.y, dz = b.z - a.z;
        const double r = std::sqrt(dx * dx + dy * dy + dz * dz + SOFTENING), f = dt * b.m / (r * r * r);
        a.vx += f * dx, a.vy += f * dy, a.vz += f * dz;
      }
    }
    for (Body& a : host) a.x += dt * a.vx, a.y += dt * a.vy, a.z += dt * a.vz;
  }
  double worst = 0;
  for (int i = 0; i < n; ++i) {
    const double error = std::fabs(positions[i].x - host[i].x) + std::fabs(positions[i].y - host[i].y) +
                         std::fabs(positions[i].z - host[i].z);
    if (error > worst || error != error) worst = error;  // a NaN enters, and stays
  }
  for (int i = 0; i < n; i += 25) printf("%3d: %7.4f %7.4f %7.4f\n", i, positions[i].x, positions[i].y, positions[i].z);
  printf(worst < 1e-5 ? "all bodies where they should be\n" : "WRONG\n");
  return worst < 1e-5 ? 0 : 1;
}
