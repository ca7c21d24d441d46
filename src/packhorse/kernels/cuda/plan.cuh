// Order of a step's routes, int32: [0] number of distinct experts; for each, ascending, its id and the first of its
// sorted routes (one more: their number); the token of each sorted route; the sorted place of route token * top_k + rank.
#pragma once

#include "mma.cuh"

constexpr int MAX_ROUTES = 160;
constexpr int PLAN_EXPERTS = 32;
constexpr int PLAN_STARTS = PLAN_EXPERTS + MAX_ROUTES;
constexpr int PLAN_TOKENS = PLAN_STARTS + MAX_ROUTES + 32;
constexpr int PLAN_POSITIONS = PLAN_TOKENS + MAX_ROUTES;
// counters: distinct experts, bytes of expert weights read, values that did not fit the activations' type.
enum Counters { EXPERTS_READ, BYTES_READ, SATURATED };
