// Everything of a block between its matrix products: norms, rotary embedding, sums, gating, the
// KV cache and attention over it. Strides are in floats; rows are tokens, or heads of tokens.
#include "common.cuh"

#define MAX_HEAD 256 // dimensions of a head, at most (placement.py asks)
#define TILE 128     // keys of one softmax step, and threads of an attention block
#define MASKED -1e38f
#define NOTHING_SEEN -1e30f // above MASKED: a row with every key masked gets weights of 0

// ------------------------------------------------------------------------------ norms
// The sum over a block of whole warps; every thread gets it.
DEVICE float block_sum(float value) {
    __shared__ float parts[32];
    value = sum_of_warp(value);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = 0.0f;
    for (u32 warp = 0; warp < blockDim.x / WARP; warp++) sum += parts[warp];
    __syncthreads(); // parts may be written again
    return sum;
}

// out = x / sqrt(mean(x^2) + eps) * weight; a block a row.
extern "C" __global__ void rms_norm(const float* x, int x_stride, float* out, int out_stride,
                                    const float* weight, int n, float eps) {
    const float* source = x + (u64)blockIdx.x * x_stride;
    float* target = out + (u64)blockIdx.x * out_stride;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) squares += source[i] * source[i];
    float factor = 1.0f / sqrtf(block_sum(squares) / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) target[i] = source[i] * factor * weight[i];
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (0: none); a block a row.
extern "C" __global__ void layer_norm(const float* x, int x_stride, float* out, int out_stride,
                                      const float* weight, const float* bias, int n, float eps) {
    const float* source = x + (u64)blockIdx.x * x_stride;
    float* target = out + (u64)blockIdx.x * out_stride;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += source[i];
    float mean = block_sum(sum) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        squares += (source[i] - mean) * (source[i] - mean);
    float factor = 1.0f / sqrtf(block_sum(squares) / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float scaled = (source[i] - mean) * factor * weight[i];
        target[i] = bias ? scaled + bias[i] : scaled;
    }
}

// ------------------------------------------------------------------------------ element by element
// grid = (pieces of a row, rows): the index within the row, and places in rows of a stride.
#define COLUMN (int)(blockIdx.x * blockDim.x + threadIdx.x)
#define AT(x, stride) (x)[(u64)blockIdx.y * (stride) + i]

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// out = silu(gate) * up
extern "C" __global__ void silu_mul(const float* gate, int gate_stride, const float* up,
                                    int up_stride, float* out, int out_stride, int n) {
    int i = COLUMN;
    if (i < n) AT(out, out_stride) = silu(AT(gate, gate_stride)) * AT(up, up_stride);
}

// out = sigmoid(gate) * up
extern "C" __global__ void sigmoid_mul(const float* gate, int gate_stride, const float* up,
                                       int up_stride, float* out, int out_stride, int n) {
    int i = COLUMN;
    if (i < n) AT(out, out_stride) = sigmoid(AT(gate, gate_stride)) * AT(up, up_stride);
}

// x += y; a stride of 0 adds one row, a bias, to all.
extern "C" __global__ void add_rows(float* x, int x_stride, const float* y, int y_stride, int n) {
    int i = COLUMN;
    if (i < n) AT(x, x_stride) += AT(y, y_stride);
}

// x[t] += sigmoid(gate[t]) * y[t]
extern "C" __global__ void add_gated(float* x, int x_stride, const float* y, int y_stride,
                                     const float* gate, int gate_stride, int n) {
    int i = COLUMN;
    if (i >= n) return;
    float factor = sigmoid(gate[(u64)blockIdx.y * gate_stride]);
    AT(x, x_stride) = fmaf(factor, AT(y, y_stride), AT(x, x_stride));
}

// x[t] *= factors[t]; a stride of 0 for the factors: one for all rows.
extern "C" __global__ void scale_rows(float* x, int x_stride, const float* factors, int factor_stride,
                                 int n) {
    int i = COLUMN;
    if (i < n) AT(x, x_stride) *= factors[(u64)blockIdx.y * factor_stride];
}

// Every value of x into [-limit, limit].
extern "C" __global__ void clamp_rows(float* x, int x_stride, int n, float limit) {
    int i = COLUMN;
    if (i < n) AT(x, x_stride) = fminf(fmaxf(AT(x, x_stride), -limit), limit);
}

