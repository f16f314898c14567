/* float32 as JSON: of all decimals that read back as the same float32 the shortest, of several that one nearest to it.

   Why: writing its numbers is half of what a large answer costs. x = m 2^-s with 24-bit m is compared with decimals k 10^-D exactly,
   in 64 bits, which holds for 2^-24 <= |x| < 2^23; a row with a value outside of that is left to the caller. Does not know Python. */

#include <stdint.h>
#include <string.h>

static const uint64_t FIVES[] = {1ull, 5ull, 25ull, 125ull, 625ull, 3125ull, 15625ull, 78125ull, 390625ull, 1953125ull, 9765625ull,
    48828125ull, 244140625ull, 1220703125ull, 6103515625ull, 30517578125ull};
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "digits are put together for little-endian processors; without this file the slower way is taken"
#endif

/* The digits of k < 10^9 at out, where 9 bytes are written; how many they are. Without branches: of random numbers none is foreseen. */
static inline int digits(uint32_t k, char *out) {
    uint32_t ninth = k / 100000000, rest = k % 100000000;
    /* Eight digits side by side: halves, quarters, digits; the first in the lowest byte. */
    uint64_t v = rest / 10000 | (uint64_t)(rest % 10000) << 32;
    uint64_t hundreds = v * 10486 >> 20 & 0x0000007f0000007f;
    v = hundreds | (v - 100 * hundreds) << 16;
    uint64_t tens = v * 103 >> 10 & 0x000f000f000f000f;
    v = tens | (v - 10 * tens) << 8;
    int zeros = ninth ? 0 : __builtin_ctzll(v | (uint64_t)1 << 56) / 8;
    v = (v | 0x3030303030303030) >> 8 * zeros;
    *out = (char)('0' + ninth);
    memcpy(out + (ninth > 0), &v, 8);
    return 8 - zeros + (ninth > 0);
}

static const uint64_t TENS[] = {1ull, 10ull, 100ull, 1000ull, 10000ull, 100000ull, 1000000ull, 10000000ull, 100000000ull, 1000000000ull,
    10000000000ull, 100000000000ull, 1000000000000ull, 10000000000000ull, 100000000000000ull, 1000000000000000ull};

/* Where the number ends; NULL for one outside of the range. */
static char *number(float x, char *out) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 23 & 255), s = 150 - exponent;
    uint64_t m = (bits & 0x7fffff) | 0x800000;
    *out = '-', out += bits >> 31;
    if (!(bits << 1)) return memcpy(out, "0.0", 3), out + 3;
    if (s < 1 || s > 47) return NULL;
    /* A step of 10^-D is at most a step of x, so that some k 10^-D reads back as x. In quarters of a step of x: */
    int d = (s * 1233 >> 12) + 1, t = s + 2 - d, removed = 0; /* 1233 / 4096 = log10(2) */
    uint64_t five = FIVES[d], at = 4 * m * five, one = (uint64_t)1 << t, odd = m & 1;
    uint64_t low = (4 * m - (m == 0x800000 ? 1 : 2)) * five, high = (4 * m + 2) * five;
    uint64_t least = (low + odd + one - 1) >> t, most = (high - odd) >> t; /* ends belong to an even m */
    for (uint64_t l, h; removed < d && (l = (least + 9) / 10) <= (h = most / 10); removed++) least = l, most = h;
    d -= removed;
    /* x itself with so many digits, halves to even. */
    uint64_t k = at >> t, rest = at & (one - 1), half = one >> 1;
    if (!removed) k += rest > half || (rest == half && (k & 1));
    else {
        uint64_t last = 0, more = rest;
        for (; removed; removed--) more |= last, last = k % 10, k /= 10;
        k += last > 5 || (last == 5 && (more || (k & 1)));
    }
    k = k < least ? least : k > most ? most : k;
    if (k < TENS[d] && k * 1000000 >= TENS[d]) { /* most: 0.000001 <= |x| < 1 */
        int zeros = (k * 10 < TENS[d]) + (k * 100 < TENS[d]) + (k * 1000 < TENS[d]) + (k * 10000 < TENS[d]) + (k * 100000 < TENS[d]);
        memcpy(out, "0.00000", 8);
        out += 2 + zeros;
        return out + digits((uint32_t)k, out);
    }
    char ds[16];
    int n = digits((uint32_t)k, ds), whole = n - d; /* digits before the point */
    if (whole > 0) {
        memcpy(out, ds, whole), out += whole;
        *out++ = '.';
        if (!d) *out++ = '0';
        memcpy(out, ds + whole, d);
        return out + d;
    }
    *out++ = ds[0];
    if (n > 1) *out++ = '.', memcpy(out, ds + 1, n - 1), out += n - 1;
    memcpy(out, "e-", 2);
    return out + 2 + digits((uint32_t)(1 - whole), out + 2);
}

/* Commas between. out: room for 20 bytes a value. The bytes written, -1 if a value is outside of the range. */
int64_t hortus_decimals(const float *x, int64_t count, char *out) {
    char *next = out;
    for (int64_t i = 0; i < count; i++) {
        if (i) *next++ = ',';
        if (!(next = number(x[i], next))) return -1;
    }
    return next - out;
}
