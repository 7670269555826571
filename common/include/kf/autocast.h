// Ops under torch.autocast: their tensors in another dtype, and then the op. Host files only.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace kf {

namespace detail {
template <class T>
const T& cast(const T& argument, at::ScalarType, c10::DeviceType) {
  return argument;
}
// Floating tensors on the device; not float64, which autocast leaves alone everywhere.
inline at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype, c10::DeviceType device) {
  return at::autocast::cached_cast(dtype, tensor, device);
}
inline std::optional<at::Tensor> cast(const std::optional<at::Tensor>& tensor, at::ScalarType dtype,
                                      c10::DeviceType device) {
  if (!tensor) return tensor;
  return at::autocast::cached_cast(dtype, *tensor, device);
}
}  // namespace detail

// Calls the registered op `name`, whose implementation is kFunction, with autocast off and its tensors in `dtype`; with
// none given, in autocast's own. Autograd sees the op, so gradients come back in the dtypes that went in.
template <auto kFunction, class... Rest>
auto call_in(std::optional<at::ScalarType> dtype, const char* name, const at::Tensor& first, const Rest&... rest) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<std::remove_pointer_t<decltype(kFunction)>>();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const c10::DeviceType device = first.device().type();
  const at::ScalarType to = dtype ? *dtype : at::autocast::get_autocast_dtype(device);
  return op.call(detail::cast(first, to, device), detail::cast(rest, to, device)...);
}

}  // namespace kf
