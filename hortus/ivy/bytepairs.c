/* Byte-level BPE of plain ASCII texts: cut at spaces, numbers and marks as GPT-2 or Qwen do; of each piece neighbours are joined, those first that
   come first in the list of merges.

   Why: it is a third of what a short text costs in front of the engine. Whatever is not printable ASCII, a tab or the end of a line, every
   text that spells an added token, and pieces of more than MOST bytes are left to the tokenizer itself. Does not know Python. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SPACE = 1, LINE = 2, LETTER = 3, DIGIT = 4, MARK = 5 }; /* 0: not plain */
enum { MOST = 128 };                                           /* bytes of a piece: what joining takes grows with their square */
enum { KEPT = 24 };                                            /* bytes of a piece that may be kept as one token */

typedef struct {
    uint64_t both; /* the two ids, and 1: 0 is an empty slot */
    int32_t rank, id;
} Merge;

typedef struct {
    uint64_t bytes[KEPT / 8]; /* zeros behind; all zero: an empty slot */
    int32_t id;
} Word;

typedef struct {
    uint8_t kind[256];
    int32_t id_of[256], added_at[256]; /* added_at: where the added tokens with this first byte begin; -1: there are none */
    Merge *table;
    Word *words; /* pieces that come out as one token: most do, and to find one in this is a look where joining is twenty */
    uint64_t mask, words_mask;
    uint8_t *added;
    int32_t qwen, before_count, after_count;
    int32_t frame[16];
} Vocabulary;

void hortus_bytepairs_free(Vocabulary *v) {
    if (v) free(v->table), free(v->words), free(v->added), free(v);
}

static inline uint64_t key(int32_t left, int32_t right) { return ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1; }
static inline uint64_t slot_of(uint64_t both, uint64_t mask) { return (both * 0x9e3779b97f4a7c15u >> 32) & mask; }

static inline const Merge *find(const Vocabulary *v, int32_t left, int32_t right) {
    uint64_t both = key(left, right), slot = slot_of(both, v->mask);
    while (v->table[slot].both && v->table[slot].both != both) slot = (slot + 1) & v->mask;
    return v->table + slot;
}

/* Ids of one piece; how many. */
static int32_t joined(const Vocabulary *v, const uint8_t *text, int32_t n, int32_t *out) {
    int32_t ranks[MOST], ids[MOST]; /* of joining each with the next */
    const int32_t never = INT32_MAX;
    for (int32_t i = 0; i < n; i++) out[i] = v->id_of[text[i]];
    for (int32_t i = 0; i < n - 1; i++) {
        const Merge *m = find(v, out[i], out[i + 1]);
        ranks[i] = m->both ? m->rank : never, ids[i] = m->id;
    }
    while (n > 1) {
        int32_t at = 0;
        for (int32_t i = 1; i < n - 1; i++)
            if (ranks[i] < ranks[at]) at = i;
        if (ranks[at] == never) break;
        out[at] = ids[at], n--;
        for (int32_t i = at + 1; i < n; i++) out[i] = out[i + 1];
        for (int32_t i = at; i < n - 1; i++) ranks[i] = ranks[i + 1], ids[i] = ids[i + 1];
        for (int32_t i = at ? at - 1 : 0; i <= at && i < n - 1; i++) {
            const Merge *m = find(v, out[i], out[i + 1]);
            ranks[i] = m->both ? m->rank : never, ids[i] = m->id;
        }
    }
    return n;
}

static Word *word_at(const Vocabulary *v, const uint8_t *text, int32_t n) {
    uint64_t b[KEPT / 8] = {0}, hash;
    memcpy(b, text, n);
    hash = (b[0] * 0x9e3779b97f4a7c15u ^ b[1]) * 0xc2b2ae3d27d4eb4fu ^ b[2];
    hash = (hash ^ hash >> 29) * 0x9e3779b97f4a7c15u >> 32;
    for (;; hash++) {
        Word *w = v->words + (hash & v->words_mask);
        if (!w->bytes[0] || !memcmp(w->bytes, b, sizeof b)) return w;
    }
}

