// For a stage's PYBIND11_MODULE: what Python asks about the stage's ops.
#pragma once

#include <kf/host.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <vector>

namespace kf {

inline const OpInfo& find_op(const char* caller, const std::vector<OpInfo>& ops, const std::string& name) {
  std::vector<std::string> names;
  for (const OpInfo& op : ops) {
    if (op.name == name) return op;
    names.push_back(op.name);
  }
  TORCH_CHECK_VALUE(false, caller, ": `op` must be ", joined(names, " or "), ", got '", name, "'");
}

inline const RungInfo& find_rung(const char* caller, const OpInfo& op, const std::string& name) {
  std::vector<std::string> names;
  for (const RungInfo& rung : op.rungs) {
    if (rung.name == name) return rung;
    names.push_back(rung.name);
  }
  TORCH_CHECK_VALUE(false, caller, ": `rung` must be one of ", joined(names), ", got '", name, "'");
}

inline void define_questions(pybind11::module_& m, const std::vector<OpInfo>& ops) {
  using pybind11::arg;
  m.def(
      "rungs",
      [ops](const std::string& op, bool on_gpu) {
        const OpInfo& found = find_op("rungs", ops, op);
        return on_gpu ? found.gpu_names : found.cpu_names;
      },
      "the names an op accepts as `rung`, in the order of the lesson", arg("op"), arg("on_gpu"));
  m.def(
      "rounds",
      [ops](const std::string& op, const std::string& rung) {
        const OpInfo& found = find_op("rounds", ops, op);
        return rung == "cpu" ? found.cpu_rounds : find_rung("rounds", found, rung).rounds;
      },
      "what a rung rounds to the tensors' dtype before its last step; \"\" for nothing", arg("op"), arg("rung"));
  m.def(
      "asks_scratch",
      [ops](const std::string& op, const std::string& rung) {
        return find_rung("asks_scratch", find_op("asks_scratch", ops, op), rung).asks_scratch;
      },
      "whether a rung needs global memory between its launches", arg("op"), arg("rung"));
  m.def(
      "varies",
      [ops](const std::string& op, const std::string& rung) {
        return find_rung("varies", find_op("varies", ops, op), rung).varies;
      },
      "whether two runs of a rung may differ in their last bits", arg("op"), arg("rung"));
  m.def(
      "choose",
      [ops](const std::string& op, const std::string& rung, const Sizes& sizes, at::ScalarType dtype) {
        const OpInfo& found = find_op("choose", ops, op);
        if (rung != "auto") find_rung("choose", found, rung);
        return found.choose(rung, sizes, dtype_of(dtype));
      },
      "the rung that would run on a GPU like the emulated one, for tensors of any size; or the error there would be",
      arg("op"), arg("rung"), arg("sizes"), arg("dtype"));
  m.def(
      "prefer",
      [ops](const std::string& op, const Sizes& sizes, at::ScalarType dtype) {
        return find_op("prefer", ops, op).prefer(sizes, dtype_of(dtype));
      },
      "the rung that `auto` takes on a GPU, if it can; one that the emulation does not have as well", arg("op"),
      arg("sizes"), arg("dtype"));
  m.def("launch_counts", &launch_counts, "how often each backend ran an op of this stage");
}

}  // namespace kf
