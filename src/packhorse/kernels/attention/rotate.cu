// Heads of queries and outputs into the basis of pages of codes, and back. Twin: hadamard of quant/codec.py, to the bit.
// -D CODEC (one that is rotated), HEAD_DIM, BF16; X32: fp32 in and out.
#include "kv.cuh"

constexpr int WARPS = 8;

// Head h of token t at x + t * step + h * D; out [rows, D], rows by token, then head. A warp has a row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    rotate_heads(const void* x, void* out, long long step, long long rows, int heads) {
    const int lane = threadIdx.x & 31;
    const long long row = blockIdx.x * (long long)WARPS + (threadIdx.x >> 5);
    if (row >= rows) return;
    const long long from = row / heads * step + row % heads * HEAD_DIM + lane * E, to = row * HEAD_DIM + lane * E;
    float v[E];
#pragma unroll
    for (int e = 0; e < E; e++)
        v[e] = X32 ? static_cast<const float*>(x)[from + e] : Act::low(static_cast<const unsigned short*>(x)[from + e]);
    rotate(v, lane);
#pragma unroll
    for (int e = 0; e < E; e += 2)
        if (X32)
            *reinterpret_cast<float2*>(static_cast<float*>(out) + to + e) = make_float2(v[e], v[e + 1]);
        else
            *reinterpret_cast<u32*>(static_cast<unsigned short*>(out) + to + e) = Act::pack(v[e], v[e + 1]);
}
