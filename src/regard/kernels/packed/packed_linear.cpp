// y = W' x for weights W' of 2 to 8 bits, on a CPU. The layouts of the weights are those of layouts.py.
//
//     W' = s (q - z) + m            s, z, m: scale, zero point and minimum of 16, 32 or more inputs of one output
//     x ≈ d p                       p: integers from -127 to 127, d = max |x| / 127 of 32 inputs
//     y = Σ s d (Σ q p - z Σ p) + m d Σ p
//
// The inner sums are exact, in int32; the outer one is in float32. Eight outputs are computed at a time: a chunk are 32
// codes, of eight outputs and four inputs each, which one or two instructions multiply by four numbers of x.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "products.h"
#include "vectors.h"

namespace regard {
namespace {

// The inputs in eight bits.

void quantize_row(const float* x, int64_t blocks, int8_t* values, float* scales, int32_t* sums) {
  for (int64_t b = 0; b < blocks; b++, x += BLOCK, values += BLOCK, sums += 2) {
    float largest[TILE] = {}, check[TILE] = {};  // in lanes, so that the compiler makes them vectors
    for (int i = 0; i < BLOCK; i += TILE)
      for (int j = 0; j < TILE; j++) {
        largest[j] = std::max(largest[j], std::abs(x[i + j]));
        check[j] += x[i + j] * 0;  // NaN if x is not finite
      }
    const float scale = *std::max_element(largest, largest + TILE) / 127;
    float nan = 0;
    for (float c : check) nan += c;
    scales[b] = scale + nan;
    const float inverse = nan == 0 && scale > 0 ? 1 / scale : 0;
    for (int h = 0; h < 2; h++) {
      int32_t sum = 0;
      for (int i = 16 * h; i < 16 * h + 16; i++) {
        const float value = nan == 0 ? x[i] * inverse : 0;
        values[i] = int8_t(std::nearbyint(value));
        sum += values[i];
      }
      sums[h] = sum;
    }
  }
}

// The layouts. Per block: scales of its groups, then the codes in planes of 4, 2 and 1 bits, or of 8.

enum class Scales { f32_header, f16_header, f16, k };

template <int BITS_, int ZERO_, int GROUP_, Scales SCALES_, bool SECOND> struct Layout {
  static constexpr int BITS = BITS_, ZERO = ZERO_, GROUP = GROUP_;
  static constexpr Scales SCALES = SCALES_;
  static constexpr bool SIGNED = BITS == 8;
  static constexpr bool INTEGERS = SCALES == Scales::f32_header || SCALES == Scales::f16_header;
  static constexpr bool ZEROS = SECOND && INTEGERS, MIN = SECOND && !INTEGERS;
  static constexpr int GROUPS = BLOCK / GROUP;  // per block
  static constexpr int HEADER_SCALE = SCALES == Scales::f32_header ? 4 * TILE : 2 * TILE;
  static constexpr int HEADER = SCALES == Scales::f16 ? 0 : HEADER_SCALE * (MIN ? 2 : 1) + (ZEROS ? TILE : 0);
  static constexpr int SCALE = SCALES == Scales::f16 ? 2 * TILE : TILE;
  static constexpr int SCALE_BYTES = INTEGERS ? 0 : SCALE * (MIN ? 2 : 1);
  static constexpr int BYTES = GROUPS * SCALE_BYTES + TILE * BLOCK * BITS / 8;
};

// Chunk C of a block, from the planes of its codes
template <class L, int C> inline Codes decode(const uint8_t* p) {
  if constexpr (L::BITS == 8) {
    return load(p + 32 * C);
  } else {
    constexpr int two = L::BITS >= 4 ? 4 * TILE * BLOCK / 8 : 0;  // where the plane of two bits begins
    constexpr int one = two + (L::BITS % 4 >= 2 ? 2 * TILE * BLOCK / 8 : 0);
    Codes codes;
    if constexpr (L::BITS >= 4) {
      Codes v = load(p + 32 * (C / 2));
      codes = mask(shift_right<C % 2 * 4>(v), 15);
      if constexpr (L::BITS == 6) {
        Codes high = mask(shift_right<2 * (C % 4)>(load(p + two + 32 * (C / 4))), 3);
        codes = merge(codes, shift_left<4>(high));
      }
    } else {
      codes = mask(shift_right<2 * (C % 4)>(load(p + two + 32 * (C / 4))), 3);
    }
    if constexpr (L::BITS % 2 == 1) {
      Codes high = mask(shift_right<C>(load(p + one)), 1);
      codes = merge(codes, shift_left<L::BITS - 1>(high));
    }
    return codes;
  }
}

// The sums of four chunks, from 4 HALF on, for ROWS rows of x
template <class L, int ROWS, int HALF, int... C>
inline void add_products(Ints (&acc)[ROWS], const uint8_t* codes, const Inputs (&x)[ROWS],
                         std::integer_sequence<int, C...>) {
  auto add = [&](auto chunk) {
    constexpr int c = decltype(chunk)::value;
    Codes w = decode<L, 4 * HALF + c>(codes);
    for (int r = 0; r < ROWS; r++) acc[r] = dot<c, L::SIGNED>(acc[r], w, x[r]);
  };
  (add(std::integral_constant<int, C>{}), ...);
}

// Eight outputs of ROWS rows. per_header: blocks that share a header
template <class L, int ROWS> void tile(const uint8_t* w, int64_t blocks, int64_t per_header, X x, Floats (&out)[ROWS]) {
  using Chunks = std::make_integer_sequence<int, 4>;
  for (auto& y : out) y = zeros();
  Floats d = zeros(), dmin = zeros();
  Ints zero = broadcast(0);
  int64_t left = 0;  // blocks until the next header
  for (int64_t b = 0; b < blocks; b++, left--) {
    if (L::HEADER > 0 && left == 0) {
      d = L::SCALES == Scales::f32_header ? load_f32(w) : load_f16(w);
      if constexpr (L::MIN) dmin = load_f16(w + L::HEADER_SCALE);
      if constexpr (L::ZEROS) zero = load_ints(w + L::HEADER_SCALE);
      w += L::HEADER;
      left = per_header;
    }
    __builtin_prefetch(w + 1024);
    const uint8_t* codes = w + L::GROUPS * L::SCALE_BYTES;
    Inputs first[ROWS], second[ROWS];
    for (int r = 0; r < ROWS; r++) {
      const int8_t* values = x.values + r * x.inputs + b * BLOCK;
      first[r] = load_inputs(values), second[r] = load_inputs(values + 16);
    }
    Ints acc[ROWS];
    auto begin = [&](auto sum) {
      for (int r = 0; r < ROWS; r++) {
        acc[r] = broadcast(start<L::SIGNED>(L::ZERO, sum(r)));
        if constexpr (L::ZEROS) acc[r] = minus_product(acc[r], zero, sum(r));
      }
    };
    auto finish = [&](int group, auto sum) {
      const uint8_t* p = w + group * L::SCALE_BYTES;
      Floats s = d, m = zeros();
      if constexpr (L::SCALES == Scales::f16) s = load_f16(p);
      if constexpr (L::SCALES == Scales::k) s = mul(to_floats(load_ints(p)), d);
      if constexpr (L::MIN) {
        const uint8_t* minimum = p + L::SCALE;
        m = L::SCALES == Scales::f16 ? load_f16(minimum) : mul(to_floats(load_ints(minimum)), dmin);
      }
      for (int r = 0; r < ROWS; r++) {
        const float scale = x.scales[r * x.inputs / BLOCK + b];
        out[r] = fma(out[r], acc[r], mul(s, scale));
        if constexpr (L::MIN) out[r] = fma(out[r], m, scale * float(sum(r)));
      }
    };
    auto sums = [&](int r) { return x.sums + r * x.inputs / 16 + 2 * b; };
    if constexpr (L::GROUPS == 1) {
      auto sum = [&](int r) { return sums(r)[0] + sums(r)[1]; };
      begin(sum);
      add_products<L, ROWS, 0>(acc, codes, first, Chunks{});
      add_products<L, ROWS, 1>(acc, codes, second, Chunks{});
      finish(0, sum);
    } else {
      auto first_sum = [&](int r) { return sums(r)[0]; };
      auto second_sum = [&](int r) { return sums(r)[1]; };
      begin(first_sum);
      add_products<L, ROWS, 0>(acc, codes, first, Chunks{});
      finish(0, first_sum);
      begin(second_sum);
      add_products<L, ROWS, 1>(acc, codes, second, Chunks{});
      finish(1, second_sum);
    }
    w += L::BYTES;
  }
}

template <class L, int ROWS>
inline void tile_to(const uint8_t* w, int64_t blocks, int64_t per_header, X x, float* y, int64_t outputs, int64_t n) {
  Floats out[ROWS];
  tile<L, ROWS>(w, blocks, per_header, x, out);
  for (int r = 0; r < ROWS; r++) {
    float* to = y + r * outputs + n;
    if (n + TILE <= outputs) {
      store(to, out[r]);
    } else {
      float values[TILE];
      store(values, out[r]);
      std::copy(values, values + (outputs - n), to);
    }
  }
}

template <class L> void multiply_tiles(const Matrix& w, X x, int64_t rows, float* y, int64_t begin, int64_t end) {
  const int64_t blocks = x.inputs / BLOCK;
  for (int64_t t = begin; t < end; t++) {
    const uint8_t* from = w.data + t * w.tile_bytes;
    for (int64_t r = 0; r < rows;) {
      X part{x.values + r * x.inputs, x.scales + r * blocks, x.sums + r * blocks * 2, x.inputs};
      float* to = y + r * w.outputs;
      const int64_t n = t * TILE, count = std::min<int64_t>(rows - r, 4);
      if (count == 4) tile_to<L, 4>(from, blocks, w.per_header, part, to, w.outputs, n);
      else if (count == 3) tile_to<L, 3>(from, blocks, w.per_header, part, to, w.outputs, n);
      else if (count == 2) tile_to<L, 2>(from, blocks, w.per_header, part, to, w.outputs, n);
      else tile_to<L, 1>(from, blocks, w.per_header, part, to, w.outputs, n);
      r += count;
    }
  }
}

using Multiply = void (*)(const Matrix&, X, int64_t, float*, int64_t, int64_t);
template <int BITS, int ZERO, int GROUP, Scales SCALES, bool SECOND> constexpr Multiply of() {
  return multiply_tiles<Layout<BITS, ZERO, GROUP, SCALES, SECOND>>;
}
const Multiply MULTIPLY[] = {  // in the order of layouts.py
    of<8, 0, 32, Scales::f32_header, false>(), of<8, 0, 32, Scales::f32_header, true>(),
    of<4, 8, 32, Scales::f32_header, false>(), of<4, 0, 32, Scales::f32_header, true>(),
    of<8, 0, 32, Scales::f16_header, false>(), of<8, 0, 32, Scales::f16_header, true>(),
    of<4, 8, 32, Scales::f16_header, false>(), of<4, 0, 32, Scales::f16_header, true>(),
    of<8, 0, 32, Scales::f16, false>(), of<4, 8, 32, Scales::f16, false>(),
    of<4, 0, 32, Scales::f16, true>(),  of<5, 16, 32, Scales::f16, false>(),
    of<5, 0, 32, Scales::f16, true>(),  of<2, 0, 16, Scales::k, true>(),
    of<3, 4, 16, Scales::k, false>(),   of<4, 0, 32, Scales::k, true>(),
    of<5, 0, 32, Scales::k, true>(),    of<6, 32, 16, Scales::k, false>(),
};

}  // namespace

void Rows::quantize(int64_t row, const float* x, int64_t inputs) {
  const int64_t blocks = inputs / BLOCK;
  quantize_row(x, blocks, &values[row * inputs], &scales[row * blocks], &sums[row * blocks * 2]);
}

void Matrix::multiply(X x, int64_t rows, float* y, int64_t begin, int64_t end) const {
  MULTIPLY[layout](*this, x, rows, y, begin, end);
}

namespace {

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, int64_t outputs, int64_t layout, int64_t per_header) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && packed.is_contiguous());
  const int64_t inputs = x.size(-1), rows = inputs ? x.numel() / inputs : 0;
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor y = at::empty(shape, x.options());
  if (rows == 0) return y;
  thread_local Rows buffer;
  Rows& quantized = buffer;  // inside parallel_for the name `buffer` would be that of each thread
  quantized.resize(rows, inputs);
  const float* from = x.const_data_ptr<float>();
  at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) quantized.quantize(r, from + r * inputs, inputs);
  });
  const Matrix w{packed.const_data_ptr<uint8_t>(), outputs, packed.size(1), layout, per_header};
  float* to = y.mutable_data_ptr<float>();
  at::parallel_for(0, w.tiles(), std::max<int64_t>(1, 32768 / (w.tile_bytes * rows)), [&](int64_t begin, int64_t end) {
    w.multiply(quantized.view(inputs), rows, to, begin, end);
  });
  return y;
}

}  // namespace
}  // namespace regard

TORCH_LIBRARY_FRAGMENT(regard, m) {
  m.def("packed_linear(Tensor x, Tensor packed, int outputs, int layout, int per_header) -> Tensor");
}
TORCH_LIBRARY_IMPL(regard, CPU, m) { m.impl("packed_linear", &regard::packed_linear); }
