// Attention over a KV cache: a step of an online softmax takes TILE keys. A unit of work is some
// rows, (token, query head of the group) pairs of one KV head, and a share of the keys; all rows of
// a unit use what is loaded of a key or value.
#include "common.cuh"
#include "cache.cuh"

#define TILE 64  // keys of one step: two a lane
#define WARPS 4  // of a block
#define COLUMN 128 // values that the lanes of a warp sum at a time, four each
#define MASKED -1e38f
#define NOTHING_SEEN -1e30f // above MASKED: a row with every key masked gets weights of 0

// ------------------------------------------------------------------------------ what is loaded
// Two neighbouring keys, and four neighbouring values, as they lie in the cache.
template <int HALF> struct Stored;
template <> struct Stored<1> {
    typedef u32 Pair;
    typedef uint2 Quad;
};
template <> struct Stored<0> {
    typedef float2 Pair;
    typedef float4 Quad;
};

DEVICE float2 floats(u32 halves) {
    return make_float2(half_to_float((u16)halves), half_to_float((u16)(halves >> 16)));
}
DEVICE float2 floats(float2 pair) { return pair; }
DEVICE float4 floats(uint2 halves) {
    float2 low = floats(halves.x), high = floats(halves.y);
    return make_float4(low.x, low.y, high.x, high.y);
}
DEVICE float4 floats(float4 quad) { return quad; }

// Two keys a lane: their dimensions `begin` and on, BATCH of them at a time.
template <int HALF, int BATCH> struct Keys {
    typedef typename Stored<HALF>::Pair Pair;
    Pair loaded[BATCH];

    // `keys`: where dimension 0 lies. Dimensions end at `to`, whole eights behind `begin`.
    __device__ __forceinline__ void load(u64 keys, int begin, int to) {
        const Pair* source = (const Pair*)keys + (u64)begin * 8;
#pragma unroll
        for (int eight = 0; eight < BATCH; eight += 8) {
            if (begin + eight >= to) break;
#pragma unroll
            for (int d = eight; d < eight + 8; d++) loaded[d] = fetch<Pair>(source + d * 8);
        }
    }

    // score[row] += queries[d][row] * key[d]
    template <int ROWS>
    __device__ __forceinline__ void multiply(const float* queries, int begin, int to,
                                             float2* score) const {
#pragma unroll
        for (int eight = 0; eight < BATCH; eight += 8) {
            if (begin + eight >= to) break;
#pragma unroll
            for (int d = eight; d < eight + 8; d++) {
                const float2 key = floats(loaded[d]);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float q = queries[(begin + d) * ROWS + r];
                    score[r].x = fmaf(q, key.x, score[r].x);
                    score[r].y = fmaf(q, key.y, score[r].y);
                }
            }
        }
    }
};

// Values of QUADS times four keys of a tile: four dimensions a lane, in each of COLUMNS.
template <int HALF, int QUADS, int COLUMNS> struct Values {
    typedef typename Stored<HALF>::Quad Quad;
    Quad loaded[QUADS][4][COLUMNS];

    // Key 4 * quad of the tile and those behind it, of every `apart`th quad of `left`; zeros from key
    // `limit` on. `base`: where in the ring the tile begins.
    __device__ __forceinline__ void load(u64 values, int quad, int apart, int left, int limit,
                                         int base, int ring, int padded, int dimension, bool used) {
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            if (q * apart >= left) break;
            const int key = (quad + q * apart) * 4, place = base + key;
            const u64 at = place < ring ? place : place - ring;
            const Quad* source = (const Quad*)values + (at * padded + dimension) / 4;
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    const bool there = used && key + j < limit && dimension + c * COLUMN < padded;
                    loaded[q][j][c] = Quad{};
                    if (there) loaded[q][j][c] = fetch<Quad>(source + (j * padded + c * COLUMN) / 4);
                }
        }
    }

    // sum[row] += weights[row][key] * value
    template <int ROWS>
    __device__ __forceinline__ void add(const float* weights, int quad, int apart, int left,
                                        float4 (*sum)[COLUMNS]) const {
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            if (q * apart >= left) break;
            const int at = quad + q * apart; // zeros of groups of lanes without keys: any weights
            const float* of_quad = weights + (at < TILE / 4 ? at * 4 : 0);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                float4 value[4];
#pragma unroll
                for (int j = 0; j < 4; j++) value[j] = floats(loaded[q][j][c]);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float4 four = *(const float4*)(of_quad + r * TILE);
                    const float weight[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        sum[r][c].x = fmaf(weight[j], value[j].x, sum[r][c].x);
                        sum[r][c].y = fmaf(weight[j], value[j].y, sum[r][c].y);
                        sum[r][c].z = fmaf(weight[j], value[j].z, sum[r][c].z);
                        sum[r][c].w = fmaf(weight[j], value[j].w, sum[r][c].w);
                    }
                }
            }
        }
    }
};

