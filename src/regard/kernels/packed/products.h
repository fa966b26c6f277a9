// Products with packed weights, as packed_linear.cpp computes them for its own operator and for decode_stack.cpp.

#pragma once

#include <cstdint>
#include <vector>

namespace regard {

constexpr int TILE = 8;    // outputs
constexpr int BLOCK = 32;  // inputs that are multiplied before the sums become floats

struct X {  // rows of quantized inputs
  const int8_t* values;
  const float* scales;
  const int32_t* sums;
  int64_t inputs;
};

struct Rows {  // their memory
  std::vector<int8_t> values;  // p
  std::vector<float> scales;   // d of every block
  std::vector<int32_t> sums;   // Σ p of every 16 inputs

  void resize(int64_t rows, int64_t inputs) {
    values.resize(rows * inputs), scales.resize(rows * inputs / BLOCK), sums.resize(rows * inputs / BLOCK * 2);
  }
  void quantize(int64_t row, const float* x, int64_t inputs);
  X view(int64_t inputs) const { return {values.data(), scales.data(), sums.data(), inputs}; }
};

struct Matrix {
  const uint8_t* data;
  int64_t outputs, tile_bytes, layout, per_header;

  int64_t tiles() const { return (outputs + TILE - 1) / TILE; }
  // y (rows, outputs) from tile `begin` to `end`, eight outputs each
  void multiply(X x, int64_t rows, float* y, int64_t begin, int64_t end) const;
};

}  // namespace regard
