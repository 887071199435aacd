// What requests ask of the logits before a token is chosen, in place: penalties, biases, bans and masks.
#include <vector>

#include "threads.h"
#include "vocabulary.h"

namespace kvern {

// Of the batch, by slot.
struct ConstrainedRows {
    const int64_t *changes, *prompt_lengths, *lists;
    const float *repetition, *presence, *frequency;
};

namespace {

enum Changes : int64_t { PENALTIES = 1, LISTS = 2 };
constexpr int HEADER = 6;
constexpr int32_t IN_PROMPT = 1 << 30;

// Each token of the text counts once: the table of counts is all zeros before and after.
void penalize(float* logits, int64_t vocabulary, const int32_t* text, int64_t length, int64_t prompt_length,
              float repetition, float presence, float frequency, std::vector<int32_t>& counts) {
    if (static_cast<int64_t>(counts.size()) < vocabulary) counts.resize(vocabulary);
    for (int64_t place = 0; place < length; ++place) {
        int32_t& count = counts[text[place]];
        count = place < prompt_length ? count | IN_PROMPT : count + 1;
    }
    for (int64_t place = 0; place < length; ++place) {
        int32_t& count = counts[text[place]];
        if (count == 0) continue;
        float& logit = logits[text[place]];
        const int32_t generated = count & (IN_PROMPT - 1);
        logit = logit > 0 ? logit / repetition : logit * repetition;
        logit -= frequency * static_cast<float>(generated) + (generated > 0 ? presence : 0.0f);
        count = 0;
    }
}

// Only the tokens whose bits are set stay. Whether any of them had been left.
template <class Number>
bool keep(Number* logits, int64_t vocabulary, const uint32_t* mask) {
    const Integers lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    bool left = false;
    for (int64_t first = 0; first < vocabulary; first += LANES) {
        const int64_t count = vocabulary - first;
        const int32_t bits = (mask[first / 32] >> (first % 32)) & 0xffff;
        const Floats scores = bits == 0 ? splat(NOTHING) : load_scores(logits + first, count);
        const Integers mask = -(((Integers{} + bits) >> lanes) & 1);
        const Floats kept = choose(mask, scores, splat(NOTHING));
        left = left || any(above(kept, splat(NOTHING)));
        store_some(logits + first, kept, count);
    }
    return left;
}

// If nothing is left of the tokens whose bits are set, all of them are equally probable.
template <class Number>
void restrict_row(Number* logits, int64_t vocabulary, const uint32_t* mask) {
    if (keep(logits, vocabulary, mask)) return;
    for (int64_t token = 0; token < vocabulary; ++token) {
        if ((mask[token / 32] >> (token % 32)) & 1) logits[token] = from_float<Number>(0.0f);
    }
}

// `list`: as `kvern.device.rows.list_of` makes it.
void apply_list(float* logits, int64_t vocabulary, const int32_t* list, const int32_t* text, int64_t length,
                int64_t prompt_length) {
    const int32_t allowed = list[0], biases = list[1], ends = list[2], first_end = list[3], words = list[4];
    const int32_t* ids = list + HEADER;
    for (int32_t place = 0; place < biases; ++place) {
        float bias;
        std::memcpy(&bias, ids + biases + place, sizeof bias);
        logits[ids[place]] += bias;
    }
    ids += 2 * biases;
    if (allowed > 0) {
        const int64_t described = std::min<int64_t>(vocabulary, int64_t{32} * allowed);
        keep(logits, described, reinterpret_cast<const uint32_t*>(ids));
        std::fill(logits + described, logits + vocabulary, NOTHING);
    }
    ids += allowed;
    for (int32_t place = 0; length < first_end && place < ends; ++place) logits[ids[place]] = NOTHING;
    ids += ends;
    const int32_t* tokens = ids + 2 * words;
    for (int32_t word = 0; word < words; ++word) {
        const int32_t *begin = tokens + ids[2 * word], before = ids[2 * word + 1] - 1;
        if (before > length - prompt_length) continue;
        if (std::equal(begin, begin + before, text + length - before)) logits[begin[before]] = NOTHING;
    }
}

template <class Number>
void restrict_rows(void* logits, const int64_t* rows, const int32_t* masks, int64_t count, int64_t vocabulary,
                   int64_t width) {
    parallel(count, [&](int64_t index) {
        restrict_row(static_cast<Number*>(logits) + rows[index] * vocabulary, vocabulary,
                     reinterpret_cast<const uint32_t*>(masks) + index * width);
    });
}

}  // namespace
}  // namespace kvern

// Change logits [count, vocabulary] float32 as the requests of the slots [count] ask, whose texts are the first
// positions [count] of the tokens in rows of `tokens`, `stride` apart.
KVERN_EXPORT void kvern_constrain(const kvern::ConstrainedRows* given, float* logits, const int64_t* slots,
                                  const int64_t* positions, const int32_t* tokens, int64_t stride, int64_t count,
                                  int64_t vocabulary) {
    const kvern::ConstrainedRows& rows = *given;
    kvern::parallel(count, [&](int64_t index) {
        thread_local std::vector<int32_t> counts;
        const int64_t slot = slots[index], changes = rows.changes[slot];
        float* row = logits + index * vocabulary;
        const int32_t* text = tokens + slot * stride;
        if (changes & kvern::PENALTIES) {
            kvern::penalize(row, vocabulary, text, positions[index], rows.prompt_lengths[slot], rows.repetition[slot],
                            rows.presence[slot], rows.frequency[slot], counts);
        }
        if (changes & kvern::LISTS) {
            kvern::apply_list(row, vocabulary, reinterpret_cast<const int32_t*>(rows.lists[slot]), text,
                              positions[index], rows.prompt_lengths[slot]);
        }
    });
}

// Leave `rows` [count] of logits [N, vocabulary] the tokens whose bits are set in masks [count, width].
KVERN_EXPORT void kvern_restrict(void* logits, const int64_t* rows, const int32_t* masks, int64_t count,
                                 int64_t vocabulary, int64_t width, int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? restrict_rows<float> : restrict_rows<BFloat16>)(logits, rows, masks, count, vocabulary, width);
}
