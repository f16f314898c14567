/* All layers of a post-norm trunk for few tokens, in one call: what few.py does with one library call after another.

   Why: a short text reads every weight once for a handful of tokens. The libraries copy an operand into a layout of their own at
   every product, and every call ends in a barrier. Here weights are read as they lie, each value once, while bias, residual and
   activation are added in registers; and work is handed out in small items, so that a thread that the system has taken off its
   core delays nobody but the item it holds.

   Activations are panels of 8 tokens, [tokens / 8, features, 8], tokens filled up to a multiple of 8: one vector holds a feature
   of 8 tokens, and a product walks a panel from end to end. Weights are [out, in], as files have them. float32 throughout. Does not know Python, files or embeddings. */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
int hortus_few_runs_here(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define PAUSE() __builtin_ia32_pause()
#else
int hortus_few_runs_here(void) { return 1; }
#define PAUSE() ((void)0)
#endif

enum { W = 8, MOST_TOKENS = 128, ROWS = 24, MOST_THREADS = 16 };
typedef float vec __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4)));

static inline vec all(float x) { return (vec){x, x, x, x, x, x, x, x}; }
static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline vec either(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }
static inline vec larger(vec a, vec b) { return either(a > b, a, b); }

/* e^x to about 2 ulp: 2^n e^r with |r| <= ln 2 / 2, e^r by the polynomial of Cephes' expf. */
static inline vec exp_(vec x) {
    x = either(x < all(-87.0f), all(-87.0f), x); /* NaN passes */
    x = either(x > all(88.0f), all(88.0f), x);
    const vec shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = x * all(1.44269504f) + shift;
    n = n - shift;
    vec r = x - n * all(0.693359375f);
    r = r + n * all(2.12194440e-4f);
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
    return p * (vec)bits;
}

static inline vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* Abramowitz and Stegun 7.1.26: within 1.5e-7. */
static inline vec erf_(vec x) {
    vec a = magnitude(x), t = all(1.0f) / (all(1.0f) + all(0.3275911f) * a);
    vec p = all(1.061405429f);
    p = p * t + all(-1.453152027f);
    p = p * t + all(1.421413741f);
    p = p * t + all(-0.284496736f);
    p = p * t + all(0.254829592f);
    vec y = all(1.0f) - p * t * exp_(-a * a);
    return either(x < all(0.0f), -y, y);
}

enum { GELU, GELU_TANH, RELU, SILU };

static inline vec activate(int kind, vec x) {
    switch (kind) {
    case GELU:
        return all(0.5f) * x * (all(1.0f) + erf_(x * all(0.70710678f)));
    case GELU_TANH: { /* 0.5 (1 + tanh y) = 1 / (1 + e^-2y) */
        vec y = all(0.79788456f) * (x + all(0.044715f) * x * x * x);
        return x / (all(1.0f) + exp_(all(-2.0f) * y));
    }
    case RELU:
        return either(x < all(0.0f), all(0.0f), x);
    default:
        return x / (all(1.0f) + exp_(-x));
    }
}

typedef struct {
    const float *qkv, *qkv_bias, *out, *out_bias, *up, *up_bias, *down, *down_bias;
    const float *norm1, *shift1, *norm2, *shift2;
} Layer;

typedef struct {
    int layers, heads, head_dim, inner, activation;
    float eps, scale;
    Layer *layer;
    float *x, *z, *qkv, *a, *u; /* panels of hidden, hidden, 3 hidden, hidden, inner features */
    int panels;                 /* of the run */
    int32_t first[MOST_TOKENS], end[MOST_TOKENS]; /* the keys that each token sees */
} Few;

/* A product: y = activation(weight x + bias) + residual. */
typedef struct {
    const float *weight, *bias, *x, *residual;
    float *y;
    int in, out, panels, activation; /* activation: -1 for none */
} Product;

