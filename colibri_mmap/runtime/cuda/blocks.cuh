// The blocks of ggml (ggml-common.h) as units of operands.cuh: which lane reads which bytes.
// Neighbouring lanes read neighbouring bytes, with the widest loads that the block's alignment has.
#pragma once
#include "operands.cuh"

// N words at any byte address, of which only the aligned words that hold them are loaded.
template <int N>
DEVICE void fetch_words(const u8* address, u32* words) {
    const u32* from = (const u32*)((u64)address & ~3ull);
    u32 shift = 8 * ((u32)(u64)address & 3), next, here = fetch<u32>(from);
#pragma unroll
    for (int i = 0; i < N; i++) {
        next = (i + 1 < N || shift) ? fetch<u32>(from + i + 1) : 0u;
        words[i] = __funnelshift_r(here, next, shift);
        here = next;
    }
}

DEVICE float low_half(u32 pair) { return half_to_float((u16)pair); }
DEVICE float high_half(u32 pair) { return half_to_float((u16)(pair >> 16)); }

// Each byte (below 128) minus the byte of `less` (up to 128), as signed bytes.
DEVICE int minus_bytes(u32 bytes, u32 less) { return (int)(((bytes | 0x80808080u) - less) ^ 0x80808080u); }

// Bits 0 to 3 to bit 4 of the four bytes.
DEVICE u32 four_bits(u32 bits) { return ((bits & 15u) * 0x02040810u) & 0x10101010u; }

// Entry of a table of 16 bytes for each nibble: even nibbles to w[0], odd ones to w[1].
DEVICE void look_up(u32 nibbles, const u32 (&table)[4], int& even, int& odd) {
    u32 high = 0x32103210u | ((nibbles & 0x88888888u) >> 1), mixed[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 below = __byte_perm(table[0], table[1], nibbles >> (16 * i));
        u32 above = __byte_perm(table[2], table[3], nibbles >> (16 * i));
        mixed[i] = __byte_perm(below, above, high >> (16 * i));
    }
    even = (int)__byte_perm(mixed[0], mixed[1], 0x6420);
    odd = (int)__byte_perm(mixed[0], mixed[1], 0x7531);
}

// ---------------------------------------------------------------- 32 weights
// Byte i holds weight i in its low nibble and weight i + 16 in the high one.
template <class T, Sums SUMS>
struct Nibbles : Quantised<T, 2, 2, 1, SUMS> {
    static const int WEIGHTS = 32, PARTS = 2;
    DEVICE int start(int part, int run) { return 8 * part + 16 * run; }
    DEVICE bool takes_sum(int part) { return part == 0; }
};

struct q4_0 : Nibbles<q4_0, NO_OFFSET> {  // f16 d, u8 q[16]; d * (q - 8)
    static const int BYTES = 18;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        u32 q[2];
        fetch_words<2>(block + 2 + 8 * part, q);
        unit.scale[0] = half_to_float(fetch<u16>(block));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            unit.w[0][i] = minus_bytes(q[i] & 0x0f0f0f0fu, 0x08080808u);
            unit.w[1][i] = minus_bytes((q[i] >> 4) & 0x0f0f0f0fu, 0x08080808u);
        }
    }
};

struct q4_1 : Nibbles<q4_1, SUM_OF_32> {  // f16 d, f16 m, u8 q[16]; d * q + m
    static const int BYTES = 20;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        u32 head = fetch<u32>(block);
        unit.scale[0] = low_half(head);
        unit.offset[0] = high_half(head);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 q = fetch<u32>(block + 4 + 8 * part + 4 * i);
            unit.w[0][i] = (int)(q & 0x0f0f0f0fu);
            unit.w[1][i] = (int)((q >> 4) & 0x0f0f0f0fu);
        }
    }
};

struct q5_0 : Nibbles<q5_0, NO_OFFSET> {  // f16 d, u32 high bits, u8 q[16]; d * (q - 16)
    static const int BYTES = 22;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        u32 q[2], high[1];
        fetch_words<2>(block + 6 + 8 * part, q);
        fetch_words<1>(block + 2, high);
        unit.scale[0] = half_to_float(fetch<u16>(block));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 bits = high[0] >> (8 * part + 4 * i);
            u32 low = (q[i] & 0x0f0f0f0fu) | four_bits(bits);
            unit.w[0][i] = minus_bytes(low, 0x10101010u);
            unit.w[1][i] = minus_bytes(((q[i] >> 4) & 0x0f0f0f0fu) | four_bits(bits >> 16), 0x10101010u);
        }
    }
};

