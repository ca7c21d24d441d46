// What surrounds the grouped products of many tokens' experts, 8 values a thread. -D BF16: the type of rows.
#include "mma.cuh"

__device__ __forceinline__ void unpack8(const uint4& words, float (&v)[8]) {
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = Act::low(pairs[i]), v[2 * i + 1] = Act::high(pairs[i]);
}

// rows [count / eighths, gate 8 eighths | up 8 eighths] -> out [.., 8 eighths] = silu(gate) * up, one rounding.
extern "C" __global__ void __launch_bounds__(256)
    swiglu(const uint4* rows, uint4* out, u64* saturated, int eighths, long long count) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= count) return;
    const long long at = i / eighths * 2 * eighths + i % eighths;
    float gate[8], up[8];
    unpack8(rows[at], gate);
    unpack8(rows[at + eighths], up);
    u32 pairs[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 low = to_act(silu(gate[2 * k]) * up[2 * k], saturated);
        pairs[k] = low | (u32)to_act(silu(gate[2 * k + 1]) * up[2 * k + 1], saturated) << 16;
    }
    out[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// out [T, 8 eighths] fp32: the sum over ranks of weights [T, top_k] times results at places [T, top_k], in the order of
// ranks, each product and each sum rounded. Grid: (T, eighths / 256).
extern "C" __global__ void __launch_bounds__(256)
    combine(const uint4* results, const long long* places, const float* weights, float4* out, int top_k, int eighths) {
    const int i = blockIdx.y * 256 + threadIdx.x;
    const long long token = blockIdx.x;
    if (i >= eighths) return;
    float sum[8];
#pragma unroll 4
    for (int rank = 0; rank < top_k; rank++) {
        const float weight = weights[token * top_k + rank];
        float v[8];
        unpack8(results[places[token * top_k + rank] * eighths + i], v);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float part = __fmul_rn(v[k], weight);
            sum[k] = rank == 0 ? part : __fadd_rn(sum[k], part);
        }
    }
    float4* to = out + (token * eighths + i) * 2;
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}
