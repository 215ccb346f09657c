// Moving tokens between rows of memory and lanes of vectors, masks, and the passes over a tile.
//
// A tile has a row for each key of a block and, in the row, a lane for each query of a block.
#pragma once

#include "plan.h"

// out[c][r] = factor * in[r][c], or adds it. With `pads` the rows of `out` are written up to a
// whole number of vectors, with zeros.
static void transpose_rows(Rows in, long height, long width, float factor, Rows out, bool pads,
                           bool adds = false) {
  for (long r = 0; r < height; r += WIDTH)
    for (long c = 0; c < width; c += WIDTH) {
      Vector x[WIDTH];
      const float* from = in.data + r * in.stride + c;
      long rows = smaller(WIDTH, height - r), columns = smaller(WIDTH, width - c);
      bool is_full = rows == WIDTH && columns == WIDTH;  // what is not is slow
      for (long i = 0; i < WIDTH; ++i, from += in.stride)
        x[i] = is_full    ? load(from) * broadcast(factor)
               : i < rows ? load_first(from, columns) * broadcast(factor)
                          : broadcast(0.0f);
      transpose(x);
      float* to = out.data + c * out.stride + r;
      for (long i = 0; i < columns; ++i, to += out.stride)
        if (pads || rows == WIDTH) store(to, adds ? load(to) + x[i] : x[i]);
        else store_first(to, rows, adds ? load_first(to, rows) + x[i] : x[i]);
    }
}

// Copies rows of `width` elements, times a factor, or adds them.
static void copy_rows(Rows in, long count, long width, float factor, Rows out, bool adds = false) {
  for (; count > 0; --count, in.data += in.stride, out.data += out.stride)
    for (long e = 0; e < width; ++e) out.data[e] = (adds ? out.data[e] : 0) + in.data[e] * factor;
}

// Adds a mask, whose element for the first query and key is at an offset, to a tile of scores.
// Where it is -infinity a score becomes that, also if it was NaN.
static void add_mask(const Mask& mask, long offset, long queries, long keys, float* tile) {
  const float* data = mask.data + offset;
  const Vector lowest = broadcast(-__builtin_inff());
  float by_query[LANES][WIDTH] = {}, by_key[WIDTH][LANES];
  for (long j = 0; j < keys; j += WIDTH, data += WIDTH * mask.key) {
    long count = smaller(WIDTH, keys - j), height = mask.query ? queries : 1;
    for (long i = 0; i < height; ++i)
      for (long e = 0; e < count; ++e) by_query[i][e] = data[i * mask.query + e * mask.key];
    if (mask.query)
      transpose_rows({by_query[0], WIDTH}, height, WIDTH, 1, {by_key[0], LANES}, true);
    for (long e = 0; e < count; ++e)
      for (long lane = 0; lane < queries; lane += WIDTH) {
        float* scores = tile + (j + e) * LANES + lane;
        Vector x = mask.query ? load(by_key[e] + lane) : broadcast(by_query[0][e]);
        store(scores, select_less(lowest, x, load(scores) + x, x));
      }
  }
}

// Turns scores into e^(score - maximum), where `top` and `sum` are the maximum and the sum of each
// lane over the blocks of keys so far; writes to `rescale` what the blocks before are to be
// multiplied with.
static void exponentiate(float* tile, long keys, long vectors, bool is_first, float* top,
                         float* sum, float* rescale) {
  const Vector lowest = broadcast(-__builtin_inff()), zero = broadcast(0.0f);
  for (long v = 0; v < vectors; ++v) {
    float* column = tile + v * WIDTH;
    Vector before = is_first ? lowest : load(top + v * WIDTH), now[2] = {before, before};
    for (long j = 0; j + 1 < keys; j += 2)
      for (long u = 0; u < 2; ++u) now[u] = maximum(now[u], load(column + (j + u) * LANES));
    Vector last = load(column + (keys - 1) * LANES);
    Vector most = maximum(maximum(now[0], now[1]), last);
    store(top + v * WIDTH, most);
    most = select_less(lowest, most, most, zero);
    Vector sums[2] = {zero, zero};
    auto step = [&](long j, Vector* total) {
      Vector e = exponential(load(column + j * LANES) - most);
      store(column + j * LANES, e);
      *total += e;
    };
    for (long j = 0; j + 1 < keys; j += 2) step(j, &sums[0]), step(j + 1, &sums[1]);
    if (keys % 2) step(keys - 1, &sums[0]);
    Vector factor = exponential(before - most);
    store(rescale + v * WIDTH, factor);
    store(sum + v * WIDTH, sums[0] + sums[1] + (is_first ? zero : factor * load(sum + v * WIDTH)));
  }
}

// Multiplies rows of lanes by a factor for each lane.
static void scale_lanes(float* rows, long count, long vectors, const float* factors) {
  for (long r = 0; r < count; ++r)
    for (long v = 0; v < vectors; ++v) {
      float* p = rows + r * LANES + v * WIDTH;
      store(p, load(p) * load(factors + v * WIDTH));
    }
}

// Makes weights of scores, from the maximum and 1 / sum of each lane.
static void weigh(float* tile, long keys, long vectors, const float* top, const float* inverse) {
  for (long v = 0; v < vectors; ++v)
    for (long j = 0; j < keys; ++j) {
      float* p = tile + j * LANES + v * WIDTH;
      store(p, exponential(load(p) - load(top + v * WIDTH)) * load(inverse + v * WIDTH));
    }
}

// Backward through the softmax: gradient = weight * (gradient - mean), by lane.
static void differentiate_softmax(const float* weights, long keys, long vectors, const float* mean,
                                  float* gradient) {
  for (long v = 0; v < vectors; ++v)
    for (long j = 0; j < keys; ++j) {
      long at = j * LANES + v * WIDTH;
      store(gradient + at, load(weights + at) * (load(gradient + at) - load(mean + v * WIDTH)));
    }
}