// Every value of x becomes `value`.
extern "C" __global__ void fill_rows(float* x, int x_stride, int n, float value) {
    int i = COLUMN;
    if (i < n) AT(x, x_stride) = value;
}

// out[t] = x[index[t]]; without an index x[t].
extern "C" __global__ void copy_rows(const float* x, int x_stride, const int* index, float* out,
                                     int out_stride, int n) {
    int i = COLUMN;
    if (i >= n) return;
    int row = index ? index[blockIdx.y] : blockIdx.y;
    AT(out, out_stride) = x[(u64)row * x_stride + i];
}

// Rotate the first 2 * pairs numbers of every head. half_split 1: number i pairs with i + pairs,
// 0: 2i with 2i + 1. grid = (pieces of heads * pairs, tokens)
extern "C" __global__ void rope(float* x, int x_stride, int heads, int head_size,
                                const float* cosines, const float* sines, int table_stride,
                                int pairs, int half_split) {
    int i = COLUMN;
    if (i >= heads * pairs) return;
    int pair = i % pairs, apart = half_split ? pairs : 1;
    float* first = x + (u64)blockIdx.y * x_stride + i / pairs * head_size +
                   (half_split ? pair : 2 * pair);
    float c = cosines[(u64)blockIdx.y * table_stride + pair];
    float s = sines[(u64)blockIdx.y * table_stride + pair];
    float a = first[0], b = first[apart];
    first[0] = a * c - b * s;
    first[apart] = a * s + b * c;
}

// ------------------------------------------------------------------------------ the KV cache
// Consecutive tokens of one sequence within a batch.
struct Slice {
    int first, tokens, position, unused; // row of token 0, how many, position of token 0
};

// Where K and V of a sequence's layer lie, as kernels/attention.py has them: K in groups of 16
// positions, [position / 16][d_k][16], V as [position][d_v rounded up to 16]; position p lies at
// p modulo ring. Strides are in bytes.
struct Place {
    u64 keys, values, key_head_stride, value_head_stride, ring;
};

template <int HALF> DEVICE float load_kv(u64 base, u64 element) {
    return HALF ? half_to_float(fetch<u16>((const u16*)base + element))
                : fetch<float>((const float*)base + element);
}

template <int HALF> DEVICE void store_kv(u64 base, u64 element, float x) {
    if (HALF) ((u16*)base)[element] = float_to_half(x);
    else ((float*)base)[element] = x;
}

// Write k and v. grid = (pieces of heads * (d_k + padded d_v), most tokens of a slice, slices)
template <int HALF>
DEVICE void append(const float* k, int k_stride, const float* v, int v_stride, int heads, int dk,
                   int dv, const Slice* slices, const Place* places) {
    int padded = (dv + 15) / 16 * 16, i = COLUMN;
    Slice slice = slices[blockIdx.z];
    if (i >= heads * (dk + padded) || (int)blockIdx.y >= slice.tokens) return;
    Place place = places[blockIdx.z];
    u64 at = (slice.position + blockIdx.y) % (int)place.ring, row = slice.first + blockIdx.y;
    int head = i / (dk + padded), d = i % (dk + padded);
    if (d < dk) {
        u64 base = place.keys + head * place.key_head_stride;
        store_kv<HALF>(base, (at / 16 * dk + d) * 16 + at % 16, k[row * k_stride + head * dk + d]);
    } else {
        d -= dk;
        u64 base = place.values + head * place.value_head_stride;
        float value = d < dv ? v[row * v_stride + head * dv + d] : 0.0f;
        store_kv<HALF>(base, at * padded + d, value);
    }
}

#define APPEND_PARAMETERS                                                                          \
    const float *k, int k_stride, const float *v, int v_stride, int heads, int dk, int dv,         \
        const Slice *slices, const Place *places
#define APPEND_ARGUMENTS k, k_stride, v, v_stride, heads, dk, dv, slices, places

extern "C" __global__ void append_kv_f16(APPEND_PARAMETERS) { append<1>(APPEND_ARGUMENTS); }
extern "C" __global__ void append_kv_f32(APPEND_PARAMETERS) { append<0>(APPEND_ARGUMENTS); }

// ------------------------------------------------------------------------------ attention
// The last key that lies too far back for the token at a position; -1 if it sees them all.
DEVICE int last_hidden(int position, int window, int chunk) {
    int by_window = position - window, by_chunk = position / chunk * chunk - 1;
    int last = by_window > by_chunk ? by_window : by_chunk;
    return last > -1 ? last : -1;
}

