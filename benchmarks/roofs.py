"""What the machine can do at most: a worker that reads memory and multiplies large matrices.

Both through numpy and the number of threads that OPENBLAS_NUM_THREADS asks for; the product of a
matrix with a vector is the fastest way of reading memory that was found here.
"""

from __future__ import annotations

import numpy as np
from workers import answer, timed

_SIZE = 2048


def main() -> None:
    """Answer {} with bytes and floating-point operations per CPU-second and per second."""
    rng = np.random.default_rng(0)
    large = rng.standard_normal((1 << 17, 1024), dtype=np.float32)  # 512 MiB
    vector = np.ones(large.shape[1], np.float32)
    left, right = (rng.standard_normal((_SIZE, _SIZE), dtype=np.float32) for _ in range(2))

    def measure() -> dict[str, float]:
        _, read = timed(lambda: large @ vector)
        _, product = timed(lambda: left @ right)
        flops = 2 * _SIZE**3
        return {
            "gb_per_cpu_second": large.nbytes / 1e9 / read["cpu"],
            "gb_per_second": large.nbytes / 1e9 / read["wall"],
            "gflop_per_cpu_second": flops / 1e9 / product["cpu"],
            "gflop_per_second": flops / 1e9 / product["wall"],
        }

    measure()
    answer(measure)


if __name__ == "__main__":
    main()