/* R rows of it for C panels from `at` on: R x C sums stay in registers. */
#define TILE(R, C)                                                                                                             \
    static void tile_##R##_##C(const Product *p, int row, int at) {                                                            \
        const long in = p->in;                                                                                                 \
        const float *w = p->weight + row * in, *x = p->x + at * in * W;                                                        \
        vec sum[R][C];                                                                                                         \
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)                                                                    \
            _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) sum[r][c] = all(p->bias[row + r]);                             \
        for (long k = 0; k < in; k++, x += W) {                                                                                \
            vec column[C];                                                                                                     \
            _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) column[c] = load(x + c * in * W);                              \
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                                              \
                const vec value = all(w[r * in + k]);                                                                          \
                _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) sum[r][c] += value * column[c];                            \
            }                                                                                                                  \
        }                                                                                                                      \
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                                                  \
            _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) {                                                              \
                const long place = ((long)(at + c) * p->out + row + r) * W;                                                    \
                vec y = sum[r][c];                                                                                             \
                if (p->activation >= 0) y = activate(p->activation, y);                                                        \
                if (p->residual) y += load(p->residual + place);                                                               \
                store(p->y + place, y);                                                                                        \
            }                                                                                                                  \
        }                                                                                                                      \
    }
TILE(6, 1)
TILE(4, 2)
TILE(4, 3)
TILE(1, 1)

static void multiply(const Product *p, int row, int stop) {
    const int panels = p->panels;
    if (panels == 1)
        for (; row + 6 <= stop; row += 6) tile_6_1(p, row, 0);
    for (; panels > 1 && row + 4 <= stop; row += 4) {
        int at = 0;
        for (; panels - at == 3 || panels - at > 4; at += 3) tile_4_3(p, row, at);
        for (; at < panels; at += 2) tile_4_2(p, row, at);
    }
    for (; row < stop; row++)
        for (int at = 0; at < panels; at++) tile_1_1(p, row, at);
}

/* One head, all queries. Scores are held by key, a vector of queries each, so that every step is the same for 8 queries. */
static void attend(const Few *f, int head) {
    const long d = f->head_dim, hidden = f->heads * d, panel = 3 * hidden * W;
    const float *queries = f->qkv + head * d * W, *keys = queries + hidden * W, *values = keys + hidden * W;
    vec score[MOST_TOKENS];
    for (int at = 0; at < f->panels; at++) {
        const float *q = queries + at * panel;
        float *a = f->a + (at * hidden + head * d) * W;
        ivec first, end;
        memcpy(&first, f->first + at * W, sizeof first);
        memcpy(&end, f->end + at * W, sizeof end);
        const int lo = first[0], hi = end[W - 1];
        vec most = all(-1e30f), sum = all(0.0f);
        for (int j = lo; j < hi; j++) {
            const float *k = keys + j / W * panel + j % W;
            vec s = all(0.0f);
            for (long e = 0; e < d; e++) s += all(k[e * W]) * load(q + e * W);
            const ivec key = (ivec){j, j, j, j, j, j, j, j};
            score[j] = s = either((key >= first) & (key < end), s * all(f->scale), all(-1e30f));
            most = larger(most, s);
        }
        for (int j = lo; j < hi; j++) {
            score[j] = either(score[j] < all(-1e29f), all(0.0f), exp_(score[j] - most));
            sum += score[j];
        }
        sum = all(1.0f) / sum;
        for (long e = 0; e < d; e++) {
            vec y = all(0.0f);
            for (int j = lo; j < hi; j++) { /* a hidden key adds nothing, not even NaN */
                const vec value = all(values[j / W * panel + e * W + j % W]);
                y += either(score[j] == all(0.0f), all(0.0f), value) * score[j];
            }
            store(a + e * W, y * sum);
        }
    }
}

/* LayerNorm of one panel: x = (z - mean) / sqrt(variance + eps) * weight + shift. */
static void normalize(const Few *f, const float *weight, const float *shift, int at) {
    const long n = (long)f->heads * f->head_dim;
    const float *z = f->z + at * n * W;
    float *x = f->x + at * n * W;
    vec sums[4] = {all(0), all(0), all(0), all(0)};
    for (long i = 0; i < n; i++) sums[i & 3] += load(z + i * W);
    const vec mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])) / all((float)n);
    for (int i = 0; i < 4; i++) sums[i] = all(0);
    for (long i = 0; i < n; i++) {
        const vec off = load(z + i * W) - mean;
        sums[i & 3] += off * off;
    }
    vec scale = ((sums[0] + sums[1]) + (sums[2] + sums[3])) / all((float)n) + all(f->eps);
    for (int i = 0; i < W; i++) scale[i] = 1.0f / sqrtf(scale[i]);
    for (long i = 0; i < n; i++) store(x + i * W, (load(z + i * W) - mean) * (scale * all(weight[i])) + all(shift[i]));
}

