// From a tensor to a rung: checks, allocation, dispatch. The only place of this step where torch and kernels meet.
#include "host/integration_host.h"

#include <kf/host.h>

#include <algorithm>

#include "cpu/integration_cpu.h"

namespace kf::step4 {
namespace {

Op<kf::embedding::Args> embedding_op() {
  return {"embedding", cpu::embedding, emulated::embedding::rungs(), gpu::embedding::rungs(), kf::embedding::automatic};
}

Op<kf::kv_append::Args> kv_append_op() {
  return {"kv_append", cpu::kv_append, emulated::kv_append::rungs(), gpu::kv_append::rungs(), kf::kv_append::automatic};
}

// CPU tensors only: on a GPU the host would have to wait for the ids, so there the kernel writes NaN instead.
template <class Id>
void check_ids(const at::Tensor& ids, int64_t vocab) {
  const Id* first = static_cast<const Id*>(ids.data_ptr());
  const Id* last = first + ids.numel();
  const Id* bad = std::find_if(first, last, [&](Id id) { return id < 0 || id >= vocab; });
  if (bad == last) return;
  const int64_t at = bad - first;
  TORCH_CHECK_VALUE(false, "embedding: `ids` must be from 0 to ", vocab - 1, ", the rows of `token_weight`, got ", *bad,
                    " at (", at / ids.size(1), ", ", at % ids.size(1), ")");
}

// Caches are written where they lie, so their layout must allow it; k and v may be copied into a layout that does.
void check_cache(const char* name, const at::Tensor& cache) {
  TORCH_CHECK_VALUE(cache.stride(3) == 1 || cache.size(3) <= 1, "kv_append: `", name,
                    "` must have stride 1 along its last dimension, got ", cache.stride(3));
  for (int64_t dim = 0; dim < 3; ++dim) {
    TORCH_CHECK_VALUE(cache.stride(dim) != 0 || cache.size(dim) <= 1, "kv_append: `", name,
                      "` must not be an expanded tensor: dimension ", dim, " has stride 0");
  }
}

kf::kv_append::Strides strides_of(const at::Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

}  // namespace

at::Tensor& embedding_out(const at::Tensor& ids, const at::Tensor& token_weight, const at::Tensor& position_weight,
                          int64_t position, std::string_view rung, at::Tensor& out) {
  check_floating("embedding", "token_weight", token_weight);
  check_dim("embedding", "token_weight", token_weight, 2);
  const int64_t width = token_weight.size(1);
  TORCH_CHECK_VALUE(token_weight.size(0) > 0 && width > 0, "embedding: `token_weight` must not be empty, got shape ",
                    shape_text(token_weight));
  check_like("embedding", "position_weight", position_weight, "token_weight", token_weight);
  check_dim("embedding", "position_weight", position_weight, 2);
  check_shape("embedding", "position_weight", position_weight, {position_weight.size(0), width});
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
                   "embedding: `ids` must be int64 or int32, got ", dtype_text(ids));
  check_device("embedding", "ids", ids, "token_weight", token_weight);
  check_dim("embedding", "ids", ids, 2);
  TORCH_CHECK_VALUE(position >= 0, "embedding: `position` must not be negative, got ", position);
  TORCH_CHECK_VALUE(position <= position_weight.size(0) - ids.size(1), "embedding: `position` (", position,
                    ") and the length of `ids` (", ids.size(1), ") go past the ", position_weight.size(0),
                    " rows of `position_weight`");
  check_out("embedding", "out", out, {ids.size(0), ids.size(1), width}, "token_weight", token_weight);
  check_apart("embedding", {{"out", out}},
              {{"ids", ids}, {"token_weight", token_weight}, {"position_weight", position_weight}});
  check_rung(embedding_op(), rung, token_weight);
  if (out.numel() == 0) return out;
  const at::Tensor contiguous_ids = ids.contiguous();
  const bool ids_64 = ids.scalar_type() == at::kLong;
  if (ids.is_cpu()) {
    ids_64 ? check_ids<int64_t>(contiguous_ids, token_weight.size(0))
           : check_ids<int32_t>(contiguous_ids, token_weight.size(0));
  }
  const at::Tensor token = token_weight.contiguous();
  const at::Tensor positions = position_weight.contiguous();
  run(embedding_op(), rung, token_weight,
      {contiguous_ids.data_ptr(), token.data_ptr(), positions.data_ptr(), out.data_ptr(), ids.size(0), ids.size(1),
       width, token_weight.size(0), position, ids_64, dtype_of(token_weight)});
  return out;
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& token_weight, const at::Tensor& position_weight,
                     int64_t position, std::string_view rung) {
  check_dim("embedding", "ids", ids, 2);
  check_dim("embedding", "token_weight", token_weight, 2);
  at::Tensor out = at::empty({ids.size(0), ids.size(1), token_weight.size(1)}, token_weight.options());
  return embedding_out(ids, token_weight, position_weight, position, rung, out);
}

void kv_append(at::Tensor& k_cache, at::Tensor& v_cache, const at::Tensor& k, const at::Tensor& v, int64_t position,
               std::string_view rung) {
  check_floating("kv_append", "k_cache", k_cache);
  check_dim("kv_append", "k_cache", k_cache, 4);
  check_like("kv_append", "v_cache", v_cache, "k_cache", k_cache, k_cache.sizes());
  check_cache("k_cache", k_cache);
  check_cache("v_cache", v_cache);
  check_like("kv_append", "k", k, "k_cache", k_cache);
  check_dim("kv_append", "k", k, 4);
  check_shape("kv_append", "k", k, {k_cache.size(0), k_cache.size(1), k.size(2), k_cache.size(3)});
  check_like("kv_append", "v", v, "k_cache", k_cache, k.sizes());
  check_apart("kv_append", {{"k_cache", k_cache}, {"v_cache", v_cache}}, {{"k", k}, {"v", v}});
  TORCH_CHECK_VALUE(position >= 0, "kv_append: `position` must not be negative, got ", position);
  TORCH_CHECK_VALUE(position <= k_cache.size(2) - k.size(2), "kv_append: `position` (", position,
                    ") and the length of `k` (", k.size(2), ") go past the caches' length ", k_cache.size(2));
  check_rung(kv_append_op(), rung, k_cache);
  if (k.numel() == 0) return;
  const at::Tensor k_rows = with_whole_rows(k);
  const at::Tensor v_rows = with_whole_rows(v);
  run(kv_append_op(), rung, k_cache,
      {k_rows.data_ptr(), v_rows.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), strides_of(k_rows),
       strides_of(v_rows), strides_of(k_cache), strides_of(v_cache), k.size(0), k.size(1), k.size(2), k.size(3),
       position, dtype_of(k_cache)});
}

std::vector<OpInfo> ops() { return {describe(embedding_op()), describe(kv_append_op())}; }

}  // namespace kf::step4
