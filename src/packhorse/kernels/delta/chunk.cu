// Gated delta rule of whole chunks of 64 tokens, fp32 throughout. Plain twin: ref.delta_chunk.
//
// -D DK, DV: head dims, multiples of 32, at most 128. BUFFERS: 2 where there is cp.async (8.0), else 1. Per chunk and value head, with total decay G_i up to token i:
//   A_ij = beta_i (k_i k_j) exp(G_i - G_j), j < i;  T = (I + A)^-1
//   W = T diag(beta exp(G)) K,  U = T diag(beta) V          delta_intra: all chunks at once
//   u = U - W S,  o = exp(G) Q S + (Q K^T exp(G_i - G_j)) u,  S' = exp(G_last) S + K^T diag(exp(G_last - G)) u
//                                                           delta_walk: chunk after chunk, S in shared memory
// Scratch of one chunk and head, floats: W^T [DK][64] | exp(G) Q^T [DK][64] | (Q K^T ..)^T [64][64] |
// K exp(G_last - G) [64][DK] | U [64][DV] | exp(G_last), 32 floats.
#include "mma.cuh"

constexpr int L = 64, SLICE = 32;
constexpr int AT_Q = DK * L, AT_P = 2 * DK * L, AT_K = AT_P + L * L, AT_U = AT_K + L * DK, AT_KEEP = AT_U + L * DV;
constexpr int SCRATCH = AT_KEEP + 32;

// Shared memory of delta_intra: keys, a slice of queries or values, A and then T, and rows of gates.
constexpr int KEY_ROW = DK + 4, SLICE_ROW = SLICE + 1, T_ROW = L + 1;

__device__ __forceinline__ float4 four(const float* p) { return *reinterpret_cast<const float4*>(p); }

