#include <vector>

#include "attention_tile.h"
#include "replay.h"
#include "threads.h"

namespace kvern {
namespace {

constexpr int64_t SHARED_KEYS = 64;  // that requests must have in common for reading them once to pay
constexpr int64_t JOBS_OF_THREAD = 3;
constexpr int64_t SHARES_OF_THREAD = 8;  // of jobs, whose keys are asked for ahead
constexpr int64_t NONE = -1;

// The tokens that attend: row among the queries, position, where the keys that they see end, and the block table of their
// request.
struct Query {
    int64_t token, position, end, out;
    const int32_t* blocks;
    int64_t kept = NONE;  // the index of the kept state of its first split
};

// Rows of queries that follow each other in the plan, and keys that they see in the same blocks.
struct Part {
    const int32_t* blocks;
    int64_t first_row, rows;  // `heads of a group` for each query
    int64_t from, to;
    int64_t known;  // the kept states know the keys up to here; no more than `from`: none do
};

struct Plan {
    std::vector<Query> queries;
    std::vector<Part> kept, parts;  // the former come first, and their states are kept for the latter
    int64_t kept_states = 0;  // of each head
};

struct Call {
    const AttentionLayer& layer;
    const AttentionStep& step;
    const void* query;
    int64_t query_stride;
    void* out;
    int64_t group() const { return layer.heads / layer.kv_heads; }
    int64_t first_key(int64_t position) const {
        return layer.window == 0 ? 0 : std::max<int64_t>(0, position + 1 - layer.window);
    }
};

int64_t round_down(int64_t number, int64_t unit) { return number / unit * unit; }

// All tokens of the step, or those wanted. Queries that are alone in their request stand behind the others.
int64_t list_queries(const Call& call, const int64_t* wanted, int64_t count, std::vector<Query>& queries) {
    const int64_t requests = call.step.count;
    const int64_t *slots = call.step.requests, *starts = slots + requests, *counts = starts + requests;
    thread_local std::vector<Query> alone;
    alone.clear();
    int64_t index = 0, token = 0;
    for (int64_t request = 0; request < requests; token += counts[request++]) {
        const int32_t* blocks = call.step.block_table + slots[request] * call.step.table_stride;
        const int64_t end = token + counts[request], keys = starts[request] + counts[request], first = index;
        if (wanted == nullptr) {
            index += counts[request];
        } else {
            while (index < count && wanted[index] < end) ++index;
        }
        for (int64_t out = first; out < index; ++out) {
            const int64_t row = wanted == nullptr ? out : wanted[out];
            const int64_t position = starts[request] + row - token;
            const bool spans = call.layer.spans && call.step.ends != nullptr;
            const int64_t seen = std::min(keys, spans ? call.step.ends[row] : position + 1 + call.layer.ahead);
            (index - first == 1 ? alone : queries).push_back({row, position, seen, out, blocks});
        }
    }
    const int64_t together = static_cast<int64_t>(queries.size());
    queries.insert(queries.end(), alone.begin(), alone.end());
    return together;
}

// Cut the rows of the queries [first, end) into tiles.
template <class Add>
void for_tiles(int64_t group, int64_t first, int64_t end, const Add& add) {
    for (int64_t row = first * group; row < end * group; row += TILE_ROWS) {
        add(row, std::min<int64_t>(TILE_ROWS, end * group - row));
    }
}

void keep_states(const Call& call, Plan& plan, Query& query) {
    if (query.kept != NONE) return;
    query.kept = plan.kept_states;
    plan.kept_states += (query.end - 1) / SPLIT - call.first_key(query.position) / SPLIT + 1;
}

// Parts of one split each, whose states are kept.
void add_kept(Plan& plan, const Part& part) {
    for (int64_t from = part.from; from < part.to; from = round_down(from, SPLIT) + SPLIT) {
        const int64_t to = std::min(part.to, round_down(from, SPLIT) + SPLIT);
        plan.kept.push_back({part.blocks, part.first_row, part.rows, from, to, from});
    }
}

// Keys that the queries [first, end) have in common, whole tiles of them.
int64_t common_keys(const Call& call, const Plan& plan, int64_t first, int64_t end) {
    const Query& one = plan.queries[first];
    int64_t blocks = one.position / call.layer.block_size;
    for (int64_t other = first + 1; other < end && blocks > 0; ++other) {
        const Query& query = plan.queries[other];
        blocks = std::min(blocks, query.position / call.layer.block_size);
        blocks = std::mismatch(one.blocks, one.blocks + blocks, query.blocks).first - one.blocks;
    }
    return round_down(blocks * call.layer.block_size, TILE);
}

void add_alone(const Call& call, Plan& plan, int64_t first) {
    const int64_t group = call.group(), count = static_cast<int64_t>(plan.queries.size());
    std::sort(plan.queries.begin() + first, plan.queries.end(), [](const Query& one, const Query& other) {
        return std::make_pair(one.blocks[0], one.out) < std::make_pair(other.blocks[0], other.out);
    });
    for (int64_t end; first < count; first = end) {
        for (end = first + 1; end < count && plan.queries[end].blocks[0] == plan.queries[first].blocks[0];) ++end;
        const int64_t common = end - first > 1 ? common_keys(call, plan, first, end) : 0;
        int64_t from = common;
        for (int64_t query = first; query < end; ++query) {
            const int64_t position = plan.queries[query].position, seen = call.first_key(position);
            from = std::min(from, round_down(seen, TILE));
        }
        const bool shares = common - from >= SHARED_KEYS;
        if (shares) {
            for (int64_t query = first; query < end; ++query) keep_states(call, plan, plan.queries[query]);
            for_tiles(group, first, end, [&](int64_t row, int64_t rows) {
                add_kept(plan, {plan.queries[first].blocks, row, rows, from, common, from});
            });
        }
        for (int64_t query = first; query < end; ++query) {
            const Query& one = plan.queries[query];
            const int64_t own = round_down(call.first_key(one.position), TILE);
            for_tiles(group, query, query + 1, [&](int64_t row, int64_t rows) {
                plan.parts.push_back({one.blocks, row, rows, own, one.end, shares ? common : own});
            });
        }
    }
}

// Queries [0, together), those of a request one behind the other.
void add_together(const Call& call, Plan& plan, int64_t together) {
    for (int64_t first = 0, end; first < together; first = end) {
        const int32_t* blocks = plan.queries[first].blocks;
        for (end = first + 1; end < together && plan.queries[end].blocks == blocks;) ++end;
        for_tiles(call.group(), first, end, [&](int64_t row, int64_t rows) {
            int64_t from = std::numeric_limits<int64_t>::max(), to = 0;
            for (int64_t query = row / call.group(); query * call.group() < row + rows; ++query) {
                const int64_t position = plan.queries[query].position;
                from = std::min(from, round_down(call.first_key(position), TILE));
                to = std::max(to, plan.queries[query].end);
            }
            plan.parts.push_back({blocks, row, rows, from, to, from});
        });
    }
}

// Long parts are cut by split where there are fewer parts than keep the threads busy.
void cut_long(const Call& call, Plan& plan) {
    const int64_t jobs = static_cast<int64_t>(plan.parts.size()) * call.layer.kv_heads;
    if (thread_count() == 1 || jobs >= JOBS_OF_THREAD * thread_count()) return;
    for (Part& part : plan.parts) {
        if (part.known > part.from || part.to - part.from <= SPLIT) continue;
        const int64_t first = part.first_row / call.group(), last = (part.first_row + part.rows - 1) / call.group();
        for (int64_t query = first; query <= last; ++query) {
            keep_states(call, plan, plan.queries[query]);
        }
        add_kept(plan, part);
        part.known = part.to;
    }
}

const Plan& make_plan(const Call& call, const int64_t* wanted, int64_t count) {
    thread_local Plan plan;
    plan.queries.clear(), plan.kept.clear(), plan.parts.clear();
    plan.kept_states = 0;
    const int64_t together = list_queries(call, wanted, count, plan.queries);
    add_together(call, plan, together);
    add_alone(call, plan, together);
    cut_long(call, plan);
    return plan;
}

template <class Product, class Number>
class Run {
public:
    Run(const Call& call, const Plan& plan) : call_(call), plan_(plan), shape_(state_shape(call.layer.value_dim)) {
        thread_local Scratch scratch;
        kept_ = scratch.array<float>(plan.kept_states * call.layer.heads * shape_.stride);
    }

