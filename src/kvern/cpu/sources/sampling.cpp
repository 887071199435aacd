// From logits to tokens. A token's time is drawn from the exponential distribution with its probability as the rate,
// and the earliest wins: it has the largest logit / temperature - log(time at rate 1). Which tokens are in question is
// told by a bound, which takes no logarithm; of few, exact scores are compared.
#include "replay.h"
#include "threads.h"
#include "vocabulary.h"

namespace kvern {

// Of the batch, by slot.
struct SampledRows {
    const int64_t *seeds, *top_k;
    const float *temperature, *top_p, *min_p, *typical_p;
};

namespace {

constexpr float GREEDY_BELOW = 1e-5f;
constexpr int UNROLLED = 4;
constexpr int64_t BLOCK = UNROLLED * LANES;

uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

// The numbers of `kvern.sample.random`: of a seed and a position, for each token.
class Numbers {
public:
    Numbers(int64_t seed, int64_t position) {
        constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
        const uint64_t place = static_cast<uint64_t>(position) * golden;
        const uint64_t key = mixed(mixed(static_cast<uint64_t>(seed) + golden) + place);
        low_ = static_cast<uint32_t>(key), high_ = static_cast<uint32_t>(key >> 32);
    }

    // Of tokens, times GOLDEN each: a number in (0, 1] times 2^31.
    Floats scaled(Words tokens) const {
        Words value = tokens ^ low_;
        value ^= value >> 16;
        value *= 0x7FEB352Du;
        value ^= value >> 15;
        value ^= high_;
        value *= 0x846CA68Bu;
        value ^= value >> 16;
        return __builtin_convertvector((Integers)(value & 0x7FFFFFFFu), Floats) + 0.5f;
    }

    // The logarithm of the token's time at rate 1.
    double log_time(int64_t token) const {
        const float scaled_up = scaled(Words{} + static_cast<uint32_t>(token) * GOLDEN)[0];
        const float number = std::min(scaled_up * 0x1p-31f, 1 - 0x1p-24f);
        return std::log(-std::log1p(-static_cast<double>(number)));
    }

    static constexpr uint32_t GOLDEN = 0x9E3779B1u;

private:
    uint32_t low_, high_;
};

// The first of the largest numbers of a row.
template <class Number>
int64_t most_probable(const Number* row, int64_t count) {
    constexpr int64_t PART = 4 * BLOCK;
    float best = NOTHING;
    int64_t place = 0;
    for (int64_t begin = 0; begin < count; begin += PART) {
        const int64_t end = std::min(begin + PART, count);
        Floats found[UNROLLED];
        if (end - begin == PART) {
            for (int part = 0; part < UNROLLED; ++part) found[part] = load(row + begin + part * LANES);
            for (int64_t first = begin + BLOCK; first < end; first += BLOCK) {
                for (int part = 0; part < UNROLLED; ++part) {
                    found[part] = larger(found[part], load(row + first + part * LANES));
                }
            }
            // A number at the start that is none would hide the others.
            for (Floats& each : found) each = larger(splat(NOTHING), each);
        }
        const bool whole = end - begin == PART;
        if (whole && !any(above(larger(larger(found[0], found[1]), larger(found[2], found[3])), splat(best)))) continue;
        const float most = row_maximum(row + begin, end - begin);
        if (most > best) best = most, place = begin;
    }
    if (best == NOTHING) return 0;
    while (to_float(row[place]) != best) ++place;
    return place;
}

// Which scores take part in a draw.
struct Kept {
    float low = NOTHING;  // at least this
    float top = 0, center = 0, limit = LARGEST;  // and top - score no farther from the center than the limit
};

Floats without(Floats scores, const Kept& kept) {
    const Floats distances = absolute((kept.top - scores) - kept.center);
    const Integers inside = at_least(scores, splat(kept.low)) & at_least(splat(kept.limit), distances);
    return choose(inside, scores, splat(NOTHING));
}

// The winner among `count` tokens with these scores, over the temperature.
template <class Number, bool FILTERED>
int64_t draw(const Number* scores, int64_t count, float temperature, const Numbers& numbers, const Kept& kept) {
    double best = NOTHING;
    float bar = NOTHING;  // below the best by more than rounding
    int64_t winner = 0;
    const float inverse = 1 / temperature;
    Words tokens;
    for (int lane = 0; lane < LANES; ++lane) tokens[lane] = lane * Numbers::GOLDEN;

    for (int64_t begin = 0; begin < count; begin += BLOCK, tokens += static_cast<uint32_t>(BLOCK) * Numbers::GOLDEN) {
        Floats found[UNROLLED], bounds[UNROLLED];
        for (int part = 0; part < UNROLLED; ++part) {
            const int64_t first = begin + part * LANES;
            found[part] = load_scores(scores + std::min(first, count), count - first);
            if (FILTERED) found[part] = without(found[part], kept);
        }
        const Floats highest_found = larger(larger(found[0], found[1]), larger(found[2], found[3]));
        if (FILTERED && !any(above(highest_found, splat(NOTHING)))) continue;
        Floats most = splat(NOTHING);
        for (int part = 0; part < UNROLLED; ++part) {
            // A time is never less than its number, whose logarithm is never less than what its bits are as an integer:
            // the exponent, and the mantissa for its own logarithm.
            const Words those = tokens + static_cast<uint32_t>(part * LANES) * Numbers::GOLDEN;
            const Integers bits = (Integers)numbers.scaled(those);
            const Floats logarithms = __builtin_convertvector(bits - ((127 + 31) << 23), Floats) * 0x1p-23f;
            bounds[part] = found[part] * inverse - logarithms * 0.693147182f;
            most = larger(most, bounds[part]);
        }
        if (!any(above(most, splat(bar)))) continue;
        const auto consider = [&](int lane) {
            const int64_t token = begin + lane;
            const double logit = found[lane / LANES][lane % LANES];
            const double score = logit / temperature - numbers.log_time(token);
            if (score > best || (score == best && token < winner)) {
                best = score, winner = token;
                bar = static_cast<float>(best) - 1e-6f * (std::abs(static_cast<float>(best)) + 64);
            }
        };
        const float highest = largest(most);
        for (int lane = 0; lane < BLOCK; ++lane) {  // it mostly shows that the others need not be looked at
            if (bounds[lane / LANES][lane % LANES] == highest) {
                consider(lane);
                break;
            }
        }
        for (int lane = 0; lane < BLOCK; ++lane) {
            if (bounds[lane / LANES][lane % LANES] > bar) consider(lane);
        }
    }
    return winner;
}

struct Filters {
    int64_t top_k;
    float top_p, min_p, typical_p;