// ------------------------------------------------------------------------------ a unit of work
// The last key that lies too far back for the token at a position; -1 if it sees them all.
DEVICE int last_hidden(int position, int window, int chunk) {
    int by_window = position - window, by_chunk = position / chunk * chunk - 1;
    int last = by_window > by_chunk ? by_window : by_chunk;
    return last > -1 ? last : -1;
}

// What has been seen of a row. Every lane has its own part of the total.
struct Softmax {
    float largest, total;

    // Scores of two keys a lane become weights; gives the factor on what was summed before.
    __device__ __forceinline__ float step(float2& score) {
        const float before = largest;
        largest = fmaxf(before, largest_of_warp(fmaxf(score.x, score.y)));
        score.x = expf(score.x - largest);
        score.y = expf(score.y - largest);
        const float past = expf(before - largest);
        total = total * past + (score.x + score.y);
        return past;
    }
};

// TOGETHER: the block is one unit, for a token or a few; its warps take a quarter of the dimensions
// each in products with keys, and a quarter of the keys in sums of values. Otherwise every warp is
// one, for prompts: the same keys and values come to the warps of a block from the first-level
// cache. grid = (KV heads * row blocks, shares, slices), block = WARPS warps. How the keys are cut
// depends on their number and on `most` shares only, not on other sequences. With one share rows are
// written to `out`; with more maximum, sum and weighted values of every share to partial
// [token * heads + head][share][2 + d_v], for attention_reduce. Heads up to COLUMNS * COLUMN.
template <int HALF, int ROWS, int TOGETHER, int COLUMNS>
DEVICE void attend(const float* q, int q_stride, float* out, int out_stride, const Slice* slices,
                   const Place* places, int row_blocks, int most, int group, int dk, int dv,
                   float factor, int window, int chunk, const float* sinks, float* partial) {
    constexpr int UNITS = TOGETHER ? 1 : WARPS, SIZE = ROWS * COLUMNS * COLUMN;
    constexpr int OWN = TOGETHER ? ROWS / WARPS : ROWS; // rows whose softmax is a warp's
    constexpr int NARROW = HALF ? 1 : 2;                // of what fits into as many registers
    constexpr int BATCH = (TOGETHER ? 32 : 16) / NARROW;
    constexpr int AHEAD = (TOGETHER ? 4 : 2) / COLUMNS / NARROW, QUADS = AHEAD ? AHEAD : 1;
    // Products by part of the dimensions; at last sums of values. Of single warps first the queries.
    __align__(16) __shared__ float exchanged[WARPS][SIZE];
    __align__(16) __shared__ float shared_queries[TOGETHER ? SIZE : 4];
    __align__(16) __shared__ float all_weights[UNITS][ROWS * TILE]; // [row][key]
    __shared__ float all_pasts[UNITS][ROWS], all_largest[UNITS][ROWS], all_totals[UNITS][ROWS];
    // Of every row: the first and last key that it sees, its token and query head.
    __shared__ int all_firsts[UNITS][ROWS], all_lasts[UNITS][ROWS];
    __shared__ int all_tokens[UNITS][ROWS], all_heads[UNITS][ROWS];

    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    const int unit = TOGETHER ? 0 : warp, member = TOGETHER ? thread : lane;
    constexpr int MEMBERS = TOGETHER ? WARPS * WARP : WARP;
    const int head = blockIdx.x / row_blocks;
    const int first = (blockIdx.x % row_blocks * UNITS + unit) * ROWS;
    const int shares = gridDim.y, heads = gridDim.x / row_blocks * group;
    const Slice slice = slices[blockIdx.z];
    const Place place = places[blockIdx.z];
    const int left = slice.tokens * group - first, rows = left < ROWS ? left : ROWS;
    const int ring = (int)place.ring;
    if ((rows <= 0) | (ring <= 0)) return; // all of a unit; both tables are asked for before
    auto meet = [] { TOGETHER ? __syncthreads() : __syncwarp(); };

    float *queries = TOGETHER ? shared_queries : exchanged[warp], *weights = all_weights[unit];
    int *firsts = all_firsts[unit], *lasts = all_lasts[unit];
    int *tokens = all_tokens[unit], *query_heads = all_heads[unit];
    if (member < ROWS) {
        const int row = first + (member < rows ? member : rows - 1);
        tokens[member] = slice.first + row / group;
        query_heads[member] = head * group + row % group;
        lasts[member] = slice.position + row / group;
        firsts[member] = last_hidden(lasts[member], window, chunk) + 1;
    }
    meet();
    const int begin = firsts[0] / 16 * 16, end = lasts[rows - 1] + 1;
    const int tiles = (end - begin + TILE - 1) / TILE, share = (tiles + most - 1) / most * TILE;
    const int start = begin + blockIdx.y * share, stop = start + share < end ? start + share : end;
    const int all_see_from = firsts[rows - 1], all_see_to = lasts[0];
    constexpr int ELEMENT = HALF ? 2 : 4;
    const u64 keys = place.keys + head * place.key_head_stride;
    const u64 values = place.values + head * place.value_head_stride;

    // Dimensions that this warp multiplies, in eights; the last ones of odd sizes one by one.
    const int eights = dk / 8, some = TOGETHER ? (eights + WARPS - 1) / WARPS : eights;
    const int from = TOGETHER ? warp * some * 8 : 0, until = from + some * 8;
    const int to = until < eights * 8 ? until : eights * 8;
    // Keys whose values it sums: in groups of lanes for as many keys as dimensions leave room for.
    const int padded = (dv + 15) / 16 * 16, per_key = padded < COLUMN ? padded / 4 : WARP;
    const int groups = WARP / per_key, key_group = lane / per_key, dimension = lane % per_key * 4;
    constexpr int OF_WARP = TOGETHER ? TILE / 4 / WARPS : TILE / 4; // fours of keys
    const int first_quad = TOGETHER ? warp * OF_WARP : 0, last_quad = first_quad + OF_WARP;
    const int quad = first_quad + key_group;

    Values<HALF, QUADS, COLUMNS> some_values;
    auto load_values = [&](int tile, int done) {
        const int count = stop - tile, limit = count < last_quad * 4 ? count : last_quad * 4;
        some_values.load(values, quad + done, groups, OF_WARP - done, limit, tile % ring, ring,
                         padded, dimension, key_group < groups);
    };
    Keys<HALF, BATCH> some_keys;
    auto keys_of_lane = [&](int tile) {
        const int wrapped = tile % ring + 2 * lane, at = wrapped < ring ? wrapped : wrapped - ring;
        return keys + ((u64)(at / 16) * dk * 16 + at % 16) * ELEMENT;
    };
    // The next keys come while values are summed, and these values while keys are multiplied.
    if (start < stop) some_keys.load(keys_of_lane(start), from, to);
#pragma unroll 2
    for (int d = member; d < dk; d += MEMBERS) {
        float of_rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            of_rows[r] = q[(u64)tokens[r] * q_stride + query_heads[r] * dk + d];
#pragma unroll
        for (int r = 0; r < ROWS; r++) queries[d * ROWS + r] = of_rows[r] * factor;
    }
    Softmax state[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const bool sink = sinks && blockIdx.y == 0;
        state[i].largest = sink ? sinks[query_heads[TOGETHER ? i * WARPS + warp : i]] : NOTHING_SEEN;
        state[i].total = sink && lane == 0 ? 1.0f : 0.0f;
    }
    float4 sum[ROWS][COLUMNS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[r][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    meet();

    for (int tile = start; tile < stop; tile += TILE) {
        load_values(tile, 0);
        const int key = tile + 2 * lane;
        const u64 source = keys_of_lane(tile);
        float2 score[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) score[r] = make_float2(0.0f, 0.0f);
        for (int d = from; d < to; d += BATCH) {
            if (d > from) some_keys.load(source, d, to);
            some_keys.template multiply<ROWS>(queries, d, to, score);
        }
        if (!TOGETHER || warp == WARPS - 1)
            for (int d = eights * 8; d < dk; d++) {
                const float2 pair = floats(fetch<typename Stored<HALF>::Pair>(
                    (const void*)(source + (u64)d * 16 * ELEMENT)));
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    score[r].x = fmaf(queries[d * ROWS + r], pair.x, score[r].x);
                    score[r].y = fmaf(queries[d * ROWS + r], pair.y, score[r].y);
                }
            }
        if (tile + TILE < stop) some_keys.load(keys_of_lane(tile + TILE), from, to);
        if (TOGETHER) {
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                *(float2*)(exchanged[warp] + r * TILE + 2 * lane) = score[r];
            __syncthreads();
        }
        const bool all_seen = tile >= all_see_from && tile + TILE - 1 <= all_see_to;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int r = TOGETHER ? i * WARPS + warp : i;
            float2 own = score[i];
            if (TOGETHER) {
                own = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const float2 part = *(const float2*)(exchanged[w] + r * TILE + 2 * lane);
                    own.x += part.x;
                    own.y += part.y;
                }
            }
            if (!all_seen) {
                const int oldest = firsts[r], newest = lasts[r];
                if (key < oldest || key > newest) own.x = MASKED;
                if (key + 1 < oldest || key + 1 > newest) own.y = MASKED;
            }
            const float past = state[i].step(own);
            *(float2*)(weights + r * TILE + 2 * lane) = own;
            if (lane == 0) all_pasts[unit][r] = past;
        }
        meet(); // weights are there; products may be written again
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float past = all_pasts[unit][r];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                sum[r][c].x *= past, sum[r][c].y *= past, sum[r][c].z *= past, sum[r][c].w *= past;
        }
        for (int done = 0; done < OF_WARP; done += QUADS * groups) {
            if (done) load_values(tile, done);
            some_values.template add<ROWS>(weights, quad + done, groups, OF_WARP - done, sum);
        }
        if (!TOGETHER) __syncwarp(); // weights may be written again; a block meets before it does
    }

    // What warps and groups of lanes have summed, and what the softmax of rows has come to.
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            *(float4*)(exchanged[warp] + (r * COLUMNS + c) * COLUMN + 4 * lane) = sum[r][c];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int r = TOGETHER ? i * WARPS + warp : i;
        const float total = sum_of_warp(state[i].total);
        if (lane == 0) all_largest[unit][r] = state[i].largest, all_totals[unit][r] = total;
    }
    meet();
    for (int i = member; i < rows * COLUMNS * WARP; i += MEMBERS) { // fours of values
        const int r = i / (COLUMNS * WARP), d = i % (COLUMNS * WARP) * 4;
        const u64 row = (u64)tokens[r] * heads + query_heads[r];
        float *target = out + (u64)tokens[r] * out_stride + query_heads[r] * dv;
        float divisor = all_totals[unit][r];
        if (shares > 1) {
            float* joined = partial + (row * shares + blockIdx.y) * (2 + dv);
            if (d == 0) joined[0] = all_largest[unit][r], joined[1] = divisor;
            target = joined + 2;
            divisor = 1.0f;
        }
        if (d >= dv) continue;
        float whole[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int g = 0; g < groups; g++)
#pragma unroll
            for (int w = 0; w < (TOGETHER ? WARPS : 1); w++) {
                const float* summed = exchanged[TOGETHER ? w : warp] + r * COLUMNS * COLUMN;
                const float4 part = *(const float4*)(summed + g * padded + d);
                whole[0] += part.x, whole[1] += part.y, whole[2] += part.z, whole[3] += part.w;
            }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (d + j < dv) target[d + j] = whole[j] / divisor;
    }
}

