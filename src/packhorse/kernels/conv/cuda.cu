// Causal depthwise convolution and silu of a chunk. -D TAPS, BF16 (type of rows and state).
#include "mma.cuh"

constexpr int RUN = 32;  // rows that a thread takes, one after another

// x: rows of `stride` values, of which the first 2 pairs are channels; weight [2 pairs, TAPS] fp32; state
// [2 pairs, TAPS - 1]: the inputs before x, oldest first, in place. out [num_rows, 2 pairs] fp32: one multiply and one
// add a tap, each rounded, then silu. A thread has two channels. Grid: (rows / RUN, pairs / 256).
extern "C" __global__ void __launch_bounds__(256)
    conv_silu(const unsigned short* __restrict__ x, const float* __restrict__ weight, unsigned short* state,
              float2* __restrict__ out, int num_rows, int stride, int pairs) {
    const int pair = blockIdx.y * 256 + threadIdx.x, first = blockIdx.x * RUN;
    if (pair >= pairs) return;
    const auto row = [&](int r) { return *reinterpret_cast<const u32*>(x + (long long)r * stride + 2 * pair); };
    float taps[2][TAPS];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) taps[c][tap] = weight[(2 * pair + c) * TAPS + tap];
    u32 window[TAPS];  // inputs of both channels; the last is the row's own
    unsigned short* mine = state + 2 * pair * (TAPS - 1);
    if (first == 0) {
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) window[i] = mine[i] | (u32)mine[TAPS - 1 + i] << 16;
        u32 last[TAPS - 1];
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) {
            const int at = num_rows - (TAPS - 1) + i;
            last[i] = at >= 0 ? row(at) : mine[num_rows + i] | (u32)mine[TAPS - 1 + num_rows + i] << 16;
        }
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) mine[i] = last[i], mine[TAPS - 1 + i] = last[i] >> 16;
    } else {
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) window[i] = row(first - (TAPS - 1) + i);
    }
    const int stop = min(first + RUN, num_rows);
#pragma unroll 8
    for (int r = first; r < stop; r++) {
        window[TAPS - 1] = row(r);
        float2 sum = make_float2(__fmul_rn(Act::low(window[0]), taps[0][0]), __fmul_rn(Act::high(window[0]), taps[1][0]));
#pragma unroll
        for (int tap = 1; tap < TAPS; tap++) {
            sum.x = __fadd_rn(sum.x, __fmul_rn(Act::low(window[tap]), taps[0][tap]));
            sum.y = __fadd_rn(sum.y, __fmul_rn(Act::high(window[tap]), taps[1][tap]));
            window[tap - 1] = window[tap];
        }
        out[(long long)r * pairs + pair] = make_float2(silu(sum.x), silu(sum.y));
    }
}
