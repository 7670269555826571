// For a step's pybind.cpp: what torch must do around ops that write into their arguments, and what Python asks.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <kf/host.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

namespace kf {

// ---- ops that write into their arguments: out-variants, and those that have an (a!) ----
//
// Autograd knows of a write by the tensor's version counter, and refuses to go back through a value that is no longer
// there. torch's own ops raise the counter; for other libraries' nobody does, unless they register that as well.

namespace detail {
inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Calls `f` with each tensor on the stack, and with what the schema says of it.
template <class F>
void for_each_tensor(const c10::OperatorHandle& op, const torch::jit::Stack& stack, F f) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    if (value.isTensor()) f(arguments[i], value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& t : value.toTensorVector()) f(arguments[i], t);
  }
}

// As torch's own out-variants, these have no derivative.
inline void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for_each_tensor(op, *stack, [&](const c10::Argument& argument, const at::Tensor& t) {
    const auto must = [&] {
      const std::string& name = op.schema().name();
      return name.substr(name.rfind(':') + 1) + ": `" + argument.name() + "` must ";
    };
    TORCH_CHECK(!(c10::GradMode::is_enabled() && t.requires_grad()), must(),
                "not require gradients: an op that writes into its arguments passes none on; call it under "
                "torch.no_grad()");
    TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(0).defined(), must(),
                                "have no tangent: an op that writes into its arguments has no forward-mode derivative");
  });
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

inline void raise_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::vector<at::Tensor> written;
  for_each_tensor(op, *stack, [&](const c10::Argument& argument, const at::Tensor& t) {
    if (is_written(argument)) written.push_back(t);
  });
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& t : written) t.unsafeGetTensorImpl()->bump_version();
}
}  // namespace detail

// The last line of a step's TORCH_LIBRARY, after its schemas.
inline void watch_writes(torch::Library& m, const std::string& step) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != step) continue;
    const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    const std::vector<c10::Argument>& arguments = op.schema().arguments();
    if (std::none_of(arguments.begin(), arguments.end(), detail::is_written)) continue;
    const std::string overload = c10::toString(name);
    m.impl(overload.c_str(), torch::dispatch(c10::DispatchKey::Autograd,
                                             torch::CppFunction::makeFromBoxedFunction<&detail::refuse_gradients>()));
    m.impl(overload.c_str(), torch::dispatch(c10::DispatchKey::ADInplaceOrView,
                                             torch::CppFunction::makeFromBoxedFunction<&detail::raise_versions>()));
  }
}

// ---- what Python asks ----

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
      "needs_scratch",
      [ops](const std::string& op, const std::string& rung) {
        return find_rung("needs_scratch", find_op("needs_scratch", ops, op), rung).needs_scratch;
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
  m.def("launch_counts", &launch_counts, "how often each backend ran an op of this step");
}

}  // namespace kf
