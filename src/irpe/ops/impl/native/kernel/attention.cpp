// Attention with encodings, forward and backward, in float32: Eq. 13-17.
//
// Table rows are additional keys: z = R^K q has an element for each row in use, a plan spreads z
// over the pairs as their initial scores, and K q is added. On the side of the values a plan sums
// the weights by row. The backward pass makes the weights again, of the normalizers of the queries.
// The work is divided into items, a block of queries of one head of one image. A worker has a range
// of items, in order, and sums of its own, which are added up in the order of the workers.

#include "call.h"
#include "plan.h"
#include "product.h"
#include "tile.h"

namespace {

struct Range {
  long first, count;  // of some tokens
  long vectors() const { return divide_up(count, WIDTH); }
};
struct KeyGradients {
  float *k, *v, *table_k;  // of a head: [key][dim]
};

// A worker's part of a call, its memory, and the head it is at.
class Worker {
 public:
  Worker(const Call& call, long number, float* memory, bool backward);
  void run(bool backward);
  void add_gradients(bool is_first);
  float* end;  // of its memory

 private:
  void forward_item(Range queries);
  void backward_item(Range queries, bool adds);
  void begin_head(long item);
  void end_head();
  void begin_queries(Range queries);
  void begin_gradients(Range queries);
  void add_keys(const KeyGradients& sums, bool adds) const;
  void make_scores(Range queries, long block, Range keys, bool backward);

  Rows at(const Tokens& x, long token) const {
    return {x.data + image * x.batch + head * x.head + token * x.token, x.token};
  }
  static Rows lanes(float* data) { return {data, LANES}; }
  Rows padded(float* data) const { return {data, dim}; }
  void to_lanes(const Tokens& x, Range tokens, float factor, float* out) const {
    transpose_rows(at(x, tokens.first), tokens.count, c.dim, factor, lanes(out), true);
  }
  void to_rows(const Tokens& x, Range tokens, float factor, float* out) const {
    copy_rows(at(x, tokens.first), tokens.count, c.dim, factor, padded(out));
  }
  void from_lanes(float* in, Range tokens, float factor, const Tokens& x) const {
    transpose_rows(lanes(in), c.dim, tokens.count, factor, at(x, tokens.first), false);
  }
  // A head's part of a table, or of the sums of its gradient, whose rows have `width` elements.
  template <class T> T* of_head(const Table& table, T* all, long width) const {
    return table.data ? all + (table.heads > 1 ? head * rows * width : 0) : nullptr;
  }
  Range keys_of(long block) const {
    return {block * key_size, smaller(key_size, c.keys - block * key_size)};
  }
  // Where the elements of a key are in `key_scores` and `key_sums`.
  long at_key(long key) const { return key / LANES * rows * LANES + key % LANES; }
  // Streams: of a block of keys for a vector of queries, of a block of queries for one of keys.
  Stream of_keys_at(long map, long query, long block) const {
    return stream_of(c.maps[map].of_keys, query / WIDTH * key_blocks + block);
  }
  Stream of_queries_at(long map, long key, long query) const {
    return stream_of(c.maps[map].of_queries, key / WIDTH * query_blocks + query / query_size);
  }
  template <int COUNT>
  void expand_rows(float* const (&sources)[COUNT], Range queries, long block,
                   float* const (&out)[COUNT]) const {
    for (long m = 0, row = 0; m < c.num_maps; row += c.maps[m++].rows)
      for (long lane = 0; lane < queries.count; lane += WIDTH)
        expand<LANES>(of_keys_at(m, queries.first + lane, block), sources, row * LANES + lane, out,
                      lane, row > 0);
  }
  template <int COUNT>
  void collect_rows(float* const (&in)[COUNT], Range queries, long block,
                    float* const (&sums)[COUNT]) const {
    for (long m = 0, row = 0; m < c.num_maps; row += c.maps[m++].rows)
      for (long lane = 0; lane < queries.count; lane += WIDTH)
        collect<LANES>(of_keys_at(m, queries.first + lane, block), in, lane, sums,
                       row * LANES + lane);
  }

  const Call& c;
  long rows = 0;  // in use, of all maps
  long dim, query_size, key_size, query_blocks, key_blocks, padded_keys;
  long first_item, last_item;
  bool has_scores;  // by row: key tables or scalars