    void all() const {
        for (const std::vector<Part>* parts : {&plan_.kept, &plan_.parts}) {
            if (parts->empty()) continue;
            const int64_t count = static_cast<int64_t>(parts->size()), all = call_.layer.kv_heads;
            // All heads of a token follow each other in memory: they are read together where rows are few.
            const bool enough = thread_count() == 1 || count >= JOBS_OF_THREAD * thread_count();
            const bool together = enough && parts->front().rows * all <= TILE_ROWS;
            const int64_t heads = together ? all : 1, jobs = count * (all / heads);
            const int64_t size = thread_count() == 1 ? jobs : jobs / (SHARES_OF_THREAD * thread_count());
            const int64_t share = std::max<int64_t>(1, size);
            parallel((jobs + share - 1) / share, [&](int64_t index) {
                some(*parts, heads, index * share, std::min(jobs, (index + 1) * share));
            });
        }
    }

private:
    // Jobs [first, end): the parts by `heads` KV heads each, the longest of a prompt first.
    void some(const std::vector<Part>& parts, int64_t heads, int64_t first, int64_t end) const {
        const int64_t ranges = call_.layer.kv_heads / heads, last = static_cast<int64_t>(parts.size()) - 1;
        thread_local std::vector<KeyRun> runs;
        runs.clear();
        for (int64_t job = first; job < end; ++job) {
            const Part& part = parts[last - job / ranges];
            const int64_t from = std::max(part.from, part.known);
            if (from < part.to) runs.push_back({part.blocks, job % ranges * heads, heads, from, part.to});
        }
        Ahead ahead(call_.layer, sizeof(Number), runs);
        for (int64_t job = first; job < end; ++job) {
            Job(*this, parts[last - job / ranges], job % ranges * heads, heads, ahead).run(&parts == &plan_.kept);
        }
    }

