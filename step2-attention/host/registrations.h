// What the host files give to the step's library; pybind.cpp registers it.
#pragma once

#include <kf/host.h>

#include <vector>

namespace torch {
class Library;
}

namespace kf::step2 {

// The ops on tensors, and what stands for some of them under torch.autocast.
void register_linear(torch::Library& m);
void register_linear_autocast(torch::Library& m);
void register_attention(torch::Library& m);
void register_attention_autocast(torch::Library& m);

// For Python's questions about their rungs; ops() are all.
std::vector<OpInfo> linear_ops();
std::vector<OpInfo> ops();

}  // namespace kf::step2
