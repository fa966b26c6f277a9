// A few tokens through all blocks of a stack, in one parallel region. All products have packed weights.
//
//     x = x + W_o attention(R W_q n, R W_k n, W_v n)         n = norm(x), R: the rotation of a token's position
//     x = x + W_down (silu(W_gate n) ⊙ W_up n)               n = norm(x)
//
// Each thread computes a share of the outputs of every product. Where it needs those of the other threads it waits at a
// barrier; the inputs of products are normalized and rounded in every thread, which takes less time than another
// barrier. Keys and values are appended to the pages of a paged store, which are read in place. A token is computed in the
// same order of operations whatever the other tokens are.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include <omp.h>

#include "products.h"

namespace regard {
namespace {

struct Block {
  const float *attention_norm, *gated_norm;
  Matrix q, k, v, o, gate, up, down;
  float *keys, *values;  // pools (slots, kv_heads, dim)
};

struct Share {  // of n units
  int64_t begin, end;
  Share(int64_t n, int thread, int threads) : begin(n * thread / threads), end(n * (thread + 1) / threads) {}
};

// Within 2 ulp between -87 and 88, beyond which it is constant. Unlike std::exp, loops with it are vectorized.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.f), 88.f);
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // x = n ln 2 + r
  float p = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  const int32_t bits = (int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return (p * r * r + r + 1) * power;
}

inline float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

inline void rotate(const float* x, float* out, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[half + i];
    out[i] = a * cos[i] - b * sin[i], out[half + i] = b * cos[i] + a * sin[i];
  }
}

struct Forward {
  std::vector<Block> blocks;
  int64_t tokens, width, hidden, heads, kv_heads, dim;
  const float *cos, *sin;  // (tokens, dim / 2)
  const int64_t *table, *positions;
  const bool* valid;
  int64_t row_tokens, columns, page;  // tokens per row of the table, blocks per row, slots per block
  float scale, eps;
  float *x, *q, *k, *v, *z, *y, *gate, *up;

  bool is_valid(int64_t t) const { return valid == nullptr || valid[t]; }
  int64_t slot(int64_t t, int64_t position) const {
    return table[t / row_tokens * columns + position / page] * page + position % page;
  }

  // The tokens of x, normalized and rounded
  X normalized(const float* weight, Rows& rows, std::vector<float>& row) const {
    rows.resize(tokens, width), row.resize(width);
    for (int64_t t = 0; t < tokens; t++) {
      const float* from = x + t * width;
      const float factor = 1 / std::sqrt(dot(from, from, width) / width + eps);
      for (int64_t i = 0; i < width; i++) row[i] = from[i] * factor * weight[i];
      rows.quantize(t, row.data(), width);
    }
    return rows.view(width);
  }
  X rounded(const float* from, int64_t inputs, Rows& rows) const {
    rows.resize(tokens, inputs);
    for (int64_t t = 0; t < tokens; t++) rows.quantize(t, from + t * inputs, inputs);
    return rows.view(inputs);
  }
  void add_to_stream(const Matrix& w, X inputs, const Share& share) const {
    w.multiply(inputs, tokens, y, share.begin, share.end);
    const int64_t end = std::min(share.end * TILE, width);
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t i = share.begin * TILE; i < end; i++) x[t * width + i] += y[t * width + i];
  }

  void append(const Block& block, int64_t t, int64_t head) const {
    if (!is_valid(t)) return;
    const int64_t from = (t * kv_heads + head) * dim, to = (slot(t, positions[t]) * kv_heads + head) * dim;
    if (cos) rotate(k + from, block.keys + to, cos + t * dim / 2, sin + t * dim / 2, dim);
    else std::copy(k + from, k + from + dim, block.keys + to);
    std::copy(v + from, v + from + dim, block.values + to);
  }

  void attend(const Block& block, int64_t t, int64_t head, std::vector<float>& scores) const {
    float* out = z + (t * heads + head) * dim;
    std::fill(out, out + dim, 0.f);
    if (!is_valid(t)) return;
    const float* query = q + (t * heads + head) * dim;
    const int64_t kv = head / (heads / kv_heads), count = positions[t] + 1;
    scores.resize(count + dim);
    float* weights = scores.data() + dim;
    if (cos) rotate(query, scores.data(), cos + t * dim / 2, sin + t * dim / 2, dim), query = scores.data();
    float largest = -INFINITY, sum = 0;
    for_each_page(t, count, [&](int64_t first, int64_t slots, int64_t n) {
      for (int64_t i = 0; i < n; i++)
        weights[first + i] = dot(query, block.keys + ((slots + i) * kv_heads + kv) * dim, dim) * scale;
    });
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, weights[i]);
    for (int64_t i = 0; i < count; i++) weights[i] = exponential(weights[i] - largest);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += weights[i];
    for_each_page(t, count, [&](int64_t first, int64_t slots, int64_t n) {
      for (int64_t i = 0; i < n; i++) {
        const float *value = block.values + ((slots + i) * kv_heads + kv) * dim, w = weights[first + i];
        for (int64_t j = 0; j < dim; j++) out[j] += w * value[j];
      }
    });
    for (int64_t j = 0; j < dim; j++) out[j] /= sum;
  }
  template <class F> void for_each_page(int64_t t, int64_t count, F f) const {
    for (int64_t first = 0; first < count; first += page) f(first, slot(t, first), std::min(page, count - first));
  }

  void run(int thread, int threads) const {
    Rows rows;
    std::vector<float> buffer;
    for (const Block& block : blocks) {
      X n = normalized(block.attention_norm, rows, buffer);
      for (auto [w, to] : {std::pair(&block.q, q), std::pair(&block.k, k), std::pair(&block.v, v)}) {
        const Share share(w->tiles(), thread, threads);
        w->multiply(n, tokens, to, share.begin, share.end);
      }
#pragma omp barrier
      const Share appended(tokens * kv_heads, thread, threads);
      for (int64_t i = appended.begin; i < appended.end; i++) append(block, i / kv_heads, i % kv_heads);
#pragma omp barrier
      const Share attended(tokens * heads, thread, threads);
      for (int64_t i = attended.begin; i < attended.end; i++) attend(block, i / heads, i % heads, buffer);
#pragma omp barrier
      add_to_stream(block.o, rounded(z, heads * dim, rows), Share(block.o.tiles(), thread, threads));
#pragma omp barrier
      n = normalized(block.gated_norm, rows, buffer);
      const Share units(block.gate.tiles(), thread, threads);
      block.gate.multiply(n, tokens, gate, units.begin, units.end);
      block.up.multiply(n, tokens, up, units.begin, units.end);
      const int64_t end = std::min(units.end * TILE, hidden);
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = t * hidden + units.begin * TILE; i < t * hidden + end; i++)
          gate[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
#pragma omp barrier
      add_to_stream(block.down, rounded(gate, hidden, rows), Share(block.down.tiles(), thread, threads));
#pragma omp barrier
    }
  }
};

