// Products of small matrices, C (+)= A B, where the columns of B and C are whole vectors.
#pragma once

#include "vector.h"

constexpr int MOST_COLUMNS = sizeof(ROWS_AT_ONCE) / sizeof(int) - 1;

template <int COLUMNS, int ROWS>
static void multiply_block(long depth, Elements a, Rows b, Rows c, bool adds) {
  Vector sums[ROWS][COLUMNS] = {};
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
  for (int r = 0; r < ROWS; ++r, c.data += c.stride)
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) {
      float* p = c.data + v * WIDTH;
      store(p, adds ? load(p) + sums[r][v] : sums[r][v]);
    }
}

template <int COLUMNS, int ROWS = ROWS_AT_ONCE[COLUMNS]>
static void multiply_columns(long rows, long depth, Elements a, Rows b, Rows c, bool adds) {
  for (; rows >= ROWS; rows -= ROWS, a.data += ROWS * a.row, c.data += ROWS * c.stride)
    multiply_block<COLUMNS, ROWS>(depth, a, b, c, adds);
  if constexpr (ROWS > 1)
    if (rows > 0) multiply_columns<COLUMNS, ROWS - 1>(rows, depth, a, b, c, adds);
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
