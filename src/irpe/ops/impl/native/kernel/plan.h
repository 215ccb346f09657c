// Plans: over a grid, most rows (keys) of a block have the same buckets as others in all lanes
// (queries) of a vector. Such a cluster has few different buckets, so what is looked up for it is
// made once by a few selections, and what is summed is first added up over its rows.
//
// A plan is one array: the offsets of its streams, of 64 bits, then the streams, of 16: number of
// clusters, and for each: number of parts, number of rows, parts (bucket, lanes as bits), rows.
#pragma once

#include <cstdlib>
#include <cstring>

#include "call.h"
#include "vector.h"

constexpr long BLOCK_KEYS = 512;  // most keys in a block

IRPE_INLINE long divide_up(long a, long b) { return (a + b - 1) / b; }
IRPE_INLINE long smaller(long a, long b) { return a < b ? a : b; }
IRPE_INLINE long round_up(long a) { return divide_up(a, WIDTH) * WIDTH; }

// How many tokens a block has: whole vectors, blocks of one size as far as possible.
static long block_size(long tokens, long most) {
  long vectors = divide_up(tokens, WIDTH);
  return divide_up(vectors, divide_up(vectors, most / WIDTH)) * WIDTH;
}
static long query_block(long queries) { return block_size(queries, LANES); }
static long key_block(long keys) { return block_size(keys, BLOCK_KEYS); }

using Stream = const uint16_t*;

IRPE_INLINE Stream stream_of(Stream plan, long index) {
  return plan + reinterpret_cast<const int64_t*>(plan)[index];
}

// Writes to the rows of a block, which are `STRIDE` apart, or adds to them, what the sources hold
// for their buckets: to each of several arrays, with one reading of the stream.
template <long STRIDE, int COUNT>
static void expand(Stream stream, float* const (&sources)[COUNT], long source,
                   float* const (&out)[COUNT], long row, bool adds) {
  for (int clusters = *stream++; clusters > 0; --clusters) {
    int num_parts = stream[0], num_rows = stream[1];
    stream += 2;
    Vector x[COUNT];
    for (int n = 0; n < COUNT; ++n) x[n] = load(sources[n] + source + stream[0] * LANES);
    for (stream += 2; --num_parts > 0; stream += 2)
      for (int n = 0; n < COUNT; ++n)
        x[n] = select(stream[1], load(sources[n] + source + stream[0] * LANES), x[n]);
    for (; num_rows > 0; --num_rows, ++stream)
      for (int n = 0; n < COUNT; ++n) {
        float* p = out[n] + row + *stream * STRIDE;
        store(p, adds ? load(p) + x[n] : x[n]);
      }
  }
}

// Adds the rows of a block to the sums of their buckets: the adjoint of `expand`.
template <long STRIDE, int COUNT>
static void collect(Stream stream, float* const (&in)[COUNT], long row,
                    float* const (&sums)[COUNT], long sum) {
  for (int clusters = *stream++; clusters > 0; --clusters) {
    int num_parts = stream[0], num_rows = stream[1];
    Stream parts = stream + 2;
    Vector x[COUNT] = {};
    for (stream = parts + 2 * num_parts; num_rows > 0; --num_rows, ++stream)
      for (int n = 0; n < COUNT; ++n) x[n] += load(in[n] + row + *stream * STRIDE);
    for (; num_parts > 0; --num_parts, parts += 2)
      for (int n = 0; n < COUNT; ++n) {
        float* p = sums[n] + sum + parts[0] * LANES;
        store(p, load(p) + select(parts[1], x[n], broadcast(0.0f)));
      }
  }
}

// An array that grows.
struct Growing {
  uint16_t* data = nullptr;
  long size = 0, capacity = 0;

  bool reserve(long more) {
    if (size + more <= capacity) return true;
    long wanted = 2 * capacity + more;
    void* grown = realloc(data, wanted * sizeof(uint16_t));
    if (grown == nullptr) return false;
    data = static_cast<uint16_t*>(grown);
    capacity = wanted;
    return true;
  }
};

// The clusters of a block of rows for one vector of lanes, found by a hash of their ids.
struct Clusters {
  static constexpr long SLOTS = 2 * BLOCK_KEYS;  // a power of two
  int32_t first[SLOTS], cluster_of[BLOCK_KEYS], counts[BLOCK_KEYS];
  uint16_t columns[BLOCK_KEYS][WIDTH];
  long size;

  // Finds them; lanes beyond the last are as the last.
  template <class Id>
  Status find(const Id* ids, long rows, long stride, long lanes, long lane_stride, long buckets) {
    size = 0;
    memset(first, -1, sizeof(first));
    for (long r = 0; r < rows; ++r) {
      uint16_t* column = columns[size];
      uint64_t hash = 0;
      for (long l = 0; l < WIDTH; ++l) {
        int64_t id = ids[r * stride + smaller(l, lanes - 1) * lane_stride];
        if (id < 0 || id >= buckets) return BAD_ID;
        column[l] = static_cast<uint16_t>(id);
        hash = (hash ^ static_cast<uint64_t>(id)) * 0x9e3779b97f4a7c15u;
      }
      long slot = static_cast<long>(hash >> 32) % SLOTS;
      while (first[slot] >= 0 && memcmp(columns[first[slot]], column, sizeof(columns[0])))
        slot = (slot + 1) % SLOTS;
      if (first[slot] < 0) {
        counts[size] = 0;
        first[slot] = size++;
      }
      cluster_of[r] = first[slot];
      ++counts[first[slot]];
    }
    return DONE;
  }

  // Appends their stream.
  Status write(long rows, Growing* out) {
    if (!out->reserve(1 + size * (2 + 2 * WIDTH) + rows)) return NO_MEMORY;
    uint16_t *stream = out->data + out->size, *p = stream;
    *p++ = size;
    for (long c = 0; c < size; ++c) {
      uint16_t* head = p;
      p += 2;
      for (int seen = 0; seen != (1 << WIDTH) - 1; p += 2) {  // the bucket of the first lane left
        p[0] = columns[c][__builtin_ctz(~seen)], p[1] = 0;
        for (int l = 0; l < WIDTH; ++l) p[1] |= (columns[c][l] == p[0]) << l;
        seen |= p[1];
      }
      head[0] = (p - head - 2) / 2, head[1] = counts[c];
      counts[c] = static_cast<int32_t>(p - stream);  // from here on: where its next row goes
      p += head[1];
    }
    for (long r = 0; r < rows; ++r) stream[counts[cluster_of[r]]++] = r;
    out->size = p - out->data;
    return DONE;
  }
};

// Makes the plan of ids: for each vector of lanes a stream for each block of rows.
template <class Id>
static Status make_plan(const void* ids, long rows, long stride, long block, long lanes,
                        long lane_stride, long buckets, Growing* out) {
  long blocks = divide_up(rows, block), streams = blocks * divide_up(lanes, WIDTH);
  if (!out->reserve(4 * streams)) return NO_MEMORY;
  out->size = 4 * streams;
  Clusters clusters;
  Status status = DONE;
  for (long s = 0; s < streams && status == DONE; ++s) {
    long lane = s / blocks * WIDTH, row = s % blocks * block, count = smaller(rows - row, block);
    reinterpret_cast<int64_t*>(out->data)[s] = out->size;
    const Id* first = static_cast<const Id*>(ids) + row * stride + lane * lane_stride;
    long width = smaller(lanes - lane, WIDTH);
    status = clusters.find(first, count, stride, width, lane_stride, buckets);
    if (status == DONE) status = clusters.write(count, out);
  }
  return status;
}
