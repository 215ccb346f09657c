// What Python passes, laid out as in layout.py. Strides and sizes are in elements.
#pragma once

#include <cstdint>

struct Tokens {  // (batch, heads, tokens, dim); the last axis is dense
  float* data;
  int64_t batch, head, token;
};

struct Table {  // (heads, rows of all maps, dim), dense; no data: there is none
  const float* data;
  float* gradient;
  int64_t heads;  // 1 if the heads share it
};

struct Mask {  // added to (batch, heads, queries, keys); strides of 0 where it is broadcast
  const float* data;
  int64_t batch, head, query, key;
};

struct Map {  // plans as `irpe_make_plan` makes them
  const uint16_t* of_keys;
  const uint16_t* of_queries;  // needed by query tables alone
  int64_t rows;
};

using Work = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Work, void* context);

struct Call {
  int64_t batch, heads, queries, keys, dim, num_maps, threads;
  double scale;
  Tokens q, k, v, table_q, table_k;  // what key and query tables meet; no data: q and k
  Tokens out, grad_out, grad_q, grad_k, grad_v, grad_table_q, grad_table_k;
  Table query, key, value, bias;
  Mask mask;
  const Map* maps;
  float* normalizers;  // (2, batch, heads, queries): the maximum and 1 / sum of each row of scores
  ParallelFor parallel_for;
};

enum Status : int32_t { DONE = 0, NO_MEMORY = 1, BAD_ID = 2, NO_THREADS = 3 };
