// From a tensor to a rung: checks, allocation, dispatch. The only place of this step where torch and kernels meet.
#include "host/integration_host.h"

#include <kf/host.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "cpu/integration_cpu.h"
#include "host/all_reduce_host.h"
#include "host/cross_entropy_host.h"
#include "host/decode_step_host.h"
#include "host/embedding_backward_host.h"
#include "host/sample_host.h"

namespace kf::step4 {
namespace {

using Optional = std::optional<at::Tensor>;

Op<kf::embedding::Args> embedding_op() {
  return {"embedding", cpu::embedding, emulated::embedding::rungs(), gpu::embedding::rungs(), kf::embedding::automatic};
}

Op<kf::kv_append::Args> kv_append_op() {
  return {"kv_append", cpu::kv_append, emulated::kv_append::rungs(), gpu::kv_append::rungs(), kf::kv_append::automatic};
}

template <class Id>
void check_ids_of(const char* op, const at::Tensor& ids, int64_t vocab) {
  const Id* first = static_cast<const Id*>(ids.data_ptr());
  const Id* last = first + ids.numel();
  const Id* bad = std::find_if(first, last, [&](Id id) { return id < 0 || id >= vocab; });
  if (bad == last) return;
  const int64_t at = bad - first;
  TORCH_CHECK_VALUE(false, op, ": `ids` must be from 0 to ", vocab - 1, ", the rows of the table, got ", *bad, " at (",
                    at / ids.size(1), ", ", at % ids.size(1), ")");
}

// How far from `position` each sequence begins: int32 [batch], beside the op's first tensor.
void check_positions(const char* op, const Optional& positions, const char* first_name, const at::Tensor& first,
                     int64_t batch) {
  if (!positions) return;
  check_type(op, "positions", *positions, at::kInt);
  check_device(op, "positions", *positions, first_name, first);
  check_shape(op, "positions", *positions, {batch});
}

// CPU tensors only, as check_ids: `length` tokens of each sequence stand within `rows`, or only before `rows`.
void check_places(const char* op, int64_t position, const at::Tensor& positions, int64_t length, int64_t rows,
                  bool from_0, const char* of) {
  for (int64_t b = 0; b < positions.numel(); ++b) {
    const int64_t first = position + positions.const_data_ptr<int32_t>()[b];
    TORCH_CHECK_VALUE(first <= rows - length && (first >= 0 || !from_0), op, ": `position` (", position,
                      ") and `positions` (", first - position, " at ", b, ") put ", length, " tokens at ", first,
                      " to ", first + length - 1, ", outside the ", rows, " ", of);
  }
}

// Where `positions` are added, `position` may be any number from 0. All that lead past the last row, whatever is added,
// are made one: no sum overflows.
int64_t within_sums(int64_t position, int64_t rows) { return std::min(position, rows + (int64_t{1} << 32)); }

// Caches are written where they lie, so their layout must allow it; k and v may be copied into a layout that does.
void check_cache(const char* name, const at::Tensor& cache) {
  TORCH_CHECK_VALUE(cache.stride(3) == 1 || cache.size(3) <= 1, "kv_append: `", name,
                    "` must have stride 1 along its last dimension, got ", cache.stride(3));
  for (int64_t dim = 0; dim < 3; ++dim) {
    TORCH_CHECK_VALUE(cache.stride(dim) != 0 || cache.size(dim) <= 1, "kv_append: `", name,
                      "` must not be an expanded tensor: dimension ", dim, " has stride 0");
  }
}

const int32_t* positions_of(const at::Tensor& moved) {
  return moved.defined() ? moved.const_data_ptr<int32_t>() : nullptr;
}

kf::kv_append::Strides strides_of(const at::Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

}  // namespace

void check_id_type(const char* op, const at::Tensor& ids) {
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, op,
                   ": `ids` must be int64 or int32, got ", dtype_text(ids));
}

void check_ids(const char* op, const at::Tensor& ids, int64_t vocab) {
  ids.scalar_type() == at::kLong ? check_ids_of<int64_t>(op, ids, vocab) : check_ids_of<int32_t>(op, ids, vocab);
}

at::Tensor& embedding_out(const at::Tensor& ids, const at::Tensor& token_weight, const at::Tensor& position_weight,
                          const Optional& positions, int64_t position, std::string_view rung, at::Tensor& out) {
  check_floating("embedding", "token_weight", token_weight);
  check_dim("embedding", "token_weight", token_weight, 2);
  const int64_t width = token_weight.size(1);
  TORCH_CHECK_VALUE(token_weight.size(0) > 0 && width > 0, "embedding: `token_weight` must not be empty, got shape ",
                    shape_text(token_weight));
  check_like("embedding", "position_weight", position_weight, "token_weight", token_weight);
  check_dim("embedding", "position_weight", position_weight, 2);
  check_shape("embedding", "position_weight", position_weight, {position_weight.size(0), width});
  check_id_type("embedding", ids);
  check_device("embedding", "ids", ids, "token_weight", token_weight);
  check_dim("embedding", "ids", ids, 2);
  check_positions("embedding", positions, "token_weight", token_weight, ids.size(0));
  const int64_t rows = position_weight.size(0);
  TORCH_CHECK_VALUE(position >= 0, "embedding: `position` must not be negative, got ", position);
  TORCH_CHECK_VALUE(positions || position <= rows - ids.size(1), "embedding: `position` (", position,
                    ") and the length of `ids` (", ids.size(1), ") go past the ", rows, " rows of `position_weight`");
  check_out("embedding", "out", out, {ids.size(0), ids.size(1), width}, "token_weight", token_weight);
  check_apart("embedding", {{"out", out}},
              {{"ids", ids}, {"token_weight", token_weight}, {"position_weight", position_weight}});
  if (positions) check_apart("embedding", {{"out", out}}, {{"positions", *positions}});
  check_rung(embedding_op(), rung, token_weight);
  if (out.numel() == 0) return out;
  const at::Tensor contiguous_ids = ids.contiguous();
  const at::Tensor moved = positions ? positions->contiguous() : at::Tensor();
  position = within_sums(position, rows);
  if (ids.is_cpu()) {
    check_ids("embedding", contiguous_ids, token_weight.size(0));
    if (positions) check_places("embedding", position, moved, ids.size(1), rows, false, "rows of `position_weight`");
  }
  const at::Tensor token = token_weight.contiguous();
  const at::Tensor place = position_weight.contiguous();
  run(embedding_op(), rung, token_weight,
      {contiguous_ids.data_ptr(), token.data_ptr(), place.data_ptr(), out.data_ptr(), ids.size(0), ids.size(1), width,
       token_weight.size(0), rows, position, positions_of(moved), ids.scalar_type() == at::kLong,
       dtype_of(token_weight)});
  return out;
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& token_weight, const at::Tensor& position_weight,
                     const Optional& positions, int64_t position, std::string_view rung) {
  check_dim("embedding", "ids", ids, 2);
  check_dim("embedding", "token_weight", token_weight, 2);
  at::Tensor out = at::empty({ids.size(0), ids.size(1), token_weight.size(1)}, token_weight.options());
  return embedding_out(ids, token_weight, position_weight, positions, position, rung, out);
}

void kv_append(at::Tensor& k_cache, at::Tensor& v_cache, const at::Tensor& k, const at::Tensor& v, int64_t position,
               const Optional& positions, std::string_view rung) {
  check_floating("kv_append", "k_cache", k_cache);
  check_dim("kv_append", "k_cache", k_cache, 4);
  check_like("kv_append", "v_cache", v_cache, "k_cache", k_cache, k_cache.sizes());
  check_cache("k_cache", k_cache);
  check_cache("v_cache", v_cache);
  check_like("kv_append", "k", k, "k_cache", k_cache);
  check_dim("kv_append", "k", k, 4);
  check_shape("kv_append", "k", k, {k_cache.size(0), k_cache.size(1), k.size(2), k_cache.size(3)});
  check_like("kv_append", "v", v, "k_cache", k_cache, k.sizes());
  check_positions("kv_append", positions, "k_cache", k_cache, k.size(0));
  const std::initializer_list<Named> caches = {{"k_cache", k_cache}, {"v_cache", v_cache}};
  check_apart("kv_append", caches, {{"k", k}, {"v", v}});
  if (positions) check_apart("kv_append", caches, {{"positions", *positions}});
  const int64_t capacity = k_cache.size(2);
  TORCH_CHECK_VALUE(position >= 0, "kv_append: `position` must not be negative, got ", position);
  TORCH_CHECK_VALUE(positions || position <= capacity - k.size(2), "kv_append: `position` (", position,
                    ") and the length of `k` (", k.size(2), ") go past the caches' length ", capacity);
  check_rung(kv_append_op(), rung, k_cache);
  if (k.numel() == 0) return;
  const at::Tensor moved = positions ? positions->contiguous() : at::Tensor();
  position = within_sums(position, capacity);
  if (positions && k.is_cpu()) {
    check_places("kv_append", position, moved, k.size(2), capacity, true, "tokens of `k_cache`");
  }
  const at::Tensor k_rows = with_whole_rows(k);
  const at::Tensor v_rows = with_whole_rows(v);
  run(kv_append_op(), rung, k_cache,
      {k_rows.data_ptr(), v_rows.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), strides_of(k_rows),
       strides_of(v_rows), strides_of(k_cache), strides_of(v_cache), k.size(0), k.size(1), k.size(2), k.size(3),
       capacity, position, positions_of(moved), dtype_of(k_cache)});
}

