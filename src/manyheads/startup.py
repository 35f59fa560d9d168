"""Facts about the process, recorded when manyheads is first imported, before torch is."""

import os

PROCESS = os.getpid()  # a forked child has another id, and none of the threads of PyTorch's pool
