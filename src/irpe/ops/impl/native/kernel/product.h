// Products of small matrices, C (+)= A B, where the columns of B and C are whole vectors.
#pragma once

#include <array>
#include <utility>

#include "vector.h"

// Accumulators are registers: this many rows of C at a time for 1, 2, ... vectors of columns.
#ifdef __AVX512F__
constexpr int ROWS_AT_ONCE[] = {0, 16, 12, 8, 6};
#else
constexpr int ROWS_AT_ONCE[] = {0, 8, 6, 4};
#endif
constexpr int MOST_COLUMNS = sizeof(ROWS_AT_ONCE) / sizeof(int) - 1;

template <int COLUMNS, int ROWS>
static void multiply_block(long depth, Elements a, Rows b, Rows c, bool adds) {
  Vector sums[ROWS][COLUMNS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v)
      sums[r][v] = adds ? load(c.data + r * c.stride + v * WIDTH) : broadcast(0.0f);
#pragma GCC unroll 1
  for (long k = 0; k < depth; ++k, b.data += b.stride, a.data += a.column) {
    Vector line[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) line[v] = load(b.data + v * WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; ++v) sums[r][v] += line[v] * broadcast(a.data[r * a.row]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) store(c.data + r * c.stride + v * WIDTH, sums[r][v]);
}

template <int COLUMNS, std::size_t... ROWS> constexpr auto blocks_of(std::index_sequence<ROWS...>) {
  return std::array{multiply_block<COLUMNS, ROWS + 1>...};
}

template <int COLUMNS>
static void multiply_columns(long rows, long depth, Elements a, Rows b, Rows c, bool adds) {
  constexpr int MOST = ROWS_AT_ONCE[COLUMNS];
  static constexpr auto blocks = blocks_of<COLUMNS>(std::make_index_sequence<MOST>());
  for (; rows > 0; rows -= MOST, a.data += MOST * a.row, c.data += MOST * c.stride)
    blocks[(rows < MOST ? rows : MOST) - 1](depth, a, b, c, adds);
}

// C (+)= A B: `rows` of A, `vectors` of columns, `depth` elements in each sum.
static void multiply(long rows, long vectors, long depth, Elements a, Rows b, Rows c, bool adds) {
  for (long panels = (vectors + MOST_COLUMNS - 1) / MOST_COLUMNS; panels > 0; --panels) {
    long columns = (vectors + panels - 1) / panels;
    if (columns == 1) multiply_columns<1>(rows, depth, a, b, c, adds);
    if (columns == 2) multiply_columns<2>(rows, depth, a, b, c, adds);
    if (columns == 3) multiply_columns<3>(rows, depth, a, b, c, adds);
    if (columns == 4) multiply_columns<MOST_COLUMNS>(rows, depth, a, b, c, adds);
    vectors -= columns, b.data += columns * WIDTH, c.data += columns * WIDTH;
  }
}