void check_peers(const char* op, const at::Tensor& buffer, at::IntArrayRef peers, int64_t rank, const char* name,
                 const at::Tensor& like, int64_t width, int64_t needed, double patience) {
  const auto workers = static_cast<int64_t>(peers.size());
  TORCH_CHECK_VALUE(rank >= 0 && rank < workers, op, ": `rank` must be from 0 to ", workers - 1, ", as there are ",
                    workers, " `peers`, got ", rank);
  check_type(op, "buffer", buffer, at::kByte);
  check_device(op, "buffer", buffer, name, like);
  TORCH_CHECK_VALUE(buffer.is_contiguous() && begins_at_16_bytes(buffer) && buffer.numel() >= needed, op,
                    ": `buffer` must be contiguous, begin at a multiple of 16 bytes and have ", needed, " for rows of ",
                    width, " and ", workers, " workers, got ", buffer.numel());
  TORCH_CHECK_VALUE(reinterpret_cast<int64_t>(buffer.data_ptr()) == peers[rank], op,
                    ": `peers` must have the address of `buffer` at `rank` (", rank, ")");
  TORCH_CHECK_VALUE(patience > 0 && patience < 1e9, op, ": `patience` must be from 0 to 1e9 seconds, got ", patience);
}

void addresses_of(at::IntArrayRef peers, void** to) {
  for (const int64_t peer : peers) {
    *to++ = reinterpret_cast<void*>(peer);  // NOLINT(performance-no-int-to-ptr): of other devices
  }
}

std::vector<OpInfo> ops() {
  return {describe(embedding_op()),
          describe_embedding_backward(),
          describe(kv_append_op()),
          describe_cross_entropy(),
          sample_info(),
          decode_step_info(),
          all_reduce_info()};
}

}  // namespace kf::step4
