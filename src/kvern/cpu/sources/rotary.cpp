#include <vector>

#include "codes.h"
#include "norm.h"
#include "replay.h"
#include "threads.h"

namespace kvern {

// The heads of a layer's queries, keys and values, side by side in a row; as `kvern.cpu.rotary.Heads` has it.
struct Heads {
    int64_t heads, kv_heads, head_dim;
    int64_t rotary_dim;  // the first entries of a head, which are rotated
    const float *query_weight, *query_bias, *key_weight, *key_bias;  // of a norm of all heads; may be null
    float epsilon;
    int32_t norm;  // its kind; 0: none
    int32_t whole_row;  // all heads of the queries are normalised together, and all of the keys
    int32_t norm_after;  // rotation comes first
    int32_t interleaved;  // the planes are neighbours; else an entry of the first half and one of the second
    int32_t norm_values;  // each head of the values is divided by its root mean square
    int32_t keys_are_values;  // values are what keys are before norm and rotation; they have no place of their own

    int64_t row() const { return (heads + (keys_are_values ? 1 : 2) * kv_heads) * head_dim; }
    int64_t first_value() const { return (heads + (keys_are_values ? 0 : kv_heads)) * head_dim; }
};

namespace {

constexpr int64_t ROWS_OF_JOB = 8;

template <class Number>
struct Step {
    const Heads& layer;
    Number* qkv;
    const int64_t *positions, *slots;
    const Number* table;
    const float* scales;
};

void normalize(const Heads& layer, float* numbers, int64_t heads, const float* weight, const float* bias) {
    const int64_t width = layer.whole_row ? heads * layer.head_dim : layer.head_dim;
    for (int64_t first = 0; first < heads * layer.head_dim; first += width) {
        const NormWeights weights{weight == nullptr ? nullptr : weight + first, bias == nullptr ? nullptr : bias + first,
                                  layer.epsilon, layer.norm};
        norm_row(numbers + first, weights, numbers + first, width);
    }
}

// `angles`: cosines, then sines, of which those of a plane's first entry are negative.
template <class Number>
void rotate(float* head, const Number* angles, int64_t dim, bool interleaved) {
    const int64_t half = dim / 2;
    const Number* sines = angles + dim;
    if (interleaved) {
        for (int64_t column = 0; column < dim; column += 2) {
            const float first = head[column], second = head[column + 1];
            head[column] = first * to_float(angles[column]) + second * to_float(sines[column]);
            head[column + 1] = second * to_float(angles[column + 1]) + first * to_float(sines[column + 1]);
        }
        return;
    }
    for_each_vector(half, [&](int64_t column, auto count) {
        const int64_t other = column + half;
        const Floats first = load_some(head + column, count), second = load_some(head + other, count);
        const Floats cosine = load_some(angles + column, count), sine = load_some(sines + other, count);
        store_some(head + column, first * cosine - second * sine, count);
        store_some(head + other, second * cosine + first * sine, count);
    });
}

template <class From, class To>
void copy(const From* from, To* to, int64_t count, float factor = 1.0f) {
    for_each_vector(count, [&](int64_t first, auto some) {
        store_some(to + first, load_some(from + first, some) * factor, some);
    });
}

template <class From, class To>
void copy_heads(const Heads& layer, const From* from, To* to, const float* scales) {
    for (int64_t head = 0; head < layer.kv_heads; ++head) {
        const float factor = scales == nullptr ? 1.0f : 1.0f / scales[head];
        copy(from + head * layer.head_dim, to + head * layer.head_dim, layer.head_dim, factor);
    }
}

template <class Number, class Stored>
void one_token(const Step<Number>& step, int64_t token, Stored* keys, Stored* values) {
    const Heads& layer = step.layer;
    const int64_t dim = layer.head_dim, queries = layer.heads * dim, stored = layer.kv_heads * dim;
    Number* row = step.qkv + token * layer.row();
    static thread_local std::vector<float> room;
    if (static_cast<int64_t>(room.size()) < queries + stored) room.resize(queries + stored);
    float* numbers = room.data();
    copy(row, numbers, queries + stored);
    const auto normalize_both = [&] {
        normalize(layer, numbers, layer.heads, layer.query_weight, layer.query_bias);
        normalize(layer, numbers + queries, layer.kv_heads, layer.key_weight, layer.key_bias);
    };
    if (layer.norm && !layer.norm_after) normalize_both();
    if (layer.rotary_dim) {
        const Number* angles = step.table + step.positions[token] * 2 * layer.rotary_dim;
        for (int64_t head = 0; head < layer.heads + layer.kv_heads; ++head) {
            rotate(numbers + head * dim, angles, layer.rotary_dim, layer.interleaved);
        }
    }
    if (layer.norm && layer.norm_after) normalize_both();
    copy(numbers, row, queries);
    if (keys == nullptr) {
        copy(numbers + queries, row + queries, stored);
        return;
    }
    const int64_t place = step.slots[token] * stored;
    const float* value_scales = step.scales == nullptr ? nullptr : step.scales + layer.kv_heads;
    copy_heads(layer, numbers + queries, keys + place, step.scales);
    const Number* given = row + layer.first_value();
    if (!layer.norm_values) return copy_heads(layer, given, values + place, value_scales);
    copy(given, numbers, stored);
    for (int64_t first = 0; first < stored; first += dim) {
        norm_row(numbers + first, {nullptr, nullptr, layer.epsilon, RMS}, numbers + first, dim);
    }
    copy_heads(layer, numbers, values + place, value_scales);
}

template <class Number, class Stored>
void all_tokens(const Step<Number>& step, int64_t tokens, void* keys, void* values) {
    parallel_for_each(tokens, ROWS_OF_JOB, [&](int64_t token) {
        one_token(step, token, static_cast<Stored*>(keys), static_cast<Stored*>(values));
    });
}

template <class Number>
void rotate_and_store(const Step<Number>& step, int64_t tokens, void* keys, void* values, int32_t stored) {
    constexpr void (*ways[])(const Step<Number>&, int64_t, void*, void*) = {
        all_tokens<Number, float>, all_tokens<Number, BFloat16>, all_tokens<Number, Int8>, all_tokens<Number, E4M3>};
    ways[stored](step, tokens, keys, values);
}

}  // namespace
}  // namespace kvern

// Normalise and rotate the queries and keys of `qkv` [tokens, heads and twice kv_heads of head_dim; once where keys are
// values]: queries in place, keys and values to the rows `slots` [tokens] of `keys` and `values` [places, kv_heads,
// head_dim]; null: keys in place as well. `table` [positions, 2, rotary_dim]; `scales` [2, kv_heads] of codes, else null.
KVERN_EXPORT void kvern_rotate_and_store(const kvern::Heads* layer, void* qkv, const int64_t* positions,
                                         const int64_t* slots, const void* table, void* keys, void* values,
                                         const float* scales, int64_t tokens, int32_t dtype, int32_t stored) {
    using namespace kvern;
    const auto run = [&](auto number) {
        using Number = decltype(number);
        const Number* angles = static_cast<const Number*>(table);
        const Step<Number> step{*layer, static_cast<Number*>(qkv), positions, slots, angles, scales};
        rotate_and_store(step, tokens, keys, values, stored);
    };
    dtype == FLOAT32 ? run(float()) : run(BFloat16());
}

KVERN_REPLAYED(kvern_rotate_and_store)
