// Attention of a tile of query rows over runs of keys, in one thread.
//
// A row is one head of one query. Its keys are taken in tiles, at fixed places, and tiles in splits, whose results are
// merged in order: what a row gets depends on its position and its keys alone. Tiles of which it sees nothing change
// no bit of it.
#pragma once

#include <algorithm>
#include <limits>

#include "attention.h"
#include "attention_products.h"
#include "math.h"
#include "scratch.h"

namespace kvern {

constexpr int64_t SPLIT = 256;  // keys whose softmax is made before it is merged with that of those before
constexpr int TILE_ROWS = 96;
constexpr float NO_SCORE = -3e38f;
constexpr float LOG2_E = 1.44269504f;

// What is known of a row after some keys, in `stride` floats: the sums of the values by weight; by lane, the sums of the
// weights 2^(score - largest); the largest score.
struct StateShape {
    int64_t width, stride;

    float* sums(float* state) const { return state + width; }
    float& largest(float* state) const { return state[width + LANES]; }

    void clear(float* state) const {
        std::fill(state, state + width + LANES, 0.0f);
        largest(state) = NO_SCORE;
    }

    // Of `state`, which it leaves with one sum, and the next split.
    void merge(float* state, float* next) const {
        const float top = std::max(largest(state), largest(next));
        const Floats powers = power_of_two(Floats{largest(state) - top, largest(next) - top});
        const Floats old = splat(powers[0]), added = splat(powers[1]);
        for (int64_t first = 0; first < width; first += LANES) {
            store(state + first, load(state + first) * old + load(next + first) * added);
        }
        sums(state)[0] = sums(state)[0] * powers[0] + sum(load(sums(next))) * powers[1];
        largest(state) = top;
    }
};

inline StateShape state_shape(int64_t value_dim) {
    const int64_t width = round_up(value_dim, 2 * LANES);
    return {width, width + 2 * LANES};
}

// The rows of a tile: what each of them sees are keys from `first` up to `end`.
struct TileRows {
    int count = 0;
    int64_t first[TILE_ROWS], end[TILE_ROWS];
};

template <class Product, class Number>
class TileAttention {
public:
    // Of `heads` KV heads from `first_head` on, each with these rows.
    TileAttention(const AttentionLayer& layer, int64_t first_head, int64_t heads, const int32_t* blocks,
                  const TileRows& rows, Ahead& ahead)
        : layer_(layer),
          first_head_(first_head),
          heads_(heads),
          blocks_(blocks),
          rows_(rows),
          ahead_(ahead),
          shape_(state_shape(layer.value_dim)) {
        thread_local Scratch scratch[4];
        words_ = (layer.head_dim + Product::PER_WORD - 1) / Product::PER_WORD;
        stride_ = round_up(layer.head_dim, Product::PER_VECTOR) / Product::PER_WORD;
        queries_ = scratch[0].array<uint32_t>(heads * rows.count * stride_);
        keys_ = scratch[1].array<uint32_t>(stride_ * TILE);
        values_ = scratch[2].array<uint32_t>(TILE / Product::PER_WORD * shape_.width);
        nothing_ = scratch[3].array<Number>(heads * layer.head_dim);
        std::memset(nothing_, 0, heads * layer.head_dim * sizeof(Number));
        cap_ = splat(layer.softcap * LOG2_E);
    }

    // Row `row` of head `head` of these.
    template <class Query>
    void set_query(int64_t head, int row, const Query* query) {
        uint32_t* to = queries_ + (head * rows_.count + row) * stride_;
        for (int64_t first = 0; first < layer_.head_dim; first += Product::PER_VECTOR) {
            const Words packed = Product::vector(query + first, layer_.head_dim - first);
            std::memcpy(to + first / Product::PER_WORD, &packed, sizeof packed);
        }
    }