// Block (chunk, value head), 256 threads. mixed: rows of `stride` floats, q, k and v of all heads side by side, raw;
// g (log decay) and beta [T, num_v].
extern "C" __global__ void __launch_bounds__(256, 2)
delta_intra(const float* __restrict__ mixed, const float* __restrict__ g, const float* __restrict__ beta,
            float* __restrict__ scratch, int num_tokens, int stride, int num_k, int num_v) {
    extern __shared__ float shared[];
    float* keys = shared;                  // [64][KEY_ROW], normalised
    float* slice = keys + L * KEY_ROW;     // [64][SLICE_ROW]
    float* t = slice + L * SLICE_ROW;      // [64][T_ROW]
    float* total = t + L * T_ROW;          // [64]
    float* gain = total + L;               // [64] beta
    float* norm = gain + L;                // [64] of queries
    const int chunk = blockIdx.x, head = blockIdx.y, k_head = head / (num_v / num_k);
    const int first = chunk * L, rows = min(L, num_tokens - first);
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* base = mixed + (long long)first * stride;
    const float* q_at = base + k_head * DK;
    const float* k_at = base + (num_k + k_head) * DK;
    const float* v_at = base + 2 * num_k * DK + head * DV;
    float* out = scratch + ((long long)chunk * num_v + head) * SCRATCH;

    // Rows of k and the norms of q: a warp a row. Rows beyond the last token are zeros and change nothing.
    for (int i = warp; i < L; i += 8) {
        float k_sum = 0, q_sum = 0, k_values[DK / 32];
#pragma unroll
        for (int c = 0; c < DK / 32; ++c) {
            k_values[c] = i < rows ? k_at[(long long)i * stride + lane + 32 * c] : 0.f;
            const float q_value = i < rows ? q_at[(long long)i * stride + lane + 32 * c] : 0.f;
            k_sum += k_values[c] * k_values[c];
            q_sum += q_value * q_value;
        }
        for (int step = 16; step; step >>= 1) {
            k_sum += __shfl_xor_sync(~0u, k_sum, step);
            q_sum += __shfl_xor_sync(~0u, q_sum, step);
        }
        const float k_norm = rsqrtf(k_sum + 1e-6f);
#pragma unroll
        for (int c = 0; c < DK / 32; ++c) keys[i * KEY_ROW + lane + 32 * c] = k_values[c] * k_norm;
        if (lane == 0) norm[i] = rsqrtf(q_sum + 1e-6f) * rsqrtf(float(DK));
    }
    if (warp == 0) {
        float low = lane < rows ? g[(long long)(first + lane) * num_v + head] : 0.f;
        float high = lane + 32 < rows ? g[(long long)(first + lane + 32) * num_v + head] : 0.f;
        for (int step = 1; step < 32; step <<= 1) {
            const float below = __shfl_up_sync(~0u, low, step), above = __shfl_up_sync(~0u, high, step);
            if (lane >= step) low += below, high += above;
        }
        total[lane] = low;
        total[lane + 32] = high + __shfl_sync(~0u, low, 31);
    }
    if (threadIdx.x < L)
        gain[threadIdx.x] = threadIdx.x < rows ? beta[(long long)(first + threadIdx.x) * num_v + head] : 0.f;
    __syncthreads();
    const float last = total[L - 1];

    {  // A, strictly lower: rows i = ty + 16 a, columns j = tx + 16 b.
        float sum[4][4] = {};
        for (int d = 0; d < DK; d += 4) {
            float4 x[4], y[4];
#pragma unroll
            for (int a = 0; a < 4; ++a) {
                x[a] = four(keys + (ty + 16 * a) * KEY_ROW + d);
                y[a] = four(keys + (tx + 16 * a) * KEY_ROW + d);
            }
#pragma unroll
            for (int a = 0; a < 4; ++a)
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    sum[a][b] += x[a].x * y[b].x + x[a].y * y[b].y + x[a].z * y[b].z + x[a].w * y[b].w;
        }
#pragma unroll
        for (int a = 0; a < 4; ++a)
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int i = ty + 16 * a, j = tx + 16 * b;
                t[i * T_ROW + j] = j < i ? gain[i] * sum[a][b] * expf(total[i] - total[j]) : 0.f;
            }
    }
    {  // Queries, a slice of dims at a time: P^T with i = tx + 16 a along the lanes, j = ty + 16 b.
        float sum[4][4] = {};
        for (int d = 0; d < DK; d += SLICE) {
            __syncthreads();
            for (int at = threadIdx.x; at < L * SLICE; at += 256) {
                const int i = at / SLICE, c = at % SLICE;
                slice[i * SLICE_ROW + c] = i < rows ? q_at[(long long)i * stride + d + c] * norm[i] : 0.f;
            }
            __syncthreads();
            for (int at = threadIdx.x; at < L * SLICE; at += 256) {
                const int i = at % L, c = at / L;
                out[AT_Q + (d + c) * L + i] = slice[i * SLICE_ROW + c] * expf(total[i]);
            }
            for (int c = 0; c < SLICE; ++c) {
                float x[4], y[4];
#pragma unroll
                for (int a = 0; a < 4; ++a) {
                    x[a] = slice[(tx + 16 * a) * SLICE_ROW + c];
                    y[a] = keys[(ty + 16 * a) * KEY_ROW + d + c];
                }
#pragma unroll
                for (int a = 0; a < 4; ++a)
#pragma unroll
                    for (int b = 0; b < 4; ++b) sum[a][b] += x[a] * y[b];
            }
        }
#pragma unroll
        for (int b = 0; b < 4; ++b)
#pragma unroll
            for (int a = 0; a < 4; ++a) {
                const int i = tx + 16 * a, j = ty + 16 * b;
                out[AT_P + j * L + i] = j <= i ? sum[a][b] * expf(total[i] - total[j]) : 0.f;
            }
    }
    // T in A's place, row by row: four threads a column, each a quarter of the sum over the rows above.
    const int column = threadIdx.x / 4, quarter = threadIdx.x % 4;
    for (int i = 0; i < L; ++i) {
        __syncthreads();
        float sum = 0;
        for (int j = column + (quarter - column % 4 + 4) % 4; j < i; j += 4) sum += t[i * T_ROW + j] * t[j * T_ROW + column];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        __syncthreads();
        if (quarter == 0 && column <= i) t[i * T_ROW + column] = column == i ? 1.f : -sum;
    }
    __syncthreads();
    {  // W^T: i = tx + 16 a along the lanes, dims d = ty + 16 b.
        float sum[4][DK / 16] = {};
        for (int j = 0; j < L; ++j) {
            const float factor = gain[j] * expf(total[j]);
            float x[4];
#pragma unroll
            for (int a = 0; a < 4; ++a) x[a] = t[(tx + 16 * a) * T_ROW + j] * factor;
#pragma unroll
            for (int b = 0; b < DK / 16; ++b) {
                const float y = keys[j * KEY_ROW + ty + 16 * b];
#pragma unroll
                for (int a = 0; a < 4; ++a) sum[a][b] += x[a] * y;
            }
        }
#pragma unroll
        for (int b = 0; b < DK / 16; ++b)
#pragma unroll
            for (int a = 0; a < 4; ++a) out[(ty + 16 * b) * L + tx + 16 * a] = sum[a][b];
    }
    for (int at = threadIdx.x; at < L * DK; at += 256) {
        const int i = at / DK, d = at % DK;
        out[AT_K + at] = keys[i * KEY_ROW + d] * expf(last - total[i]);
    }
    for (int d = 0; d < DV; d += SLICE) {  // U: i = ty + 16 a, dims tx and tx + 16 of the slice along the lanes.
        __syncthreads();
        for (int at = threadIdx.x; at < L * SLICE; at += 256) {
            const int i = at / SLICE, c = at % SLICE;
            slice[i * SLICE_ROW + c] = i < rows ? v_at[(long long)i * stride + d + c] * gain[i] : 0.f;
        }
        __syncthreads();
        float sum[4][2] = {};
        for (int j = 0; j < L; ++j)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const float y = slice[j * SLICE_ROW + tx + 16 * b];
#pragma unroll
                for (int a = 0; a < 4; ++a) sum[a][b] += t[(ty + 16 * a) * T_ROW + j] * y;
            }