/* A layer is seven phases of items that may run at the same time. */
enum { QKV, ATTEND, OUT, NORM1, UP, DOWN, NORM2, PHASES };

static int rows_of(const Few *f, int phase) {
    const int hidden = f->heads * f->head_dim;
    return phase == QKV ? 3 * hidden : phase == UP ? f->inner : hidden;
}

static int items_of(const Few *f, int phase) {
    if (phase == ATTEND) return f->heads;
    if (phase == NORM1 || phase == NORM2) return f->panels;
    return (rows_of(f, phase) + ROWS - 1) / ROWS;
}

static void do_item(const Few *f, int step, int item) {
    const Layer *l = f->layer + step / PHASES;
    const int phase = step % PHASES, hidden = f->heads * f->head_dim, rows = rows_of(f, phase), row = item * ROWS;
    Product p = {.in = hidden, .out = rows, .panels = f->panels, .activation = -1};
    switch (phase) {
    case ATTEND:
        attend(f, item);
        return;
    case NORM1:
        normalize(f, l->norm1, l->shift1, item);
        return;
    case NORM2:
        normalize(f, l->norm2, l->shift2, item);
        return;
    case QKV:
        p.weight = l->qkv, p.bias = l->qkv_bias, p.x = f->x, p.y = f->qkv;
        break;
    case OUT:
        p.weight = l->out, p.bias = l->out_bias, p.x = f->a, p.y = f->z, p.residual = f->x;
        break;
    case UP:
        p.weight = l->up, p.bias = l->up_bias, p.x = f->x, p.y = f->u, p.activation = f->activation;
        break;
    default:
        p.weight = l->down, p.bias = l->down_bias, p.x = f->u, p.y = f->z, p.residual = f->x, p.in = f->inner;
    }
    multiply(&p, row, row + ROWS < rows ? row + ROWS : rows);
}

/* The threads. One word says what there is to do: the step, how many items it has, how many are taken. Taking one is a
   compare-and-swap of that word, so nobody takes an item of a step that is over. */
static _Atomic uint64_t offer;
static _Atomic uint32_t finished, sleeping;
static const Few *_Atomic running;
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER, run_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static int threads_made;

enum { SPINS = 20000 }; /* about a quarter of a millisecond: longer than any wait inside a run */

static int take(uint64_t *seen) {
    *seen = atomic_load(&offer);
    while ((*seen & 0xffff) < (*seen >> 16 & 0xffff))
        if (atomic_compare_exchange_weak(&offer, seen, *seen + 1)) return 1;
    return 0;
}

static int help(void) {
    uint64_t taken;
    if (!take(&taken)) return 0;
    do_item(atomic_load(&running), (int)(taken >> 32), (int)(taken & 0xffff));
    atomic_fetch_add(&finished, 1);
    return 1;
}

static void *work(void *nothing) {
    for (int idle = 0;;) {
        if (help()) {
            idle = 0;
        } else if (++idle < SPINS) {
            PAUSE();
        } else {
            pthread_mutex_lock(&pool_lock);
            atomic_fetch_add(&sleeping, 1);
            const uint64_t seen = atomic_load(&offer);
            if ((seen & 0xffff) >= (seen >> 16 & 0xffff)) pthread_cond_wait(&more, &pool_lock);
            atomic_fetch_sub(&sleeping, 1);
            pthread_mutex_unlock(&pool_lock);
            idle = 0;
        }
    }
    return nothing;
}

static void have_threads(int count) {
    for (; threads_made < count && threads_made < MOST_THREADS; threads_made++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) return; /* fewer will do */
        pthread_detach(thread);
    }
}

static void do_step(const Few *f, int step) {
    const uint32_t items = (uint32_t)items_of(f, step % PHASES);
    atomic_store(&finished, 0);
    atomic_store(&offer, (uint64_t)step << 32 | (uint64_t)items << 16);
    if (items > 1 && atomic_load(&sleeping)) {
        pthread_mutex_lock(&pool_lock);
        pthread_cond_broadcast(&more);
        pthread_mutex_unlock(&pool_lock);
    }
    while (help()) {
    }
    for (int spins = 0; atomic_load(&finished) < items; spins++) {
        if (spins < 2000) PAUSE();
        else sched_yield();
    }
}