struct q5_1 : Nibbles<q5_1, SUM_OF_32> {  // f16 d, f16 m, u32 high bits, u8 q[16]; d * q + m
    static const int BYTES = 24;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        uint2 head = fetch<uint2>(block), q = fetch<uint2>(block + 8 + 8 * part);
        unit.scale[0] = low_half(head.x);
        unit.offset[0] = high_half(head.x);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 bits = head.y >> (8 * part + 4 * i), nibbles = i == 0 ? q.x : q.y;
            unit.w[0][i] = (int)((nibbles & 0x0f0f0f0fu) | four_bits(bits));
            unit.w[1][i] = (int)(((nibbles >> 4) & 0x0f0f0f0fu) | four_bits(bits >> 16));
        }
    }
};

struct q8_0 : Quantised<q8_0, 1, 2, 1, NO_OFFSET> {  // f16 d, i8 q[32]
    static const int WEIGHTS = 32, BYTES = 34, PARTS = 4;
    DEVICE int start(int part, int run) { return 8 * part; }
    DEVICE void read(const u8* block, int part, Unit& unit) {
        u32 q[2];
        fetch_words<2>(block + 2 + 8 * part, q);
        unit.scale[0] = half_to_float(fetch<u16>(block));
        unit.w[0][0] = (int)q[0];
        unit.w[0][1] = (int)q[1];
    }
};

struct mxfp4 : Nibbles<mxfp4, NO_OFFSET> {  // u8 e, u8 q[16]; 2^(e - 128) * table[q]
    static const int BYTES = 17;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        // 0 1 2 3 4 6 8 12 and their negatives: twice the values of E2M1
        const u32 table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
        u32 q[2], e = fetch<u8>(block);
        fetch_words<2>(block + 1 + 8 * part, q);
        unit.scale[0] = __uint_as_float(e > 1 ? (e - 1) << 23 : 0x00200000u << e);
#pragma unroll
        for (int i = 0; i < 2; i++) look_up(q[i], table, unit.w[0][i], unit.w[1][i]);
    }
};

// ---------------------------------------------------------------- 256 weights
// The 6-bit scales and minima of Q4_K and Q5_K: those of the groups 2 * pair and 2 * pair + 1.
template <class Unit>
DEVICE void k_scales(uint4 head, int pair, Unit& unit) {
    u32 shift = 16 * (pair & 1), scales = head.y >> shift, minima = head.z >> shift, rest = head.w >> shift;
    u32 s = pair < 2 ? scales & 0x3f3fu : (rest & 0x0f0fu) | ((scales >> 2) & 0x3030u);
    u32 m = pair < 2 ? minima & 0x3f3fu : ((rest >> 4) & 0x0f0fu) | ((minima >> 2) & 0x3030u);
    float d = low_half(head.x), dmin = -high_half(head.x);
    unit.scale[0] = d * (float)(s & 255u);
    unit.scale[1] = d * (float)((s >> 8) & 255u);
    unit.offset[0] = dmin * (float)(m & 255u);
    unit.offset[1] = dmin * (float)((m >> 8) & 255u);
}

// Groups of 32 weights in pairs: low nibbles of 32 bytes, then their high nibbles.
template <class T>
struct GroupPairs : Quantised<T, 2, 4, 2, SUM_OF_32> {
    static const int WEIGHTS = 256, PARTS = 8;
    DEVICE int start(int part, int run) { return 64 * (part >> 1) + 16 * (part & 1) + 32 * run; }
    DEVICE bool takes_sum(int part) { return (part & 1) == 0; }
};

struct q4_k : GroupPairs<q4_k> {  // f16 d, f16 dmin, u8 scales[12], u8 q[128]
    static const int BYTES = 144;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        uint4 q = fetch<uint4>(block + 16 + 16 * part);
        k_scales(fetch<uint4>(block), part >> 1, unit);
        const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unit.w[0][i] = (int)(words[i] & 0x0f0f0f0fu);
            unit.w[1][i] = (int)((words[i] >> 4) & 0x0f0f0f0fu);
        }
    }
};

struct q5_k : GroupPairs<q5_k> {  // f16 d, f16 dmin, u8 scales[12], u8 high[32], u8 q[128]
    static const int BYTES = 176;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        uint4 q = fetch<uint4>(block + 48 + 16 * part), high = fetch<uint4>(block + 16 + 16 * (part & 1));
        k_scales(fetch<uint4>(block), part >> 1, unit);
        const u32 words[4] = {q.x, q.y, q.z, q.w}, bits[4] = {high.x, high.y, high.z, high.w};
        int group = part & ~1;  // its bit of the high bytes
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 two = bits[i] >> group;
            unit.w[0][i] = (int)((words[i] & 0x0f0f0f0fu) | ((two << 4) & 0x10101010u));
            unit.w[1][i] = (int)(((words[i] >> 4) & 0x0f0f0f0fu) | ((two << 3) & 0x10101010u));
        }
    }
};

