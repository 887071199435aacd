// What attention over a paged KV cache is told: the structures that `kvern.cpu.attention` fills.
#pragma once

#include "numbers.h"

namespace kvern {

// One layer and its cache. A query that sees all keys before it has no window, 0; of the keys behind it, it sees as many
// as `ahead` says, 0: none.
struct AttentionLayer {
    void* keys;  // [blocks, block_size, kv_heads, head_dim] of cache_dtype
    void* values;  // as keys, of which the first value_dim numbers of a head count; where these are the keys' own, keys
    const float* key_scales;  // [kv_heads], of a cache in 8 bits; else null
    const float* value_scales;
    const float* sinks;  // [heads], logits that take part in the softmax without a value; or null
    int64_t heads, kv_heads, head_dim, value_dim, block_size;
    int64_t window, ahead;
    int64_t spans;  // whether the ends of the step's spans are those of its queries' keys
    float scale;
    float softcap;  // 0: none
    int32_t cache_dtype;
    int32_t dtype;  // of queries, and of keys and values that are stored
};

// One step: requests whose tokens follow each other, each `counts` of them, the first at position `starts`.
struct AttentionStep {
    const int32_t* block_table;  // [slots, table_stride]
    int64_t table_stride;
    const int64_t* requests;  // [3, count]: slots, starts, counts
    int64_t count;
    const int64_t* ends;  // [tokens]: where the keys end that each sees in a layer with spans; null: behind itself
};

}  // namespace kvern