void hortus_few_free(Few *f) {
    if (!f) return;
    free(f->layer);
    free(f->x);
    free(f);
}

/* weights: 12 pointers a layer, in the order of Layer; they are not copied. NULL when there is no memory. */
Few *hortus_few_new(int layers, int heads, int head_dim, int inner, int activation, float eps, float scale, const float **weights) {
    Few *f = calloc(1, sizeof *f);
    const size_t hidden = (size_t)heads * (size_t)head_dim;
    if (!f) return NULL;
    *f = (Few){.layers = layers, .heads = heads, .head_dim = head_dim, .inner = inner, .activation = activation, .eps = eps, .scale = scale};
    f->layer = malloc(sizeof(Layer) * (size_t)(layers ? layers : 1));
    void *memory = NULL;
    if (!f->layer || posix_memalign(&memory, 64, sizeof(float) * MOST_TOKENS * (6 * hidden + (size_t)inner))) {
        hortus_few_free(f);
        return NULL;
    }
    f->x = memory;
    f->z = f->x + hidden * MOST_TOKENS;
    f->a = f->z + hidden * MOST_TOKENS;
    f->qkv = f->a + hidden * MOST_TOKENS;
    f->u = f->qkv + 3 * hidden * MOST_TOKENS;
    if (layers) memcpy(f->layer, weights, sizeof(Layer) * (size_t)layers);
    return f;
}

/* Only these tokens go on: their columns of x and of what attention gave. */
static void narrow(Few *f, const int32_t *rows, int kept) {
    const long hidden = (long)f->heads * f->head_dim;
    float *const both[2] = {f->x, f->a};
    f->panels = (kept + W - 1) / W;
    for (int b = 0; b < 2; b++) {
        for (int i = 0; i < f->panels * W; i++) { /* by way of qkv, which has been read; what fills up is 0 */
            const float *from = i < kept ? both[b] + rows[i] / W * hidden * W + rows[i] % W : NULL;
            float *to = f->qkv + i / W * hidden * W + i % W;
            for (long h = 0; h < hidden; h++) to[h * W] = from ? from[h * W] : 0.0f;
        }
        memcpy(both[b], f->qkv, sizeof(float) * (size_t)(f->panels * W * hidden));
    }
}

/* x: [cu_seqlens[sequences], hidden], at most 128 tokens -> y: [kept, hidden], of the tokens in rows, or of all where that is NULL.
   threads: in all, the caller's included. */
void hortus_few_rows(
    Few *f, const float *x, float *y, const int32_t *cu_seqlens, int sequences, const int32_t *rows, int kept, int threads
) {
    const int tokens = cu_seqlens[sequences];
    const long hidden = (long)f->heads * f->head_dim;
    pthread_mutex_lock(&run_lock);
    f->panels = (tokens + W - 1) / W;
    for (int s = 0; s < sequences; s++)
        for (int i = cu_seqlens[s]; i < cu_seqlens[s + 1]; i++) f->first[i] = cu_seqlens[s], f->end[i] = cu_seqlens[s + 1];
    for (int i = tokens; i < f->panels * W; i++) f->first[i] = i, f->end[i] = i + 1; /* what fills up sees itself */
    for (int i = 0; i < f->panels * W; i++) {
        float *panel = f->x + i / W * hidden * W + i % W;
        for (long h = 0; h < hidden; h++) panel[h * W] = i < tokens ? x[i * hidden + h] : 0.0f;
    }
    atomic_store(&running, f);
    have_threads(threads - 1);
    for (int step = 0; step < f->layers * PHASES; step++) {
        if (rows && step == (f->layers - 1) * PHASES + OUT) narrow(f, rows, kept);
        do_step(f, step);
    }
    for (int i = 0; i < kept; i++) {
        const float *panel = f->x + i / W * hidden * W + i % W;
        for (long h = 0; h < hidden; h++) y[i * hidden + h] = panel[h * W];
    }
    pthread_mutex_unlock(&run_lock);
}

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute pop
#endif
