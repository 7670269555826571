// Clusters: their barrier, and which of its blocks one is.
#include <algorithm>

#include "scheduler.h"

namespace kf::simt {

void Worker::cluster_arrive(CallSite site) {
  const Inside inside(*this);
  if (cluster_ == nullptr) begin_lone_cluster();
  if (cluster_phase_[current_] > cluster_->passed.load(std::memory_order_acquire)) {
    fail([&] { return "arrives twice at the cluster's barrier without waiting in between (" + text_of(site) + ")"; });
  }
  note_event();
  cluster_->passes[cluster_phase_[current_]++ % 2].release();
  ++cluster_arrived_;
  check_cluster_barrier();
}

// A block that was launched in no cluster is one of its own: its barrier is another one of the block.
void Worker::begin_lone_cluster() {
  const race::Quiet quiet;  // what is written here is the runtime's, whichever thread comes first
  lone_cluster_.emplace().members = {this};
  std::fill_n(cluster_phase_, threads_, 0);
  cluster_ = &*lone_cluster_;
}

void Worker::check_cluster_barrier() {
  if (cluster_arrived_ == 0 || cluster_arrived_ + exited_ != threads_) return;
  cluster_arrived_ = 0;
  ++cluster_block_phase_;
  race_.run_worker();  // the lock of the launch is no meeting of threads
  launch_->arrive_at_cluster(cluster_);
  if (fiber_of_[current_] != nullptr) race_.run(current_);
}

void Worker::cluster_wait(CallSite site) {
  if (cluster_ == nullptr) return;  // nobody has arrived
  const std::uint64_t phase = cluster_phase_[current_];
  while (cluster_->passed.load(std::memory_order_acquire) < phase) yield("the cluster's barrier", site);
  note_event();
  if (phase != 0) cluster_->passes[(phase - 1) % 2].acquire();
}

Worker& Worker::member(unsigned rank, const char* what) {
  if (cluster_ == nullptr ? rank != 0 : rank >= launch_->cluster_size) {
    fail([&] {
      return std::string(what) + " of block " + std::to_string(rank) + " of its cluster, which has " +
             std::to_string(launch_->cluster_size);
    });
  }
  return cluster_ == nullptr ? *this : *cluster_->members[rank];
}

Cluster* Launch::join_cluster(std::uint64_t number, unsigned rank, Worker* worker) {
  std::unique_lock<std::mutex> lock(mutex);
  std::unique_ptr<Cluster>& entry = clusters[number];
  if (!entry) {
    entry = std::make_unique<Cluster>();
    entry->members.resize(cluster_size);
  }
  Cluster* const joined = entry.get();
  joined->members[rank] = worker;
  ++joined->joined;
  grid_changed.notify_all();
  grid_changed.wait(lock, [&] { return joined->joined == cluster_size || cancelled.load(); });
  return cancelled.load() ? nullptr : joined;
}

bool Launch::leave_cluster(Cluster* left) {
  std::unique_lock<std::mutex> lock(mutex);
  ++left->left;
  if (left->arrived != 0 && left->arrived + left->left == cluster_size) {
    left->arrived = 0;
    left->passed.fetch_add(1);
  }
  grid_changed.notify_all();
  grid_changed.wait(lock, [&] { return left->left == cluster_size || cancelled.load(); });
  return !cancelled.load();
}

void Launch::arrive_at_cluster(Cluster* at) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (++at->arrived + at->left == cluster_size) {
    at->arrived = 0;
    at->passed.fetch_add(1);
  }
}

// What kernels call.

unsigned kf_cluster_rank() { return running("a block's rank").cluster_rank(); }
unsigned kf_cluster_size() { return running("a cluster's size").launch().cluster_size; }
dim3 kf_cluster_dim() { return running("a cluster's size").launch().cluster; }
uint3 kf_cluster_index() {
  const dim3 dim = kf_cluster_dim();
  return {blockIdx.x / dim.x, blockIdx.y / dim.y, blockIdx.z / dim.z};
}
uint3 kf_cluster_block_index() {
  const dim3 dim = kf_cluster_dim();
  return {blockIdx.x % dim.x, blockIdx.y % dim.y, blockIdx.z % dim.z};
}
dim3 kf_grid_clusters() {
  const dim3 dim = kf_cluster_dim();
  return {gridDim.x / dim.x, gridDim.y / dim.y, gridDim.z / dim.z};
}
void cluster_arrive(CallSite site) { running("the cluster's barrier").cluster_arrive(site); }
void cluster_wait(CallSite site) { running("the cluster's barrier").cluster_wait(site); }

}  // namespace kf::simt