    // One part by some KV heads.
    class Job {
    public:
        Job(const Run& run, const Part& part, int64_t first_head, int64_t heads, Ahead& ahead)
            : run_(run),
              part_(part),
              first_head_(first_head),
              heads_(heads),
              count_(heads * part.rows),
              ahead_(ahead) {
            for (int64_t row = 0; row < part.rows; ++row) {
                const int64_t position = query(row).position;
                rows_.first[row] = run.call_.first_key(position);
                rows_.end[row] = query(row).end;
            }
            rows_.count = static_cast<int>(part.rows);
        }

        void run(bool keeps) {
            thread_local Scratch scratch[2];
            TileAttention<Product, Number> tile(run_.call_.layer, first_head_, heads_, part_.blocks, rows_, ahead_);
            for (int64_t index = 0; index < count_; ++index) set_query(tile, index);
            states_ = scratch[0].array<float>(count_ * stride());
            totals_ = scratch[1].array<float>(count_ * stride());
            clear(totals_);
            for (int64_t from = part_.from, next; from < part_.to; from = next) {
                next = round_down(from, SPLIT) + SPLIT;
                clear(states_);
                if (part_.known > from) exchange(from / SPLIT, [&](float* state, float* kept) { copy(state, kept); });
                tile.run(states_, std::max(from, part_.known), std::min(part_.to, next));
                if (keeps) {
                    exchange(from / SPLIT, [&](float* state, float* kept) { copy(kept, state); });
                } else {
                    for (int64_t place = 0; place < count_ * stride(); place += stride()) {
                        run_.shape_.merge(totals_ + place, states_ + place);
                    }
                }
            }
            if (!keeps) write();
        }

    private:
        // Rows of all heads, [heads, rows], by index.
        const Query& query(int64_t index) const {
            return run_.plan_.queries[(part_.first_row + index % part_.rows) / run_.call_.group()];
        }
        int64_t head(int64_t index) const {
            const int64_t kv_head = first_head_ + index / part_.rows, group = run_.call_.group();
            return kv_head * group + (part_.first_row + index % part_.rows) % group;
        }
        int64_t stride() const { return run_.shape_.stride; }
        void copy(float* to, const float* from) const { std::memcpy(to, from, stride() * sizeof(float)); }
        void clear(float* states) const {
            for (int64_t index = 0; index < count_; ++index) run_.shape_.clear(states + index * stride());
        }