#pragma unroll
        for (int a = 0; a < 4; ++a)
#pragma unroll
            for (int b = 0; b < 2; ++b) out[AT_U + (ty + 16 * a) * DV + d + tx + 16 * b] = sum[a][b];
    }
    if (threadIdx.x == 0) out[AT_KEEP] = expf(last);
}

#if BUFFERS == 2
__device__ __forceinline__ void fetch(float* to, const float* from, int floats) {
    for (int at = 4 * threadIdx.x; at < floats; at += 4 * 128) {
        const unsigned place = (unsigned)__cvta_generic_to_shared(to + at);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from + at));
    }
    asm volatile("cp.async.commit_group;");
}
template <int LATER>
__device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER));
}
#else
__device__ __forceinline__ void fetch(float* to, const float* from, int floats) {
    for (int at = 4 * threadIdx.x; at < floats; at += 4 * 128) *reinterpret_cast<float4*>(to + at) = four(from + at);
}
template <int LATER>
__device__ __forceinline__ void arrived() {}
#endif

// sum[a][b] += over k < depth of x[k][4 r + a] y[k][4 c + b]: x rows of X floats, y rows of SLICE.
template <int X>
__device__ __forceinline__ void product(const float* x, const float* y, int depth, int r, int c, float (&sum)[4][4]) {
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
        const float4 u = four(x + k * X + 4 * r), w = four(y + k * SLICE + 4 * c);
        const float left[4] = {u.x, u.y, u.z, u.w}, right[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int a = 0; a < 4; ++a)
#pragma unroll
            for (int b = 0; b < 4; ++b) sum[a][b] = fmaf(left[a], right[b], sum[a][b]);
    }
}