  // The head it is at: its tables and the sums of their gradients.
  long image = 0, head = 0;
  const float *query_table, *key_table, *value_table, *bias;
  // Of a block of queries: [element or row][lane], [lane].
  float *q_lanes, *table_lanes, *out_lanes, *grad_lanes;
  float *scores, *score_sums, *value_scores, *weight_sums;
  float *top, *sum, *rescale, *mean;
  float *tile, *gradient;  // [key of a block][lane]
  float* squares;          // [query of a block][lane of keys]
  // [query of a block][dim], [key][dim], [row][dim], with dim as long as whole vectors.
  float *q_rows, *table_q_rows, *grad_rows, *k_rows, *query_rows;
  float *key_scores, *key_sums;              // [block of LANES keys][row][lane]
  KeyGradients own, begun, *of_keys = &own;  // begun: of a head that the worker before began
  float *sum_query, *sum_key, *sum_value, *sum_bias;  // [head of the table][row][dim]
};

Worker::Worker(const Call& call, long number, float* memory, bool backward) : c(call) {
  for (long m = 0; m < c.num_maps; ++m) rows += c.maps[m].rows;
  dim = round_up(c.dim), padded_keys = divide_up(c.keys, LANES) * LANES;
  query_size = query_block(c.queries), query_blocks = divide_up(c.queries, query_size);
  key_size = key_block(c.keys), key_blocks = divide_up(c.keys, key_size);
  long items = c.batch * c.heads * query_blocks;
  first_item = number * items / c.threads, last_item = (number + 1) * items / c.threads;
  has_scores = c.key.data || c.bias.data;
  auto take = [&](long count, bool is_used = true) {
    float* taken = memory;
    memory += is_used ? divide_up(count, 16) * 16 : 0;  // whole cache lines
    return taken;
  };
  auto sums_of = [&](const Table& table, long width) {
    return take(table.heads * rows * width, backward && table.data);
  };
  q_lanes = take(dim * LANES), table_lanes = take(dim * LANES, c.table_q.data);
  out_lanes = take(dim * LANES), grad_lanes = take(dim * LANES, backward);
  scores = take(rows * LANES, has_scores), score_sums = take(rows * LANES, has_scores && backward);
  value_scores = take(rows * LANES, c.value.data && backward);
  weight_sums = take(rows * LANES, c.value.data);
  top = take(LANES), sum = take(LANES), rescale = take(LANES), mean = take(LANES);
  tile = take(key_size * LANES), gradient = take(key_size * LANES, backward);
  squares = take(LANES * WIDTH, c.query.data);
  q_rows = take(LANES * dim, backward), grad_rows = take(LANES * dim, backward);
  table_q_rows = take(LANES * dim, backward && c.table_q.data);
  k_rows = take(c.keys * dim, c.query.data && backward);
  query_rows = take(rows * dim, c.query.data && backward);
  key_scores = take(rows * padded_keys, c.query.data);
  key_sums = take(rows * padded_keys, c.query.data && backward);
  bool has_begun = backward && c.threads > 1, is_rotated = c.table_k.data;
  long size = c.keys * dim;
  own = {take(size, backward), take(size, backward), take(size, backward && is_rotated)};
  begun = {take(size, has_begun), take(size, has_begun), take(size, has_begun && is_rotated)};
  sum_query = sums_of(c.query, dim), sum_key = sums_of(c.key, dim);
  sum_value = sums_of(c.value, dim), sum_bias = sums_of(c.bias, 1);
  end = memory;
}

// Goes to the head of an item; its keys, as lanes, meet the query tables once: scale * R^Q k.
void Worker::begin_head(long item) {
  image = item / query_blocks / c.heads, head = item / query_blocks % c.heads;
  query_table = of_head(c.query, c.query.data, c.dim), bias = of_head(c.bias, c.bias.data, 1);
  key_table = of_head(c.key, c.key.data, c.dim);
  value_table = of_head(c.value, c.value.data, c.dim);
  for (long j = 0; query_table && j < c.keys; j += LANES) {
    long count = smaller(LANES, c.keys - j);
    to_lanes(c.table_k.data ? c.table_k : c.k, {j, count}, c.scale, out_lanes);
    multiply(rows, divide_up(count, WIDTH), c.dim, {query_table, c.dim, 1}, lanes(out_lanes),
             lanes(key_scores + j * rows), false);
  }
}

// Brings a block of queries into lanes, where they meet the key tables: scale * (R^K q + bias).
void Worker::begin_queries(Range queries) {
  to_lanes(c.q, queries, c.scale, q_lanes);
  if (c.table_q.data) to_lanes(c.table_q, queries, c.scale, table_lanes);
  for (long r = 0; bias && r < rows; ++r)
    for (long lane = 0; lane < queries.count; lane += WIDTH)
      store(scores + r * LANES + lane, broadcast(static_cast<float>(bias[r] * c.scale)));
  if (key_table)
    multiply(rows, queries.vectors(), c.dim, {key_table, c.dim, 1},
             lanes(c.table_q.data ? table_lanes : q_lanes), lanes(scores), bias);
}

// Makes the scores of a block of queries and a block of keys, scaled and masked; for the backward
// pass also what the value tables give to the gradients of their weights.
void Worker::make_scores(Range queries, long block, Range keys, bool backward) {
  long vectors = queries.vectors();
  bool has_values = backward && value_table;
  if (has_scores && has_values)
    expand_rows({scores, value_scores}, queries, block, {tile, gradient});
  else if (has_scores) expand_rows({scores}, queries, block, {tile});
  else if (has_values) expand_rows({value_scores}, queries, block, {gradient});
  for (long j = 0; query_table && j < keys.count; j += WIDTH) {
    for (long m = 0, row = 0; m < c.num_maps; row += c.maps[m++].rows)
      expand<WIDTH>(of_queries_at(m, keys.first + j, queries.first), {key_scores},
                    at_key(keys.first + j) + row * LANES, {squares}, 0, row > 0);
    transpose_rows({squares, WIDTH}, queries.count, smaller(WIDTH, keys.count - j), 1,
                   lanes(tile + j * LANES), true, has_scores);
  }
  multiply(keys.count, vectors, c.dim, by_row(at(c.k, keys.first)), lanes(q_lanes), lanes(tile),
           has_scores || query_table);
  long of_head = image * c.mask.batch + head * c.mask.head;
  if (c.mask.data)
    add_mask(c.mask, of_head + queries.first * c.mask.query + keys.first * c.mask.key,
             queries.count, keys.count, tile);
}

void Worker::forward_item(Range queries) {
  long vectors = queries.vectors(), count = queries.count;
  begin_queries(queries);
  if (value_table) memset(weight_sums, 0, rows * LANES * sizeof(float));
  for (long block = 0; block < key_blocks; ++block) {
    Range keys = keys_of(block);
    make_scores(queries, block, keys, false);
    exponentiate(tile, keys.count, vectors, block == 0, top, sum, rescale);
    if (block > 0) scale_lanes(out_lanes, c.dim, vectors, rescale);
    if (block > 0 && value_table) scale_lanes(weight_sums, rows, vectors, rescale);
    multiply(c.dim, vectors, keys.count, by_column(at(c.v, keys.first)), lanes(tile),
             lanes(out_lanes), block > 0);
    if (value_table) collect_rows({tile}, queries, block, {weight_sums});
  }
  if (value_table)
    multiply(c.dim, vectors, rows, {value_table, 1, c.dim}, lanes(weight_sums), lanes(out_lanes),
             true);
  const Vector zero = broadcast(0.0f), lowest = broadcast(-__builtin_inff());
  for (long lane = 0; lane < count; lane += WIDTH) {  // weights of 0 where all keys are masked
    Vector most = load(top + lane), inverse = broadcast(1.0f) / load(sum + lane);
    store(top + lane, select_less(lowest, most, most, zero));
    store(sum + lane, select_less(lowest, most, inverse, select_less(most, zero, zero, most)));
  }
  scale_lanes(out_lanes, c.dim, vectors, sum);
  from_lanes(out_lanes, queries, 1, c.out);
  float* kept = c.normalizers + (image * c.heads + head) * c.queries + queries.first;
  memcpy(kept, top, count * sizeof(float));
  memcpy(kept + c.batch * c.heads * c.queries, sum, count * sizeof(float));
}

// Reads what is known of a block of queries: their gradients, normalizers, and the weighted mean of
// the gradients of their weights, which is out . grad.
void Worker::begin_gradients(Range queries) {
  long count = queries.count;
  to_lanes(c.out, queries, 1, out_lanes);
  to_lanes(c.grad_out, queries, 1, grad_lanes);
  to_rows(c.grad_out, queries, 1, grad_rows);
  to_rows(c.q, queries, c.scale, q_rows);
  if (c.table_q.data) to_rows(c.table_q, queries, c.scale, table_q_rows);
  const float* kept = c.normalizers + (image * c.heads + head) * c.queries + queries.first;
  memcpy(top, kept, count * sizeof(float));
  memcpy(sum, kept + c.batch * c.heads * c.queries, count * sizeof(float));
  for (long lane = 0; lane < count; lane += WIDTH) {
    Vector total = broadcast(0.0f);
    for (long e = 0; e < c.dim; ++e)
      total += load(out_lanes + e * LANES + lane) * load(grad_lanes + e * LANES + lane);
    store(mean + lane, total);
  }
  if (has_scores) memset(score_sums, 0, rows * LANES * sizeof(float));
  if (!value_table) return;
  memset(weight_sums, 0, rows * LANES * sizeof(float));
  multiply(rows, queries.vectors(), c.dim, {value_table, c.dim, 1}, lanes(grad_lanes),
           lanes(value_scores), false);
}

void Worker::backward_item(Range queries, bool adds) {
  long vectors = queries.vectors(), count = queries.count, dim_vectors = dim / WIDTH;
  begin_queries(queries);
  begin_gradients(queries);
  for (long block = 0; block < key_blocks; ++block) {
    Range keys = keys_of(block);
    make_scores(queries, block, keys, true);
    weigh(tile, keys.count, vectors, top, sum);
    multiply(keys.count, dim_vectors, count, by_row(lanes(tile)), padded(grad_rows),
             padded(of_keys->v + keys.first * dim), adds);
    multiply(keys.count, vectors, c.dim, by_row(at(c.v, keys.first)), lanes(grad_lanes),
             lanes(gradient), value_table);
    differentiate_softmax(tile, keys.count, vectors, mean, gradient);
    multiply(keys.count, dim_vectors, count, by_row(lanes(gradient)), padded(q_rows),
             padded(of_keys->k + keys.first * dim), adds);
    multiply(c.dim, vectors, keys.count, by_column(at(c.k, keys.first)), lanes(gradient),
             lanes(out_lanes), block > 0);
    if (has_scores && value_table)
      collect_rows({gradient, tile}, queries, block, {score_sums, weight_sums});
    else if (value_table) collect_rows({tile}, queries, block, {weight_sums});
    else if (has_scores) collect_rows({gradient}, queries, block, {score_sums});
    for (long j = 0; query_table && j < keys.count; j += WIDTH) {
      transpose_rows(lanes(gradient + j * LANES), smaller(WIDTH, keys.count - j), count, 1,
                     {squares, WIDTH}, true);
      for (long m = 0, row = 0; m < c.num_maps; row += c.maps[m++].rows)
        collect<WIDTH>(of_queries_at(m, keys.first + j, queries.first), {squares}, 0, {key_sums},
                       at_key(keys.first + j) + row * LANES);
    }
  }
  if (value_table)
    multiply(rows, dim_vectors, count, by_row(lanes(weight_sums)), padded(grad_rows),
             padded(of_head(c.value, sum_value, dim)), true);
  if (key_table) {
    bool is_rotated = c.table_q.data;
    multiply(rows, dim_vectors, count, by_row(lanes(score_sums)),
             padded(is_rotated ? table_q_rows : q_rows), padded(of_head(c.key, sum_key, dim)),
             true);
    multiply(c.dim, vectors, rows, {key_table, 1, c.dim}, lanes(score_sums),
             lanes(is_rotated ? table_lanes : out_lanes), !is_rotated);
    if (is_rotated) from_lanes(table_lanes, queries, c.scale, c.grad_table_q);
  }
  float* bias_sums = of_head(c.bias, sum_bias, 1);
  for (long r = 0; bias && r < rows; ++r)
    for (long i = 0; i < count; ++i) bias_sums[r] += score_sums[r * LANES + i];
  from_lanes(out_lanes, queries, c.scale, c.grad_q);
}

// What blocks of queries gave to the keys, and through the query tables to them and the tables.
void Worker::end_head() {
  bool is_rotated = c.table_k.data;
  if (query_table) {
    copy_rows({const_cast<float*>(query_table), c.dim}, rows, c.dim, c.scale, padded(query_rows));
    to_rows(is_rotated ? c.table_k : c.k, {0, c.keys}, c.scale, k_rows);
    for (long j = 0; j < c.keys; j += LANES) {
      long count = smaller(LANES, c.keys - j);
      multiply(rows, dim / WIDTH, count, by_row(lanes(key_sums + j * rows)),
               padded(k_rows + j * dim), padded(of_head(c.query, sum_query, dim)), true);
      multiply(count, dim / WIDTH, rows, by_column(lanes(key_sums + j * rows)), padded(query_rows),
               padded((is_rotated ? of_keys->table_k : of_keys->k) + j * dim), !is_rotated);
    }
  }
  if (of_keys == &own) add_keys(own, false);  // otherwise the others do it in the end
}

// Writes the gradients of a head's keys, or adds them to what is there.
void Worker::add_keys(const KeyGradients& sums, bool adds) const {
  auto add = [&](const Tokens& x, float* data) {
    if (x.data) copy_rows(padded(data), c.keys, c.dim, 1, at(x, 0), adds);
  };
  add(c.grad_k, sums.k), add(c.grad_v, sums.v), add(c.grad_table_k, sums.table_k);
}

// Adds what a worker has to the gradients of the tables, and to those of the head it found begun.
void Worker::add_gradients(bool is_first) {
  auto add = [&](const Table& table, float* sums, long width, long stride, float factor) {
    if (table.data)
      copy_rows({sums, stride}, table.heads * rows, width, factor, {table.gradient, width},
                !is_first);
  };
  add(c.query, sum_query, c.dim, dim, 1), add(c.key, sum_key, c.dim, dim, 1);
  add(c.value, sum_value, c.dim, dim, 1), add(c.bias, sum_bias, 1, 1, c.scale);
  if (first_item == last_item || first_item % query_blocks == 0) return;
  image = first_item / query_blocks / c.heads, head = first_item / query_blocks % c.heads;
  add_keys(begun, true);
}

void Worker::run(bool backward) {
  if (backward) {
    memset(q_rows, 0, (key_scores - q_rows) * sizeof(float));  // what lies between rows stays 0
    memset(sum_query, 0, (end - sum_query) * sizeof(float));   // the sums of all tables
  }
  for (long item = first_item; item < last_item; ++item) {
    bool is_first = item == first_item || item % query_blocks == 0;
    if (is_first) {
      begin_head(item);
      of_keys = item % query_blocks ? &begun : &own;
      if (backward && query_table) memset(key_sums, 0, rows * padded_keys * sizeof(float));
    }
    long first = item % query_blocks * query_size;
    Range queries = {first, smaller(query_size, c.queries - first)};
    backward ? backward_item(queries, !is_first) : forward_item(queries);
    if (backward && (item + 1 == last_item || (item + 1) % query_blocks == 0)) end_head();
  }
}

// A pass over a call, with the memory of all its workers, `size` elements each.
struct Pass {
  const Call& call;
  bool backward;
  float* memory;
  long size;
  Worker worker(long number) const { return {call, number, memory + number * size, backward}; }
};

Status run(const Call& call, bool backward) {
  alignas(64) static float nowhere[1];
  long size = Worker(call, 0, nowhere, backward).end - nowhere;
  void* memory = aligned_alloc(64, call.threads * size * sizeof(float));
  if (memory == nullptr) return NO_MEMORY;
  Pass pass{call, backward, static_cast<float*>(memory), size};
  Work work = [](int64_t begin, int64_t end, void* context) {
    const Pass& pass = *static_cast<const Pass*>(context);
    for (; begin < end; ++begin) pass.worker(begin).run(pass.backward);
  };
  Status status = DONE;
  if (call.threads == 1) work(0, 1, &pass);
  else if (call.parallel_for(0, call.threads, 1, work, &pass)) status = NO_THREADS;
  for (long number = 0; backward && status == DONE && number < call.threads; ++number)
    pass.worker(number).add_gradients(number == 0);
  free(memory);
  return status;
}

}  // namespace

#define IRPE_EXPORT extern "C" __attribute__((visibility("default")))

IRPE_EXPORT int32_t irpe_forward(const Call* call) { return run(*call, false); }
IRPE_EXPORT int32_t irpe_backward(const Call* call) { return run(*call, true); }

// Makes the plan of ids of any strides: integers of 8 bits without a sign, or of 16 or 64 bits with
// one. Rows are keys and lanes are queries, or `of_queries` the other way round.
IRPE_EXPORT int32_t irpe_make_plan(const void* ids, int64_t bits, int64_t rows, int64_t row_stride,
                                   int64_t lanes, int64_t lane_stride, int64_t buckets,
                                   int32_t of_queries, uint16_t** plan) {
  Growing out;
  long block = of_queries ? query_block(rows) : key_block(rows);
  auto make = bits == 8 ? make_plan<uint8_t> : bits == 16 ? make_plan<int16_t> : make_plan<int64_t>;
  Status status = make(ids, rows, row_stride, block, lanes, lane_stride, buckets, &out);
  if (status == DONE) *plan = out.data;
  else free(out.data);
  return status;
}

IRPE_EXPORT void irpe_free(void* memory) { free(memory); }
IRPE_EXPORT const char irpe_hash[] = IRPE_HASH;
