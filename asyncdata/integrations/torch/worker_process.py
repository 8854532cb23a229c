"""Whether this is a worker process of PyTorch's ``DataLoader``, where no loader may be used."""

from __future__ import annotations

import sys

from asyncdata.core.errors import ConfigError

__all__ = ("refuse_in_torch_worker",)


def refuse_in_torch_worker() -> None:
    """Each worker of torch would have its own loader, and deliver the same samples.

    :raises ConfigError: in a worker process of torch.
    """
    workers = sys.modules.get("torch.utils.data")
    found = None if workers is None else workers.get_worker_info()
    if found is not None:
        raise ConfigError(
            f"this dataset is read in one of torch's {found.num_workers} workers, and each would deliver the same "
            "batches: pass num_workers=0 to torch's DataLoader. asyncdata has workers of its own: pass num_workers= to "
            "the dataset"
        )
