"""ROSE, the engine: `step(batch) -> LazyTensor`, and the only part that knows torch.

Setting one variable of the OpenMP library has to happen before torch is imported, and so happens here. Its idle worker
threads spin for the next loop, for ever when they think that each has a core of its own. With anything else on those
cores (our own event loop is enough) every small loop then waits for a thread that is not running: measured on two cores
beside other work, a 16-token text took 428 ms in place of 10. Spinning for about a millisecond bounds that, and still
spans the gaps between the loops of one step.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "60000")
