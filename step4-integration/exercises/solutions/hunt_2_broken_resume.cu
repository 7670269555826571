// Bug hunt 2: a training that is stopped and goes on still learns, and is not the one that was not stopped.
//
//   kernel-fusion learn check hunt_2_broken_resume
//   kernel-fusion simt exercises/solutions/hunt_2_broken_resume.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_2_broken_resume.cu && ./a.out      with a GPU
#include <kf/exercise.h>

constexpr int kWidth = 32, kSamples = 8, kSteps = 20;

// A number from 0 to 1 that looks random, of its index: as Philox's, it needs no state but where the next ones begin.
__host__ __device__ float uniform(unsigned index) {
  unsigned x = index * 0x9E3779B9u + 0x85EBCA6Bu;
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return ((x ^ (x >> 15)) >> 8) * (1.f / (1 << 24));
}

// The gradient of half the squared distance from the sample, of which dropout leaves some; the loss.
__global__ void differ(const float* weights, const float* sample, float* grad, float* loss, unsigned offset) {
  __shared__ float squares[kWidth];
  const int i = threadIdx.x;
  const bool kept = uniform(offset + i) >= 0.25f;
  grad[i] = kept ? weights[i] - sample[i] : 0;
  squares[i] = grad[i] * grad[i] / 2;
  __syncthreads();
  if (i > 0) return;
  float sum = 0;
  for (int j = 0; j < kWidth; ++j) sum += squares[j];
  *loss = sum;
}

// AdamW's step `count`, from 1 on: the moments begin at 0, which the powers make up for.
__global__ void update(float* weights, const float* grad, float* mean, float* square, int count) {
  const int i = threadIdx.x;
  mean[i] = 0.9f * mean[i] + 0.1f * grad[i];
  square[i] = 0.95f * square[i] + 0.05f * grad[i] * grad[i];
  const float m = mean[i] / (1 - powf(0.9f, count)), s = square[i] / (1 - powf(0.95f, count));
  weights[i] -= 0.05f * (m / (sqrtf(s) + 1e-8f) + 0.1f * weights[i]);
}

using Floats = std::vector<float>;

struct Checkpoint {
  Floats weights, mean, square;
  int steps;        // that were taken
  unsigned offset;  // of the random numbers
};

struct Trainer {
  unsigned offset = 0;  // where the next random numbers begin
  int steps = 0;        // taken of the training
  // SOLUTION
  // | int count = 0;  // AdamW's steps
  // END
  OnGpu<float> weights, mean{Floats(kWidth)}, square{Floats(kWidth)}, grad{Floats(kWidth)}, loss{Floats(1)}, samples;

  Trainer() : weights(drawn(kWidth)), samples(drawn(kSamples * kWidth)) {}

  // SOLUTION
  // | explicit Trainer(const Checkpoint& from)
  // |     : offset(from.offset), steps(from.steps), weights(drawn(kWidth)), samples(drawn(kSamples * kWidth)) {
  // |   write(weights, from.weights), write(mean, from.mean), write(square, from.square);
  // | }
  // The random numbers last: what a new trainer draws for itself moves them on.
  explicit Trainer(const Checkpoint& from) : Trainer() {
    write(weights, from.weights), write(mean, from.mean), write(square, from.square);
    steps = from.steps, offset = from.offset;
  }
  // END

  Floats drawn(int n) {
    Floats values(n);
    for (float& value : values) value = 2 * uniform(offset++) - 1;
    return values;
  }
  static void write(OnGpu<float>& to, const Floats& from) {
    CHECK(cudaMemcpy(to.data, from.data(), to.bytes, cudaMemcpyHostToDevice));
  }

  // The next step: an epoch has each sample once, each epoch in another order.
  float step() {
    const int epoch = steps / kSamples, sample = (5 * steps + 3 * epoch) % kSamples;
    differ<<<1, kWidth>>>(weights.data, samples.data + sample * kWidth, grad.data, loss.data, offset);
    // SOLUTION
    // | update<<<1, kWidth>>>(weights.data, grad.data, mean.data, square.data, ++count);
    update<<<1, kWidth>>>(weights.data, grad.data, mean.data, square.data, steps + 1);
    // END
    CHECK(cudaGetLastError());
    offset += kWidth, ++steps;
    Floats value(1);
    loss.read(value);
    return value[0];
  }
  Checkpoint save() const {
    Checkpoint to{Floats(kWidth), Floats(kWidth), Floats(kWidth), steps, offset};
    weights.read(to.weights), mean.read(to.mean), square.read(to.square);
    return to;
  }
};

// Whether a training that ends after `stop` steps, and goes on, has the losses of one that does not: all bits of them.
bool right(const Floats& whole, int stop) {
  std::printf("stopped after %d steps: ", stop);
  Trainer first;
  for (int step = 0; step < stop; ++step) first.step();
  Trainer second(first.save());
  for (int step = stop; step < kSteps; ++step) {
    const float loss = second.step();
    if (loss == whole[step]) continue;
    std::printf("WRONG: the loss of step %d is %.9g, must be %.9g\n", step, loss, whole[step]);
    return false;
  }
  std::printf("right\n");
  return true;
}

int main() {
  Floats whole;
  for (Trainer trainer; trainer.steps < kSteps;) whole.push_back(trainer.step());
  bool all = true;
  for (const int stop : {1, 5, kSamples}) all &= right(whole, stop);
  std::printf(all ? "all right\n" : "Hint: on what does a step depend, besides weights and moments?\n");
  return all ? 0 : 1;
}