    // Go on with the states [heads, rows] over the keys from `from`, where a tile begins, up to `to`.
    void run(float* states, int64_t from, int64_t to) {
        for (int64_t tile = from; tile < to; tile += TILE) {
            const int count = static_cast<int>(std::min<int64_t>(TILE, to - tile));
            locate(tile, count);
            ahead_.pass(count);
            for (int64_t head = 0; head < heads_; ++head) {
                scale_of(first_head_ + head);
                pack_keys(head * layer_.head_dim, count);
                if (rows_.count > IN_PLACE_ROWS) pack_values(head * layer_.head_dim, count);
                for (int row = 0; row < rows_.count; row += BLOCK_ROWS) {
                    attend(states, head, row, std::min(BLOCK_ROWS, rows_.count - row), tile, count);
                }
            }
        }
    }

private:
    // Where `count` keys from `from` on and their values lie. A key that is not there is 0: what its place holds is
    // nobody's. So is one before all windows, whose block may be another request's by now.
    void locate(int64_t from, int count) {
        const int64_t first = *std::min_element(rows_.first, rows_.first + rows_.count);
        const int passed = static_cast<int>(std::clamp<int64_t>(first - from, 0, count));
        std::fill(keys_of_, keys_of_ + passed, nothing_);
        std::fill(values_of_, values_of_ + passed, nothing_);
        int64_t block = (from + passed) / layer_.block_size, offset = (from + passed) % layer_.block_size;
        for (int key = passed; key < count; ++key) {
            const int64_t token = blocks_[block] * layer_.block_size + offset;
            const int64_t place = (token * layer_.kv_heads + first_head_) * layer_.head_dim;
            keys_of_[key] = static_cast<const Number*>(layer_.keys) + place;
            values_of_[key] = static_cast<const Number*>(layer_.values) + place;
            if (++offset == layer_.block_size) ++block, offset = 0;
        }
        std::fill(keys_of_ + count, keys_of_ + TILE, nothing_);
        std::fill(values_of_ + count, values_of_ + TILE, nothing_);
    }

    void scale_of(int64_t kv_head) {
        const float scale = layer_.scale * (layer_.key_scales == nullptr ? 1.0f : layer_.key_scales[kv_head]);
        scale_ = splat(layer_.softcap == 0.0f ? scale * LOG2_E : scale / layer_.softcap * (-2.0f * LOG2_E));
    }

    // Lay out keys and values, `offset` numbers behind where they lie.
    void pack_keys(int64_t offset, int count) {
        for (int first = 0; first < count; first += LANES) {
            for (int64_t number = 0; number < layer_.head_dim; number += Product::PER_VECTOR) {
                Words rows[LANES], columns[LANES];
                for (int row = 0; row < LANES; ++row) {
                    rows[row] = Product::vector(keys_of_[first + row] + offset + number, layer_.head_dim - number);
                }
                transpose(rows, columns);
                uint32_t* to = keys_ + number / Product::PER_WORD * TILE + first;
                for (const Words& column : columns) std::memcpy(to, &column, sizeof column), to += TILE;
                ahead_.read(LANES * Product::PER_VECTOR * sizeof(Number));
            }
        }
    }

    void pack_values(int64_t offset, int count) {
        const InPlace<Product, Number> values{values_of_, offset, layer_.value_dim, ahead_};
        for (int word = 0; word * Product::PER_WORD < count; ++word) {
            for (int64_t number = 0; number < layer_.value_dim; number += Product::PER_VECTOR) {
                typename Product::Operand pairs[Product::PER_WORD * OPERANDS];
                values.operands(word, number, pairs);
                std::memcpy(values_ + word * shape_.width + number, pairs, sizeof pairs);
            }
        }
    }