struct q6_k : Quantised<q6_k, 2, 1, 2, NO_OFFSET> {  // u8 low[128], u8 high[64], i8 scales[16], f16 d
    static const int WEIGHTS = 256, BYTES = 210, PARTS = 32;
    DEVICE int start(int part, int run) { return 128 * (part >> 4) + 4 * (part & 15) + 64 * run; }
    DEVICE void read(const u8* block, int part, Unit& unit) {
        int half = part >> 4, word = part & 15;
        u32 low[1], high[1];
        fetch_words<1>(block + 4 * part, low);
        fetch_words<1>(block + 128 + 32 * half + 4 * (word & 7), high);
        float d = half_to_float(fetch<u16>(block + 208));
        u32 bits = high[0] >> (2 * (word >> 3));
#pragma unroll
        for (int run = 0; run < 2; run++) {
            u32 q = ((low[0] >> (4 * run)) & 0x0f0f0f0fu) | (((bits >> (4 * run)) & 0x03030303u) << 4);
            unit.w[run][0] = minus_bytes(q, 0x20202020u);
            unit.scale[run] = d * (float)fetch<i8>(block + 192 + start(part, run) / 16);
        }
    }
};

// Two bits a weight: bits 2j and 2j + 1 of 32 bytes are the weights 32j to 32j + 31 of a half.
template <class T, Sums SUMS>
struct TwoBits : Quantised<T, 4, 1, 4, SUMS> {
    static const int WEIGHTS = 256, PARTS = 16;
    DEVICE int start(int part, int run) { return 128 * (part >> 3) + 4 * (part & 7) + 32 * run; }
};

struct q2_k : TwoBits<q2_k, SUM_OF_RUN> {  // u8 scales[16], u8 q[64], f16 d, f16 dmin
    static const int BYTES = 84;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        int half = part >> 3, late = (part >> 2) & 1;
        u32 q = fetch<u32>(block + 16 + 4 * part), head = fetch<u32>(block + 80);
        u32 fields[2] = {fetch<u32>(block + 8 * half), fetch<u32>(block + 8 * half + 4)};
        float d = low_half(head), dmin = -high_half(head);
#pragma unroll
        for (int run = 0; run < 4; run++) {
            u32 field = fields[run >> 1] >> (16 * (run & 1) + 8 * late);
            unit.w[run][0] = (int)((q >> (2 * run)) & 0x03030303u);
            unit.scale[run] = d * (float)(field & 15u);
            unit.offset[run] = dmin * (float)((field >> 4) & 15u);
        }
    }
};

struct q3_k : TwoBits<q3_k, NO_OFFSET> {  // u8 high[32], u8 q[64], u8 scales[12], f16 d
    static const int BYTES = 110;
    DEVICE void read(const u8* block, int part, Unit& unit) {
        int half = part >> 3, late = (part >> 2) & 1;
        u32 q[1], high[1], fields[3];
        fetch_words<1>(block + 32 + 4 * part, q);
        fetch_words<1>(block + 4 * (part & 7), high);
        fetch_words<3>(block + 96, fields);
        float d = half_to_float(fetch<u16>(block + 108));
        u32 bits = high[0] >> (4 * half);
#pragma unroll
        for (int run = 0; run < 4; run++) {
            int shift = 8 * (2 * (run & 1) + late) + 4 * half;
            u32 low = (fields[run >> 1] >> shift) & 15u, above = (fields[2] >> (shift + 2 * (run >> 1))) & 3u;
            u32 weights = ((q[0] >> (2 * run)) & 0x03030303u) | (((bits >> run) & 0x01010101u) << 2);
            unit.w[run][0] = minus_bytes(weights, 0x04040404u);
            unit.scale[run] = d * (float)((int)(low | above << 4) - 32);
        }
    }
};

// f16 d, u16 high bits of scales, u8 low nibbles of scales[4], u8 q[128]; d * (scale - 32) * table[q]
struct iq4_xs : Quantised<iq4_xs, 2, 2, 1, NO_OFFSET> {
    static const int WEIGHTS = 256, BYTES = 136, PARTS = 16;
    DEVICE int start(int part, int run) { return 32 * (part >> 1) + 8 * (part & 1) + 16 * run; }
    DEVICE void read(const u8* block, int part, Unit& unit) {
        // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
        const u32 table[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
        uint2 head = fetch<uint2>(block), q = fetch<uint2>(block + 8 + 8 * part);
        int group = part >> 1;
        u32 low = (head.y >> (4 * group)) & 15u, high = (head.x >> (16 + 2 * group)) & 3u;
        unit.scale[0] = low_half(head.x) * (float)((int)(low | high << 4) - 32);
        look_up(q.x, table, unit.w[0][0], unit.w[1][0]);
        look_up(q.y, table, unit.w[0][1], unit.w[1][1]);
    }
};
