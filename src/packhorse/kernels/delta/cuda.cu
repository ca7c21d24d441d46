// A delta-net step between its projections, 1 to 16 tokens a sequence: causal convolution and silu, unit q and k,
// gates, the gated delta rule, the gated norm. A block has one value head: its state [D, D] is read once, kept in
// registers over all tokens, and written once.
//
// Per token: S <- decay S; S <- S + k (beta (v - S^T k))^T; o = S^T q. With r = decay S^T k and p = decay S^T q the
// change is c = beta (v - r) and o = p + (k q) c: one pass over the state, one meeting of the threads.
//
// Value heads of one key head share the convolution of q and k. Each computes it for itself; the one that is last to
// read its state writes the new one.
//
// A thread has 4 x 4 of the state: a warp 16 rows by 32 columns, lane (i, j) = (lane / 8, lane % 8) rows 4 i and
// columns 4 j of them; D / 32 warps side by side, D / 16 one under the other. In the convolution a thread has one of
// the 3 D channels of q, k and v (two, where there are fewer threads).
// -D HEAD_DIM, TAPS, BF16 (type of conv states and out, and of projections that are not fp32).
#include "mma.cuh"

constexpr int D = HEAD_DIM;
constexpr int ACROSS = D / 32, DOWN = D / 16;
constexpr int THREADS = 32 * ACROSS * DOWN;

__device__ __forceinline__ float at(const void* values, size_t i, int fp32) {
    return fp32 ? static_cast<const float*>(values)[i] : Act::low(static_cast<const unsigned short*>(values)[i]);
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// rows: a row's channels of q, k and v heads, then z of the value heads, at r * stride; ba: its b, then a, of each
// value head, at r * ba_stride; both fp32 or both not. weight [channels, TAPS], a_log, dt_bias, norm [D]: fp32.
// conv: of a slot at slot * conv_stride bytes: [channels, TAPS - 1], the last inputs, oldest first. states: of a slot
// at slot * state_stride bytes: fp32 [value heads, D, D]. Both change in place. turns: zeros, [sequences, key heads].
// first_row, num_tokens (0: none), slots: of each sequence. out [rows, value heads, D]: o over its root mean square,
// times norm and silu(z). at_rest: states and where they are can be read while the kernel before still runs.
// Grid: value heads, sequences.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_step(const void* rows, const void* ba, const float* weight, const float* a_log, const float* dt_bias,
               const float* norm, unsigned char* conv, unsigned char* states, int* turns, const int* first_row,
               const int* num_tokens, const int* slots, unsigned short* out, u64 conv_stride, u64 state_stride,
               float eps, int stride, int ba_stride, int fp32, int num_k_heads, int at_rest) {
    __shared__ float sums[2][DOWN][D];
    __shared__ __align__(16) float mixed[3][D];
    __shared__ float gate[D], squares[3][D / 32], decay, beta;
    __shared__ float window[TAPS - 1][3 * D], taps[TAPS][3 * D];  // a thread's own channels: registers are short
    __shared__ int last_reader;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, mine = threadIdx.x;
    const int row = 16 * (warp / ACROSS) + 4 * (lane >> 3), column = 32 * (warp % ACROSS) + 4 * (lane & 7);
    const int head = blockIdx.x, num_heads = gridDim.x, sequence = blockIdx.y;
    const int group = num_heads / num_k_heads, k_head = head / group;
    // Of q, k and v side by side: where it is in rows, weight and conv.
    const auto channel = [=](int c) {
        const int part = c / D;
        return (part == 0 ? k_head : part == 1 ? num_k_heads + k_head : 2 * num_k_heads + head) * D + c % D;
    };
    for (int c = mine; c < 3 * D; c += THREADS)
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) taps[tap][c] = weight[(size_t)channel(c) * TAPS + tap];
    let_next_start();
    if (!at_rest) wait_for_previous();
    const int tokens = num_tokens[sequence], first = first_row[sequence], slot = slots[sequence];
    if (tokens == 0) {
        wait_for_previous();  // who waits for this kernel waits for all before it
        return;
    }
    float4* const state = reinterpret_cast<float4*>(states + slot * state_stride) +
                          ((size_t)head * D + row) * (D / 4) + column / 4;
    unsigned short* const inputs = reinterpret_cast<unsigned short*>(conv + slot * conv_stride);
    float4 s[4];
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = state[i * (D / 4)];
    for (int c = mine; c < 3 * D; c += THREADS)
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; tap++)
            window[tap][c] = Act::low(inputs[(size_t)channel(c) * (TAPS - 1) + tap]);
    wait_for_previous();

    int turn = 0;