        void set_query(TileAttention<Product, Number>& tile, int64_t index) const {
            const int64_t first = query(index).token * run_.call_.query_stride + head(index) * run_.call_.layer.head_dim;
            const int64_t among = index / part_.rows;
            const int row = static_cast<int>(index % part_.rows);
            if (run_.call_.layer.dtype == BFLOAT16) {
                tile.set_query(among, row, static_cast<const BFloat16*>(run_.call_.query) + first);
            } else {
                tile.set_query(among, row, static_cast<const float*>(run_.call_.query) + first);
            }
        }

        // Hand each row's state and the kept one of a split to `one`, if the row sees a key of it.
        template <class One>
        void exchange(int64_t split, const One& one) const {
            for (int64_t index = 0; index < count_; ++index) {
                const Query& asks = query(index);
                const int64_t first = rows_.first[index % part_.rows] / SPLIT;
                if (split < first || split > (asks.end - 1) / SPLIT) continue;
                const int64_t place = (asks.kept + split - first) * run_.call_.layer.heads + head(index);
                one(states_ + index * stride(), run_.kept_ + place * stride());
            }
        }

        void write() const {
            const AttentionLayer& layer = run_.call_.layer;
            for (int64_t index = 0; index < count_; ++index) {
                float* total = totals_ + index * stride();
                const int64_t kv_head = first_head_ + index / part_.rows;
                const float scale = layer.value_scales == nullptr ? 1.0f : layer.value_scales[kv_head];
                float weights = run_.shape_.sums(total)[0];
                if (layer.sinks != nullptr) {
                    weights += std::exp2(layer.sinks[head(index)] * LOG2_E - run_.shape_.largest(total));
                }
                const Floats factor = splat(scale / weights);
                const int64_t place = (query(index).out * layer.heads + head(index)) * layer.value_dim;
                if (layer.dtype == BFLOAT16) {
                    write_row(static_cast<BFloat16*>(run_.call_.out) + place, total, factor);
                } else {
                    write_row(static_cast<float*>(run_.call_.out) + place, total, factor);
                }
            }
        }

        template <class Result>
        void write_row(Result* to, const float* total, Floats factor) const {
            const int64_t width = run_.call_.layer.value_dim;
            for (int64_t first = 0; first < width; first += Product::PER_VECTOR) {
                Floats sums[Product::PER_WORD];
                for (int part = 0; part < Product::PER_WORD; ++part) sums[part] = load(total + first + part * LANES);
                Product::put_in_order(sums);
                for (int part = 0; part < Product::PER_WORD; ++part) {
                    const int64_t place = first + part * LANES;
                    if (place < width) store_some(to + place, sums[part] * factor, width - place);
                }
            }
        }

        const Run& run_;
        const Part& part_;
        const int64_t first_head_, heads_, count_;
        Ahead& ahead_;
        TileRows rows_;
        float *states_ = nullptr, *totals_ = nullptr;
    };

    const Call& call_;
    const Plan& plan_;
    const StateShape shape_;
    float* kept_;
};

template <class Number>
void run_over(const Call& call, const Plan& plan) {
#if defined(__AVX512BF16__)
    if constexpr (!std::is_same<Number, float>::value) {
        if (call.layer.dtype == BFLOAT16) return Run<PairProduct, Number>(call, plan).all();
    }
#endif
    Run<FloatProduct, Number>(call, plan).all();
}

}  // namespace
}  // namespace kvern

// Attention of a step's tokens, or of the `count` wanted of them, over a layer's cache, in which their own keys and
// values are: query [tokens, heads, head_dim], `query_stride` numbers from one token to the next; out [count, heads,
// value_dim] without gaps.
KVERN_EXPORT void kvern_attend(const kvern::AttentionLayer* layer, const kvern::AttentionStep* step, const void* query,
                               int64_t query_stride, void* out, const int64_t* wanted, int64_t count) {
    using namespace kvern;
    const Call call{*layer, *step, query, query_stride, out};
    const Plan& plan = make_plan(call, wanted, count);
    switch (layer->cache_dtype) {
        case FLOAT32: return run_over<float>(call, plan);
        case BFLOAT16: return run_over<BFloat16>(call, plan);
        case INT8: return run_over<Int8>(call, plan);
        default: return run_over<E4M3>(call, plan);
    }
}

KVERN_REPLAYED(kvern_attend)
