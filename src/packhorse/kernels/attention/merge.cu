// A segment's attention added to that of the segments before it: two softmaxes become one by their log-sum-exps.
// -D BF16: the type of a segment's output.
#include "mma.cuh"

#define NOTHING __int_as_float(0xff800000)  // the log of a sum of nothing: minus infinity

// part: rows of 8 eighths values; of query token t and head h = kv * groups + g at kv * kv_step + g * group_step +
// t * token_step values. part_lse: fp32, in the same way with lse steps. out [T, heads, 8 eighths] fp32, changed in
// place; lse, new_lse [T, heads], -inf where no key was seen. Without lse the segment is the first. A thread: 8 values.
extern "C" __global__ void __launch_bounds__(256)
    merge_segment(const unsigned short* part, const float* part_lse, float* out, const float* lse, float* new_lse,
                  long long kv_step, long long group_step, long long token_step, long long lse_kv_step,
                  long long lse_group_step, long long lse_token_step, int groups, int heads, int eighths,
                  long long count) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= count) return;
    const long long row = i / eighths, token = row / heads;
    const int at = (int)(i % eighths), head = (int)(row % heads), kv = head / groups, group = head % groups;
    const uint4 words = *reinterpret_cast<const uint4*>(part + kv * kv_step + group * group_step + token * token_step +
                                                        8 * at);
    const float added = part_lse[kv * lse_kv_step + group * lse_group_step + token * lse_token_step];
    float old_share = 0, new_share = 1, total = added;
    if (lse != nullptr) {
        const float known = lse[row], high = fmaxf(known, added);
        // A row that has seen no key has shares of 0, not NaN.
        const float floor = high == NOTHING ? 0.f : high;
        total = floor + logf(expf(known - floor) + expf(added - floor));
        const float from = total == NOTHING ? 0.f : total;
        old_share = expf(known - from);
        new_share = expf(added - from);
    }
    if (at == 0) new_lse[row] = total;
    float* to = out + 8 * i;
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 a = pairs[2 * half], b = pairs[2 * half + 1];
        float4 v = make_float4(Act::low(a), Act::high(a), Act::low(b), Act::high(b));
        float4* place = reinterpret_cast<float4*>(to) + half;
        if (lse != nullptr) {
            const float4 old = *place;
            v.x = old.x * old_share + v.x * new_share, v.y = old.y * old_share + v.y * new_share;
            v.z = old.z * old_share + v.z * new_share, v.w = old.w * old_share + v.w * new_share;
        }
        *place = v;
    }
}