/* Fill `words` with what the merges make, where joining its bytes makes it too. 0: no memory. */
static int keep_words(Vocabulary *v, const int32_t *merges, int64_t count) {
    int32_t most = 255;
    for (int64_t i = 0; i < 3 * count; i++) most = merges[i] > most ? merges[i] : most;
    for (int c = 0; c < 256; c++) most = v->id_of[c] > most ? v->id_of[c] : most;
    uint8_t(*texts)[KEPT] = malloc((most + 1) * sizeof *texts), *sizes = calloc(most + 1, 1);
    v->words = calloc(v->words_mask + 1, sizeof *v->words);
    for (int c = 0; c < 256 && texts && sizes; c++)
        if (v->id_of[c] >= 0) texts[v->id_of[c]][0] = c, sizes[v->id_of[c]] = 1;
    for (int64_t i = 0; i < count && texts && sizes && v->words; i++) {
        int32_t left = merges[3 * i], right = merges[3 * i + 1], id = merges[3 * i + 2], out[KEPT], n = sizes[left] + sizes[right];
        if (!sizes[left] || !sizes[right] || n > KEPT || sizes[id]) continue;
        memcpy(texts[id], texts[left], sizes[left]), memcpy(texts[id] + sizes[left], texts[right], sizes[right]);
        sizes[id] = n;
        if (joined(v, texts[id], n, out) != 1 || *out != id) continue;
        Word *w = word_at(v, texts[id], n);
        memcpy(w->bytes, texts[id], n), w->id = id;
    }
    free(texts);
    int whole = texts && sizes && v->words;
    free(sizes);
    return whole;
}

/* bytes: the id of each plain byte. merges: `count` times (left, right, what they become), the first to be joined first. added: texts of added tokens in order
   of their bytes, each ended by a zero byte, none the beginning of another. qwen: pieces as Qwen cuts them, else as GPT-2 does. frame: ids put before and
   then after every text. NULL: no memory. */
Vocabulary *hortus_bytepairs_new(const int32_t *bytes, const int32_t *merges, int64_t count, const uint8_t *added, int64_t added_bytes, int32_t qwen,
                                 const int32_t *frame, int32_t before_count, int32_t after_count) {
    Vocabulary *v = calloc(1, sizeof *v);
    uint64_t size = 64;
    while (size < 2 * (uint64_t)count) size *= 2;
    if (!v || before_count + after_count > 16) return free(v), NULL;
    v->table = calloc(size, sizeof *v->table), v->added = malloc(added_bytes + 1);
    if (!v->table || !v->added) return hortus_bytepairs_free(v), NULL;
    v->mask = v->words_mask = size - 1, v->qwen = qwen, v->before_count = before_count, v->after_count = after_count;
    memcpy(v->id_of, bytes, sizeof v->id_of), memcpy(v->added, added, added_bytes), v->added[added_bytes] = 0;
    memcpy(v->frame, frame, (before_count + after_count) * sizeof *frame);
    for (int c = 0; c < 256; c++) {
        int letter = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
        v->kind[c] = c == ' ' || c == '\t'     ? SPACE
                     : c == '\n' || c == '\r'  ? LINE
                     : letter                  ? LETTER
                     : c >= '0' && c <= '9'    ? DIGIT
                     : c > ' ' && c < 127      ? MARK
                                               : 0;
        v->added_at[c] = -1;
    }
    for (int64_t i = added_bytes - 1; i >= 0; i--)
        if (added[i] && (i == 0 || !added[i - 1])) v->added_at[added[i]] = (int32_t)i;
    for (int64_t i = 0; i < count; i++) {
        const int32_t *m = merges + 3 * i;
        Merge *at = (Merge *)find(v, m[0], m[1]);
        *at = (Merge){key(m[0], m[1]), (int32_t)i, m[2]};
    }
    if (!keep_words(v, merges, count)) return hortus_bytepairs_free(v), NULL;
    return v;
}