    bool any() const { return top_k > 0 || top_p < 1 || min_p > 0 || typical_p < 1; }
};

// Weights of keys, e to the distance from `top`; the sum of all.
double weights_of(const float* keys, int64_t count, float top, float* weights) {
    for (int64_t first = 0; first < count; first += LANES) {
        store_some(weights + first, exp(load_scores(keys + first, count - first) - top), count - first);
    }
    return exponential_sum(keys, count, top);
}

// The least score that top_p leaves of `keys`, which are overwritten.
float nucleus(float* keys, int64_t count, float top, float share, Scratch& scratch) {
    const double total = exponential_sum(keys, count, top);
    // All that weigh less than a fair part of what is dropped weigh, together, less than it.
    const double light = std::log(std::max(1 - static_cast<double>(share), 1e-9) * 0.5 * total / count);
    const int64_t left = collect(keys, count, top + static_cast<float>(light), keys);
    float* weights = scratch.array<float>(left + LANES);
    weights_of(keys, left, top, weights);
    return std::min(boundary(keys, weights, left, share * total), top);
}

// Locally typical sampling: those nearest the expected surprise, of keys which are overwritten.
void keep_typical(float* keys, int64_t count, float share, Scratch& scratch, Kept& kept) {
    float* weights = scratch.array<float>(count + LANES);
    const double total = weights_of(keys, count, kept.top, weights);
    double expected = 0;  // distance from the largest
    for (int64_t place = 0; place < count; ++place) {
        expected += static_cast<double>(kept.top - keys[place]) * weights[place];
    }
    kept.center = static_cast<float>(expected / total);
    for (int64_t place = 0; place < count; ++place) keys[place] = -std::abs((kept.top - keys[place]) - kept.center);
    kept.limit = -boundary(keys, weights, count, share * total);
}

template <class Number>
int64_t draw_filtered(const Number* row, int64_t count, float temperature, const Filters& filters,
                      const Numbers& numbers, Scratch (&scratch)[3]) {
    float* scores = scratch[0].array<float>(count + LANES);
    float* keys = scratch[1].array<float>(count + LANES);
    Floats most = splat(NOTHING);
    for (int64_t first = 0; first < count; first += LANES) {
        Floats quotient = load_scores(row + first, count - first) / temperature;
        quotient = smaller(quotient, splat(LARGEST));
        store_some(scores + first, quotient, count - first);
        most = larger(most, quotient);
    }
    Kept kept;
    kept.top = largest(most);
    if (kept.top == NOTHING) return 0;
    int64_t left = count;
    const auto refresh = [&] { left = collect(scores, count, std::max(kept.low, -LARGEST), keys); };
    if (filters.top_k > 0 && filters.top_k < count) {
        refresh();
        kept.low = boundary(keys, nullptr, left, static_cast<double>(filters.top_k));
    }
    if (filters.top_p < 1) {
        refresh();
        kept.low = std::max(kept.low, nucleus(keys, left, kept.top, filters.top_p, scratch[2]));
    }
    if (filters.min_p > 0) {
        const double distance = std::log(static_cast<double>(filters.min_p));
        kept.low = std::max(kept.low, static_cast<float>(kept.top + distance));
    }
    if (filters.typical_p < 1) {
        refresh();
        keep_typical(keys, left, filters.typical_p, scratch[2], kept);
    }
    return draw<float, true>(scores, count, 1.0f, numbers, kept);
}

template <class Number>
void sample_rows(const SampledRows& rows, const void* logits, const int64_t* slots, const int64_t* positions,
                 int64_t* tokens, int64_t count, int64_t vocabulary) {
    parallel(count, [&](int64_t index) {
        thread_local Scratch scratch[3];
        const Number* row = static_cast<const Number*>(logits) + index * vocabulary;
        const int64_t slot = slots[index];
        const float temperature = rows.temperature[slot];
        const Filters filters{rows.top_k[slot], rows.top_p[slot], rows.min_p[slot], rows.typical_p[slot]};
        if (temperature < GREEDY_BELOW) {
            tokens[index] = most_probable(row, vocabulary);
            return;
        }
        const Numbers numbers(rows.seeds[slot], positions[index]);
        if (filters.any()) {
            tokens[index] = draw_filtered(row, vocabulary, temperature, filters, numbers, scratch);
        } else {
            tokens[index] = draw<Number, false>(row, vocabulary, temperature, numbers, {});
        }
    });
}

}  // namespace
}  // namespace kvern

