// An op of a step in torch's words: its schemas, and what is called on a CPU, on a GPU and under torch.autocast.
#pragma once

#include <kf/argument_checks.h>
#include <kf/autocast.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace kf {
namespace detail {

template <class Function>
struct Signature;
template <class... P>
struct Signature<void(P...)> {
  static constexpr size_t outs = (size_t{0} + ... + std::is_same_v<P, at::Tensor&>);
  using Ins = std::make_index_sequence<sizeof...(P) - outs>;
  using Outs = std::make_index_sequence<outs>;
  template <size_t i>
  using At = std::tuple_element_t<i, std::tuple<P...>>;
};

// The two functions that are made of kWrite, whose last arguments are the tensors that it writes to.
template <auto kWrite, class S, class Ins, class Outs>
struct Ways;
template <auto kWrite, class S, size_t... in, size_t... out>
struct Ways<kWrite, S, std::index_sequence<in...>, std::index_sequence<out...>> {
  // To new tensors: it gets undefined ones, and makes them.
  static auto returning(typename S::template At<in>... given) {
    std::array<at::Tensor, sizeof...(out)> made;
    kWrite(given..., made[out]...);
    if constexpr (sizeof...(out) == 1) {
      return made[0];
    } else {
      return std::tuple(made[out]...);
    }
  }

  template <size_t>
  using Out = at::Tensor&;
  static auto writing(typename S::template At<in>... given, Out<out>... to)
      -> std::conditional_t<sizeof...(out) == 1, at::Tensor&, std::tuple<Out<out>...>> {
    kWrite(given..., to...);
    if constexpr (sizeof...(out) == 1) {
      return (to, ...);
    } else {
      return {to...};
    }
  }

  struct InAutocast {
    std::string name;
    std::optional<at::ScalarType> dtype;
    auto operator()(typename S::template At<in>... given) const {
      return call_in<&returning>(dtype, name.c_str(), given...);
    }
  };
};

}  // namespace detail

// Autocast leaves an op alone, as backward passes, which get what the forward had; or it casts its tensors.
enum class Autocast { kNone, kToFloat32, kToItsDtype };

// A step's library of ops.
struct Ops {
  torch::Library& m;
  const char* step;

  // Defines the op that kWrite computes, and its out-variant. arguments: as in a schema, without a closing bracket;
  // `rung` comes behind them, then, in the out-variant, what is written to. kWrite makes of this what is not defined.
  template <auto kWrite>
  void define(const std::string& arguments, const std::vector<const char*>& outs,
              Autocast autocast = Autocast::kNone) const {
    using S = detail::Signature<std::remove_pointer_t<decltype(kWrite)>>;
    using Ways = detail::Ways<kWrite, S, typename S::Ins, typename S::Outs>;
    const size_t bracket = arguments.find('(');
    const std::string name = arguments.substr(0, bracket), rest = arguments.substr(bracket) + ", str rung=\"auto\"";
    std::string returned, written, to;
    for (size_t i = 0; i < outs.size(); ++i) {
      const std::string comma = i == 0 ? "" : ", ", tensor = std::string("Tensor(") + static_cast<char>('a' + i) + "!)";
      returned += comma + "Tensor";
      written += comma + tensor;
      to += ", " + tensor + " " + outs[i];
    }
    m.def((name + rest + ") -> (" + returned + ")").c_str());
    m.def((name + ".out" + rest + to + ") -> (" + written + ")").c_str());
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      m.impl(name.c_str(), torch::dispatch(key, &Ways::returning));
      m.impl((name + ".out").c_str(), torch::dispatch(key, &Ways::writing));
    }
    if (autocast == Autocast::kNone) return;
    const std::optional<at::ScalarType> dtype =
        autocast == Autocast::kToFloat32 ? std::optional(at::kFloat) : std::nullopt;
    for (const auto key : {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}) {
      m.impl(name.c_str(), torch::dispatch(key, typename Ways::InAutocast{step + ("::" + name), dtype}));
    }
  }
};

// Where an op writes: to what it is given, which must be right; where it is not, to what is made now.
inline void make_or_check_out(const char* op, const char* name, at::Tensor& out, at::IntArrayRef shape,
                              const char* first_name, const at::Tensor& first) {
  if (!out.defined()) out = at::empty(shape, first.options());
  check_out(op, name, out, shape, first_name, first);
}

}  // namespace kf
