"""When this process began: imported before anything else by whatever is measured from its first statement."""

import time

BEGAN = time.perf_counter()


def seconds() -> float:
    return time.perf_counter() - BEGAN