/* Whether a text goes on, from here, with an added token. */
static int spells_added(const Vocabulary *v, const uint8_t *text, const uint8_t *end) {
    const uint8_t *a = v->added + v->added_at[*text];
    while (*a == *text) {
        const uint8_t *t = text;
        while (*a && t < end && *a == *t) a++, t++;
        if (!*a) return 1;
        while (*a++) {}
    }
    return 0;
}

/* Bytes of a contraction: 's 't 're 've 'm 'll 'd. */
static int contraction(const uint8_t *t, const uint8_t *end, int any_case) {
    uint8_t lower = any_case ? 32 : 0;
    if (*t != '\'' || end - t < 2) return 0;
    uint8_t a = t[1] | lower, b = end - t > 2 ? t[2] | lower : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

static inline const uint8_t *run(const Vocabulary *v, const uint8_t *t, const uint8_t *end, uint8_t kind) {
    while (t < end && v->kind[*t] == kind) t++;
    return t;
}

/* Where the piece ends that begins at t: the expression of the tokenizer's file, alternative by alternative. */
static const uint8_t *piece(const Vocabulary *v, const uint8_t *t, const uint8_t *end) {
    int short_one = contraction(t, end, v->qwen);
    if (short_one) return t + short_one;
    const uint8_t *p = t + (*t == ' '), *line = NULL;
    uint8_t kind = v->kind[*t], next = p < end ? v->kind[*p] : 0;
    if (v->qwen) {
        if (kind == LETTER) return run(v, t, end, LETTER);
        if ((kind == SPACE || kind == MARK) && t + 1 < end && v->kind[t[1]] == LETTER) return run(v, t + 1, end, LETTER);
        if (kind == DIGIT) return t + 1;
        if (next == MARK) return run(v, run(v, p, end, MARK), end, LINE);
    } else if (next == LETTER || next == DIGIT || next == MARK)
        return run(v, p, end, next);
    for (p = t; p < end && (v->kind[*p] == SPACE || v->kind[*p] == LINE); p++)
        if (v->kind[*p] == LINE) line = p + 1;
    if (v->qwen && line) return line;
    return p == end || p - t < 2 ? p : p - 1; /* the last space goes with what follows */
}

/* Texts, one after another, with their lengths in bytes. out: ids of all, room for a byte's each and the frames. counts: ids of each text, -1 for
   one that is not plain and has none. framed: with the frame around each. Returns how many ids. */
int64_t hortus_bytepairs_run(const Vocabulary *v, const uint8_t *text, const int64_t *lengths, int64_t count, int32_t framed, int32_t *out,
                             int64_t *counts) {
    int32_t *next = out;
    for (int64_t i = 0; i < count; text += lengths[i++]) {
        const uint8_t *end = text + lengths[i];
        int32_t *begin = next;
        for (const uint8_t *t = text; t < end; t++)
            if (!v->kind[*t] || (v->added_at[*t] >= 0 && spells_added(v, t, end))) goto not_plain;
        for (int32_t j = 0; framed && j < v->before_count; j++) *next++ = v->frame[j];
        for (const uint8_t *t = text, *stop; t < end; t = stop) {
            stop = piece(v, t, end);
            int32_t n = (int32_t)(stop - t);
            if (n > MOST) goto not_plain;
            const Word *w = n <= KEPT ? word_at(v, t, n) : NULL;
            if (w && w->bytes[0])
                *next++ = w->id;
            else
                next += joined(v, t, n, next);
        }
        for (int32_t j = 0; framed && j < v->after_count; j++) *next++ = v->frame[v->before_count + j];
        counts[i] = next - begin;
        continue;
    not_plain:
        counts[i] = -1;
        next = begin;
    }
    return next - out;
}
