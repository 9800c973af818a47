// The KV cache of a layer, as the kernels find it.
#pragma once
#include "common.cuh"

// Consecutive tokens of one sequence within a batch.
struct __align__(16) Slice {
    int first, tokens, position, unused; // row of token 0, how many, position of token 0
};

// Where K and V of a sequence's layer lie, as kernels/attention.py has them: K in groups of 16
// positions, [position / 16][d_k][16], V as [position][d_v rounded up to 16]; position p lies at
// p modulo ring, a multiple of 64. Strides are in bytes.
struct Place {
    u64 keys, values, key_head_stride, value_head_stride, ring;
};
