// The plain C++ versions of this step's ops: rung 0.
#pragma once

#include "kernels/attention/rungs.h"
#include "kernels/attention_backward/rungs.h"
#include "kernels/attention_decode/rungs.h"
#include "kernels/softmax/rungs.h"
#include "kernels/softmax_backward/rungs.h"

namespace kf::cpu {

// The keys of a batch that exist: begin ≤ j < end; none where end ≤ begin.
struct KeyRange {
  int64_t begin, end;
};
KeyRange keys_of(const kf::attention::Args& args, int64_t batch);

// What `query` is among, of a batch whose keys are `keys`: all of its queries; or, in a packed row, its document's.
// Where the mask is causal, query i sees keys j ≤ i + diagonal of these.
struct Document {
  KeyRange queries, keys;
  int64_t diagonal;
};
Document document_of(const kf::attention::Args& args, int64_t query, const KeyRange& keys);

// The first element of a row.
template <class T>
T* row_of(T* first, const kf::attention::Strides& stride, int64_t batch, int64_t head, int64_t position) {
  return first + batch * stride.batch + head * stride.head + position * stride.seq;
}

void softmax(const kf::softmax::Args& args);
void softmax_backward(const kf::softmax_backward::Args& args);
void attention(const kf::attention::Args& args);
void attention_backward(const kf::attention_backward::Args& args);
void attention_decode(const kf::attention_decode::Args& args);

}  // namespace kf::cpu