// One token for each row of logits [count, vocabulary], by what `rows` says of the slots [count]; positions [count] are
// those of the tokens that are chosen.
KVERN_EXPORT void kvern_sample(const kvern::SampledRows* rows, const void* logits, const int64_t* slots,
                               const int64_t* positions, int64_t* tokens, int64_t count, int64_t vocabulary,
                               int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? sample_rows<float> : sample_rows<BFloat16>)(*rows, logits, slots, positions, tokens, count,
                                                                    vocabulary);
}

// tokens[slots[i]][positions[i]] = chosen[i], of `count`; rows of tokens are `stride` apart.
KVERN_EXPORT void kvern_write_tokens(int32_t* tokens, int64_t stride, const int64_t* slots, const int64_t* positions,
                                     const int64_t* chosen, int64_t count) {
    for (int64_t index = 0; index < count; ++index) {
        tokens[slots[index] * stride + positions[index]] = static_cast<int32_t>(chosen[index]);
    }
}

// What the next step of decodes reads: of requests [2, count], slots and positions, the tokens of rows, the places of
// their keys and values, and the positions that follow, int64 [count] each. The positions of rows are shifted from
// `turn_first` on, for rotary embeddings alone.
KVERN_EXPORT void kvern_read_decodes(const int64_t* requests, const int32_t* tokens, int64_t stride,
                                     const int32_t* block_table, int64_t table_stride, int64_t block_size,
                                     const int64_t* turn_first, const int64_t* turn_shift, int64_t* ids,
                                     int64_t* positions, int64_t* slot_mapping, int64_t* following, int64_t count) {
    for (int64_t index = 0; index < count; ++index) {
        const int64_t slot = requests[index], position = requests[count + index];
        ids[index] = tokens[slot * stride + position];
        positions[index] = position + (position >= turn_first[slot] ? turn_shift[slot] : 0);
        slot_mapping[index] = block_table[slot * table_stride + position / block_size] * block_size + position % block_size;
        following[index] = position + 1;
    }
}

KVERN_REPLAYED(kvern_sample)
KVERN_REPLAYED(kvern_read_decodes)
KVERN_REPLAYED(kvern_write_tokens)
