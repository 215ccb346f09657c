// The kernels without Python, for valgrind: random calls of ragged sizes, forward and backward,
// with every table, a mask and rotated tokens. Every array has exactly the size that is needed.
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "attention.cpp"

namespace {

std::mt19937 generator(0);

std::vector<float> normal(long count) {
  std::normal_distribution<float> distribution;
  std::vector<float> x(count);
  for (float& element : x) element = distribution(generator);
  return x;
}

long draw(long first, long last) {
  return std::uniform_int_distribution<long>(first, last)(generator);
}

// Workers one after the other: valgrind knows no more.
int32_t in_turn(int64_t begin, int64_t end, int64_t, Work work, void* context) {
  for (; begin < end; ++begin) work(begin, begin + 1, context);
  return 0;
}

struct Array {
  std::vector<float> data;
  Tokens tokens;
  Array(const Call& c, long count, bool is_filled)
      : data(is_filled ? normal(c.batch * c.heads * count * c.dim)
                       : std::vector<float>(c.batch * c.heads * count * c.dim)) {
    tokens = {data.data(), c.heads * count * c.dim, count * c.dim, c.dim};
  }
};

bool is_finite(const std::vector<float>& x) {  // each element decides a branch: none is undefined
  for (float element : x)
    if (!(element - element == 0)) return false;
  return true;
}

bool run(long number) {
  Call c = {};
  c.batch = draw(1, 2), c.heads = draw(1, 2), c.queries = draw(1, 90), c.keys = draw(1, 90);
  c.dim = draw(1, 35), c.num_maps = draw(1, 2), c.threads = draw(1, 3), c.scale = 0.3;
  if (number % 8 == 0) c.keys = draw(513, 1100);
  c.parallel_for = in_turn;
  long rows = 0;
  std::vector<Map> maps;
  for (long m = 0; m < c.num_maps; ++m) {
    long count = draw(1, 40);
    std::vector<int16_t> ids(c.queries * c.keys);
    for (int16_t& id : ids) id = static_cast<int16_t>(draw(0, count - 1));
    maps.push_back({nullptr, nullptr, count});
    auto make_plan = [&](long buckets, int of_queries, uint16_t** plan) {
      return of_queries ? irpe_make_plan(ids.data(), 16, c.queries, c.keys, c.keys, 1, buckets, 1, plan)
                        : irpe_make_plan(ids.data(), 16, c.keys, 1, c.queries, c.keys, buckets, 0, plan);
    };
    for (int of_queries : {0, 1}) {
      uint16_t* plan;
      if (make_plan(count, of_queries, &plan) != DONE) return false;
      (of_queries ? maps.back().of_queries : maps.back().of_keys) = plan;
      if (make_plan(0, of_queries, &plan) != BAD_ID) return false;
    }
    rows += count;
  }
  c.maps = maps.data();
  Array q(c, c.queries, true), k(c, c.keys, true), v(c, c.keys, true), out(c, c.queries, false);
  Array table_q(c, c.queries, true), table_k(c, c.keys, true), grad(c, c.queries, true);
  Array dq(c, c.queries, false), dk(c, c.keys, false), dv(c, c.keys, false);
  Array dtable_q(c, c.queries, false), dtable_k(c, c.keys, false);
  c.q = q.tokens, c.k = k.tokens, c.v = v.tokens, c.out = out.tokens, c.grad_out = grad.tokens;
  c.grad_q = dq.tokens, c.grad_k = dk.tokens, c.grad_v = dv.tokens;
  if (number % 3 == 0) {
    c.table_q = table_q.tokens, c.table_k = table_k.tokens;
    c.grad_table_q = dtable_q.tokens, c.grad_table_k = dtable_k.tokens;
  }
  std::vector<std::vector<float>> tables, gradients;
  for (Table* table : {&c.query, &c.key, &c.value, &c.bias}) {
    long heads = draw(1, 2) == 1 ? 1 : c.heads,
         size = heads * rows * (table == &c.bias ? 1 : c.dim);
    if (draw(0, 3) == 0 && table != &c.key && table != &c.query) continue;
    tables.push_back(normal(size)), gradients.push_back(std::vector<float>(size));
    *table = {tables.back().data(), gradients.back().data(), heads};
  }
  std::vector<float> mask = normal(c.queries * c.keys),
                     normalizers(2 * c.batch * c.heads * c.queries);
  if (number % 2) c.mask = {mask.data(), 0, 0, c.keys, 1};
  c.normalizers = normalizers.data();
  bool is_done = irpe_forward(&c) == DONE && irpe_backward(&c) == DONE;
  for (const Array* array : {&out, &dq, &dk, &dv, &dtable_q, &dtable_k})
    is_done = is_done && is_finite(array->data);
  for (const auto& gradient : gradients) is_done = is_done && is_finite(gradient);
  for (const Map& map : maps)
    irpe_free(const_cast<uint16_t*>(map.of_keys)), irpe_free(const_cast<uint16_t*>(map.of_queries));
  return is_done;
}

}  // namespace

int main() {
  for (long number = 0; number < 40; ++number)
    if (!run(number)) return std::printf("call %ld\n", number), 1;
  return 0;
}