constexpr int64_t WEIGHTS = 9, POOLS = 2;  // tensors per block

// x (tokens, width); weights of each block: norm, q, k, v, o, norm, gate, up, down; packing: outputs, layout and
// per_header of these seven matrices
at::Tensor decode_stack(const at::Tensor& x, at::TensorList weights, at::IntArrayRef packing, at::TensorList pools,
                        const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& table,
                        const at::Tensor& positions, const std::optional<at::Tensor>& valid, int64_t heads,
                        int64_t page, double scale, double eps) {
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kFloat && !weights.empty());
  TORCH_CHECK(table.is_contiguous() && positions.is_contiguous() && cos.is_contiguous() && sin.is_contiguous());
  Forward f;
  const int64_t* numbers = packing.data();
  auto matrix = [&](int64_t i) {
    const at::Tensor& w = weights[i];
    TORCH_CHECK(w.is_contiguous() && w.scalar_type() == at::kByte);
    const Matrix m{w.const_data_ptr<uint8_t>(), numbers[0], w.size(1), numbers[1], numbers[2]};
    numbers += 3;
    return m;
  };
  for (size_t i = 0; i < weights.size() / WEIGHTS; i++) {
    const int64_t w = i * WEIGHTS;
    const at::Tensor &k = pools[i * POOLS], &v = pools[i * POOLS + 1];
    TORCH_CHECK(k.is_contiguous() && v.is_contiguous());
    Block block{weights[w].const_data_ptr<float>(), weights[w + 5].const_data_ptr<float>()};
    block.q = matrix(w + 1), block.k = matrix(w + 2), block.v = matrix(w + 3), block.o = matrix(w + 4);
    block.gate = matrix(w + 6), block.up = matrix(w + 7), block.down = matrix(w + 8);
    block.keys = k.mutable_data_ptr<float>(), block.values = v.mutable_data_ptr<float>();
    f.blocks.push_back(block);
  }
  const at::Tensor result = x.clone();
  f.tokens = x.size(0), f.width = x.size(1), f.hidden = f.blocks[0].gate.outputs, f.heads = heads;
  f.kv_heads = pools[0].size(1), f.dim = pools[0].size(2);
  f.cos = cos.numel() ? cos.const_data_ptr<float>() : nullptr, f.sin = sin.const_data_ptr<float>();
  f.table = table.const_data_ptr<int64_t>(), f.positions = positions.const_data_ptr<int64_t>();
  f.valid = valid ? valid->const_data_ptr<bool>() : nullptr;
  f.row_tokens = f.tokens / std::max<int64_t>(table.size(0), 1), f.columns = table.size(1), f.page = page;
  f.scale = scale, f.eps = eps;
  const int64_t q = heads * f.dim, kv = f.kv_heads * f.dim;
  std::vector<float> memory(f.tokens * (2 * q + 2 * kv + f.width + 2 * f.hidden));
  float* next = memory.data();
  auto take = [&](int64_t size) { return std::exchange(next, next + f.tokens * size); };
  f.x = result.mutable_data_ptr<float>(), f.q = take(q), f.k = take(kv), f.v = take(kv), f.z = take(q);
  f.y = take(f.width), f.gate = take(f.hidden), f.up = take(f.hidden);
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
#pragma omp parallel num_threads(threads) if (threads > 1)
  f.run(omp_get_thread_num(), omp_get_num_threads());
  return result;
}

}  // namespace
}  // namespace regard

TORCH_LIBRARY_FRAGMENT(regard, m) {
  m.def(
      "decode_stack(Tensor x, Tensor[] weights, int[] packing, Tensor(a!)[] pools, Tensor cos, Tensor sin, Tensor table, "
      "Tensor positions, Tensor? valid, int heads, int page, float scale, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(regard, CPU, m) { m.impl("decode_stack", &regard::decode_stack); }