// Block (slice of 32 value dims, value head), 128 threads: thread (r, c) has rows 4r.. and columns 4c.. of a product.
// state [num_v, DK, DV] in place; out [T, num_v, DV].
extern "C" __global__ void __launch_bounds__(128)
delta_walk(const float* __restrict__ scratch, float* __restrict__ state, float* __restrict__ out, int num_tokens,
           int num_v) {
    extern __shared__ float shared[];
    constexpr int BIG = DK * L > L * L ? DK * L : L * L;
    float* s = shared;               // [DK][32]
    float* update = s + DK * SLICE;  // [64][32]
    float* buffer = update + L * SLICE;
    const int head = blockIdx.y, d = blockIdx.x * SLICE, r = threadIdx.x / 8, c = threadIdx.x % 8;
    const int num_chunks = (num_tokens + L - 1) / L;
    float* mine = state + (long long)head * DK * DV + d;
    for (int at = threadIdx.x; at < DK * SLICE; at += 128) s[at] = mine[at / SLICE * DV + at % SLICE];

    // The four matrices of a chunk in the order of their use; each is fetched while the one before is worked on.
    const auto part = [&](int step) { return buffer + (BUFFERS == 2 ? step % 2 : 0) * BIG; };
    const auto start = [&](int step) {
        if (step >= 4 * num_chunks) return;
        const float* from = scratch + ((long long)(step / 4) * num_v + head) * SCRATCH;
        const int which = step % 4;
        fetch(part(step), from + (which == 0 ? 0 : which == 1 ? AT_Q : which == 2 ? AT_P : AT_K),
              which == 2 ? L * L : DK * L);
    };
    const auto turn = [&](int step) {  // the matrix of `step` is there when this returns
        if (BUFFERS == 1) {
            __syncthreads();
            start(step);
        } else if (step + 1 < 4 * num_chunks) {
            __syncthreads();
            start(step + 1);
            arrived<1>();
        } else {
            arrived<0>();
        }
        __syncthreads();
    };
    if (BUFFERS == 2) start(0);
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
        const float* from = scratch + ((long long)chunk * num_v + head) * SCRATCH;
        float u[4][4], sum[4][4] = {};
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const float4 x = four(from + AT_U + (4 * r + a) * DV + d + 4 * c);
            u[a][0] = x.x, u[a][1] = x.y, u[a][2] = x.z, u[a][3] = x.w;
        }
        const float keep = from[AT_KEEP];
        turn(4 * chunk);
        product<L>(part(4 * chunk), s, DK, r, c, sum);
#pragma unroll
        for (int a = 0; a < 4; ++a)
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                update[(4 * r + a) * SLICE + 4 * c + b] = u[a][b] - sum[a][b];
                sum[a][b] = 0;
            }
        turn(4 * chunk + 1);
        product<L>(part(4 * chunk + 1), s, DK, r, c, sum);
        turn(4 * chunk + 2);
        product<L>(part(4 * chunk + 2), update, L, r, c, sum);
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const int token = chunk * L + 4 * r + a;
            if (token < num_tokens)
                *reinterpret_cast<float4*>(out + ((long long)token * num_v + head) * DV + d + 4 * c) =
                    make_float4(sum[a][0], sum[a][1], sum[a][2], sum[a][3]);
        }
        turn(4 * chunk + 3);
        for (int rows = r; rows < DK / 4; rows += 16) {
            float more[4][4] = {};
            product<DK>(part(4 * chunk + 3), update, L, rows, c, more);
#pragma unroll
            for (int a = 0; a < 4; ++a)
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    float* place = s + (4 * rows + a) * SLICE + 4 * c + b;
                    *place = fmaf(keep, *place, more[a][b]);
                }
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < DK * SLICE; at += 128) mine[at / SLICE * DV + at % SLICE] = s[at];
}
