"""From how many rows on, and up to how many, `(W @ xᵀ)ᵀ` beats `x @ Wᵀ` on this CPU; why replicas/forward/linear.py is.

    python benchmarks/linear.py [--threads N]

Shapes are those of the default model. Several weights take turns, so that they come from memory as in a model.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPES = {"attention": (576, 576), "feed forward": (1536, 576), "vocabulary": (49152, 576)}
ROWS = (1, 2, 3, 4, 8, 16, 32, 48, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads")
    torch.set_num_threads(parser.parse_args().threads)
    print("time of the transposed product over the plain one; below 1 it is the faster one")
    print(f"{'rows':>6} " + " ".join(f"{name:>14}" for name in SHAPES))
    for rows in ROWS:
        ratios = [_ratio(rows, *shape) for shape in SHAPES.values()]
        print(f"{rows:6} " + " ".join(f"{ratio:14.2f}" for ratio in ratios))


@torch.inference_mode()
def _ratio(rows: int, num_out: int, num_in: int) -> float:
    weights = [torch.randn(num_out, num_in) for _ in range(max(1, 2**24 // (num_out * num_in)))]
    x = torch.randn(rows, num_in)
    plain = _time(lambda weight: F.linear(x, weight), weights)
    transposed = _time(lambda weight: torch.mm(weight, x.t()).t(), weights)
    return transposed / plain


def _time(product: Callable[[torch.Tensor], torch.Tensor], weights: list[torch.Tensor]) -> float:
    times = []
    for index in range(24):
        started = time.perf_counter()
        product(weights[index % len(weights)])
        times.append(time.perf_counter() - started)
    return statistics.median(times[4:])


if __name__ == "__main__":
    main()