// Rows are (token, query head of the group) pairs; a block has ROWS of them, of one KV head, and a
// share of the keys, in tiles through an online softmax. grid = (KV heads * row blocks, shares,
// slices), block = TILE threads. In a tile every thread computes the scores of one key, then the
// block the softmax of every row, then every thread sums some values of one or two dimensions.
// How the keys are cut depends on their number and on `most` shares only, not on other sequences.
// With one share rows are written to `out`; with more maximum, sum and weighted values of every
// share to partial [token * heads + head][share][2 + d_v], for attention_reduce.
template <int HALF, int ROWS>
DEVICE void attend(const float* q, int q_stride, float* out, int out_stride, const Slice* slices,
                   const Place* places, int row_blocks, int most, int group, int dk, int dv,
                   float factor, int window, int chunk, const float* sinks, float* partial) {
    constexpr int APART = ROWS == 8 ? 12 : ROWS; // of keys: 16-byte loads, few bank conflicts
    __align__(16) __shared__ float queries[MAX_HEAD * ROWS]; // [d][row]
    __align__(16) __shared__ float weights[TILE * APART];    // [key][row]: scores, then weights
    __shared__ float largest[ROWS], total[ROWS], past[ROWS];
    const int thread = threadIdx.x, padded = (dv + 15) / 16 * 16;
    const int head = blockIdx.x / row_blocks, first = blockIdx.x % row_blocks * ROWS;
    const int shares = gridDim.y, heads = gridDim.x / row_blocks * group;
    const Slice slice = slices[blockIdx.z];
    const Place place = places[blockIdx.z];
    const int left = slice.tokens * group - first, rows = left < ROWS ? left : ROWS;
    if (rows <= 0) return;

    for (int i = thread; i < dk * ROWS; i += TILE) {
        int row = first + i % ROWS, d = i / ROWS;
        const float* source = q + (u64)(slice.first + row / group) * q_stride;
        queries[i] = i % ROWS < rows ? source[(head * group + row % group) * dk + d] * factor : 0.0f;
    }
    if (thread < ROWS) {
        bool sink = sinks && blockIdx.y == 0 && thread < rows;
        largest[thread] = sink ? sinks[head * group + (first + thread) % group] : NOTHING_SEEN;
        total[thread] = sink ? 1.0f : 0.0f;
    }

    const int oldest = slice.position + first / group;
    const int newest = slice.position + (first + rows - 1) / group;
    const int begin = (last_hidden(oldest, window, chunk) + 1) / 16 * 16;
    const int tiles = (newest + 1 - begin + TILE - 1) / TILE;
    const int share = (tiles + most - 1) / most * TILE;
    const int start = begin + blockIdx.y * share;
    const int stop = start + share < newest + 1 ? start + share : newest + 1;
    const int ring = (int)place.ring;
    const u64 keys = place.keys + head * place.key_head_stride;
    const u64 values = place.values + head * place.value_head_stride;

    // Threads of the third part: each one dimension (or two, TILE apart) of a group of the keys.
    const int groups = padded < TILE ? TILE / padded : 1, key_group = thread / padded;
    const int d0 = padded < TILE ? thread % padded : thread, d1 = thread + TILE;
    const bool first_used = d0 < padded && key_group < groups, second_used = d1 < padded;
    float sum0[ROWS], sum1[ROWS];
    for (int r = 0; r < ROWS; r++) sum0[r] = sum1[r] = 0.0f;

    for (int tile = start; tile < stop; tile += TILE) {
        __syncthreads(); // queries are there; weights are not read any more
        const int key = tile + thread;
        float score[ROWS];
        for (int r = 0; r < ROWS; r++) score[r] = 0.0f;
        if (key < stop) {
            const u64 at = key % ring, element = at / 16 * dk * 16 + at % 16;
#pragma unroll 8
            for (int d = 0; d < dk; d++) {
                float k = load_kv<HALF>(keys, element + d * 16);
#pragma unroll
                for (int r = 0; r < ROWS; r++) score[r] = fmaf(queries[d * ROWS + r], k, score[r]);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            int position = slice.position + (first + (r < rows ? r : rows - 1)) / group;
            bool seen = key < stop && key <= position && key > last_hidden(position, window, chunk);
            weights[thread * APART + r] = seen ? score[r] : MASKED;
        }
        __syncthreads();
        for (int r = thread / WARP; r < ROWS; r += TILE / WARP) {
            float* row = weights + r;
            float before = largest[r], best = before, sum = 0.0f;
            for (int i = thread % WARP; i < TILE; i += WARP) best = fmaxf(best, row[i * APART]);
            best = largest_of_warp(best);
            for (int i = thread % WARP; i < TILE; i += WARP)
                sum += row[i * APART] = expf(row[i * APART] - best);
            sum = sum_of_warp(sum);
            if (thread % WARP == 0) {
                largest[r] = best;
                past[r] = expf(before - best);
                total[r] = total[r] * past[r] + sum;
            }
        }
        __syncthreads();
        for (int r = 0; r < ROWS; r++) sum0[r] *= past[r], sum1[r] *= past[r];
        const int count = stop - tile < TILE ? stop - tile : TILE, base = tile % ring;
        if (first_used) {
#pragma unroll 4
            for (int j = key_group; j < count; j += groups) {
                u64 at = base + j < ring ? base + j : base + j - ring;
                float v = load_kv<HALF>(values, at * padded + d0);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sum0[r] = fmaf(weights[j * APART + r], v, sum0[r]);
            }
        }
        if (second_used) {
#pragma unroll 4
            for (int j = 0; j < count; j++) {
                u64 at = base + j < ring ? base + j : base + j - ring;
                float v = load_kv<HALF>(values, at * padded + d1);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sum1[r] = fmaf(weights[j * APART + r], v, sum1[r]);
            }
        }
    }

    __syncthreads();
    for (int r = 0; r < ROWS; r++) weights[thread * APART + r] = sum0[r]; // of a group of keys
    __syncthreads();
    for (int r = 0; r < rows; r++) {
        const u64 row = slice.first + (first + r) / group;
        const int query_head = head * group + (first + r) % group;
        float* target = out + row * out_stride + query_head * dv;
        float divisor = total[r];
        if (shares > 1) {
            float* state = partial + ((row * heads + query_head) * shares + blockIdx.y) * (2 + dv);
            if (thread == 0) state[0] = largest[r], state[1] = total[r];
            target = state + 2;
            divisor = 1.0f;
        }
        if (thread < padded && thread < dv) {
            float sum = 0.0f;
            for (int g = 0; g < groups; g++) sum += weights[(g * padded + thread) * APART + r];
            target[thread] = sum / divisor;
        }
        if (second_used && d1 < dv) target[d1] = sum1[r] / divisor;
    }
}

#define PARAMETERS                                                                                 \
    const float *q, int q_stride, float *out, int out_stride, const Slice *slices,                 \
        const Place *places, int row_blocks, int most, int group, int dk, int dv, float factor,   \
        int window, int chunk, const float *sinks, float *partial
#define ARGUMENTS                                                                                  \
    q, q_stride, out, out_stride, slices, places, row_blocks, most, group, dk, dv, factor,         \
        window, chunk, sinks, partial

extern "C" __global__ void attention_f16_r1(PARAMETERS) { attend<1, 1>(ARGUMENTS); }
extern "C" __global__ void attention_f16_r4(PARAMETERS) { attend<1, 4>(ARGUMENTS); }
extern "C" __global__ void attention_f16_r8(PARAMETERS) { attend<1, 8>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r1(PARAMETERS) { attend<0, 1>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r4(PARAMETERS) { attend<0, 4>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r8(PARAMETERS) { attend<0, 8>(ARGUMENTS); }

// The shares of every row joined. grid = (heads, tokens)
extern "C" __global__ void attention_reduce(const float* partial, float* out, int out_stride,
                                            int dv, int shares) {
    const u64 row = (u64)blockIdx.y * gridDim.x + blockIdx.x;
    const float* states = partial + row * shares * (2 + dv);
    float best = NOTHING_SEEN;
    for (int s = 0; s < shares; s++) best = fmaxf(best, states[s * (2 + dv)]);
    for (int d = threadIdx.x; d < dv; d += blockDim.x) {
        float total = 0.0f, sum = 0.0f;
        for (int s = 0; s < shares; s++) {
            const float* state = states + s * (2 + dv);
            float weight = expf(state[0] - best);
            total += weight * state[1];
            sum += weight * state[2 + d];
        }
        out[(u64)blockIdx.y * out_stride + blockIdx.x * dv + d] = sum / total;
    }
}