    __attribute__((always_inline)) void attend(float* states, int64_t head, int row, int rows, int64_t from, int count) {
        if (std::all_of(rows_.end + row, rows_.end + row + rows, [&](int64_t end) { return end <= from; })) return;
        const int vectors = (count + LANES - 1) / LANES;
        const int words = (count + Product::PER_WORD - 1) / Product::PER_WORD;
        alignas(64) float scores[BLOCK_ROWS * TILE];
        alignas(64) uint32_t weights[BLOCK_ROWS * TILE];
        float decay[LANES] = {};
        const int64_t place = head * rows_.count + row;
        const uint32_t* queries = queries_ + place * stride_;
        multiply<Product>(rows, vectors, queries, stride_, Packed<Product>{keys_, TILE}, scores, TILE, words_, nullptr);
        float* state = states + place * shape_.stride;
        for (int index = 0; index < rows; ++index, state += shape_.stride) {
            const float old = shape_.largest(state);
            const float top = scale_scores(scores + index * TILE, row + index, from, count, old);
            decay[index] = old - top;
            shape_.largest(state) = top;
        }
        store(decay, power_of_two(load(decay)));
        state = states + place * shape_.stride;
        for (int index = 0; index < rows; ++index) {
            Lanes weight[TILE_VECTORS * OPERANDS];
            const float top = shape_.largest(state + index * shape_.stride);
#pragma GCC unroll 16
            for (int part = 0; part < TILE_VECTORS * OPERANDS; ++part) {
                const Lanes score = load_as<Lanes>(scores + index * TILE + part * WIDTH);
                weight[part] = part < vectors * OPERANDS ? power_of_two(score - top) : Lanes{};
            }
            Product::store_weights(weights + index * TILE, weight);
            float* sums = shape_.sums(state + index * shape_.stride);
#pragma GCC unroll 16
            for (int part = 0; part < OPERANDS; ++part, sums += WIDTH) {
                const Lanes* of = weight + part;
                const Lanes added = (of[0] + of[OPERANDS]) + (of[2 * OPERANDS] + of[3 * OPERANDS]);
                const Lanes sum = load_as<Lanes>(sums) * decay[index] + added;
                std::memcpy(sums, &sum, sizeof sum);
            }
        }
        const int64_t across = round_up(layer_.value_dim, Product::PER_VECTOR) / LANES;
        const auto add_values = [&](const auto& values) {
            multiply<Product>(rows, across, weights, TILE, values, state, shape_.stride, words, decay);
        };
        if (rows_.count > IN_PLACE_ROWS) {
            add_values(Packed<Product>{values_, shape_.width});
        } else {
            add_values(InPlace<Product, Number>{values_of_, head * layer_.head_dim, layer_.value_dim, ahead_});
        }
    }

    // Scores of products, in powers of two, -infinity where the row does not see the key; the largest, or `top`.
    float scale_scores(float* scores, int row, int64_t from, int count, float top) const {
        const int64_t first = rows_.first[row] - from, end = std::min<int64_t>(rows_.end[row] - from, count);
        const bool hides = first > 0 || end < count || count % LANES != 0;
        if (!hides && layer_.softcap == 0.0f && count == TILE) return scale_all(scores, top);
        Floats most = splat(top);
        for (int part = 0; part < count; part += LANES) {
            Floats score = load(scores + part) * scale_;
            if (layer_.softcap != 0.0f) score = capped(score);
            if (hides) {
                const Floats lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
                const Floats key = lane + static_cast<float>(part);
                const Integers seen =
                    at_least(key, splat(static_cast<float>(first))) & above(splat(static_cast<float>(end)), key);
                score = choose(seen, score, splat(-std::numeric_limits<float>::infinity()));
            }
            store(scores + part, score);
            most = larger(most, score);
        }
        return kvern::largest(most);
    }

    // The same of a whole tile that the row sees.
    float scale_all(float* scores, float top) const {
        const float scale = scale_[0];
        Lanes most = top - Lanes{};
#pragma GCC unroll 16
        for (int part = 0; part < TILE; part += WIDTH) {
            const Lanes score = load_as<Lanes>(scores + part) * scale;
            std::memcpy(scores + part, &score, sizeof score);
            most = score > most ? score : most;
        }
        float found = top;
        for (int lane = 0; lane < WIDTH; ++lane) found = std::max(found, most[lane]);
        return found;
    }

    // cap * tanh(x), of -2 x / log(2).
    Floats capped(Floats score) const {
        const Floats power = power_of_two(smaller(score, splat(126.0f)));
        return cap_ * (splat(1.0f) - power) / (splat(1.0f) + power);
    }

    const AttentionLayer& layer_;
    const int64_t first_head_, heads_;
    const int32_t* blocks_;
    const TileRows& rows_;
    Ahead& ahead_;
    const StateShape shape_;
    const Number *keys_of_[TILE], *values_of_[TILE];
    int64_t words_, stride_;  // of a query: those with numbers, and from one to the next
    uint32_t *queries_, *keys_, *values_;  // [heads, rows, stride], [stride, TILE], [TILE / PER_WORD, width]
    Number* nothing_;  // zeros
    Floats scale_, cap_;
};

}  // namespace kvern
