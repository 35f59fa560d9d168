"""The id of the process, recorded before torch is imported."""

import os

PROCESS = os.getpid()  # a forked child has another id, and no threads of PyTorch's pool
