/* BERT's tokenizing of plain ASCII texts: lower case, words and punctuation apart, of each word the longest pieces the vocabulary has.

   Why: it is most of what a short text costs in front of the engine. Whatever is not printable ASCII, a tab or the end of a line, and
   every text that spells an added token in whatever case, is left to the tokenizer itself. Does not know Python. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SPACE = 1, WORD = 2, MARK = 3 }; /* 0: not plain */

typedef struct {
    uint32_t hash, at; /* at: where its bytes begin */
    int32_t id;
    uint16_t length, inner; /* inner: it goes on a word */
} Piece;

typedef struct {
    uint8_t kind[256], lower[256], begins_added[256];
    Piece *table;
    uint32_t mask;
    uint8_t *bytes, *added;
    int64_t added_bytes;
    int32_t longest, most, unknown, before_count, after_count;
    int32_t frame[16];
} Vocabulary;

static inline uint32_t more(uint32_t hash, uint8_t c) { return (hash ^ c) * 16777619u; } /* FNV-1a */
static inline uint32_t first(int inner) { return inner ? 0x9e3779b9u : 2166136261u; }
static inline uint32_t spread(uint32_t hash) { return hash ^ hash >> 15; }

void hortus_wordpiece_free(Vocabulary *v) {
    if (v) free(v->table), free(v->bytes), free(v->added), free(v);
}

/* pieces: `count` of them one after another, with their lengths, whether each goes on a word (its prefix left out), and ids.
   added: texts of added tokens in lower case, each ended by a zero byte. most: characters of a word, of a longer one nothing is looked for. frame: ids put before
   and then after every text. NULL: no memory. */
Vocabulary *hortus_wordpiece_new(const uint8_t *pieces, const int32_t *lengths, const uint8_t *inner, const int32_t *ids, int32_t count,
                                 const uint8_t *added, int64_t added_bytes, int32_t lower, int32_t most, int32_t unknown,
                                 const int32_t *frame, int32_t before_count, int32_t after_count) {
    Vocabulary *v = calloc(1, sizeof *v);
    int64_t total = 0;
    uint32_t size = 64;
    for (int32_t i = 0; i < count; i++) total += lengths[i];
    while (size < 2 * (uint32_t)count) size *= 2;
    if (!v || before_count + after_count > 16) return free(v), NULL;
    v->table = calloc(size, sizeof *v->table);
    v->bytes = malloc(total + 1), v->added = malloc(added_bytes + 1);
    if (!v->table || !v->bytes || !v->added) return hortus_wordpiece_free(v), NULL;
    memcpy(v->bytes, pieces, total), memcpy(v->added, added, added_bytes);
    v->mask = size - 1, v->added_bytes = added_bytes, v->most = most, v->unknown = unknown;
    v->before_count = before_count, v->after_count = after_count;
    memcpy(v->frame, frame, (before_count + after_count) * sizeof *frame);
    for (int c = 0; c < 256; c++) {
        int word = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
        v->kind[c] = c == ' ' || c == '\t' || c == '\n' || c == '\r' ? SPACE : word ? WORD : c > ' ' && c < 127 ? MARK : 0;
        v->lower[c] = lower && c >= 'A' && c <= 'Z' ? c + 32 : c;
    }
    for (int64_t i = 0; i < added_bytes; i++)
        if (i == 0 || !added[i - 1]) {
            v->begins_added[added[i]] = 1;
            if (added[i] >= 'a' && added[i] <= 'z') v->begins_added[added[i] - 32] = 1;
        }
    uint32_t at = 0;
    for (int32_t i = 0; i < count; at += lengths[i++]) {
        if (lengths[i] == 0 || lengths[i] > 65535) continue; /* never looked for: no word is so long */
        uint32_t hash = first(inner[i]);
        for (int32_t j = 0; j < lengths[i]; j++) hash = more(hash, pieces[at + j]);
        uint32_t slot = spread(hash) & v->mask;
        while (v->table[slot].length) slot = (slot + 1) & v->mask;
        v->table[slot] = (Piece){hash, at, ids[i], (uint16_t)lengths[i], inner[i]};
        if (lengths[i] > v->longest) v->longest = lengths[i];
    }
    return v;
}

static inline int32_t find(const Vocabulary *v, uint32_t hash, const uint8_t *text, int32_t length, int inner) {
    for (uint32_t slot = spread(hash) & v->mask; v->table[slot].length; slot = (slot + 1) & v->mask) {
        const Piece *p = v->table + slot;
        if (p->hash == hash && p->length == length && p->inner == inner && !memcmp(v->bytes + p->at, text, length)) return p->id;
    }
    return -1;
}

/* Whether a text goes on, from here, with an added token in whatever case. */
static int spells_added(const Vocabulary *v, const uint8_t *text, const uint8_t *end) {
    const uint8_t *a = v->added, *last = v->added + v->added_bytes;
    while (a < last) {
        const uint8_t *t = text;
        for (; *a && t < end; a++, t++) {
            uint8_t c = *t >= 'A' && *t <= 'Z' ? *t + 32 : *t;
            if (c != *a && !(v->kind[c] == SPACE && v->kind[*a] == SPACE)) break;
        }
        if (!*a) return 1;
        while (*a) a++;
        a++;
    }
    return 0;
}

/* Ids of one word, in lower case already; how many. */
static int32_t pieces_of(const Vocabulary *v, const uint8_t *word, int32_t length, int32_t *out) {
    int32_t n = 0, begin = 0;
    uint32_t hashes[256];
    if (length > v->most) return *out = v->unknown, 1;
    while (begin < length) {
        int32_t most = length - begin < v->longest ? length - begin : v->longest, found = -1;
        uint32_t hash = first(begin > 0);
        for (int32_t i = 0; i < most; i++) hashes[i] = hash = more(hash, word[begin + i]);
        for (; most > 0 && found < 0; most--) found = find(v, hashes[most - 1], word + begin, most, begin > 0);
        if (found < 0) return *out = v->unknown, 1;
        begin += most + 1;
        out[n++] = found;
    }
    return n;
}

/* Texts, one after another, with their lengths in bytes. out: ids of all, room for a byte's each and the frames. counts: ids of each text, -1 for
   one that is not plain and has none. framed: with the frame around each. Returns how many ids. v->most is at most 256. */
int64_t hortus_wordpiece_run(const Vocabulary *v, const uint8_t *text, const int64_t *lengths, int64_t count, int32_t framed, int32_t *out,
                             int64_t *counts) {
    int32_t *next = out;
    uint8_t word[256];
    for (int64_t i = 0; i < count; text += lengths[i++]) {
        const uint8_t *t = text, *end = text + lengths[i];
        int32_t *begin = next;
        if (framed)
            for (int32_t j = 0; j < v->before_count; j++) *next++ = v->frame[j];
        while (t < end) {
            uint8_t kind = v->kind[*t];
            if (!kind || (v->begins_added[*t] && spells_added(v, t, end))) goto not_plain;
            if (kind == SPACE) {
                t++;
                continue;
            }
            int32_t length = 0;
            do {
                if (v->begins_added[*t] && spells_added(v, t, end)) goto not_plain;
                if (length < 256) word[length] = v->lower[*t];
                length++, t++;
            } while (kind == WORD && t < end && v->kind[*t] == WORD);
            next += pieces_of(v, word, length, next);
        }
        if (framed)
            for (int32_t j = 0; j < v->after_count; j++) *next++ = v->frame[v->before_count + j];
        counts[i] = next - begin;
        continue;
    not_plain:
        counts[i] = -1;
        next = begin;
    }
    return next - out;
}
