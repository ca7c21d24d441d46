// Order of a step's routes: for each distinct expert, ascending, a Slot; behind them int32: the number of slots, the
// token of each route sorted by expert, the sorted place of route token * top_k + rank or -1 where the token is nobody's;
// then u64 for each slot: 0, or HOST where its expert is read from host memory, or where to keep it, | HOST.
#pragma once

#include "mma.cuh"

struct alignas(16) Slot {
    u64 address;                  // of the expert's first byte
    unsigned short start, count;  // its sorted routes
    int expert;

    __device__ __forceinline__ static Slot load(const Slot* from) {
        // Around L1: the kernel may have started before the plan was written.
        const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from));
        return {(u64)v.y << 32 | v.x, (unsigned short)v.z, (unsigned short)(v.z >> 16), (int)v.w};
    }
};

constexpr int MAX_ROUTES = 160;
constexpr int PLAN_NUM = 4 * MAX_ROUTES;  // in int32
constexpr int PLAN_TOKENS = PLAN_NUM + 32;
constexpr int PLAN_PLACES = PLAN_TOKENS + MAX_ROUTES;
constexpr int PLAN_KEEP = PLAN_PLACES + MAX_ROUTES;
constexpr u64 HOST = 1;  // in an address: of host memory
// counters: distinct experts, bytes of expert weights read, values that did not fit the activations' type, bytes read
// from host memory, those of them that were kept.
enum Counters { EXPERTS_READ, BYTES_READ, SATURATED, BYTES_HOST, BYTES_KEPT };