#define PARAMETERS                                                                                 \
    const float *q, int q_stride, float *out, int out_stride, const Slice *slices,                 \
        const Place *places, int row_blocks, int most, int group, int dk, int dv, float factor,   \
        int window, int chunk, const float *sinks, float *partial
#define ARGUMENTS                                                                                  \
    q, q_stride, out, out_stride, slices, places, row_blocks, most, group, dk, dv, factor,         \
        window, chunk, sinks, partial

// By the rows of a block, and the dimensions that heads have at most.
extern "C" __global__ void attention_f16_r4_d128(PARAMETERS) { attend<1, 4, 1, 1>(ARGUMENTS); }
extern "C" __global__ void attention_f16_r8_d128(PARAMETERS) { attend<1, 8, 1, 1>(ARGUMENTS); }
extern "C" __global__ void attention_f16_r32_d128(PARAMETERS) { attend<1, 8, 0, 1>(ARGUMENTS); }
extern "C" __global__ void attention_f16_r4_d256(PARAMETERS) { attend<1, 4, 1, 2>(ARGUMENTS); }
extern "C" __global__ void attention_f16_r8_d256(PARAMETERS) { attend<1, 8, 1, 2>(ARGUMENTS); }
extern "C" __global__ void attention_f16_r32_d256(PARAMETERS) { attend<1, 8, 0, 2>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r4_d128(PARAMETERS) { attend<0, 4, 1, 1>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r8_d128(PARAMETERS) { attend<0, 8, 1, 1>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r32_d128(PARAMETERS) { attend<0, 8, 0, 1>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r4_d256(PARAMETERS) { attend<0, 4, 1, 2>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r8_d256(PARAMETERS) { attend<0, 8, 1, 2>(ARGUMENTS); }
extern "C" __global__ void attention_f32_r32_d256(PARAMETERS) { attend<0, 8, 0, 2>(ARGUMENTS); }

// ------------------------------------------------------------------------------ joining
#define MOST_SHARES 64
#define PARTS 4   // of the shares, summed at the same time
#define AT_ONCE 8 // loads under way

// The shares of every row joined. grid = (heads, tokens), block = (dimensions of a step, PARTS)
extern "C" __global__ void attention_reduce(const float* partial, float* out, int out_stride,
                                            int dv, int shares) {
    __shared__ float weights[MOST_SHARES], sums[PARTS][COLUMN];
    const u64 row = (u64)blockIdx.y * gridDim.x + blockIdx.x;
    const float* states = partial + row * shares * (2 + dv);
    const int part = threadIdx.y, lane = threadIdx.x % WARP; // rows of threads are whole warps
    float largest[MOST_SHARES / WARP], totals[MOST_SHARES / WARP];
    float best = NOTHING_SEEN, total = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_SHARES / WARP; i++) {
        const float* state = states + (i * WARP + lane) * (2 + dv);
        const bool there = i * WARP + lane < shares;
        largest[i] = there ? state[0] : NOTHING_SEEN;
        totals[i] = there ? state[1] : 0.0f;
        best = larger(best, largest[i]);
    }
    best = largest_of_warp(best);
#pragma unroll
    for (int i = 0; i < MOST_SHARES / WARP; i++) {
        const float weight = expf(largest[i] - best);
        total = fmaf(weight, totals[i], total);
        if (threadIdx.y == 0 && threadIdx.x < WARP) weights[i * WARP + lane] = weight;
    }
    total = sum_of_warp(total);
    __syncthreads();
    for (int begin = 0; begin < dv; begin += blockDim.x) {
        const int d = begin + threadIdx.x;
        float sum = 0.0f;
        for (int first = part; first < shares; first += PARTS * AT_ONCE) {
            float values[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int s = first + i * PARTS;
                values[i] = s < shares && d < dv ? states[s * (2 + dv) + 2 + d] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int s = first + i * PARTS;
                if (s < shares) sum = fmaf(weights[s], values[i], sum);
            }
        }
        sums[part][threadIdx.x] = sum;
        __syncthreads();
        if (part == 0 && d < dv) {
            for (int other = 1; other < PARTS; other++) sum += sums[other][threadIdx.x];
            out[(u64)blockIdx.y * out_stride + blockIdx.x * dv + d] = sum / total;
        }
        __syncthreads(); // sums may be written again
    }
}