#pragma unroll 1
    for (int token = 0; token < tokens; token++) {
        const size_t r = first + token;
#pragma unroll
        for (int c = mine; c < 3 * D; c += THREADS) {
            // Inputs have the precision of the state, so that a later step sees what this one did.
            const float input = Act::low(Act::bits(at(rows, r * stride + channel(c), fp32)));
            float x = input * taps[TAPS - 1][c];
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++) {
                x += window[tap][c] * taps[tap][c];
                window[tap][c] = tap < TAPS - 2 ? window[tap + 1][c] : input;
            }
            x /= 1.f + __expf(-x);
            mixed[c / D][c % D] = x;
            const float square = warp_sum(x * x);
            if (lane == 0) squares[c / D][c % D / 32] = square;
        }
        if (mine == THREADS - 1) {
            const float a = at(ba, r * ba_stride + num_heads + head, fp32) + dt_bias[head];
            decay = expf(-expf(a_log[head]) * (a > 20.f ? a : log1pf(expf(a))));
            beta = 1.f / (1.f + expf(-at(ba, r * ba_stride + head, fp32)));
        }
        if (mine < D) gate[mine] = at(rows, r * stride + (size_t)(2 * num_k_heads + num_heads + head) * D + mine, fp32);
        __syncthreads();
        if (token == 0 && mine == 0) {
            // All threads have read the conv state. The value heads of a key head meet here once.
            turn = atomicAdd(turns + sequence * num_k_heads + k_head, 1);
        }
        float q_unit = 1e-6f, k_unit = 1e-6f;
#pragma unroll
        for (int w = 0; w < D / 32; w++) q_unit += squares[0][w], k_unit += squares[1][w];
        q_unit = rsqrtf(q_unit) * rsqrtf((float)D), k_unit = rsqrtf(k_unit);
        const float4 query = *reinterpret_cast<const float4*>(&mixed[0][row]);
        const float4 key = *reinterpret_cast<const float4*>(&mixed[1][row]);
        const float ks[4] = {key.x * k_unit, key.y * k_unit, key.z * k_unit, key.w * k_unit};
        const float qs[4] = {query.x, query.y, query.z, query.w};
        float4 read = make_float4(0, 0, 0, 0), ask = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[i].x *= decay, s[i].y *= decay, s[i].z *= decay, s[i].w *= decay;
            read.x += ks[i] * s[i].x, read.y += ks[i] * s[i].y, read.z += ks[i] * s[i].z, read.w += ks[i] * s[i].w;
            ask.x += qs[i] * s[i].x, ask.y += qs[i] * s[i].y, ask.z += qs[i] * s[i].z, ask.w += qs[i] * s[i].w;
        }
        float* const parts[8] = {&read.x, &read.y, &read.z, &read.w, &ask.x, &ask.y, &ask.z, &ask.w};
#pragma unroll
        for (int e = 0; e < 8; e++) {
            *parts[e] += __shfl_xor_sync(~0u, *parts[e], 8);
            *parts[e] += __shfl_xor_sync(~0u, *parts[e], 16);
        }
        if (lane < 8) {
            *reinterpret_cast<float4*>(&sums[0][warp / ACROSS][column]) = read;
            *reinterpret_cast<float4*>(&sums[1][warp / ACROSS][column]) = ask;
        }
        float kq = 0;
        if (mine < D) {
#pragma unroll
            for (int e = 0; e < D / 32; e++) kq += mixed[0][32 * e + lane] * mixed[1][32 * e + lane];
            kq = warp_sum(kq) * k_unit;
        }
        __syncthreads();
        const float4 value = *reinterpret_cast<const float4*>(&mixed[2][column]);
        float4 change = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < DOWN; w++) {
            const float4 part = *reinterpret_cast<const float4*>(&sums[0][w][column]);
            change.x += part.x, change.y += part.y, change.z += part.z, change.w += part.w;
        }
        change.x = beta * (value.x - change.x), change.y = beta * (value.y - change.y);
        change.z = beta * (value.z - change.z), change.w = beta * (value.w - change.w);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[i].x += ks[i] * change.x, s[i].y += ks[i] * change.y;
            s[i].z += ks[i] * change.z, s[i].w += ks[i] * change.w;
        }
        if (token == tokens - 1) {
#pragma unroll
            for (int j = 0; j < 4; j++) state[j * (D / 4)] = s[j];
        }
        if (token == tokens - 1 && mine == 0) {
            last_reader = turn == group - 1;
            if (last_reader) turns[sequence * num_k_heads + k_head] = 0;
        }
        float o = 0;
        if (mine < D) {
            float read_one = 0;
#pragma unroll
            for (int w = 0; w < DOWN; w++) read_one += sums[0][w][mine], o += sums[1][w][mine];
            o = (o + kq * (beta * (mixed[2][mine] - read_one))) * q_unit;
            const float square = warp_sum(o * o);
            if (lane == 0) squares[2][warp] = square;
        }
        __syncthreads();
        if (mine < D) {
            float square = 0;
#pragma unroll
            for (int w = 0; w < D / 32; w++) square += squares[2][w];
            const float z = gate[mine];
            o *= rsqrtf(square / D + eps) * norm[mine] * (z / (1.f + expf(-z)));
            out[(r * num_heads + head) * D + mine] = Act::bits(o);
        }
    }
#pragma unroll
    for (int c = mine; c < 3 * D; c += THREADS)
        if (c >= 2 * D || last_reader)
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++)
                inputs[(size_t)channel(c) * (TAPS - 1) + tap] = Act::bits(window[tap][c]);
}
